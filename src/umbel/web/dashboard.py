"""Dashboard: the site that pages and the API use, and the tasks that keep its model up to date.

It starts with the first request or with the server, whichever comes first: a framework that mounts the
application may not run its lifespan. Everything it returns is redacted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from sqlite3 import Error as FileError
from time import time
from typing import Any

import msgspec

from umbel.app.app import App
from umbel.app.options import has_secrets
from umbel.brokers.registry import open_broker
from umbel.errors import BrokerError, ConfigurationError, HistoryError
from umbel.events.view import TaskRecord
from umbel.launch.timetable import leader_of, read_timetable
from umbel.monitor.cluster import KnownCluster
from umbel.monitor.feed import Feed
from umbel.monitor.model import ClusterModel
from umbel.monitor.records import (
    DeadLetterRow,
    Election,
    Happening,
    Health,
    Lease,
    Mark,
    Node,
    Overview,
    PeriodicTask,
    Queue,
    Rates,
    Schedule,
    TaskDetail,
    TaskFilter,
    TaskPage,
    WaitingMessage,
    Worker,
    Workflow,
    letter_row,
    waiting_row,
)
from umbel.monitor.tasks import story_of
from umbel.protocol.delivery.redaction import redact
from umbel.protocol.delivery.states import FAILURE
from umbel.stores.interface import Where
from umbel.text import without_password
from umbel.web.action_events import ACTION, EventPublisher
from umbel.web.actions import ROLES, ActionResult, AnyAction, AuditEntry, SavedView
from umbel.web.hub import Hub
from umbel.web.journal import (
    HOUR_S,
    QUERY,
    Journal,
    JournalBuffer,
    answered,
    ended,
    entry_of,
    give_back,
    name_of,
    note_of,
    result_of,
)
from umbel.web.lake import RecordedCache
from umbel.web.oidc import Provider
from umbel.web.performer import ONLY_RETAINED, Performer, as_command, call_of
from umbel.web.problems import Forbidden, Refused
from umbel.web.redaction import DETAIL_MAX, LIST_MAX, changed_fields, redact_data, redact_task, shown
from umbel.web.settings import WebSettings
from umbel.web.site import PAGE_MAX, LakeReaders, Visitor, may_query
from umbel.web.visitors import Visitors
from umbel.wire.control import QueueRow, Stats, TaskRow, rows, texts, typed

# ---- inspecting ------------------------------------------------------------------------------------
#
# One worker, as it describes itself just now.

ASK_S = 1.5
QUESTIONS = ("stats", "active", "reserved", "active_queues", "registered", "conf")
SHOWN_MAX = 500


async def inspect_worker(feed: Feed, node: Node, failures: list[TaskRecord]) -> Worker:
    """Ask a node for its stats, tasks, queues and settings; what it does not answer is empty."""
    asked = [feed.ask(question, {}, node.node, timeout_s=ASK_S) for question in QUESTIONS]
    answers = await asyncio.gather(*asked)
    found = {
        question: redact_data(answer.replies.get(node.node), LIST_MAX)
        for question, answer in zip(QUESTIONS, answers, strict=True)
    }
    stats = found["stats"] if isinstance(found["stats"], dict) else {}
    active = _maps(found["active"])
    return Worker(
        node=node,
        silent=not stats,
        stats=stats,
        children=_children(stats, active),
        active=active,
        reserved=_maps(found["reserved"]),
        queues=sorted(
            queue.name for queue in rows(found["active_queues"], QueueRow) if queue.name is not None
        ),
        registered=texts(found["registered"])[:SHOWN_MAX],
        settings=found["conf"] if isinstance(found["conf"], dict) else {},
        failures=failures,
    )


def _maps(reply: Any) -> list[dict[str, Any]]:
    return [item for item in reply if isinstance(item, dict)][:SHOWN_MAX] if isinstance(reply, list) else []


def _children(stats: dict[str, Any], active: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each child process with its task; Celery's workers report theirs in the same fields."""
    runs = {row.worker_pid: row for row in rows(active, TaskRow)}
    now = time()
    children = []
    for pid in (typed(stats, Stats).pool.processes or ())[:SHOWN_MAX]:
        task = runs.get(pid, TaskRow())
        age_s = round(max(0.0, now - task.time_start), 1) if task.time_start else None
        children.append({"pid": pid, "task": task.name or "", "task_id": task.id or "", "age_s": age_s})
    return children


# ---- dashboard -------------------------------------------------------------------------------------
#
# The site that pages and the API ask, and the life of what feeds it.
#
# It starts with the first request or with the server, whichever comes first: a framework that mounts the
# application may not tell it of its start. Everything it hands out is redacted.

