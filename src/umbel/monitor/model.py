"""ClusterModel: what a monitor shows, from the events it hears; no screen and no broker.

Tasks and workers come from the cluster's state, which is the same on every monitor that heard the
same. Beside it are kept the events of the tasks that were last heard of, for their timelines; how much
happened in each step of the last hour; elections, leases, and who came and went. All of it is bounded:
`tasks_max` tasks, the events of STORIES_MAX of them, an hour of steps, HAPPENINGS_MAX changes. Texts of
events are cut to TEXT_MAX before anything keeps them.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from umbel.events.meters import Meters
from umbel.events.receiver import EventReceiver
from umbel.events.state import ClusterState, Tracked
from umbel.events.timeline import timeline
from umbel.events.types import Event, TaskEvent, TaskReceived, TaskSent, TaskStarted, WorkerBeat
from umbel.events.view import TaskRecord
from umbel.monitor.changes import Changes
from umbel.monitor.elections import ElectionBook, LeaseBook
from umbel.monitor.flow import QueueFlow
from umbel.monitor.happenings import lease_changed, version_changed
from umbel.monitor.rates import SECONDS_MAX, RateBook
from umbel.monitor.shapes import Happening, Mark
from umbel.protocol.clock import LamportClock
from umbel.wire.event import decode_events
from umbel.wire.retried import RETRY_OF

TASKS_MAX = 20_000
STORIES_MAX = 5_000
STORY_MAX = 200  # events of one task
TEXT_MAX = 20_000  # of arguments, results, errors; more is shown nowhere
TEXTS = ("args", "kwargs", "result", "exception", "traceback")
HAPPENINGS_MAX = 5_000
MARKS_MAX = 200
MARK = "control-mark"
_ENDED = ("succeeded", "failed", "revoked")
Events = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which tasks are listed: a part of the name or the beginning of the id, a state, a worker."""

    text: str = ""
    state: str = ""
    worker: str = ""

    def admits(self, task: Tracked) -> bool:
        named = not self.text or self.text in (task.name or "") or task.uuid.startswith(self.text)
        return named and (not self.state or task.counted == self.state)


@dataclass(frozen=True, slots=True)
class MemberRow:
    node: str
    state: str  # alive, silent, left
    software: str
    clock: int
    active: int
    processed: int
    load: str
    silent_s: float


