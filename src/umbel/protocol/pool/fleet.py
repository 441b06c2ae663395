"""The children of a pool: how they start, work and end (`slots.py` decides about their jobs).

A slot whose child ended is filled again: at once after a normal life, later after a failed start (`Starts`).
A child that is asked to end and does not is killed. `Child` is one child as the slots machine sees it: the
jobs that it was sent, its deadlines, and its unfinished jobs when it dies.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic

from umbel.protocol.pool.events import (
    Dismiss,
    Effect,
    EndedT,
    JobLoss,
    Kill,
    PoolFailed,
    Recall,
    SignalSoftLimit,
    SlotSettings,
    Start,
    Weigh,
    WorkT,
)

# ---- child -----------------------------------------------------------------------------------------

TOKEN_VALUES = 256  # a token is one byte: the number of its batch, modulo this


class ChildState(Enum):
    """The states of a child between its start and its end."""

    ABSENT = auto()
    STARTING = auto()
    READY = auto()
    LEAVING = auto()  # dismissed or killed: it gets no more jobs, and its end is expected


@dataclass(slots=True)
class Batch(Generic[WorkT]):
    """The jobs that were sent to a child together."""

    number: int
    jobs: list[WorkT]
    done: int = 0  # number of leading jobs that have outcomes


@dataclass(slots=True)
class Child(Generic[WorkT]):
    """One child: the batches that it was sent, and its deadlines."""

    number: int
    state: ChildState = ChildState.ABSENT
    batches: list[Batch[WorkT]] = field(default_factory=list)
    single: bool = False  # it runs a job behind which no other job may be queued
    recalled: bool = False  # its batch is slow; it gets no more jobs until the batch has ended
    sent: int = 0  # number of batches sent
    ended: int = 0  # number of jobs ended
    stale: bool = False  # it will be replaced when it is idle
    heavy: bool = False  # it uses too much memory, which was reported
    begun_at: float = 0.0  # when its start was requested
    ready_at: float | None = None
    kill_reason: str = ""
    timed_out: bool = False
    # Deadlines of the child.
    start_at: float | None = None
    kill_at: float | None = None  # when it is killed unless it is ready, or has exited
    recall_at: float | None = None
    soft_at: float | None = None
    soft_repeats: int = 0
    stopping: bool = False  # it is interrupted because the worker stops
    hard_at: float | None = None
    weigh_at: float | None = None
    weighed_at: float = float("-inf")

    def outstanding(self) -> int:
        """Return how many jobs were sent to the child and have no outcome yet."""
        count = 0
        for batch in self.batches:  # no generator, because this runs for each child at each claim
            count += len(batch.jobs) - batch.done
        return count

    def running(self) -> WorkT | None:
        """Return the running job: exact if no job is queued behind it, otherwise as far as known."""
        if not self.batches:
            return None
        first = self.batches[0]
        return self.batches[-1].jobs[-1] if self.recalled else first.jobs[first.done]

    def due(self) -> float | None:
        """Return the child's next deadline; None if there is none."""
        times = (self.start_at, self.kill_at, self.recall_at, self.soft_at, self.hard_at, self.weigh_at)
        set_times = [at for at in times if at is not None]
        return min(set_times) if set_times else None

    def calm(self) -> None:
        """Clear the deadlines of jobs, because the child has no jobs."""
        self.single = self.recalled = self.stopping = False
        self.recall_at = self.soft_at = self.hard_at = None

    def add(self, jobs: list[WorkT]) -> Batch[WorkT]:
        """Add jobs as the child's next batch, and return the batch."""
        batch = Batch(self.sent % TOKEN_VALUES, jobs)
        self.sent += 1
        self.batches.append(batch)
        return batch

    def finish(
        self, outcomes: Sequence[EndedT], note: Callable[[str, list[float]], None], recall_at: float
    ) -> int:
        """Remove the jobs that ended; return how many outcomes belong to expected jobs.

        `note` gets the run times of consecutive jobs of one task, in seconds.
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
        """Remove jobs that could not be sent."""
        for batch in self.batches:
            batch.jobs = [job for job in batch.jobs if job.number not in numbers]
        self.batches = [batch for batch in self.batches if batch.done < len(batch.jobs)]

    def take_back(self, tokens: bytes) -> list[WorkT]:
        """Return, in order, the jobs that never started, according to the tokens that were not taken."""
        unstarted: list[WorkT] = []
        for batch in self.batches:
            # A child that reports a job before it takes its token leaves too many tokens.
            left = min(tokens.count(batch.number), len(batch.jobs) - batch.done)
            if left:
                unstarted += batch.jobs[-left:]
                del batch.jobs[-left:]
        self.batches = [batch for batch in self.batches if batch.done < len(batch.jobs)]
        return unstarted

    def losses(self, reason: str, *, charge: bool) -> list[JobLoss]:
        """Return the jobs that a dead child ran or had run, after `take_back`; the last one was running."""
        jobs = [job.number for batch in self.batches for job in batch.jobs[batch.done :]]
        if not jobs:
            return []
        finished = [JobLoss(job, charged=False, ran=True, reason=reason) for job in jobs[:-1]]
        return [*finished, JobLoss(jobs[-1], charge, ran=True, reason=reason, timed_out=self.timed_out)]


def takers_of(children: Iterable[Child[WorkT]], now: float) -> list[Child[WorkT]]:
    """Return the children that can take a batch now: idle children first, then those with a single batch."""
    idle: list[Child[WorkT]] = []
    busy: list[Child[WorkT]] = []
    for child in children:
        if child.state is not ChildState.READY:
            continue
        if not child.batches:
            idle.append(child)
        elif len(child.batches) == 1 and not (child.single or child.recalled or child.stale):
            late = child.recall_at is not None and now >= child.recall_at
            if not late:
                busy.append(child)
    return idle + busy


def holder_of(children: Iterable[Child[WorkT]], job: int) -> int | None:
    """Return the child that was sent this job, whether it has started it or not."""
    for child in children:
        for batch in child.batches:
            if any(held.number == job for held in batch.jobs[batch.done :]):
                return child.number
    return None


def least_useful(children: Iterable[Child[WorkT]], count: int) -> list[Child[WorkT]]:
    """Return the children to end when the pool shrinks: children not ready, idle, then busy; newest first."""
    order = {ChildState.ABSENT: 0, ChildState.LEAVING: 1, ChildState.STARTING: 2, ChildState.READY: 3}
    ranked = sorted(children, key=lambda child: (order[child.state], child.outstanding(), -child.number))
    return ranked[: max(0, count)]


def is_down(child: Child[WorkT]) -> bool:
    """Return whether the child is unable to work."""
    return child.state is not ChildState.READY and not child.batches


# ---- starts ----------------------------------------------------------------------------------------
#
# Failures are counted in rounds: children that were started together and fail together count as one failure,
# so a large pool is as patient as a small one. While at least one child works, the pool works, and failed
# starts are retried without end. Without any child, the pool has failed after a number of rounds, or when it
# has been without a child for as long as a start may take. A pool that never had a child fails sooner,
# because a person is probably waiting at the terminal. A child that dies within a second, without a job,
# counts as a failed start.

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.1, 10.0
_FIRST_ROUNDS = 3
_SHORT_LIFE_S = 1.0


class Starts:
    """The failed starts of one pool's children, in rounds."""

    def __init__(self, settings: SlotSettings) -> None:
        self._attempts = settings.start_attempts
        self._patience_s = settings.start_timeout_s
        self._rounds = 0  # consecutive rounds of failures
        self._failed_at = float("-inf")
        self._alive_at: float | None = None  # when a child was last ready
        self._said = False

    def seen_alive(self, now: float) -> None:
        """Record that a child is ready, or was until now."""
        self._alive_at = now

    def ended(
        self, *, begun_at: float, ready_at: float | None, did_something: bool, now: float
    ) -> float | None:
        """Record that a child ended or did not start; return when to start the next one, None for at once."""
        if ready_at is not None:
            self.seen_alive(now)
            if did_something or now - ready_at >= _SHORT_LIFE_S:
                self._rounds, self._said = 0, False
                return None
        return self._failed(begun_at=begun_at, now=now)

    def given_up(self, now: float) -> str:
        """Return the error to report, once, if no child exists and enough starts have failed; else ""."""
        if self._said:
            return ""
        if self._alive_at is None:
            self._said = self._rounds >= min(_FIRST_ROUNDS, self._attempts)
        else:
            without_s = now - self._alive_at
            self._said = self._rounds >= self._attempts or without_s >= self._patience_s
        return f"{self._rounds} attempts failed; last error: " if self._said else ""

    def _failed(self, *, begun_at: float, now: float) -> float:
        if begun_at > self._failed_at:  # otherwise it belongs to a round that was counted already
            self._rounds += 1
            self._failed_at = now
        return now + min(_BACKOFF_FIRST_S * 2.0 ** min(self._rounds - 1, 10), _BACKOFF_MAX_S)


