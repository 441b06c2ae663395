"""Dashboard: the tasks that keep the model of the cluster up to date, what needs the broker, and actions.

Handlers ask `Dashboard.cluster` what is in memory; the methods here ask the broker, the nodes or the
dashboard's file. All answers are redacted. Methods raise BrokerError if the broker does not answer.

The dashboard starts with the first request or with the server, whichever comes first: a framework that mounts
the application may not run its lifespan.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from sqlite3 import Error as FileError
from time import time
from typing import Any

import msgspec

from umbel.app.app import App
from umbel.app.options import has_secrets
from umbel.brokers.registry import open_broker
from umbel.errors import BrokerError
from umbel.events.view import TaskRecord
from umbel.launch.timetable import leader_of, read_timetable
from umbel.monitor.cluster import KnownCluster
from umbel.monitor.feed import Feed
from umbel.monitor.model import ClusterModel
from umbel.monitor.records import (
    DETAIL_MAX,
    LIST_MAX,
    DeadLetterRow,
    Mark,
    Node,
    PeriodicTask,
    Schedule,
    TaskDetail,
    TaskFilter,
    WaitingMessage,
    Worker,
    changed_fields,
    letter_row,
    redact_data,
    redact_task,
    redact_text,
    waiting_row,
)
from umbel.monitor.tasks import story_of
from umbel.protocol.delivery.states import FAILURE
from umbel.text import without_password
from umbel.web.action_events import ACTION, EventPublisher
from umbel.web.actions import ActionResult, AnyAction, AuditEntry, SavedView
from umbel.web.audit import Audit, ended, entry_of, name_of, result_of
from umbel.web.history import LakeReaders, RecordedCache
from umbel.web.http import Forbidden, Visitor
from umbel.web.hub import Hub
from umbel.web.journal import HOUR_S, Journal, JournalBuffer, give_back
from umbel.web.oidc import Provider
from umbel.web.performer import ONLY_RETAINED, Performer, as_command, call_of
from umbel.web.settings import WebSettings
from umbel.web.visitors import Visitors
from umbel.wire.control import QueueRow, Stats, TaskRow, rows, texts, typed

# ---- inspecting a worker ---------------------------------------------------------------------------

ASK_S = 1.5
QUESTIONS = ("stats", "active", "reserved", "active_queues", "registered", "conf")
SHOWN_MAX = 500


async def inspect_worker(feed: Feed, node: Node, failures: list[TaskRecord]) -> Worker:
    """Ask a node for its stats, tasks, queues and settings; what it does not answer is empty."""
    answers = await asyncio.gather(
        *(feed.ask(question, {}, [node.node], timeout_s=ASK_S) for question in QUESTIONS)
    )
    stats, active, reserved, queues, registered, settings = (
        redact_data(answer.replies.get(node.node), LIST_MAX) for answer in answers
    )
    stats = stats if isinstance(stats, dict) else {}
    return Worker(
        node=node,
        silent=not stats,
        stats=stats,
        children=_children(stats, _maps(active)),
        active=_maps(active),
        reserved=_maps(reserved),
        queues=sorted(queue.name for queue in rows(queues, QueueRow) if queue.name is not None),
        registered=texts(registered)[:SHOWN_MAX],
        settings=settings if isinstance(settings, dict) else {},
        failures=failures,
    )


def _maps(reply: Any) -> list[dict[str, Any]]:
    return [item for item in reply if isinstance(item, dict)][:SHOWN_MAX] if isinstance(reply, list) else []


def _children(stats: dict[str, Any], active: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each child process with its task; Celery's workers report theirs in the same fields."""
    tasks = {row.worker_pid: row for row in rows(active, TaskRow)}
    now = time()
    children = []
    for pid in (typed(stats, Stats).pool.processes or ())[:SHOWN_MAX]:
        task = tasks.get(pid, TaskRow())
        age_s = round(max(0.0, now - task.time_start), 1) if task.time_start else None
        children.append({"pid": pid, "task": task.name or "", "task_id": task.id or "", "age_s": age_s})
    return children


# ---- dashboard -------------------------------------------------------------------------------------

log = logging.getLogger("umbel.web")
OPEN_AGAIN_S = 2.0
WRITE_EVERY_S = 1.0
STORIES_MAX = 20_000
STEPS_WRITTEN = 3  # the newest steps, which may still change


