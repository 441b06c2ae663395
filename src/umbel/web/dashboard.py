"""Dashboard: the site that pages and the API ask, and the life of what feeds it.

It starts with the first request or with the server, whichever comes first: a framework that mounts the
application may not tell it of its start. Everything it hands out is redacted.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from sqlite3 import Error as FileError
from time import time
from typing import Any

import msgspec

from umbel.app.app import App
from umbel.app.secrecy import has_secrets
from umbel.brokers.registry import open_broker
from umbel.errors import BrokerError
from umbel.launch.timetable import leader_of, read_timetable
from umbel.monitor.cluster import KnownCluster
from umbel.monitor.feed import Feed
from umbel.monitor.messages import letter_row, waiting_row
from umbel.monitor.model import ClusterModel
from umbel.monitor.shapes import (
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
)
from umbel.monitor.story import story_of
from umbel.protocol.delivery.states import FAILURE
from umbel.stores.interface import Where
from umbel.urls import without_password
from umbel.web.actions import ROLES, ActionResult, AnyAction, AuditEntry
from umbel.web.auditing import ended, entry_of, name_of, result_of
from umbel.web.hub import Hub
from umbel.web.inspecting import look_at_worker
from umbel.web.journal import HOUR_S, Journal
from umbel.web.performing import Performer
from umbel.web.problems import Forbidden, Refused
from umbel.web.recorded import Recollection
from umbel.web.redaction import DETAIL_MAX, LIST_MAX, changed_fields, redact, redact_data, redact_task, shown
from umbel.web.resending import as_command, call_of
from umbel.web.saved_views import SavedView
from umbel.web.settings import WebSettings
from umbel.web.site import PAGE_MAX, Visitor
from umbel.web.telling import ACTION, Teller
from umbel.web.unwritten import Unwritten, give_back
from umbel.web.visitors import Visitors

log = logging.getLogger("umbel.web")
OPEN_AGAIN_S = 2.0
WRITE_EVERY_S = 1.0
STORIES_MAX = 20_000
LOOKING_BACK_MAX = 2
STEPS_WRITTEN = 3  # the newest, which may still change


class Dashboard:
    """Implements `umbel.web.site.Site`."""

    def __init__(self, app: App, settings: WebSettings) -> None:
        self.app, self.settings = app, settings
        self.journal = Journal(settings.state_file)
        self.visitors = Visitors(settings, self.journal.tokens)
        self._broker = open_broker(app.broker_settings())
        model = ClusterModel(tasks_max=settings.tasks_max, stories_max=min(STORIES_MAX, settings.tasks_max))
        self.cluster = KnownCluster(self._make_feed(model), redact, self.hides)
        self.hub = Hub(self.cluster, clients_max=settings.clients_max)
        self._make_performer()
        self._unwritten = Unwritten()
        self._running: asyncio.Task[None] | None = None
        self._looking_back = asyncio.Semaphore(LOOKING_BACK_MAX)
        self.recollection = Recollection()

    @property
    def feed(self) -> Feed:
        return self.cluster.feed

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._running is not None and self._running.done():
            self._running = None
            self._begin_again()
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="umbel-web")
            self._running.add_done_callback(self._note_end)

    async def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        self.journal.close()
        self.app.close()

    def _begin_again(self) -> None:
        """With another connection; what is known stays."""
        self._broker = open_broker(self.app.broker_settings())
        self.cluster.feed = self._make_feed(self.cluster.model)
        self._make_performer()

    def _make_feed(self, model: ClusterModel) -> Feed:
        feed = Feed(self._broker, enable=self.settings.enable_events, model=model)
        feed.heard = self._note_heard
        return feed

    def _make_performer(self) -> None:
        self._teller = Teller(self._broker, self.cluster.model.receiver.clock)
        self._performer = Performer(self.app, self._broker, self.cluster, self._teller, self.journal)

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
        heard = self._unwritten.take()
        happened = [model.unsaved.popleft() for _ in range(len(model.unsaved))]
        steps = list(model.book.steps)[-STEPS_WRITTEN:]
        packed = [msgspec.convert(msgspec.to_builtins(step), type(step), strict=False) for step in steps]
        try:
            await asyncio.to_thread(self.journal.write_hour, heard, packed, happened, time())
        except FileError as error:
            self._unwritten.give_back(heard)
            give_back(model.unsaved, happened)
            log.warning(
                "cannot save the recent events of the dashboard to its state file; retrying",
                extra={"why": str(error)},
            )

    async def _restore(self) -> None:
        """Show the last hour again. Events are joined with what is heard meanwhile: order does not matter."""
        model, since = self.cluster.model, time() - HOUR_S
        model.book.restore(await asyncio.to_thread(self.journal.steps, since))
        for one in await asyncio.to_thread(self.journal.happened, since):
            if isinstance(one, Mark):
                model.marks.append(one)
            else:
                model.happenings.append(one)
        parts = self.journal.heard(since)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            at, bodies = part
            model.replay(bodies, at)
            await asyncio.sleep(0)

    # -- what pages ask --------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return self.app.name

    @property
    def badge(self) -> str:
        return self.settings.badge

    @property
    def broker(self) -> str:
        return without_password(self._broker.url)

    @property
    def problem(self) -> str:
        return self.feed.problem

    @property
    def lake(self) -> Where:
        return self.app.settings.history_lake

    @property
    def looking_back(self) -> asyncio.Semaphore:
        return self._looking_back

    @property
    def task_names(self) -> Sequence[str]:
        return sorted({*self.app.tasks, *self.cluster.model.state.names()})

    def hides(self, name: str | None) -> bool:
        """Whether the task of that name has arguments that nobody may read."""
        return has_secrets(self.app, name)

    def health(self) -> Health:
        return self.cluster.health()

    def overview(self) -> Overview:
        return self.cluster.overview()

    def nodes(self) -> list[Node]:
        return self.cluster.nodes()

    def node(self, name: str) -> Node | None:
        return self.cluster.node(name)

    async def worker(self, name: str) -> Worker | None:
        node = self.cluster.node(name)
        if node is None:
            return None
        wanted = TaskFilter(worker=name, state="FAILURE")
        failures = self.tasks(wanted, limit=20).tasks
        return await look_at_worker(self.feed, node, failures)

    def happenings(self, *, since: float = 0.0) -> list[Happening]:
        return self.cluster.happenings(since=since)

    def tasks(
        self, wanted: TaskFilter, *, limit: int = 50, cursor: str = "", order: str = "clock"
    ) -> TaskPage:
        page = self.cluster.tasks(wanted, limit=max(1, min(limit, PAGE_MAX)), cursor=cursor, order=order)
        return msgspec.structs.replace(
            page, tasks=[redact_task(one, LIST_MAX, self.hides) for one in page.tasks]
        )

    def count(self, wanted: TaskFilter) -> int:
        return self.cluster.count(wanted)

    def task(self, task_id: str) -> TaskDetail | None:
        found = self.cluster.model.state.task(task_id)
        if found is None:
            return None
        clean = redact_task(found, DETAIL_MAX, self.hides)
        events, edges, attempts = story_of(self.cluster.model.story(task_id))
        call = call_of(found)
        is_whole = not isinstance(call, str) and (clean.args, clean.kwargs) == (found.args, found.kwargs)
        return TaskDetail(
            task=clean,
            events=[msgspec.structs.replace(one, detail=shown(one.detail, LIST_MAX)) for one in events],
            edges=edges,
            attempts=[msgspec.structs.replace(one, error=shown(one.error, LIST_MAX)) for one in attempts],
            progress=self._progress(task_id),
            can_retry=not isinstance(call, str) or found.state == FAILURE,  # its message may be kept
            why_not=call if isinstance(call, str) else "",
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
        return self.cluster.workflow(task_id)

    def queues(self) -> list[Queue]:
        return self.cluster.queues()

    async def peek(self, queue: str, limit: int = 20) -> list[WaitingMessage]:
        waiting = await self._broker.peek(queue, max(1, min(limit, PAGE_MAX)))
        rows = [waiting_row(one, self.hides) for one in waiting]
        return [
            msgspec.structs.replace(one, args=shown(one.args, LIST_MAX), kwargs=shown(one.kwargs, LIST_MAX))
            for one in rows
        ]

    async def dead_letters(self, limit: int = 100) -> list[DeadLetterRow]:
        letters = await self._broker.dead_letters(max(1, min(limit, PAGE_MAX)))
        rows = [letter_row(one) for one in letters]
        return [msgspec.structs.replace(one, reason=shown(one.reason, LIST_MAX)) for one in rows]

    async def dead_letter_count(self, limit: int) -> int:
        return len(await self._broker.dead_letters(limit))

    async def log_lag(self) -> dict[str, int]:
        """By recorder: how many events of the log it has not acknowledged."""
        if not self._broker.capabilities.event_log:
            return {}
        log_state = await self._broker.event_log()
        return {
            name: max(0, log_state.last_offset - offset) for name, offset in log_state.acknowledged.items()
        }

    async def schedule(self) -> Schedule:
        if not self._broker.capabilities.leases:
            return Schedule(leader=None, term=0, tasks=[], note="this broker has no leases, so no schedule")
        lease, found = await read_timetable(self.app, self._broker)
        tasks = [PeriodicTask(**(one.as_data() | {"paused": one.paused}), missed=one.missed) for one in found]
        note = "" if tasks else "this app has no periodic tasks; define one with @app.periodic(every=60)"
        return Schedule(leader=leader_of(lease) or None, term=lease.term, tasks=tasks, note=note)

    def elections(self) -> list[Election]:
        found = self.cluster.elections()
        return [msgspec.structs.replace(one, outcome=shown(one.outcome, LIST_MAX)) for one in found]

    def leases(self) -> list[Lease]:
        return self.cluster.leases()

    def rates(self, *, last_s: float = HOUR_S, step_s: int = 0) -> Rates:
        return self.cluster.rates(last_s=last_s, step_s=step_s)

    async def audit(self, *, limit: int = 100, before: int = 0) -> list[AuditEntry]:
        limit = max(1, min(limit, PAGE_MAX))
        return await asyncio.to_thread(self.journal.audit, limit=limit, before=before)

    async def views(self) -> list[SavedView]:
        return await asyncio.to_thread(self.journal.views)

    # -- what pages change -----------------------------------------------------------------------

    async def act(self, visitor: Visitor, action: AnyAction) -> ActionResult:
        """Write it to the audit, do it, write what came of it. Raises `Forbidden` for a role that may not."""
        needed = ROLES[type(action)]
        if not visitor.role.may(needed):
            await self._written(entry_of(visitor, action, "refused"), self.journal.refuse)
            raise Forbidden(f"{name_of(action)} needs the role {needed}; {visitor.name} is {visitor.role}")
        action = self._performer.check(action)
        entry = await self._written(entry_of(visitor, action, "sent"), self.journal.begin)
        outcome: dict[str, Any] = {"problem": "it was interrupted"}
        try:
            outcome = await self._performer.perform(action)
        except BrokerError as error:
            outcome = {"problem": str(error)}
        finally:
            result = result_of(entry.id, outcome)
            await self._finish(ended(entry, result))
        return result

    async def _written(self, entry: AuditEntry, write: Callable[[AuditEntry], int]) -> AuditEntry:
        try:
            number = await asyncio.to_thread(write, entry)
        except FileError as error:
            raise Refused(
                503, "Audit unavailable", f"action refused: it cannot be written to the audit log: {error}"
            ) from None
        self.cluster.model.changes.note("audit", str(number))
        return msgspec.structs.replace(entry, id=number)

    async def _finish(self, entry: AuditEntry) -> None:
        try:
            await asyncio.to_thread(self.journal.finish, entry)
        except FileError as error:
            said = {"action": entry.action, "who": entry.who, "why": str(error)}
            log.error("dashboard action done, but its outcome is missing in the audit log", extra=said)
        self.cluster.model.changes.note("audit", str(entry.id))
        fields = ("who", "role", "address", "action", "target", "status")
        told = {name: getattr(entry, name) for name in fields} | {"replies": (entry.result or {})["replies"]}
        try:
            await self._teller.tell(ACTION, told)
        except BrokerError as error:
            said = {"action": entry.action, "who": entry.who, "why": str(error)}
            log.warning("dashboard action done, but its event could not be sent to monitors", extra=said)
