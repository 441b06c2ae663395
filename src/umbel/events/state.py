"""What a monitor knows of tasks and workers from the events it received, in bounded memory.

Every task is a join of its events (`merge.py`), so two monitors that received the same events, in any order
and any number of times, have the same tasks in the same order. A limit on the number of tasks does not bound
memory, because anyone with write access to the broker can send events of megabytes. So texts are truncated
before they are stored, and sizes are counted.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge as merged
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec

from umbel.events.merge import Registers, absorb, eid, put, winner
from umbel.events.order import Key, OrderIndex
from umbel.events.precedence import ENDINGS, rank, state_of
from umbel.events.types import Event, TaskEvent, WorkerBeat, WorkerOffline
from umbel.events.view import EventReader, TaskRecord, name_of, view, worker_of

# ---- workers ---------------------------------------------------------------------------------------
#
# The newest heartbeat and the newest offline event of each worker are stored, each the greatest by (time,
# clock, pid, digest): a join again. Here time comes before the clock: whether a node is online is a question
# of physical time, and a Celery worker that restarts without its state resets its clock to 0. So the clocks
# of different machines must not differ by hours, or an old run hides a new one of the same name.
#
# A name that appears in one event only may be forged. It counts as unproven: monitors do not list it, and it
# is removed first when the table is full. So a flood of forged names displaces no node that is online.
#
# The receiver's time decides whether a node is alive, if it is known, so that a sender's wrong clock does not
# make the node look lost. Other code acts on the membership that gossip decides, not on this.

WORKERS_MAX = 10_000
BEAT_S = 60.0
"""The heartbeat interval assumed for a node that does not state its own."""
BEATS_MISSED = 2.0


class WorkerRecord(msgspec.Struct, gc=False):
    """One node, by name. `heard_at` is when an event of it was last received here.

    `is_proven`: two different events of the node were received.
    """

    hostname: str
    beat: WorkerBeat | None = None
    farewell: WorkerOffline | None = None
    heard_at: float | None = None
    is_proven: bool = False

    @property
    def newest(self) -> WorkerBeat:
        """Return the node's newest event."""
        newest = self.farewell if self.is_offline else self.beat
        assert newest is not None, "a known node has sent an event"
        return newest

    @property
    def is_offline(self) -> bool:
        """Return whether the node's newest event says that it went offline."""
        if self.farewell is None or self.beat is None:
            return self.beat is None
        return _key(self.farewell) > _key(self.beat)

    def is_alive(self, now: float) -> bool:
        """Return whether the node is online and has missed fewer than BEATS_MISSED heartbeats."""
        if self.is_offline or self.beat is None:
            return False
        last = self.beat.at_us / 1_000_000 if self.heard_at is None else self.heard_at
        every_s = self.beat.freq or BEAT_S
        return now < last + BEATS_MISSED * every_s


