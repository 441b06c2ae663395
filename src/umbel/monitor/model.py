"""ClusterModel: what a monitor knows of the cluster, computed from events alone.

Tasks and workers come from the cluster's state (`events/state.py`), which is the same on every monitor that
received the same events. The model adds the events of the newest tasks for their timelines, the rates of the
last hour, elections, leases, and changes of membership.

Everything is bounded: `tasks_max` tasks, the events of STORIES_MAX tasks, an hour of steps, HAPPENINGS_MAX
changes. Tasks and their events also have limits in bytes, and texts are cut before they are stored.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from umbel.events.merge import timeline
from umbel.events.meters import Meters
from umbel.events.stamp import EventReceiver
from umbel.events.state import ClusterState, Tracked, bounded
from umbel.events.types import Event, TaskEvent, TaskReceived, TaskSent, TaskStarted, WorkerBeat
from umbel.events.view import TaskRecord
from umbel.monitor.coordination import ElectionBook, LeaseBook, lease_changed, version_changed
from umbel.monitor.rates import SECONDS_MAX, QueueFlow, RateBook
from umbel.monitor.records import Happening, Mark
from umbel.protocol.clock import LamportClock
from umbel.wire.event import decode_events
from umbel.wire.retried import RETRY_OF

# ---- changes ---------------------------------------------------------------------------------------

NAMES_MAX = 100


class Change(msgspec.Struct, frozen=True):
    """The changes of one topic: how many there were, and the names that changed last."""

    count: int
    names: list[str]

    def joined(self, later: "Change") -> "Change":
        """Return this change and a later one as one; the later names come first."""
        names = list(dict.fromkeys([*later.names, *self.names]))[:NAMES_MAX]
        return Change(self.count + later.count, names)


class Changes:
    """Collects changes by topic until they are pushed to browsers."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, None]] = {}
        self._counts: dict[str, int] = {}

    def note(self, topic: str, name: str) -> None:
        """Count one change of a topic, under the name of what changed."""
        self._counts[topic] = self._counts.get(topic, 0) + 1
        names = self._topics.setdefault(topic, {})
        names.pop(name, None)  # so that the name moves to the end
        names[name] = None
        if len(names) > 2 * NAMES_MAX:
            self._topics[topic] = dict.fromkeys(list(names)[-NAMES_MAX:])

    def drain(self) -> dict[str, Change]:
        """Return the changes since the last call by topic, the newest names first, and forget them."""
        topics, counts = self._topics, self._counts
        self._topics, self._counts = {}, {}
        return {
            topic: Change(counts[topic], list(reversed(names))[:NAMES_MAX]) for topic, names in topics.items()
        }


# ---- cluster model ---------------------------------------------------------------------------------

