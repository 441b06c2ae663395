"""Slots: which child gets which jobs, and what happens to a job when its child is slow or dies.

A slot is the place of one child process, and may have different processes over time. Jobs wait in one queue.
A job that is slow, new to this worker, limited in time or marked to run alone is sent singly to an idle
child. Short jobs are sent in batches that take about `batch_target_s`, at most two batches to a child, so
that it never idles. A batch that has not ended after `batch_patience_s` is recalled: jobs that have not
started return to the front of the queue, and other children run them.

If a worker is killed, jobs that ended but are not settled run again. So the pool sends no further jobs while
its running and unsettled jobs fill `UNSETTLED_BATCHES` batches per child.

Recalling is safe because every job needs a token. The shell writes the tokens of a batch into a pipe before
it sends the batch, and the child takes one before it starts a job. Taking a token is what decides, and the
kernel gives each token only once. So the tokens in the pipe, when the shell recalls a batch or removes a dead
child, belong to the jobs at the end of the batch, which never started and never will. Therefore a job cannot
be in two children, and a death charges only the job that was running: the last one that took a token and has
no outcome.

Limits: this fails if a child runs jobs in another order than they were sent, or if outcomes of a dead child
are read after its death was reported, so the shell reads all of them first.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Generic, assert_never

from umbel.protocol.machine import Tick
from umbel.protocol.pool.events import (
    BATCH_MAX,
    ChildDied,
    ChildReady,
    Close,
    Effect,
    EndedT,
    Event,
    Finished,
    Interrupt,
    JobBegan,
    JobLoss,
    JobsLost,
    NotSent,
    Open,
    Overweight,
    PoolClosed,
    Recalled,
    Replace,
    Reported,
    Resize,
    Retire,
    Send,
    SlotSettings,
    Submit,
    Unsettled,
    Weigh,
    Weighed,
    Withdraw,
    Withdrawn,
    WorkT,
)
from umbel.protocol.pool.fleet import Child, ChildState, Fleet, Recycling, holder_of, takers_of

BRIEF_S = 0.25  # jobs of shorter tasks are claimed ahead instead of left to other nodes
_BATCHES_AHEAD = 3
UNSETTLED_BATCHES = 3  # for each child: two in hand, and one being acknowledged
UNSETTLED_PER_CHILD_MAX = UNSETTLED_BATCHES * BATCH_MAX
_SLOWER_WEIGHT = 0.5
_QUICKER_WEIGHT = 0.1
_NAMES_MAX = 10_000
_SOFT_REPEATS = 8  # a signal may arrive a moment before its job starts


class Slots(Generic[WorkT, EndedT]):
    """The machine of one pool: its queue of jobs, its children, and the jobs that each of them runs."""

    def __init__(self, settings: SlotSettings) -> None:
        assert 1 <= settings.batch_max <= 1024, "two batches of tokens fit into the smallest pipe"
        self._settings = settings
        self._fleet: Fleet[WorkT, EndedT] = Fleet(settings)
        self._children = self._fleet.children
        self._ready: deque[WorkT] = deque()  # limited by the worker, which submits what room() allows
        self._paces = Paces(batch_target_s=settings.batch_target_s, batch_max=settings.batch_max)
        self._recycling = Recycling(settings)
        self._unsettled = 0  # number of ended jobs that are not settled
        self._withdrawing: set[int] | None = None  # children whose tokens a withdrawal waits for

    @property
    def deadline(self) -> float | None:
        """Return when the machine wants a Tick; None for never."""
        return self._fleet.deadline

    def step(self, event: Event[WorkT, EndedT] | Tick, now: float) -> list[Effect[WorkT, EndedT]]:
        """Process one event; return what to send, signal, kill or report."""
        match event:
            case Finished(child, outcomes):
                return self._finish(self._children[child], outcomes, now)
            case Submit(jobs):
                return self._submit(jobs, now)
            case Unsettled(count):
                self._unsettled = count
                return self._dispatch(now)
            case Tick():
                return self._fleet.expire(now)
            case NotSent(child, reasons):
                return self._not_sent(self._children[child], reasons, now)
            case Recalled(child, tokens):
                return self._take_back(self._children[child], tokens, now)
            case ChildReady(child):
                self._fleet.welcome(self._children[child], now)
                return self._dispatch(now)
            case ChildDied(child, tokens, reason):
                return self._bury(self._children[child], tokens, reason, now)
            case Withdraw():
                return self._withdraw()
            case Interrupt():
                return self._interrupt(now)
            case Weighed(child, size_bytes):
                return self._judge_weight(self._children[child], size_bytes, now)
            case Retire(child, reason):
                return self._fleet.retire(self._children[child], reason, now)
            case Replace():
                self._fleet.replace()
                return self._dispatch(now)
            case Open():
                return [self._fleet.start(child, now) for child in self._children.values()]
            case Resize(children):
                return self._fleet.resize(children, now)
            case Close(grace_s):
                return self._close(grace_s, now)
            case _:
                assert_never(event)

    def room(self) -> int:
        """Return how many more jobs the pool can use now."""
        if self._fleet.closing:
            return 0
        wanted = self._paces.wanted_per_child()
        room = -len(self._ready)
        for child in self._children.values():
            if child.state is not ChildState.READY or child.recalled:
                continue
            free = min(wanted, 2) - 1 if child.single else wanted - child.outstanding()
            room += free if child.single else self._recycling.allowance(child, free)
        return max(0, room)

    def free(self) -> int:
        """Return how many more jobs could start at once."""
        if self._fleet.closing:
            return 0
        idle = sum(child.state is ChildState.READY and not child.batches for child in self._children.values())
        return max(0, min(idle, self._sendable()) - len(self._ready))

    def waiting(self) -> int:
        """Return how many jobs wait in the queue."""
        return len(self._ready)

    def outstanding(self, child: int) -> int:
        """Return how many jobs the child was sent that have not ended."""
        return self._children[child].outstanding()

    def running(self, child: int) -> WorkT | None:
        """Return the child's running job: exact if no job is queued behind it, otherwise as far as known."""
        return self._children[child].running()

    def holder_of(self, job: int) -> int | None:
        """Return the child that was sent this job, whether it has started it or not."""
        return holder_of(self._children.values(), job)

    # ---- sending jobs ------------------------------------------------------------------------------

    def _submit(self, jobs: Sequence[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        self._ready.extend(jobs)
        return self._give_up() if self._fleet.closing else self._dispatch(now)

    def _dispatch(self, now: float) -> list[Effect[WorkT, EndedT]]:
        effects: list[Effect[WorkT, EndedT]] = self._fleet.roll(now) if self._fleet.rolling else []
        if not self._ready or self._withdrawing is not None:
            return effects
        takers = takers_of(self._children.values(), now)
        most = self._sendable()
        for position, child in enumerate(takers):
            if not self._ready or most <= 0:
                break
            share = min(most, -(-len(self._ready) // (len(takers) - position)))
            if not (share := self._recycling.allowance(child, share)):
                continue
            jobs = self._next_batch(share=share)
            if not jobs:
                if child.batches:
                    break  # the first job in the queue waits for an idle child, and no job overtakes it
                child.single = True
                jobs = [self._ready.popleft()]
            most -= len(jobs)
            effects.append(self._send(child, jobs, now))
            if child.single:
                effects.append(JobBegan(child.number, jobs[0].number))
        return effects

    def _sendable(self) -> int:
        """Return how many jobs may be sent before more of the ended ones are settled."""
        most = UNSETTLED_BATCHES * self._settings.batch_max * len(self._children) - self._unsettled
        for child in self._children.values():
            most -= child.outstanding()
        return most

    def _next_batch(self, *, share: int) -> list[WorkT]:
        """Take short jobs from the front of the queue; none if the first must be sent singly."""
        estimates_s, ready = self._paces.estimates_s, self._ready
        left_s = self._settings.batch_target_s
        task, estimate_s = None, None
        jobs: list[WorkT] = []
        for _ in range(min(share, self._settings.batch_max, len(ready))):
            job = ready[0]
            if job.task != task:
                task, estimate_s = job.task, estimates_s.get(job.task)
            if estimate_s is None or estimate_s >= left_s or job.alone or job.redelivered:
                break
            if job.hard_limit_s is not None or job.soft_limit_s is not None:
                break
            left_s -= estimate_s
            jobs.append(ready.popleft())
        return jobs

    def _send(self, child: Child[WorkT], jobs: list[WorkT], now: float) -> Send[WorkT]:
        batch = child.add(jobs)
        if child.single:
            job = jobs[0]
            child.soft_at = None if job.soft_limit_s is None else now + job.soft_limit_s
            child.hard_at = None if job.hard_limit_s is None else now + job.hard_limit_s
            child.soft_repeats = _SOFT_REPEATS
        elif child.recall_at is None:
            child.recall_at = now + self._settings.batch_patience_s
        self._recycling.job_sent(child, now)
        self._fleet.watch(child)
        return Send(child.number, batch.number, tuple(jobs))

    def _not_sent(
        self, child: Child[WorkT], reasons: Mapping[int, str], now: float
    ) -> list[Effect[WorkT, EndedT]]:
        child.drop(reasons)
        if not child.batches:
            self._fleet.rest(child, now)
        losses = [JobLoss(job, False, False, reason, fault=reason) for job, reason in reasons.items()]
        return [JobsLost(losses), *self._dispatch(now)]

    # ---- outcomes and returned jobs ----------------------------------------------------------------

    def _finish(
        self, child: Child[WorkT], outcomes: Sequence[EndedT], now: float
    ) -> list[Effect[WorkT, EndedT]]:
        known = child.finish(outcomes, self._paces.note, now + self._settings.batch_patience_s)
        self._unsettled += known
        if not child.batches:
            self._fleet.rest(child, now)
        # Send the child's next jobs first, because processing the outcomes may take time.
        effects = self._go_on(child, now)
        if known == len(outcomes):
            effects.append(Reported(child.number, outcomes))
            return effects
        effects.append(Reported(child.number, outcomes[:known]))
        stray = outcomes[known].number
        return effects + self._fleet.kill(child, f"it reported job {stray}, which was not sent to it")

    def _go_on(self, child: Child[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        """Continue after a job: retire the child at its limit, measure its memory, or send more jobs."""
        if why := self._recycling.job_limit_reached(child):
            return self._fleet.retire(child, why, now) + self._dispatch(now)
        if self._recycling.is_to_be_weighed(child, now):
            return [Weigh(child.number)]
        self._fleet.watch(child)
        return self._dispatch(now)

    def _judge_weight(self, child: Child[WorkT], size_bytes: int, now: float) -> list[Effect[WorkT, EndedT]]:
        effects: list[Effect[WorkT, EndedT]] = []
        if child.state in (ChildState.READY, ChildState.LEAVING) and not child.kill_reason:
            self._recycling.weighed(child, now)
            self._fleet.watch(child)
            if child.batches and (why := self._recycling.over_hard_limit(size_bytes)):
                effects = self._fleet.kill(child, why)
            elif not child.heavy and (why := self._recycling.over_memory_limit(size_bytes)):
                child.heavy = True
                running = self.running(child.number)
                report = Overweight(child.number, None if running is None else running.number, size_bytes)
                effects = [report, *self._fleet.retire(child, why, now)]
        return effects + self._dispatch(now)

    def _take_back(self, child: Child[WorkT], tokens: bytes, now: float) -> list[Effect[WorkT, EndedT]]:
        self._ready.extendleft(reversed(child.take_back(tokens)))
        effects: list[Effect[WorkT, EndedT]] = []
        if child.batches:
            effects.append(JobBegan(child.number, child.batches[-1].jobs[-1].number))
        else:
            self._fleet.rest(child, now)
        if self._withdrawing is not None:
            self._withdrawing.discard(child.number)
            return effects + self._end_withdrawal()
        return effects + (self._give_up() if self._fleet.closing else self._dispatch(now))

    def _withdraw(self) -> list[Effect[WorkT, EndedT]]:
        if self._withdrawing is not None:
            return []  # a withdrawal is in progress and will return all jobs
        holders = [child for child in self._children.values() if child.batches and not child.single]
        self._withdrawing = {child.number for child in holders}
        return self._fleet.recall(holders) or self._end_withdrawal()

    def _end_withdrawal(self) -> list[Effect[WorkT, EndedT]]:
        if self._withdrawing:
            return []
        jobs = tuple(self._ready)
        self._ready.clear()
        self._withdrawing = None
        return [Withdrawn(jobs)]

    def _give_up(self) -> list[Effect[WorkT, EndedT]]:
        losses = [
            JobLoss(job.number, False, False, "the pool stopped before the task started")
            for job in self._ready
        ]
        self._ready.clear()
        return [JobsLost(losses)] if losses else []

    # ---- children that ended -----------------------------------------------------------------------

    def _bury(
        self, child: Child[WorkT], tokens: bytes, reason: str, now: float
    ) -> list[Effect[WorkT, EndedT]]:
        why, unstarted = child.kill_reason or reason, child.take_back(tokens)
        # If a child is killed because the pool stops, its job is not at fault.
        innocent = self._fleet.closing and bool(child.kill_reason) and not child.timed_out
        losses = child.losses(why, charge=not innocent)
        if child.timed_out:  # its single job has used up its time, though it may not have begun
            losses += [JobLoss(job.number, False, False, why, timed_out=True) for job in unstarted]
        else:
            self._ready.extendleft(reversed(unstarted))
        effects: list[Effect[WorkT, EndedT]] = [JobsLost(losses)] if losses else []
        effects += self._fleet.bury(child, reason, now, did_something=bool(child.ended or losses))
        if not self._fleet.closing:
            return effects + self._dispatch(now)
        return effects + self._give_up() + self._closed()

    def _close(self, grace_s: float, now: float) -> list[Effect[WorkT, EndedT]]:
        effects = self._fleet.close(grace_s, now)
        return effects + self._give_up() + self._closed()

    def _closed(self) -> list[Effect[WorkT, EndedT]]:
        return [PoolClosed()] if self._fleet.is_empty() else []

    def _interrupt(self, now: float) -> list[Effect[WorkT, EndedT]]:
        for child in self._children.values():
            if child.batches and not child.kill_reason:
                child.soft_at, child.soft_repeats, child.stopping = now, _SOFT_REPEATS, True
        return self._fleet.expire(now)


class Paces:
    """Measures how long tasks run, and so how many of them make a good batch.

    The estimate moves half the way towards a longer run time and a tenth of the way towards a shorter one. So
    a task that is slow now and then counts as slow for some time. A task that is wrongly considered slow
    costs a round trip; a task that is wrongly considered short makes other jobs wait.
    """

    def __init__(self, *, batch_target_s: float, batch_max: int) -> None:
        self.estimates_s: dict[str, float] = {}
        self._target_s = batch_target_s
        self._batch_max = batch_max
        self._typical_s: float | None = None  # the estimate of the task that ran last

    def note(self, task: str, runtimes_s: Iterable[float]) -> None:
        """Process the run times of one task, in order. Called once for many runs, because this is the hot
        path.
        """
        estimate_s = self.estimates_s.get(task)
        for runtime_s in runtimes_s:
            if estimate_s is None:
                estimate_s = runtime_s
            elif runtime_s > estimate_s:
                estimate_s += (runtime_s - estimate_s) * _SLOWER_WEIGHT
            else:
                estimate_s += (runtime_s - estimate_s) * _QUICKER_WEIGHT
        if estimate_s is None or not 0.0 <= estimate_s < inf:  # a child can write any number
            return
        # names come from outside, so the table is limited: start again with an empty one
        if len(self.estimates_s) >= _NAMES_MAX:
            self.estimates_s.clear()
        self.estimates_s[task] = self._typical_s = estimate_s

    def wanted_per_child(self) -> int:
        """Return how many jobs one child can use, including running ones."""
        typical_s = self._typical_s
        if typical_s is None or typical_s >= BRIEF_S:
            return 1
        if typical_s >= self._target_s:
            return 2
        batch = self._batch_max if typical_s <= 0 else min(self._target_s / typical_s, self._batch_max)
        return _BATCHES_AHEAD * max(1, int(batch))