class Workers:
    """Nodes by name, at most `workers_max`; unproven nodes are removed first, then the longest silent."""

    def __init__(self, workers_max: int = WORKERS_MAX) -> None:
        self._workers_max = workers_max
        self._workers: dict[str, WorkerRecord] = {}

    def put(self, event: Event, heard_at: float | None = None) -> None:
        """Process an event of a worker, received at that time; other events are ignored."""
        if not isinstance(event, WorkerBeat):
            return
        hostname = event.hostname
        worker = self._workers.get(hostname)
        if worker is None:
            self._make_room()
            worker = self._workers[hostname] = WorkerRecord(hostname)
        elif not worker.is_proven:
            worker.is_proven = _key(event) != _key(worker.newest)
        if isinstance(event, WorkerOffline):
            if worker.farewell is None or _key(event) > _key(worker.farewell):
                worker.farewell = event
        elif worker.beat is None or _key(event) > _key(worker.beat):
            worker.beat = event
        if heard_at is not None and not isinstance(event, WorkerOffline):
            worker.heard_at = heard_at if worker.heard_at is None else max(worker.heard_at, heard_at)

    def absorb(self, other: "Workers") -> None:
        """Merge what another monitor knows of the nodes."""
        for worker in other:
            for event in (worker.beat, worker.farewell):
                if event is not None:
                    self.put(event, worker.heard_at)
            self._workers[worker.hostname].is_proven |= worker.is_proven

    def get(self, hostname: str) -> WorkerRecord | None:
        """Return the node's record; None if it is unknown."""
        return self._workers.get(hostname)

    def alive(self, now: float) -> list[WorkerRecord]:
        """Return the nodes that are alive, sorted by name."""
        return [worker for worker in self if worker.is_alive(now)]

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(sorted(self._workers.values(), key=lambda worker: worker.hostname))

    def __len__(self) -> int:
        return len(self._workers)

    def _make_room(self) -> None:
        """Remove a tenth of the nodes at a time; otherwise a flood of names would sort them all for each new
        name.
        """
        if len(self._workers) < self._workers_max:
            return
        oldest = sorted(self._workers.values(), key=lambda worker: (worker.is_proven, _key(worker.newest)))
        for worker in oldest[: max(1, self._workers_max // 10)]:
            del self._workers[worker.hostname]


def _key(event: WorkerBeat) -> tuple[int, int, int, int]:
    return (event.at_us, event.clock, event.pid, eid(event))


# ---- memory ----------------------------------------------------------------------------------------
#
# Memory that events take at a monitor is limited by truncating texts and dropping events that are still too
# large. The size in bytes is returned, for code that limits bytes in addition to tasks.
#
# Of a dropped task only a hash and its state are remembered, so that the task is not counted twice. They are
# in two generations: when the younger is full, the older is discarded. So at least one full generation is
# always remembered. Two tasks with the same 64-bit hash would be confused; among a million tasks that chance
# is about one in thirty million.

TEXT_MAX = 20_000  # characters of arguments, results and errors; no page shows more
NAME_MAX = 1_000  # characters of any other text
EVENT_MAX_BYTES = 160 * 1024  # of a whole event, after its texts were truncated
BEAT_MAX_BYTES = 8 * 1024  # of a worker's heartbeat in memory, because there are many workers
RECORD_BYTES, DIGEST_BYTES = 400, 100  # of a record without its texts, and of a repeated event
PART_BYTES = 100  # of each list, map and entry, and of each field beyond FIELDS_USUAL
FIELDS_USUAL = 30
TEXTS = frozenset({"args", "kwargs", "result", "exception", "traceback"})
CUT = "…"
_IDENTITIES = frozenset({"uuid", "type"})  # never truncated: different values could become equal
_BEATS = frozenset({"worker-online", "worker-heartbeat", "worker-offline"})
_encode = msgspec.json.Encoder(enc_hook=repr).encode
REMEMBERED_MIN = 1000


def bounded(event: dict[str, Any]) -> tuple[dict[str, Any] | None, int]:
    """Return the event with long texts truncated, and the size of its record; None for an event that is too
    large.
    """
    text = _encode(event)
    if len(text) > NAME_MAX:  # rare; in a shorter event no text can be longer
        long = {
            name: most
            for name, value in event.items()
            if isinstance(value, str) and len(value) > (most := TEXT_MAX if name in TEXTS else NAME_MAX)
        }
        if not _IDENTITIES.isdisjoint(long):
            return None, len(text)
        if long:
            event = event | {name: event[name][:most] + CUT for name, most in long.items()}
            text = _encode(event)
        if len(text) > EVENT_MAX_BYTES:
            return None, len(text)
    size = RECORD_BYTES + len(text)
    if len(event) > FIELDS_USUAL:
        size += PART_BYTES * (len(event) - FIELDS_USUAL)
    if b'":[' in text or b'":{' in text:
        size += _size_of_parts(event.values())
    return (None if size > BEAT_MAX_BYTES and event["type"] in _BEATS else event), size


def size_of(event: TaskEvent) -> int:
    """Estimate the size of an event's record in bytes."""
    extra = event.extra or {}
    return RECORD_BYTES + len(_encode(event)) + PART_BYTES * len(extra) + _size_of_parts(extra.values())


def size_of_all(known: Registers) -> int:
    """Estimate the size of a task's registers in bytes."""
    digests = () if known.repeats is None else known.repeats.digests.values()
    repeated = sum(len(found) - 1 for found in digests)
    return sum(map(size_of, known.events())) + DIGEST_BYTES * repeated


def _size_of_parts(values: Iterable[Any]) -> int:
    """Estimate the size of lists and maps in addition to their text; commas within texts count too."""
    text = _encode([value for value in values if isinstance(value, list | dict)])
    return PART_BYTES * (text.count(b",") + text.count(b"[") - 1 + text.count(b"{"))


class Dropped(msgspec.Struct, frozen=True, gc=False):
    """A dropped task. `state` is the state it was counted under; `ended` says that this state is final."""

    state: str
    ended: bool


class Endings:
    """The states of dropped tasks by hash, in two generations of limited size."""

    def __init__(self, generation_max: int) -> None:
        self._generation_max = max(generation_max, REMEMBERED_MIN)
        self._young: dict[int, Dropped] = {}
        self._old: dict[int, Dropped] = {}
        self._shared: dict[tuple[str, bool], Dropped] = {}

    def note(self, uuid: str, state: str, *, ended: bool) -> None:
        """Remember the state of a dropped task."""
        if len(self._young) >= self._generation_max:
            self._old, self._young = self._young, {}
            self._shared.clear()  # users can define any number of states
        self._young[hash(uuid)] = self._shared.setdefault((state, ended), Dropped(state, ended))

    def recall(self, uuid: str) -> Dropped | None:
        """Return and forget the remembered state of a task, because the task is in memory again."""
        number = hash(uuid)
        return self._young.pop(number, None) or self._old.pop(number, None)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


# ---- cluster state ---------------------------------------------------------------------------------
#
# Tasks are ordered by (clock, time, origin) of the event that decides each task's state, then by task id. The
# clock is the one on the wire; the time that a receiver assigned plays no part. Adding an event costs the
# same with a thousand tasks in memory as with a million: the order is in indices that are updated in batches,
# or when they are read.
#
# Memory is limited by the number of tasks and by bytes. At the limit the oldest finished tasks are dropped
# first, and unfinished tasks only when there are no finished ones. The outcome of a dropped task is
# remembered for a while, so that a late event neither counts it again nor moves it back; its new record is
# marked as partial. Here two monitors may differ, because each drops tasks according to what it had received
# by then.

TASKS_MAX = 10_000
BYTES_MAX = 256 * 2**20
RECOUNTED_BYTES = 16 * 2**10  # of a task; the size of a smaller task may include replaced events
EVICTED_SHARE = 100  # drop a hundredth of the tasks at a time
STATES_MAX = 1_000
OTHER = "OTHER"
BATCH_MAX = 4096
NO_RANK = -1
NO_KEY: Key = (0, 0, "", 0, "")
_DESCRIBING = frozenset({"sent", "received"})


class Tracked(Registers, gc=False):
    """A task and its index keys. `key`, `name` and `worker` are the values under which it is indexed."""

    best: TaskEvent | None = None
    rank: int = NO_RANK
    unsaid: bool = False  # an event did not state its attempt, so a receipt may change ranks
    waiting: bool = False  # its place in the indices is not up to date
    key: Key = NO_KEY
    name: str | None = None
    worker: str | None = None
    finished: bool = False
    counted: str | None = None  # the state it is counted under
    remembered: str | None = None
    partial: bool = False
    size_bytes: int = 0
    recounted_at: int = RECOUNTED_BYTES


class ClusterState:
    """The tasks and workers that a monitor knows, at most `tasks_max` tasks and `bytes_max` bytes."""

    def __init__(self, *, tasks_max: int = TASKS_MAX, bytes_max: int = BYTES_MAX) -> None:
        assert tasks_max > 0
        self.tasks_max = tasks_max
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self.heard = 0
        self.unreadable = 0
        self.evicted = 0
        self.workers = Workers()
        self._counts: Counter[str] = Counter()
        self._tasks: dict[str, Tracked] = {}
        self._reader = EventReader(self._tasks)
        self._endings = Endings(tasks_max)
        self._waiting: list[Tracked] = []
        self._batch_max = max(1, min(BATCH_MAX, tasks_max // 8))
        self._finished = OrderIndex(self._is_alive)
        self._unfinished = OrderIndex(self._is_alive)
        self._by_name: dict[str, OrderIndex] = {}
        self._by_worker: dict[str, OrderIndex] = {}

    def apply(
        self, events: dict[str, Any] | Sequence[dict[str, Any]], *, heard_at: float | None = None
    ) -> None:
        """Process an event from the wire, or a list of them, received at that time."""
        if isinstance(events, dict):
            self.apply_one(events, heard_at)
        else:
            for event in events:
                self.apply_one(event, heard_at)

    def apply_one(
        self, event: dict[str, Any], heard_at: float | None, *, size_bytes: int | None = None
    ) -> Event | None:
        """Process one event; return its record, or None if it is not an event.

        `size_bytes` is the size of the record, if it is known.
        """
        self.heard += 1
        record = self._reader.read(event)
        if isinstance(record, TaskEvent):
            self._apply_task(record, size_of(record) if size_bytes is None else size_bytes)
        elif record is None:
            self.unreadable += 1
        else:
            self.workers.put(record, heard_at)
        if self.size_bytes > self.bytes_max:
            self._bring_up_to_date()
            self._shrink()
        return record

    def absorb(self, other: "ClusterState") -> None:
        """Merge another state into this one. The other is not changed."""
        for known in other._tasks.values():
            task = self._tasks.get(known.uuid) or self._begin(known.uuid)
            absorb(task, known)
            self._recount(task)
            task.unsaid |= known.unsaid
            self._judge(task)
        self.workers.absorb(other.workers)

    @property
    def counts(self) -> dict[str, int]:
        """Return how many tasks are in each state, including tasks that were dropped from memory."""
        self._bring_up_to_date()
        return {state: count for state, count in sorted(self._counts.items()) if count}

    def __len__(self) -> int:
        self._bring_up_to_date()
        return len(self._tasks)

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._tasks

    def task(self, uuid: str) -> TaskRecord | None:
        """Return the task's record; None if it is not in memory."""
        task = self._tasks.get(uuid)
        if task is None:
            return None
        return view(task, remembered=task.remembered, partial=task.partial)

    def registers(self, uuid: str) -> Registers | None:
        """Return the registers behind the record, for merging and for the timeline."""
        return self._tasks.get(uuid)

    def tasks(
        self,
        *,
        name: str | None = None,
        worker: str | None = None,
        finished: bool | None = None,
        newest_first: bool = True,
        limit: int | None = None,
        below: Key | None = None,
        admits: Callable[[Tracked], bool] | None = None,
    ) -> list[TaskRecord]:
        """Return tasks in order: all, or filtered by name, by worker, or by whether they are finished.

        `admits` is called for each task before its record is built, because building it is expensive.
        `below`: with the newest first, return only tasks before this place (`place`).
        """
        ids = self._ordered(name, worker, finished, newest_first, below)
        if admits is not None:
            ids = (uuid for uuid in ids if admits(self._tasks[uuid]))
        return [record for uuid in islice(ids, limit) if (record := self.task(uuid)) is not None]

    def place(self, uuid: str) -> Key | None:
        """Return the task's position in the order; it changes with the task's state."""
        self._bring_up_to_date()
        task = self._tasks.get(uuid)
        return None if task is None else task.key

    def tracked(self) -> Iterable[Tracked]:
        """Return all tasks in memory, unordered; the caller must not change them."""
        self._bring_up_to_date()
        return self._tasks.values()

    def names(self) -> list[str]:
        """Return the names of the tasks in memory."""
        self._bring_up_to_date()
        return sorted(self._by_name)

    def count_by_name(self) -> dict[str, int]:
        """Return how many tasks of each name are in memory."""
        self._bring_up_to_date()
        return {name: index.live for name, index in sorted(self._by_name.items())}

    def count_by_worker(self) -> dict[str, int]:
        """Return how many tasks of each worker are in memory."""
        self._bring_up_to_date()
        return {name: index.live for name, index in sorted(self._by_worker.items())}

    # ---- one event ---------------------------------------------------------------------------------

    def _apply_task(self, event: TaskEvent, size_bytes: int) -> None:
        task = self._tasks.get(event.uuid) or self._begin(event.uuid)
        has_changed = put(task, event)
        if not has_changed:
            size_bytes = DIGEST_BYTES
        self.size_bytes += size_bytes
        task.size_bytes += size_bytes  # replaced events are included until the next recount
        if task.size_bytes >= task.recounted_at:
            self._recount(task)
        if not has_changed:
            return
        slot, received = event.slot, task.received
        if event.retries is None and not task.unsaid:
            task.unsaid = True
        if task.unsaid and slot == "received":
            self._judge(task)
            return
        of_event = rank(event, received)
        if of_event >= task.rank:
            task.best, task.rank = event, of_event
            if not task.waiting:
                self._place(task)
        elif task.best is not None and task.best.slot == slot:
            self._judge(task)
        elif slot in _DESCRIBING:
            self._place(task)

    def _recount(self, task: Tracked) -> None:
        self.size_bytes -= task.size_bytes
        task.size_bytes = size_of_all(task)
        task.recounted_at = max(RECOUNTED_BYTES, 2 * task.size_bytes)
        self.size_bytes += task.size_bytes

    def _begin(self, uuid: str) -> Tracked:
        task = self._tasks[uuid] = Tracked(uuid)
        dropped = self._endings.recall(uuid)
        if dropped is not None:
            task.partial = True
            task.counted = dropped.state
            task.remembered = dropped.state if dropped.ended else None
        return task

    def _judge(self, task: Tracked) -> None:
        """Find the winning event among all registers again, after ranks may have changed."""
        task.best = winner(task)
        task.rank = NO_RANK if task.best is None else rank(task.best, task.received)
        self._place(task)

    def _place(self, task: Tracked) -> None:
        """Queue the task for the next update of the indices."""
        if task.waiting:
            return
        task.waiting = True
        self._waiting.append(task)
        if len(self._waiting) >= self._batch_max:
            self._bring_up_to_date()

    # ---- the order ---------------------------------------------------------------------------------

    def _bring_up_to_date(self) -> None:
        """Update the indices for all changed tasks, and drop tasks above the limit."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        self._take_out(waiting)
        for task in waiting:
            self._mark(task)
            self._count(task)
        waiting.sort(key=attrgetter("key"))
        endings = list[Key](), list[Key]()
        names, workers = defaultdict[str, list[Key]](list), defaultdict[str, list[Key]](list)
        for task in waiting:
            key = task.key
            endings[task.finished].append(key)
            if task.name is not None:
                names[task.name].append(key)
            if task.worker is not None:
                workers[task.worker].append(key)
        self._unfinished.add(endings[False])
        self._finished.add(endings[True])
        _put_in(self._by_name, names, self._is_alive)
        _put_in(self._by_worker, workers, self._is_alive)
        self._evict(len(self._tasks) - self.tasks_max)

    def _mark(self, task: Tracked) -> None:
        best = task.best
        assert best is not None, "a task that waits for indexing has an event"
        task.key = (best.clock, best.at_us, best.hostname, best.pid, task.uuid)
        task.name, task.worker = name_of(task), worker_of(best)
        task.finished = best.slot in ENDINGS or task.remembered is not None
        task.waiting = False

    def _count(self, task: Tracked) -> None:
        best = task.best
        assert best is not None
        if task.remembered is not None and best.slot not in ENDINGS:
            return
        state = state_of(best)
        if state != task.counted:
            if task.counted is not None:
                self._counts[task.counted] -= 1
            if state not in self._counts and len(self._counts) >= STATES_MAX:
                self._counts = +self._counts  # without states that no task is in
                state = OTHER if len(self._counts) >= STATES_MAX else state
            self._counts[state] += 1
            task.counted = state

    def _take_out(self, tasks: Iterable[Tracked]) -> None:
        """Mark the keys of these tasks as dead in all indices."""
        indexed = [task for task in tasks if task.key is not NO_KEY]
        for task in indexed:
            task.key = NO_KEY
        finished = sum(task.finished for task in indexed)
        self._finished.forget(finished)
        self._unfinished.forget(len(indexed) - finished)
        self._leave_groups(indexed)

    def _leave_groups(self, tasks: Sequence[Tracked]) -> None:
        _take_from(self._by_name, Counter(task.name for task in tasks))
        _take_from(self._by_worker, Counter(task.worker for task in tasks))

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        keys = self._finished.take_oldest(count)
        keys += self._unfinished.take_oldest(count - len(keys))
        gone = [self._tasks.pop(key[-1]) for key in keys]
        for task in gone:
            assert task.counted is not None, "an indexed task is counted"
            self._endings.note(task.uuid, task.counted, ended=task.finished)
        self._leave_groups(gone)
        self.size_bytes -= sum(task.size_bytes for task in gone)
        self.evicted += len(gone)

    def _shrink(self) -> None:
        """Drop tasks until the bytes are within the limit; a single task may exceed it."""
        while self.size_bytes > self.bytes_max and len(self._tasks) > 1:
            self._evict(max(1, len(self._tasks) // EVICTED_SHARE))

    def _ordered(
        self,
        name: str | None,
        worker: str | None,
        finished: bool | None,
        newest_first: bool,
        below: Key | None = None,
    ) -> Iterable[str]:
        self._bring_up_to_date()
        indices = (
            [self._finished, self._unfinished]
            if finished is None
            else [self._finished if finished else self._unfinished]
        )
        if worker is not None:
            indices = [self._by_worker[worker]] if worker in self._by_worker else []
        elif name is not None:
            indices = [self._by_name[name]] if name in self._by_name else []
        in_order = [index.descending(below) if newest_first else iter(index) for index in indices]
        for *_, uuid in merged(*in_order, reverse=newest_first):
            task = self._tasks[uuid]
            if (name is None or task.name == name) and (finished is None or task.finished == finished):
                yield uuid

    def _is_alive(self, key: Key) -> bool:
        task = self._tasks.get(key[4])
        return task is not None and task.key is key


def _put_in(
    indices: dict[str, OrderIndex], groups: Mapping[str, Sequence[Key]], is_alive: Callable[[Key], bool]
) -> None:
    for name, keys in groups.items():
        index = indices.get(name)
        if index is None:
            index = indices[name] = OrderIndex(is_alive)
        index.add(keys)


def _take_from(indices: dict[str, OrderIndex], counts: Mapping[str | None, int]) -> None:
    """Remove the tasks from the indices; remove an index that becomes empty."""
    for name, count in counts.items():
        if name is not None:
            indices[name].forget(count)
            if not indices[name].live:
                del indices[name]