TASKS_MAX = 20_000
STORIES_MAX = 5_000
STORY_MAX = 200  # events of one task
STORIES_BYTES_MAX = 64 * 2**20
HAPPENINGS_MAX = 5_000
MARKS_MAX = 200
MARK = "control-mark"
_ENDED = ("succeeded", "failed", "revoked")
Events = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which tasks `umbel top` lists: a part of the name or the beginning of the id, a state, a worker."""

    text: str = ""
    state: str = ""
    worker: str = ""

    def admits(self, task: Tracked) -> bool:
        """Return whether the task's name or id, and its state match; the worker is looked up by its index."""
        is_named = not self.text or self.text in (task.name or "") or task.uuid.startswith(self.text)
        return is_named and (not self.state or task.counted == self.state)


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A worker as `umbel top` lists it."""

    node: str
    state: str  # alive, silent, left
    software: str
    clock: int
    active: int
    processed: int
    load: str
    silent_s: float


@dataclass(slots=True)
class _Story:
    """The events of one task, in the order in which they were received."""

    events: list[TaskEvent]
    size_bytes: int = 0


class ClusterModel:
    """Everything a monitor knows of the cluster.

    `dropped` counts the events that were too large. `unsaved` has the changes that the dashboard has not yet
    written to its file.
    """

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
        self.unsaved: deque[Happening | Mark] = deque(maxlen=HAPPENINGS_MAX)
        self.dropped = 0
        self._stories_max = stories_max
        self._stories: OrderedDict[str, _Story] = OrderedDict()
        self._stories_bytes = 0
        self._versions: dict[str, str] = {}
        self._retries: OrderedDict[str, str] = OrderedDict()
        self._retries_max = tasks_max

    # -- input -----------------------------------------------------------------------------------

    def take(self, body: bytes, now: float) -> Events:
        """Apply one message of the fan-out, an event or a list of events; return those about nodes."""
        of_nodes: Events = []
        for event, size in self._read(body):
            self.book.count(event["type"], now)
            record = self.state.apply_one(event, now, size_bytes=size)
            if isinstance(record, TaskEvent):
                self._add_to_story(record, size)
                self._measure(record, now)
                self.changes.note("tasks", record.uuid)
            elif record is not None:
                self._take_other(record, now)
                of_nodes.append(event)
        return of_nodes

    def replay(self, bodies: Iterable[bytes], received_at: float) -> None:
        """Apply events that were saved before a restart.

        They merge with the state in any order, but are not counted in the rates, which are saved separately.
        """
        for body in bodies:
            for event, size in self._read(body):
                record = self.state.apply_one(event, received_at, size_bytes=size)
                if isinstance(record, TaskEvent):
                    self._add_to_story(record, size)
                elif record is not None:
                    self.elections.take(record)

    def happened(self, happening: Happening) -> None:
        """Store a change of membership, leadership or version."""
        self.happenings.append(happening)
        self.unsaved.append(happening)

    def mark(self, mark: Mark) -> None:
        """Store a moment that the charts annotate."""
        self.marks.append(mark)
        self.unsaved.append(mark)
        self.changes.note("rates", "mark")

    def lease_changed(self, name: str, holder: str, term: int, now: float) -> None:
        """Store that a lease has a new holder or term."""
        self.happened(lease_changed(name, holder, term, now))
        self.changes.note("elections", name)

    def note_retry(self, old: str, new: str) -> None:
        """Remember that `new` retries `old`, from a worker's event or because this process sends it."""
        self._retries[old] = new
        if len(self._retries) > self._retries_max:
            self._retries.popitem(last=False)

    def forget_retry(self, old: str) -> None:
        """Undo `note_retry` for a retry that could not be sent."""
        self._retries.pop(old, None)

    # -- questions of `umbel top` and of task pages ------------------------------------------------

    def members(self, now: float) -> list[MemberRow]:
        """Return the nodes with at least two events: the name in a single event may be made up."""
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
        """Return the newest matching tasks in Lamport order."""
        return self.state.tasks(worker=wanted.worker or None, limit=limit, admits=wanted.admits)

    def story(self, uuid: str) -> list[TaskEvent]:
        """Return a task's events in causal order; for an older task, the newest event of each type."""
        story = self._stories.get(uuid)
        if story is not None:
            return timeline(story.events)
        known = self.state.registers(uuid)
        return [] if known is None else timeline(known.events())

    def retry_of(self, uuid: str) -> str | None:
        """Return the id of the task that retries this task, if it is known."""
        return self._retries.get(uuid)

    def rates(self, now: float, *, over: int = 5) -> tuple[float, float, float]:
        """Return events, successes and failures per second, over the last whole seconds."""
        recent = self.book.recent(now, over)
        return (
            sum(second.events for second in recent) / over,
            sum(second.done for second in recent) / over,
            sum(second.failed for second in recent) / over,
        )

    def history(self, now: float) -> Sequence[int]:
        """Return how many tasks ended in each of the last seconds, oldest first."""
        ended = {second.at: second.done + second.failed for second in self.book.seconds}
        return [ended.get(at, 0) for at in range(int(now) - SECONDS_MAX, int(now))]

    # -- events ----------------------------------------------------------------------------------

    def _read(self, body: bytes) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the events of a message with their sizes in bytes, except those that are too large."""
        for received in self.receiver.receive(body):
            event, size = bounded(received.event)
            if event is None:
                self.dropped += 1
            else:
                yield event, size

    def _take_other(self, record: Event, now: float) -> None:
        if election := self.elections.take(record):
            self.changes.note("elections", election)
        if (lease := self.leases.take(record)) is not None:
            self.lease_changed(lease.name, lease.holder, lease.term, now)
        if isinstance(record, WorkerBeat):
            self._note_version(record, now)
            self.changes.note("nodes", record.hostname)
        elif record.type_name == MARK and record.extra:
            self.mark(Mark(at=record.timestamp, text=str(record.extra.get("text", ""))[:200]))

    def _note_version(self, beat: WorkerBeat, now: float) -> None:
        """Mark a deploy if the node had another version before."""
        version, known = beat.sw_ver, self._versions.get(beat.hostname)
        if not version or known == version:
            return
        if len(self._versions) >= HAPPENINGS_MAX:
            self._versions.clear()
        self._versions[beat.hostname] = version
        if known is not None:
            changed = version_changed(beat.hostname, known, version, now)
            self.happened(changed)
            self.mark(Mark(at=now, text=changed.text, kind="version"))

    def _add_to_story(self, record: TaskEvent, size_bytes: int) -> None:
        if isinstance(record, TaskReceived) and record.extra:
            old = record.extra.get(RETRY_OF)
            if isinstance(old, str) and old:
                self.note_retry(old, record.uuid)
        story = self._stories.get(record.uuid)
        if story is None:
            story = self._stories[record.uuid] = _Story([])
        elif len(story.events) >= STORY_MAX:
            return
        story.events.append(record)
        story.size_bytes += size_bytes
        self._stories_bytes += size_bytes
        while len(self._stories) > self._stories_max or self._stories_bytes > STORIES_BYTES_MAX:
            _, oldest = self._stories.popitem(last=False)
            self._stories_bytes -= oldest.size_bytes

    def _measure(self, record: TaskEvent, now: float) -> None:
        """Count how long the task waited and ran, and the flow of its queue."""
        known = self.state.registers(record.uuid)
        if known is None:
            return
        name = self.meters.take(record, known)
        if isinstance(record, TaskSent):
            self.flow.entered(record.queue, now)
        elif isinstance(record, TaskStarted):
            queued = known.sent or known.received
            if known.sent is not None:
                self.flow.left(known.sent.queue, now)
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


def load_of(beat: WorkerBeat) -> float | None:
    """Return the load average of the worker's machine over the last minute; None if it is not reported."""
    loadavg = beat.loadavg
    return float(loadavg[0]) if loadavg and isinstance(loadavg[0], int | float) else None
