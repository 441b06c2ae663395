"""ClusterState: what a monitor knows of tasks and workers from the events it heard.

Every task is a join of its events (`merge.py`), so two monitors that heard the same events, in
whatever order and however often, hold the same tasks in the same order: by (clock, time, origin)
of the event that says each task's state, and by the task's id where all that is equal. The clock is the one
on the wire; what a receiver made of it for itself plays no part.

Putting an event in costs the same with a thousand tasks in memory or a million. The order is kept
in indices that are brought up to date in batches, or when somebody asks.

Memory is bounded by the number of tasks. Where it is full the oldest finished ones go first, and
unfinished ones only when there is nothing else. How a dropped task ended is remembered for a
while, so that a late event neither counts it again nor moves it back; its record is then marked
partial. Here two monitors may differ: what is dropped depends on what each heard by then.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import merge as merged
from itertools import islice
from operator import attrgetter
from typing import Any

from umbel.events.memory import Endings
from umbel.events.merge import Registers, absorb, put, winner
from umbel.events.order import Key, OrderIndex
from umbel.events.precedence import ENDINGS, rank, state_of
from umbel.events.reading import EventReader
from umbel.events.types import Event, TaskEvent
from umbel.events.view import TaskRecord, name_of, view, worker_of
from umbel.events.workers import Workers

TASKS_MAX = 10_000
BATCH_MAX = 4096
NO_RANK = -1
NO_KEY: Key = (0, 0, "", 0, "")
_DESCRIBING = frozenset({"sent", "received"})


class Tracked(Registers, gc=False):
    """A task and its place. `key`, `name` and `worker` are those under which it is indexed."""

    best: TaskEvent | None = None
    rank: int = NO_RANK
    unsaid: bool = False  # some event came without its attempt, so a receipt may change ranks
    waiting: bool = False  # for its place in the indices
    key: Key = NO_KEY
    name: str | None = None
    worker: str | None = None
    finished: bool = False
    counted: str | None = None  # the state it is counted under
    remembered: str | None = None
    partial: bool = False


class ClusterState:
    def __init__(self, *, tasks_max: int = TASKS_MAX) -> None:
        assert tasks_max > 0
        self.tasks_max = tasks_max
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
        """Take in an event as it is on the wire, or a list of them, received at that time."""
        if isinstance(events, dict):
            self.apply_one(events, heard_at)
        else:
            for event in events:
                self.apply_one(event, heard_at)

    def apply_one(self, event: dict[str, Any], heard_at: float | None) -> Event | None:
        """The same for one event; the record it was read as, or None if it is none."""
        self.heard += 1
        record = self._reader.read(event)
        if isinstance(record, TaskEvent):
            self._apply_task(record)
        elif record is None:
            self.unreadable += 1
        else:
            self.workers.put(record, heard_at)
        return record

    def absorb(self, other: "ClusterState") -> None:
        """Join what another state knows. It is not changed."""
        for known in other._tasks.values():
            task = self._tasks.get(known.uuid) or self._begin(known.uuid)
            absorb(task, known)
            task.unsaid |= known.unsaid
            self._judge(task)
        self.workers.absorb(other.workers)

    @property
    def counts(self) -> dict[str, int]:
        """How many tasks are in each state, those that were dropped from memory included."""
        self._bring_up_to_date()
        return {state: count for state, count in sorted(self._counts.items()) if count}

    def __len__(self) -> int:
        self._bring_up_to_date()
        return len(self._tasks)

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._tasks

    def task(self, uuid: str) -> TaskRecord | None:
        task = self._tasks.get(uuid)
        if task is None:
            return None
        return view(task, remembered=task.remembered, partial=task.partial)

    def registers(self, uuid: str) -> Registers | None:
        """What the record is made from; for merging and for the timeline."""
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
        """The tasks in their order; of one name, on one worker, finished or not.

        `admits` is asked of each before its record is made, which is what costs. `below`: where the newest
        first are listed, only those before this place (`place`).
        """
        ids = self._ordered(name, worker, finished, newest_first, below)
        if admits is not None:
            ids = (uuid for uuid in ids if admits(self._tasks[uuid]))
        return [record for uuid in islice(ids, limit) if (record := self.task(uuid)) is not None]

    def place(self, uuid: str) -> Key | None:
        """Where a task stands in the order; it changes with the task's state."""
        self._bring_up_to_date()
        task = self._tasks.get(uuid)
        return None if task is None else task.key

    def tracked(self) -> Iterable[Tracked]:
        """All that is in memory, in no order; not to be changed."""
        self._bring_up_to_date()
        return self._tasks.values()

    def names(self) -> list[str]:
        self._bring_up_to_date()
        return sorted(self._by_name)

    def count_by_name(self) -> dict[str, int]:
        """How many tasks of each name are in memory."""
        self._bring_up_to_date()
        return {name: index.live for name, index in sorted(self._by_name.items())}

    def count_by_worker(self) -> dict[str, int]:
        self._bring_up_to_date()
        return {name: index.live for name, index in sorted(self._by_worker.items())}

    # ---- one event ---------------------------------------------------------------------------------

    def _apply_task(self, event: TaskEvent) -> None:
        task = self._tasks.get(event.uuid) or self._begin(event.uuid)
        if not put(task, event):
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

    def _begin(self, uuid: str) -> Tracked:
        task = self._tasks[uuid] = Tracked(uuid)
        dropped = self._endings.recall(uuid)
        if dropped is not None:
            task.partial = True
            task.counted = dropped.state
            task.remembered = dropped.state if dropped.ended else None
        return task

    def _judge(self, task: Tracked) -> None:
        """Find the winner among all registers: needed where ranks may have changed or fallen."""
        task.best = winner(task)
        task.rank = NO_RANK if task.best is None else rank(task.best, task.received)
        self._place(task)

    def _place(self, task: Tracked) -> None:
        """Have the task get its new place with the next batch."""
        if task.waiting:
            return
        task.waiting = True
        self._waiting.append(task)
        if len(self._waiting) >= self._batch_max:
            self._bring_up_to_date()

    # ---- the order ---------------------------------------------------------------------------------

    def _bring_up_to_date(self) -> None:
        """Give all tasks that changed their new places, and drop what is too much."""
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
        assert best is not None, "a task that waits for its place has had an event"
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
            self._counts[state] += 1
            task.counted = state

    def _take_out(self, tasks: Iterable[Tracked]) -> None:
        """The keys of these die, in all indices that have them."""
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
            assert task.counted is not None, "a task that has a place is counted"
            self._endings.note(task.uuid, task.counted, ended=task.finished)
        self._leave_groups(gone)
        self.evicted += len(gone)

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
    """An index that nobody is left in goes."""
    for name, count in counts.items():
        if name is not None:
            indices[name].forget(count)
            if not indices[name].live:
                del indices[name]