# ---- fleet -----------------------------------------------------------------------------------------
#
# A child that is asked to leave finishes its current job and gets no other, so retiring, recycling or
# replacing a child loses no job. Replacing all children continues only while every slot is filled: if new
# children do not start, the pool keeps its old ones.
#
# A child is recycled (rule F5) after a number of jobs, or because of its memory. It is never sent more jobs
# than it may still run, so the last job is known when it is sent, and no job has to be taken back. Memory is
# measured when a job ends, at most every `_PAUSE_S`, and every `_EVERY_S` while a job runs; an idle child is
# not measured. Above the first limit the child finishes its job and ends. Above the hard limit it is killed,
# because otherwise the kernel would kill some process. Limit: a job that uses up all memory in less than half
# a second is not noticed in time.

_SHRINKS = "pool shrinking"
_SOFT_REPEAT_S = 0.25  # a signal may arrive a moment before its job starts, so it is repeated
_EVERY_S, _PAUSE_S = 0.5, 0.05
_MIB = 1024 * 1024


class Fleet(Generic[WorkT, EndedT]):
    """The children of one pool by number, and the next deadline of any of them."""

    def __init__(self, settings: SlotSettings) -> None:
        self.deadline: float | None = None
        self.closing = False
        self.rolling = False  # whether children are being replaced, one after the other
        self.children: dict[int, Child[WorkT]] = {n: Child(n) for n in range(settings.children)}
        self._settings = settings
        self._starts = Starts(settings)
        self._going: set[int] = set()  # children whose slots are not filled again

    def is_empty(self) -> bool:
        """Return whether no child has a process."""
        return all(child.state is ChildState.ABSENT for child in self.children.values())

    # ---- starts ------------------------------------------------------------------------------------

    def start(self, child: Child[WorkT], now: float) -> Start:
        """Start the child's process, with a deadline for it to be ready."""
        child.state, child.begun_at = ChildState.STARTING, now
        child.start_at, child.kill_at = None, now + self._settings.start_timeout_s
        self.watch(child)
        return Start(child.number)

    def welcome(self, child: Child[WorkT], now: float) -> None:
        """Record that the child is ready."""
        if child.state is ChildState.STARTING:  # otherwise it was killed meanwhile
            child.state, child.ready_at, child.kill_at = ChildState.READY, now, None
            self._starts.seen_alive(now)

    def bury(
        self, child: Child[WorkT], reason: str, now: float, *, did_something: bool
    ) -> list[Effect[WorkT, EndedT]]:
        """Record that the child ended; start or plan a new one, unless the pool shrinks or closes."""
        heir = self.children[child.number] = Child(child.number)
        if self.closing:
            return []
        if child.number in self._going:
            self._going.discard(child.number)
            del self.children[child.number]
            return []
        did_something = did_something or child.state is ChildState.LEAVING
        heir.start_at = self._starts.ended(
            begun_at=child.begun_at, ready_at=child.ready_at, did_something=did_something, now=now
        )
        if heir.start_at is None:
            return [self.start(heir, now)]
        self.watch(heir)
        if any(other.state is ChildState.READY for other in self.children.values()):
            return []
        given_up = self._starts.given_up(now)
        return [PoolFailed(given_up + (child.kill_reason or reason))] if given_up else []

    # ---- ends --------------------------------------------------------------------------------------

    def kill(self, child: Child[WorkT], reason: str) -> list[Effect[WorkT, EndedT]]:
        """Kill the child, once, for this reason."""
        if child.kill_reason:
            return []
        child.calm()
        child.state, child.kill_reason, child.kill_at, child.weigh_at = ChildState.LEAVING, reason, None, None
        return [Kill(child.number, reason)]

    def retire(self, child: Child[WorkT], reason: str, now: float) -> list[Effect[WorkT, EndedT]]:
        """Let the child finish its job and end; recall the jobs queued in it."""
        if child.state is not ChildState.READY:
            return []
        child.state = ChildState.LEAVING
        if not child.batches:
            self.rest(child, now)
        waiting = child.batches and not (child.single or child.recalled)
        return [*self.recall([child] if waiting else []), Dismiss(child.number, reason)]

    def rest(self, child: Child[WorkT], now: float) -> None:
        """Record that the child has no more jobs; if it is leaving, it must exit soon."""
        child.calm()
        if child.state is ChildState.LEAVING and not child.kill_reason:
            child.kill_at = now + self._settings.stop_grace_s
            self.watch(child)

    def recall(self, children: Iterable[Child[WorkT]]) -> list[Effect[WorkT, EndedT]]:
        """Take back the jobs that have not started in these children."""
        effects: list[Effect[WorkT, EndedT]] = []
        for child in children:
            child.recalled, child.recall_at = True, None
            effects.append(Recall(child.number))
        return effects

    def replace(self) -> None:
        """Plan the replacement of every current child."""
        for child in self.children.values():
            child.stale = child.state is not ChildState.ABSENT
        self.rolling = True

    def roll(self, now: float) -> list[Effect[WorkT, EndedT]]:
        """Retire one idle child that must be replaced, if every slot is filled."""
        self.rolling = not self.closing and any(child.stale for child in self.children.values())
        if not self.rolling or any(is_down(child) for child in self.children.values()):
            return []
        for child in self.children.values():
            if child.stale and child.state is ChildState.READY and not child.batches:
                return self.retire(child, "pool restart", now)
        return []

    def resize(self, wanted: int, now: float) -> list[Effect[WorkT, EndedT]]:
        """Start or end children until the pool has the wanted number."""
        assert wanted >= 1, "a pool has at least one child"
        staying = [child for child in self.children.values() if child.number not in self._going]
        effects: list[Effect[WorkT, EndedT]] = []
        for child in least_useful(staying, len(staying) - wanted):
            if child.state is ChildState.ABSENT:
                del self.children[child.number]
                continue
            self._going.add(child.number)
            is_new = child.state is ChildState.STARTING
            effects += self.kill(child, _SHRINKS) if is_new else self.retire(child, _SHRINKS, now)
        number = 0
        for _ in range(0 if self.closing else wanted - len(staying)):
            while number in self.children:
                number += 1
            self.children[number] = Child(number)
            effects.append(self.start(self.children[number], now))
        return effects

    def close(self, grace_s: float, now: float) -> list[Effect[WorkT, EndedT]]:
        """End all children within `grace_s`, and start no others."""
        self.closing = True
        children = self.children.values()
        effects = self.recall(
            child for child in children if child.batches and not (child.single or child.recalled)
        )
        for child in children:
            child.start_at = None
            if child.state is ChildState.STARTING:
                effects += self.kill(child, "pool shutdown")
            elif child.state is ChildState.READY:
                child.state = ChildState.LEAVING
                effects.append(Dismiss(child.number, "pool shutdown"))
            if child.state is ChildState.LEAVING and not child.kill_reason:
                leave_by = now + (grace_s if child.batches else self._settings.stop_grace_s)
                child.kill_at = leave_by if child.kill_at is None else min(child.kill_at, leave_by)
            self.watch(child)
        return effects

    # ---- deadlines ---------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Effect[WorkT, EndedT]]:
        """Act on the deadlines that have passed."""
        effects: list[Effect[WorkT, EndedT]] = []
        for child in self.children.values():
            due = child.due()
            if due is not None and due <= now:
                effects += self._expire_child(child, now)
        # `deadline` may be too early after a deadline was cleared, which costs one Tick; recompute it here.
        self.watch_all()
        return effects

    def _expire_child(self, child: Child[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        def passed(at: float | None) -> bool:
            return at is not None and at <= now

        if passed(child.start_at):
            return [self.start(child, now)]
        if passed(child.kill_at):
            if child.state is ChildState.STARTING:
                return self.kill(child, f"not ready after {self._settings.start_timeout_s:g} s")
            still = "its task was still running" if child.batches else "it did not exit"
            return self.kill(child, f"{still} at the end of the shutdown grace period")
        if passed(child.hard_at):
            child.timed_out = True
            return self.kill(
                child, f"hard time limit of {child.batches[0].jobs[0].hard_limit_s:g} s exceeded"
            )
        effects: list[Effect[WorkT, EndedT]] = []
        if passed(child.weigh_at):
            child.weigh_at = None
            effects.append(Weigh(child.number))
        if passed(child.soft_at):
            if (job := child.running()) is not None:
                effects.append(SignalSoftLimit(child.number, job.number, child.stopping))
            child.soft_repeats -= 1
            child.soft_at = now + _SOFT_REPEAT_S if child.soft_repeats else None
        if passed(child.recall_at):
            child.recall_at = None
            effects += self.recall([child] if child.batches else [])
        return effects

    def watch(self, child: Child[WorkT]) -> None:
        """Include the child's deadlines in `deadline`."""
        due = child.due()
        if due is not None and (self.deadline is None or due < self.deadline):
            self.deadline = due

    def watch_all(self) -> None:
        """Compute `deadline` again from all children."""
        self.deadline = None
        for child in self.children.values():
            self.watch(child)


class Recycling:
    """Decides when a child is replaced, by its number of jobs and its memory use."""

    def __init__(self, settings: SlotSettings) -> None:
        self._jobs_max = settings.jobs_max
        self._max_bytes = settings.memory_max_bytes
        self._hard_bytes = settings.memory_hard_bytes
        self._weighs = self._max_bytes is not None or self._hard_bytes is not None

    def allowance(self, child: Child[WorkT], wanted: int) -> int:
        """Return how many of `wanted` more jobs the child may be sent."""
        if self._jobs_max is None:
            return wanted
        return max(0, min(wanted, self._jobs_max - child.ended - child.outstanding()))

    def job_limit_reached(self, child: Child[WorkT]) -> str:
        """Return why the child is replaced now; "" if it is not."""
        if self._jobs_max is not None and child.ended >= self._jobs_max:
            return f"max_tasks_per_child reached after {child.ended} tasks"
        return ""

    def job_sent(self, child: Child[WorkT], now: float) -> None:
        """Plan a memory check of a child that got a job."""
        if self._weighs and child.weigh_at is None:
            child.weigh_at = now + _EVERY_S

    def is_to_be_weighed(self, child: Child[WorkT], now: float) -> bool:
        """Return whether to measure the child's memory now, after a job ended; otherwise plan a check."""
        if not self._weighs:
            return False
        child.weigh_at = child.weighed_at + _PAUSE_S
        if child.weigh_at > now:
            return False
        child.weigh_at = None
        return True

    def weighed(self, child: Child[WorkT], now: float) -> None:
        """Record that the memory was measured, and plan the next check."""
        child.weighed_at = now
        child.weigh_at = now + _EVERY_S if child.batches else None

    def over_memory_limit(self, size_bytes: int) -> str:
        """Return why the child is replaced when its job has ended; "" if it is not."""
        if self._max_bytes is None or size_bytes <= self._max_bytes:
            return self.over_hard_limit(size_bytes)  # for an idle child, because its next job would be killed
        return f"memory use of {_shown(size_bytes)} exceeds max_memory_per_child of {_shown(self._max_bytes)}"

    def over_hard_limit(self, size_bytes: int) -> str:
        """Return why the child is killed; "" if it is not."""
        if self._hard_bytes is None or size_bytes <= self._hard_bytes:
            return ""
        return f"memory use of {_shown(size_bytes)} exceeds max_memory_hard of {_shown(self._hard_bytes)}"


def _shown(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.0f} MiB"