log = logging.getLogger("umbel.web")
OPEN_AGAIN_S = 2.0
WRITE_EVERY_S = 1.0
STORIES_MAX = 20_000
STEPS_WRITTEN = 3  # the newest steps, which may still change


class Dashboard:
    """Implements `umbel.web.site.Site`: answers pages and the API from the model, and performs actions."""

    def __init__(self, app: App, settings: WebSettings) -> None:
        self.app, self.settings = app, settings
        self.journal = Journal(settings.state_file)
        self.visitors = Visitors(settings, self.journal.tokens, self._note)
        self.provider = None if settings.oidc is None else Provider(settings.oidc, settings.public_url)
        self._broker = open_broker(app.broker_settings())
        model = ClusterModel(tasks_max=settings.tasks_max, stories_max=min(STORIES_MAX, settings.tasks_max))
        self.cluster = KnownCluster(self._make_feed(model), redact, self.hides)
        self.hub = Hub(self.cluster, clients_max=settings.clients_max)
        self._make_performer()
        self._unwritten = JournalBuffer()
        self._running: asyncio.Task[None] | None = None
        self.reads = LakeReaders()
        self.recollection = RecordedCache()

    @property
    def feed(self) -> Feed:
        """The feed of the model; replaced when the dashboard restarts after an internal error."""
        return self.cluster.feed

    # -- start and stop --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the feed and the hub unless they run."""
        if self._running is not None and self._running.done():
            self._running = None
            self._begin_again()
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="umbel-web")
            self._running.add_done_callback(self._note_end)

    async def stop(self) -> None:
        """Stop everything, and close the broker, the journal and the app."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        if self.provider is not None:
            self.provider.close()
        await asyncio.to_thread(self.reads.close)
        self.journal.close()
        self.app.close()

    def _begin_again(self) -> None:
        """Open a new connection to the broker; the model is retained."""
        self._broker = open_broker(self.app.broker_settings())
        self.cluster.feed = self._make_feed(self.cluster.model)
        self._make_performer()

    def _make_feed(self, model: ClusterModel) -> Feed:
        feed = Feed(self._broker, enable=self.settings.enable_events, model=model)
        feed.heard = self._note_heard
        return feed

    def _make_performer(self) -> None:
        self._teller = EventPublisher(self._broker, self.cluster.model.receiver.clock)
        self._performer = Performer(
            self.app,
            self._broker,
            self.cluster,
            self._teller,
            self.journal,
            self.visitors.sessions.end_named,
        )

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._restore())
                group.create_task(self.hub.run())
                group.create_task(self._write_on())
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

    def _note_end(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and running.exception() is not None:
            log.error(
                "internal error; dashboard receives no events until its next request; please report it",
                exc_info=running.exception(),
            )

    # -- the last hour ---------------------------------------------------------------------------

    def _note_heard(self, body: bytes, now: float) -> None:
        self._unwritten.add(now, body)

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self._write()

    async def _write(self) -> None:
        model = self.cluster.model
        messages = self._unwritten.take()
        happened = [model.unsaved.popleft() for _ in range(len(model.unsaved))]
        steps = list(model.book.steps)[-STEPS_WRITTEN:]
        packed = [msgspec.convert(msgspec.to_builtins(step), type(step), strict=False) for step in steps]
        try:
            await asyncio.to_thread(self.journal.write_hour, messages, packed, happened, time())
        except FileError as error:
            self._unwritten.give_back(messages)
            give_back(model.unsaved, happened)
            log.warning(
                "cannot save the recent events of the dashboard to its state file; retrying",
                extra={"why": str(error)},
            )

    async def _restore(self) -> None:
        """Load the last hour from the journal; events merge with new ones in any order."""
        model, since = self.cluster.model, time() - HOUR_S
        model.book.restore(await asyncio.to_thread(self.journal.steps, since))
        for item in await asyncio.to_thread(self.journal.happened, since):
            if isinstance(item, Mark):
                model.marks.append(item)
            else:
                model.happenings.append(item)
        parts = self.journal.heard(since)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            at, bodies = part
            model.replay(bodies, at)
            await asyncio.sleep(0)

    # -- queries ---------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The app's name."""
        return self.app.name

    @property
    def badge(self) -> str:
        """The environment, shown on every page; "" if none was given."""
        return self.settings.badge

    @property
    def broker(self) -> str:
        """The broker's URL, without the password."""
        return without_password(self._broker.url)

    @property
    def problem(self) -> str:
        """Why the dashboard receives no events; "" if it does."""
        return self.feed.problem

    @property
    def pushed(self) -> int:
        """The number of the newest push to browsers."""
        return self.hub.number

    @property
    def lake(self) -> Where:
        """Where the history is recorded."""
        return self.app.settings.history_lake

    @property
    def task_names(self) -> Sequence[str]:
        """The names of the app's tasks and of those in memory."""
        return sorted({*self.app.tasks, *self.cluster.model.state.names()})

    def hides(self, name: str | None) -> bool:
        """Return whether the task of that name has secret arguments."""
        return has_secrets(self.app, name)

    def health(self) -> Health:
        """Return the state of the cluster in one sentence."""
        return self.cluster.health()

    def overview(self) -> Overview:
        """Return the cluster at a glance."""
        return self.cluster.overview()

    def nodes(self) -> list[Node]:
        """Return all members of the cluster, by name."""
        return self.cluster.nodes()

    def node(self, name: str) -> Node | None:
        """Return one member; None if it is unknown."""
        return self.cluster.node(name)

    async def worker(self, name: str) -> Worker | None:
        """Ask a node to describe itself; None if it is unknown."""
        node = self.cluster.node(name)
        if node is None:
            return None
        wanted = TaskFilter(worker=name, state="FAILURE")
        failures = self.tasks(wanted, limit=20).tasks
        return await inspect_worker(self.feed, node, failures)

    def happenings(self, *, since: float = 0.0) -> list[Happening]:
        """Return the changes of the last hour, oldest first."""
        return self.cluster.happenings(since=since)

    def tasks(
        self, wanted: TaskFilter, *, limit: int = 50, cursor: str = "", order: str = "clock"
    ) -> TaskPage:
        """Return a page of the matching tasks, redacted, newest first."""
        page = self.cluster.tasks(wanted, limit=max(1, min(limit, PAGE_MAX)), cursor=cursor, order=order)
        return msgspec.structs.replace(
            page, tasks=[redact_task(task, LIST_MAX, self.hides) for task in page.tasks]
        )

    def count(self, wanted: TaskFilter) -> int:
        """Return how many tasks match."""
        return self.cluster.count(wanted)

    def task(self, task_id: str) -> TaskDetail | None:
        """Return everything known about a task, redacted; None if it is not in memory."""
        found = self.cluster.model.state.task(task_id)
        if found is None:
            return None
        clean = redact_task(found, DETAIL_MAX, self.hides)
        events, edges, attempts = story_of(self.cluster.model.story(task_id))
        call = call_of(found)
        is_whole = not isinstance(call, str) and (clean.args, clean.kwargs) == (found.args, found.kwargs)
        why_not = call if isinstance(call, str) else ""
        if self.app.settings.keyring is not None:
            why_not = ONLY_RETAINED
        return TaskDetail(
            task=clean,
            events=[msgspec.structs.replace(event, detail=shown(event.detail, LIST_MAX)) for event in events],
            edges=edges,
            attempts=[
                msgspec.structs.replace(attempt, error=shown(attempt.error, LIST_MAX)) for attempt in attempts
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

    def workflow(self, task_id: str) -> Workflow | None:
        """Return the workflow that a task is part of; None if the task is unknown."""
        return self.cluster.workflow(task_id)

    def queues(self) -> list[Queue]:
        """Return all queues, by name."""
        return self.cluster.queues()

    async def peek(self, queue: str, limit: int = 20) -> list[WaitingMessage]:
        """Return the next messages of a queue without taking them, redacted."""
        waiting = await self._broker.peek(queue, max(1, min(limit, PAGE_MAX)))
        rows = [waiting_row(delivery, self.hides) for delivery in waiting]
        return [
            msgspec.structs.replace(row, args=shown(row.args, LIST_MAX), kwargs=shown(row.kwargs, LIST_MAX))
            for row in rows
        ]

    async def dead_letters(self, limit: int = 100) -> list[DeadLetterRow]:
        """Return the newest dead letters, redacted."""
        limit = max(1, min(limit, PAGE_MAX))
        letters = await self._broker.dead_letters(limit)
        if len(letters) < limit:  # so these are all: what is dropped before the next look is noticed too
            self.feed.note_letters(len(letters))
        rows = [letter_row(letter) for letter in letters]
        return [msgspec.structs.replace(row, reason=shown(row.reason, LIST_MAX)) for row in rows]

    async def dead_letter_count(self, limit: int) -> int:
        """Return how many dead letters there are, counted up to `limit`."""
        return await self._broker.count_dead(limit)

    async def log_lag(self) -> dict[str, int]:
        """Return how many events of the log each recorder has not acknowledged."""
        if not self._broker.capabilities.event_log:
            return {}
        log_state = await self._broker.event_log()
        return {
            name: max(0, log_state.last_offset - offset) for name, offset in log_state.acknowledged.items()
        }

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

    def elections(self) -> list[Election]:
        """Return all known elections, the newest first, redacted."""
        found = self.cluster.elections()
        return [
            msgspec.structs.replace(election, outcome=shown(election.outcome, LIST_MAX)) for election in found
        ]

    def leases(self) -> list[Lease]:
        """Return all known leases, by name."""
        return self.cluster.leases()

    def rates(self, *, last_s: float = HOUR_S, step_s: int = 0) -> Rates:
        """Return the charts of the last hour."""
        return self.cluster.rates(last_s=last_s, step_s=step_s)

    async def audit(self, *, limit: int = 100, before: int = 0) -> list[AuditEntry]:
        """Return entries of the audit, the newest first, older than `before`."""
        limit = max(1, min(limit, PAGE_MAX))
        return await asyncio.to_thread(self.journal.audit, limit=limit, before=before)

    async def views(self) -> list[SavedView]:
        """Return the saved views, by name."""
        return await asyncio.to_thread(self.journal.views)

    # -- actions ---------------------------------------------------------------------------------

    async def act(self, visitor: Visitor, action: AnyAction) -> ActionResult:
        """Audit an action, perform it, and audit its result; `Forbidden` if the visitor's role may not."""
        needed = ROLES[type(action)]
        if not visitor.role.may(needed):
            await self._written(entry_of(visitor, action, "refused"))
            raise Forbidden(f"{name_of(action)} needs the role {needed}; {visitor.name} is {visitor.role}")
        action = self._performer.check(action)
        entry = await self._written(entry_of(visitor, action, "sent"))
        outcome: dict[str, Any] = {"problem": "it was interrupted"}
        try:
            outcome = await self._performer.perform(action)
        except BrokerError as error:
            outcome = {"problem": str(error)}
        finally:
            result = result_of(entry.id, outcome)
            await self._finish(ended(entry, result))
        return result

    @asynccontextmanager
    async def queried(self, visitor: Visitor, sql: str) -> AsyncIterator[Callable[[int], None]]:
        """Audit a query before it runs, and its outcome afterwards; the caller passes the number of rows to
        what this yields.

        Raises `Forbidden` if the visitor's role may not.
        """
        asked = partial(
            note_of, QUERY, visitor.name, visitor.role.value, visitor.address, arguments={"sql": sql}
        )
        if not may_query(visitor):
            await self._written(asked(status="refused"))
            raise Forbidden("queries need the role operator")
        entry = await self._written(asked(status="sent"))
        counted: list[int] = []
        problem = "it was interrupted"
        try:
            yield counted.append
            problem = ""
        except (HistoryError, ConfigurationError) as error:
            problem = str(error)
            raise
        except Refused as refused:
            problem = refused.problem.detail
            raise
        finally:
            await self._write_end(answered(entry, sum(counted), problem))

    async def _note(self, entry: AuditEntry) -> None:
        """Write an entry of something that happens even if the audit cannot be written, such as a login."""
        try:
            await self._written(entry)
        except Refused as refused:
            fields = {name: getattr(entry, name) for name in ("action", "who", "role", "address", "target")}
            log.error("cannot write to the audit log", extra=fields | {"why": refused.problem.detail})

    async def _written(self, entry: AuditEntry) -> AuditEntry:
        try:
            number = await asyncio.to_thread(self.journal.note, entry)
        except FileError as error:
            detail = f"{entry.action} refused: it cannot be written to the audit log: {error}"
            raise Refused(503, "Audit unavailable", detail) from None
        self.cluster.model.changes.note("audit", str(number))
        return msgspec.structs.replace(entry, id=number)

    async def _write_end(self, entry: AuditEntry) -> None:
        try:
            await asyncio.to_thread(self.journal.finish, entry)
        except FileError as error:
            fields = {"action": entry.action, "who": entry.who, "why": str(error)}
            log.error("dashboard action done, but its outcome is missing in the audit log", extra=fields)
        self.cluster.model.changes.note("audit", str(entry.id))

    async def _finish(self, entry: AuditEntry) -> None:
        await self._write_end(entry)
        fields = ("who", "role", "address", "action", "target", "status")
        event = {name: getattr(entry, name) for name in fields} | {"replies": (entry.result or {})["replies"]}
        try:
            await self._teller.tell(ACTION, event)
        except BrokerError as error:
            context = {"action": entry.action, "who": entry.who, "why": str(error)}
            log.warning("dashboard action done, but its event could not be sent to monitors", extra=context)