class ClusterModel:
    def __init__(self, *, tasks_max: int = TASKS_MAX, stories_max: int = STORIES_MAX, clock: int = 0) -> None:
        self.state = ClusterState(tasks_max=tasks_max)
        self.receiver = EventReceiver(LamportClock(clock), decode_events)
        self.book = RateBook()
        self.flow = QueueFlow()
        self.meters = Meters()
        self.elections = ElectionBook()
        self.leases = LeaseBook()
        self.changes = Changes()
        self.happenings: deque[Happening] = deque(maxlen=HAPPENINGS_MAX)
        self.marks: deque[Mark] = deque(maxlen=MARKS_MAX)
        self.unsaved: deque[Happening | Mark] = deque(maxlen=HAPPENINGS_MAX)  # for who writes them down
        self._stories_max = stories_max
        self._stories: OrderedDict[str, list[TaskEvent]] = OrderedDict()
        self._versions: dict[str, str] = {}
        self._retries: OrderedDict[str, str] = OrderedDict()
        self._retries_max = tasks_max

    def take(self, body: bytes, now: float) -> Events:
        """One message of the fan-out: an event, or a list of them. Returns those about nodes."""
        of_nodes: Events = []
        for heard in self.receiver.receive(body):
            event = _cut(heard.event)
            self.book.count(event["type"], now)
            record = self.state.apply_one(event, now)
            if isinstance(record, TaskEvent):
                self._keep(record)
                self._measure(record, now)
                self.changes.note("tasks", record.uuid)
            elif record is not None:
                self._take_other(record, now)
                of_nodes.append(event)
        return of_nodes

    def replay(self, bodies: Iterable[bytes], heard_at: float) -> None:
        """What was heard and written down before. It is joined with what is known, and counted by nobody."""
        for body in bodies:
            for heard in self.receiver.receive(body):
                record = self.state.apply_one(_cut(heard.event), heard_at)
                if isinstance(record, TaskEvent):
                    self._keep(record)
                elif record is not None:
                    self.elections.take(record)

    def happened(self, happening: Happening) -> None:
        self.happenings.append(happening)
        self.unsaved.append(happening)

    def mark(self, mark: Mark) -> None:
        self.marks.append(mark)
        self.unsaved.append(mark)
        self.changes.note("rates", "mark")

    def members(self, now: float) -> list[MemberRow]:
        """The nodes that were heard twice: any one event may have a name that was made up."""
        return [
            MemberRow(
                node=worker.hostname,
                state="left" if worker.is_offline else "alive" if worker.is_alive(now) else "silent",
                software=worker.newest.sw_ident or "",
                clock=worker.newest.clock,
                active=worker.newest.active or 0,
                processed=worker.newest.processed or 0,
                load="" if (load := load_of(worker.newest)) is None else f"{load:.2f}",
                silent_s=max(0.0, now - (worker.heard_at or now)),
            )
            for worker in self.state.workers
            if worker.is_proven
        ]

    def tasks(self, wanted: Filter, limit: int) -> list[TaskRecord]:
        """The newest in Lamport order."""
        return self.state.tasks(worker=wanted.worker or None, limit=limit, admits=wanted.admits)

    def story(self, uuid: str) -> list[TaskEvent]:
        """What was heard of a task, in its causal order; of an older task the newest event of each type."""
        kept = self._stories.get(uuid)
        if kept is None:
            known = self.state.registers(uuid)
            kept = [] if known is None else known.events()
        return timeline(kept)

    def retry_of(self, uuid: str) -> str | None:
        """The task that is known to retry this one."""
        return self._retries.get(uuid)

    def note_retry(self, old: str, new: str) -> None:
        """Heard from the worker that received it, or known to who sends it."""
        self._retries[old] = new
        if len(self._retries) > self._retries_max:
            self._retries.popitem(last=False)

    def forget_retry(self, old: str) -> None:
        """It was not sent after all."""
        self._retries.pop(old, None)

    def rates(self, now: float, *, over: int = 5) -> tuple[float, float, float]:
        """Events, successes and failures a second, over the last whole seconds."""
        recent = self.book.recent(now, over)
        events, done, failed = (
            sum(one.events for one in recent),
            sum(one.done for one in recent),
            sum(one.failed for one in recent),
        )
        return events / over, done / over, failed / over

    def history(self, now: float) -> Sequence[int]:
        """Tasks that ended in each of the last seconds, oldest first."""
        ended = {one.at: one.done + one.failed for one in self.book.seconds}
        return [ended.get(at, 0) for at in range(int(now) - SECONDS_MAX, int(now))]

    def _take_other(self, record: Event, now: float) -> None:
        election = self.elections.take(record)
        if election:
            self.changes.note("elections", election)
        lease = self.leases.take(record)
        if lease is not None:
            self.lease_changed(lease.name, lease.holder, lease.term, now)
        if isinstance(record, WorkerBeat):
            self._note_version(record, now)
            self.changes.note("nodes", record.hostname)
        elif record.type_name == MARK and record.extra:
            self.mark(Mark(at=record.timestamp, text=str(record.extra.get("text", ""))[:200]))

    def lease_changed(self, name: str, holder: str, term: int, now: float) -> None:
        self.happened(lease_changed(name, holder, term, now))
        self.changes.note("elections", name)

    def _note_version(self, beat: WorkerBeat, now: float) -> None:
        """A node that comes back with another version is a deploy."""
        version = beat.sw_ver
        if not version:
            return
        known = self._versions.get(beat.hostname)
        if known == version:
            return
        if len(self._versions) >= HAPPENINGS_MAX:
            self._versions.clear()
        self._versions[beat.hostname] = version
        if known is not None:
            changed = version_changed(beat.hostname, known, version, now)
            self.happened(changed)
            self.mark(Mark(at=now, text=changed.text, kind="version"))

    def _keep(self, record: TaskEvent) -> None:
        if isinstance(record, TaskReceived) and record.extra:
            old = record.extra.get(RETRY_OF)
            if isinstance(old, str) and old:
                self.note_retry(old, record.uuid)
        story = self._stories.get(record.uuid)
        if story is None:
            story = self._stories[record.uuid] = []
            if len(self._stories) > self._stories_max:
                self._stories.popitem(last=False)
        elif len(story) >= STORY_MAX:
            return
        story.append(record)

    def _measure(self, record: TaskEvent, now: float) -> None:
        """How long it waited and ran, and through which queue it went."""
        known = self.state.registers(record.uuid)
        if known is None:
            return
        name = self.meters.take(record, known)
        if isinstance(record, TaskSent):
            self.flow.came(record.queue, now)
        elif isinstance(record, TaskStarted):
            queued = known.sent or known.received
            if known.sent is not None:
                self.flow.went(known.sent.queue, now)
            if queued is not None and queued.eta is None:
                self.book.waited(record.timestamp - queued.timestamp, now)
                self.meters.waited(name, record.timestamp - queued.timestamp)
        elif record.slot in _ENDED:
            runtime = getattr(record, "runtime", None)
            if runtime is None and known.started is not None:
                runtime = record.timestamp - known.started.timestamp
            if runtime is not None:
                self.book.ran(runtime, now)
                self.meters.ran(name, runtime)


def _cut(event: dict[str, Any]) -> dict[str, Any]:
    long = [name for name in TEXTS if isinstance(text := event.get(name), str) and len(text) > TEXT_MAX]
    return event | {name: event[name][:TEXT_MAX] + "…" for name in long} if long else event


def load_of(beat: WorkerBeat) -> float | None:
    """The load of its machine over the last minute."""
    loadavg = beat.loadavg
    return float(loadavg[0]) if loadavg and isinstance(loadavg[0], int | float) else None