class Dashboard:
    """Everything that the handlers of pages and of the API use."""

    def __init__(self, app: App, settings: WebSettings) -> None:
        self.app, self.settings = app, settings
        self.journal = Journal(settings.state_file)
        self.audit = Audit(self.journal, lambda number: self._changed("audit", str(number)))
        self.visitors = Visitors(settings, self.journal.tokens, self.audit.note)
        self.provider = None if settings.oidc is None else Provider(settings.oidc, settings.public_url)
        self.readers = LakeReaders()
        self.recorded = RecordedCache()
        self._unwritten = JournalBuffer()
        self._running: asyncio.Task[None] | None = None
        model = ClusterModel(tasks_max=settings.tasks_max, stories_max=min(STORIES_MAX, settings.tasks_max))
        self._connect(model)
        self.cluster = KnownCluster(self.feed, partial(has_secrets, app))
        self.hub = Hub(self.cluster, clients_max=settings.clients_max)

    def _changed(self, topic: str, name: str) -> None:
        self.cluster.model.changes.note(topic, name)

    # -- start and stop --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the feed and the hub unless they run; after an internal error, with a new connection."""
        if self._running is not None and self._running.done():
            self._running = None
            self._connect(self.cluster.model)
            self.cluster.feed = self.feed
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="umbel-web")
            self._running.add_done_callback(_log_failure)

    async def stop(self) -> None:
        """Stop everything, and close the broker, the journal and the app."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        if self.provider is not None:
            self.provider.close()
        await asyncio.to_thread(self.readers.close)
        self.journal.close()
        self.app.close()

    def _connect(self, model: ClusterModel) -> None:
        self._broker = open_broker(self.app.broker_settings())
        self.feed = Feed(self._broker, enable=self.settings.enable_events, model=model)
        self.feed.received = lambda body, now: self._unwritten.add(now, body)
        self._publisher = EventPublisher(self._broker, model.receiver.clock)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._restore())
                group.create_task(self.hub.run())
                group.create_task(self._write_repeatedly())
                await self._open()
                group.create_task(self.feed.run())
        finally:
            await self._broker.close()

    async def _open(self) -> None:
        while True:
            try:
                await self._broker.open()
            except BrokerError as error:
                self.feed.report("broker", str(error))
                await asyncio.sleep(OPEN_AGAIN_S)
            else:
                self.feed.report("broker", "")
                return

    # -- the last hour ---------------------------------------------------------------------------

    async def _write_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self._write()

    async def _write(self) -> None:
        model = self.cluster.model
        messages = self._unwritten.take()
        happened = [model.unsaved.popleft() for _ in range(len(model.unsaved))]
        steps = list(model.book.steps)[-STEPS_WRITTEN:]
        copies = [msgspec.convert(msgspec.to_builtins(step), type(step), strict=False) for step in steps]
        try:
            await asyncio.to_thread(self.journal.write_hour, messages, copies, happened, time())
        except FileError as error:
            self._unwritten.give_back(messages)
            give_back(model.unsaved, happened)
            log.warning(
                "cannot save the recent events of the dashboard to its state file; retrying",
                extra={"why": str(error)},
            )

    async def _restore(self) -> None:
        """Load the last hour from the journal; events merge with new events in any order."""
        model, since = self.cluster.model, time() - HOUR_S
        model.book.restore(await asyncio.to_thread(self.journal.steps, since))
        for item in await asyncio.to_thread(self.journal.happened, since):
            if isinstance(item, Mark):
                model.marks.append(item)
            else:
                model.happenings.append(item)
        parts = self.journal.events(since)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            received_at, bodies = part
            model.replay(bodies, received_at)
            await asyncio.sleep(0)

    # -- the app and its broker ------------------------------------------------------------------

    @property
    def broker_url(self) -> str:
        """The broker's URL, without the password."""
        return without_password(self._broker.url)

    @property
    def task_names(self) -> Sequence[str]:
        """The names of the app's tasks and of the tasks in memory, for suggestions."""
        return sorted({*self.app.tasks, *self.cluster.model.state.names()})

    async def worker(self, name: str) -> Worker | None:
        """Ask a node to describe itself; None if it is unknown."""
        node = self.cluster.node(name)
        if node is None:
            return None
        failures = self.cluster.tasks(TaskFilter(worker=name, state=FAILURE), limit=20).tasks
        return await inspect_worker(self.feed, node, failures)

    def task(self, task_id: str) -> TaskDetail | None:
        """Return everything known about a task; None if it is not in memory."""
        model = self.cluster.model
        found = model.state.task(task_id)
        if found is None:
            return None
        clean = redact_task(found, DETAIL_MAX, self.cluster.hides)
        events, edges, attempts = story_of(model.story(task_id))
        call = call_of(found)
        is_whole = (clean.args, clean.kwargs) == (found.args, found.kwargs)
        why_not = call if isinstance(call, str) else ""
        if self.app.settings.keyring is not None:
            why_not = ONLY_RETAINED
        return TaskDetail(
            task=clean,
            events=[msgspec.structs.replace(event, detail=redact_text(event.detail)) for event in events],
            edges=edges,
            attempts=[
                msgspec.structs.replace(attempt, error=redact_text(attempt.error)) for attempt in attempts
            ],
            progress=self._progress(task_id),
            can_retry=not why_not or found.state == FAILURE,  # its message may be retained
            why_not=why_not,
            as_call=as_command(call) if is_whole and not isinstance(call, str) else "",
            truncated=changed_fields(found, clean),
        )

    def _progress(self, task_id: str) -> dict[str, Any] | None:
        known = self.cluster.model.state.registers(task_id)
        custom = None if known is None else known.custom
        if custom is None or not custom.extra:
            return None
        clean: dict[str, Any] = redact_data({"state": custom.subject.upper(), **custom.extra}, LIST_MAX)
        return clean

    async def peek(self, queue: str, limit: int = 20) -> list[WaitingMessage]:
        """Return the next messages of a queue without taking them."""
        waiting = await self._broker.peek(queue, limit)
        found = [waiting_row(delivery, self.cluster.hides) for delivery in waiting]
        return [
            msgspec.structs.replace(row, args=redact_text(row.args), kwargs=redact_text(row.kwargs))
            for row in found
        ]

    async def dead_letters(self, limit: int = 100) -> list[DeadLetterRow]:
        """Return the newest dead letters."""
        letters = await self._broker.dead_letters(limit)
        if len(letters) < limit:  # all letters were read, so the list also shows that a letter was dropped
            self.feed.note_letters(len(letters))
        return [
            msgspec.structs.replace(row, reason=redact_text(row.reason)) for row in map(letter_row, letters)
        ]

    async def log_lag(self) -> dict[str, int]:
        """Return how many events of the log each recorder has not acknowledged."""
        if not self._broker.capabilities.event_log:
            return {}
        state = await self._broker.event_log()
        return {name: max(0, state.last_offset - offset) for name, offset in state.acknowledged.items()}

    async def schedule(self) -> Schedule:
        """Return the periodic tasks and the node that sends them, or a note why there are none."""
        if not self._broker.capabilities.leases:
            return Schedule(leader=None, term=0, tasks=[], note="this broker has no leases, so no schedule")
        lease, found = await read_timetable(self.app, self._broker)
        tasks = [
            PeriodicTask(**(entry.as_data() | {"paused": entry.paused}), missed=entry.missed)
            for entry in found
        ]
        note = "" if tasks else "this app has no periodic tasks; define one with @app.periodic(every=60)"
        return Schedule(leader=leader_of(lease) or None, term=lease.term, tasks=tasks, note=note)

    async def views(self) -> list[SavedView]:
        """Return the saved views of the list of tasks, by name."""
        return await asyncio.to_thread(self.journal.views)

    # -- actions ---------------------------------------------------------------------------------

    async def act(self, visitor: Visitor, action: AnyAction) -> ActionResult:
        """Audit an action, perform it, and audit its result; Forbidden if the visitor's role may not."""
        if not visitor.role.may(action.role):
            await self.audit.write(entry_of(visitor, action, "refused"))
            raise Forbidden(
                f"{name_of(action)} needs the role {action.role}; {visitor.name} is {visitor.role}"
            )
        performer = Performer(
            self.app,
            self._broker,
            self.cluster,
            self._publisher,
            self.journal,
            self.visitors.sessions.end_named,
        )
        action = performer.check(action)
        entry = await self.audit.write(entry_of(visitor, action, "sent"))
        outcome: dict[str, Any] = {"problem": "it was interrupted"}
        try:
            outcome = await performer.perform(action)
        except BrokerError as error:
            outcome = {"problem": str(error)}
        finally:
            result = result_of(entry.id, outcome)
            await self._finish(ended(entry, result))
        return result

    async def _finish(self, entry: AuditEntry) -> None:
        await self.audit.finish(entry)
        fields = ("who", "role", "address", "action", "target", "status")
        event = {name: getattr(entry, name) for name in fields} | {"replies": (entry.result or {})["replies"]}
        try:
            await self._publisher.publish(ACTION, event)
        except BrokerError as error:
            context = {"action": entry.action, "who": entry.who, "why": str(error)}
            log.warning("dashboard action done, but its event could not be sent to monitors", extra=context)


def _log_failure(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and running.exception() is not None:
        log.error(
            "internal error; dashboard receives no events until its next request; please report it",
            exc_info=running.exception(),
        )
