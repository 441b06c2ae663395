"""One child as the slots machine sees it: what it was sent, what is late, what it leaves behind."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic

from umbel.protocol.pool.events import EndedT, Loss, WorkT

TOKEN_VALUES = 256  # a token is one byte: the number of its batch, modulo this


class State(Enum):
    ABSENT = auto()
    STARTING = auto()
    READY = auto()
    LEAVING = auto()  # dismissed or killed: it gets nothing more, and its death is no surprise


@dataclass(slots=True)
class Batch(Generic[WorkT]):
    number: int
    jobs: list[WorkT]
    done: int = 0  # outcomes of the first so many have arrived


@dataclass(slots=True)
class Child(Generic[WorkT]):
    number: int
    state: State = State.ABSENT
    batches: list[Batch[WorkT]] = field(default_factory=list)
    single: bool = False  # it runs a job that nothing may wait behind
    recalled: bool = False  # what it has is slow; it gets more when that is done
    sent: int = 0  # batches
    ended: int = 0  # jobs
    stale: bool = False  # it is to be replaced as soon as it is idle
    heavy: bool = False  # it used too much memory, and that was reported
    begun_at: float = 0.0  # when its start was asked for
    ready_at: float | None = None
    kill_reason: str = ""
    timed_out: bool = False
    # When to look at it again, and for what.
    start_at: float | None = None
    kill_at: float | None = None  # it starts, or leaves, too slowly
    recall_at: float | None = None
    soft_at: float | None = None
    soft_repeats: int = 0
    stopping: bool = False  # the soft limit is that of the worker
    hard_at: float | None = None
    weigh_at: float | None = None
    weighed_at: float = float("-inf")

    def outstanding(self) -> int:
        count = 0
        for batch in self.batches:  # without a generator: it is asked for each child at each claim
            count += len(batch.jobs) - batch.done
        return count

    def running(self) -> WorkT | None:
        """The job it is at: exact when nothing waits behind it, else what is known."""
        if not self.batches:
            return None
        first = self.batches[0]
        return self.batches[-1].jobs[-1] if self.recalled else first.jobs[first.done]

    def due(self) -> float | None:
        times = (self.start_at, self.kill_at, self.recall_at, self.soft_at, self.hard_at, self.weigh_at)
        set_times = [at for at in times if at is not None]
        return min(set_times) if set_times else None

    def calm(self) -> None:
        """It has nothing to do, so nothing about its jobs can be late."""
        self.single = self.recalled = self.stopping = False
        self.recall_at = self.soft_at = self.hard_at = None

    def add(self, jobs: list[WorkT]) -> Batch[WorkT]:
        batch = Batch(self.sent % TOKEN_VALUES, jobs)
        self.sent += 1
        self.batches.append(batch)
        return batch

    def finish(
        self, outcomes: Sequence[EndedT], note: Callable[[str, list[float]], None], recall_at: float
    ) -> int:
        """Tick off the jobs that ended; return how many outcomes are for the jobs expected.

        `note` gets the runs of one task in a row, in seconds.
        """
        batches = self.batches
        known = 0
        task = ""
        runtimes_s: list[float] = []
        for outcome in outcomes:
            if not batches:
                break
            batch = batches[0]
            job = batch.jobs[batch.done]
            if job.number != outcome.number:
                break
            known += 1
            if job.task != task:
                note(task, runtimes_s)
                task, runtimes_s = job.task, []
            runtimes_s.append(outcome.runtime_s)
            batch.done += 1
            if batch.done == len(batch.jobs):
                del batches[0]
                self.recall_at = recall_at
        note(task, runtimes_s)
        self.ended += known
        return known

    def drop(self, numbers: Container[int]) -> None:
        """Forget jobs that were not sent after all."""
        for batch in self.batches:
            batch.jobs = [job for job in batch.jobs if job.number not in numbers]
        self.batches = [batch for batch in self.batches if batch.done < len(batch.jobs)]

    def take_back(self, tokens: bytes) -> list[WorkT]:
        """Return, in order, the jobs that never started, as the tokens that nobody took tell."""
        unstarted: list[WorkT] = []
        for batch in self.batches:
            # A child that answers for a job before it takes its token leaves tokens too many.
            left = min(tokens.count(batch.number), len(batch.jobs) - batch.done)
            if left:
                unstarted += batch.jobs[-left:]
                del batch.jobs[-left:]
        self.batches = [batch for batch in self.batches if batch.done < len(batch.jobs)]
        return unstarted

    def losses(self, reason: str, *, charge: bool) -> list[Loss]:
        """What a dead child leaves once the unstarted jobs are taken back: the last one ran."""
        jobs = [job.number for batch in self.batches for job in batch.jobs[batch.done :]]
        if not jobs:
            return []
        finished = [Loss(job, charged=False, ran=True, reason=reason) for job in jobs[:-1]]
        return [*finished, Loss(jobs[-1], charge, ran=True, reason=reason, timed_out=self.timed_out)]


def takers_of(children: Iterable[Child[WorkT]], now: float) -> list[Child[WorkT]]:
    """Who can take a batch now: the idle, then those with only one in hand."""
    idle: list[Child[WorkT]] = []
    busy: list[Child[WorkT]] = []
    for child in children:
        if child.state is not State.READY:
            continue
        if not child.batches:
            idle.append(child)
        elif len(child.batches) == 1 and not (child.single or child.recalled or child.stale):
            late = child.recall_at is not None and now >= child.recall_at
            if not late:
                busy.append(child)
    return idle + busy


def holder_of(children: Iterable[Child[WorkT]], job: int) -> int | None:
    """The child that was sent this job, whether it has started it or not."""
    for child in children:
        for batch in child.batches:
            if any(held.number == job for held in batch.jobs[batch.done :]):
                return child.number
    return None


def least_useful(children: Iterable[Child[WorkT]], count: int) -> list[Child[WorkT]]:
    """Who goes when the pool shrinks: those that do not work yet, the idle, the busy; new ones first."""
    order = {State.ABSENT: 0, State.LEAVING: 1, State.STARTING: 2, State.READY: 3}
    ranked = sorted(children, key=lambda child: (order[child.state], child.outstanding(), -child.number))
    return ranked[: max(0, count)]


def is_down(child: Child[WorkT]) -> bool:
    """It does no work and could not."""
    return child.state is not State.READY and not child.batches
