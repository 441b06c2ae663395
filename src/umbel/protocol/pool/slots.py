"""Slots: which child gets which jobs, and what becomes of a job when its child is slow or dies.

A slot is the place of one child process; the process in it may change. Jobs wait in one queue.
A job that is slow, new to us, limited in time or to be run alone goes singly to an idle child.
Quick ones go in batches that take about `batch_target_s`, at most two batches to a child, so
that it never idles. A batch that is not through after `batch_patience_s` is recalled: what has
not started goes back to the front of the queue, and others run it.

Recalling is safe because every job needs a token. The shell puts the tokens of a batch into a
pipe before it sends the batch; the child takes one before it starts a job; whoever takes a token
decides, and the kernel gives each token once. So the tokens that the shell finds in the pipe,
when it recalls a batch or buries a child, are the jobs from the end of the batch that never
started and never will. This is why a job cannot be in two children, and why a death charges only
the job that was running: the last one that took a token and whose outcome has not arrived.

It stops being right if a child runs jobs in another order than they were sent, or if outcomes
of a dead child are read after its death was reported: the shell reads to the end first.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, assert_never

from umbel.protocol.machine import Tick
from umbel.protocol.pace import Paces
from umbel.protocol.pool.child import Child, State, holder_of, takers_of
from umbel.protocol.pool.events import (
    Began,
    ChildDied,
    ChildReady,
    Close,
    Closed,
    Effect,
    EndedT,
    Event,
    Finished,
    Interrupt,
    Loss,
    Lost,
    NotSent,
    Open,
    Overweight,
    Recalled,
    Replace,
    Reported,
    Resize,
    Retire,
    Send,
    SignalSoftLimit,
    SlotSettings,
    Submit,
    Weigh,
    Weighed,
    Withdraw,
    Withdrawn,
    WorkT,
)
from umbel.protocol.pool.fleet import Fleet
from umbel.protocol.pool.wear import Wear

_SOFT_REPEAT_S, _SOFT_REPEATS = 0.25, 8  # a signal may come a moment before the job it is meant for


class Slots(Generic[WorkT, EndedT]):
    def __init__(self, settings: SlotSettings) -> None:
        assert 1 <= settings.batch_max <= 1024, "two batches of tokens fit into the smallest pipe"
        self._settings = settings
        self._fleet: Fleet[WorkT, EndedT] = Fleet(settings)
        self._children = self._fleet.children
        self._ready: deque[WorkT] = deque()  # bounded by the worker, which submits what room() allows
        self._paces = Paces(batch_target_s=settings.batch_target_s, batch_max=settings.batch_max)
        self._wear = Wear(settings)
        self._withdrawing: set[int] | None = None  # children whose tokens a withdrawal waits for

    @property
    def deadline(self) -> float | None:
        return self._fleet.deadline

    def step(self, event: Event[WorkT, EndedT] | Tick, now: float) -> list[Effect[WorkT, EndedT]]:
        match event:
            case Finished(child, outcomes):
                return self._finish(self._children[child], outcomes, now)
            case Submit(jobs):
                return self._submit(jobs, now)
            case Tick():
                return self._expire(now)
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
        """How many more jobs would be of use now."""
        if self._fleet.closing:
            return 0
        wanted = self._paces.wanted_per_child()
        room = -len(self._ready)
        for child in self._children.values():
            if child.state is not State.READY or child.recalled:
                continue
            free = min(wanted, 2) - 1 if child.single else wanted - child.outstanding()
            room += free if child.single else self._wear.allowance(child, free)
        return max(0, room)

    def waiting(self) -> int:
        return len(self._ready)

    def outstanding(self, child: int) -> int:
        return self._children[child].outstanding()

    def running(self, child: int) -> WorkT | None:
        """The job that the child is at: exact when nothing waits behind it, else what is known."""
        return self._children[child].running()

    def holder_of(self, job: int) -> int | None:
        """The child that was sent this job, whether it has started it or not."""
        return holder_of(self._children.values(), job)

    # ---- jobs go out -------------------------------------------------------------------------------

    def _submit(self, jobs: Sequence[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        self._ready.extend(jobs)
        return self._give_up() if self._fleet.closing else self._dispatch(now)

    def _dispatch(self, now: float) -> list[Effect[WorkT, EndedT]]:
        effects: list[Effect[WorkT, EndedT]] = self._fleet.roll(now) if self._fleet.rolling else []
        if not self._ready or self._withdrawing is not None:
            return effects
        takers = takers_of(self._children.values(), now)
        for position, child in enumerate(takers):
            if not self._ready:
                break
            share = -(-len(self._ready) // (len(takers) - position))
            if not (share := self._wear.allowance(child, share)):
                continue
            jobs = self._next_batch(share=share)
            if not jobs:
                if child.batches:
                    break  # the first in the queue waits for an idle child, and nobody overtakes it
                child.single = True
                jobs = [self._ready.popleft()]
            effects.append(self._send(child, jobs, now))
            if child.single:
                effects.append(Began(child.number, jobs[0].number))
        return effects

    def _next_batch(self, *, share: int) -> list[WorkT]:
        """Take quick jobs from the front of the queue; none when the first has to go singly."""
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
        self._wear.job_sent(child, now)
        self._fleet.watch(child)
        return Send(child.number, batch.number, tuple(jobs))

    def _not_sent(
        self, child: Child[WorkT], reasons: Mapping[int, str], now: float
    ) -> list[Effect[WorkT, EndedT]]:
        child.drop(reasons)
        if not child.batches:
            self._fleet.rest(child, now)
        losses = [Loss(job, False, False, reason, fault=reason) for job, reason in reasons.items()]
        return [Lost(losses), *self._dispatch(now)]

    # ---- and come back -----------------------------------------------------------------------------

    def _finish(
        self, child: Child[WorkT], outcomes: Sequence[EndedT], now: float
    ) -> list[Effect[WorkT, EndedT]]:
        known = child.finish(outcomes, self._paces, now + self._settings.batch_patience_s)
        if not child.batches:
            self._fleet.rest(child, now)
        # The child's next work first: the listener may take its time.
        effects = self._go_on(child, now)
        if known == len(outcomes):
            effects.append(Reported(child.number, outcomes))
            return effects
        effects.append(Reported(child.number, outcomes[:known]))
        stray = outcomes[known].number
        return effects + self._fleet.kill(child, f"it answered for job {stray}, which it had not been given")

    def _go_on(self, child: Child[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        """A job has ended: perhaps it was the child's last; perhaps its memory is to be seen first."""
        if worn := self._wear.worn_out(child):
            return self._fleet.retire(child, worn, now) + self._dispatch(now)
        if self._wear.is_to_be_weighed(child, now):
            return [Weigh(child.number)]
        self._fleet.watch(child)
        return self._dispatch(now)

    def _judge_weight(self, child: Child[WorkT], size_bytes: int, now: float) -> list[Effect[WorkT, EndedT]]:
        effects: list[Effect[WorkT, EndedT]] = []
        if child.state in (State.READY, State.LEAVING) and not child.kill_reason:
            self._wear.weighed(child, now)
            self._fleet.watch(child)
            if child.batches and (why := self._wear.far_too_heavy(size_bytes)):
                effects = self._fleet.kill(child, why)
            elif not child.heavy and (why := self._wear.too_heavy(size_bytes)):
                child.heavy = True
                running = self.running(child.number)
                said = Overweight(child.number, None if running is None else running.number, size_bytes)
                effects = [said, *self._fleet.retire(child, why, now)]
        return effects + self._dispatch(now)

    def _take_back(self, child: Child[WorkT], tokens: bytes, now: float) -> list[Effect[WorkT, EndedT]]:
        self._ready.extendleft(reversed(child.take_back(tokens)))
        effects: list[Effect[WorkT, EndedT]] = []
        if child.batches:
            effects.append(Began(child.number, child.batches[-1].jobs[-1].number))
        else:
            self._fleet.rest(child, now)
        if self._withdrawing is not None:
            self._withdrawing.discard(child.number)
            return effects + self._end_withdrawal()
        return effects + (self._give_up() if self._fleet.closing else self._dispatch(now))

    def _withdraw(self) -> list[Effect[WorkT, EndedT]]:
        if self._withdrawing is not None:
            return []  # one is under way, and will bring everything
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
            Loss(job.number, False, False, "the pool was stopped before it started") for job in self._ready
        ]
        self._ready.clear()
        return [Lost(losses)] if losses else []

    # ---- children come and go ----------------------------------------------------------------------

    def _bury(
        self, child: Child[WorkT], tokens: bytes, reason: str, now: float
    ) -> list[Effect[WorkT, EndedT]]:
        why, unstarted = child.kill_reason or reason, child.take_back(tokens)
        # Who is killed because the pool stops did no harm.
        innocent = self._fleet.closing and bool(child.kill_reason) and not child.timed_out
        losses = child.losses(why, charge=not innocent)
        if child.timed_out:  # its one job has had its time, though it may not have begun
            losses += [Loss(job.number, False, False, why, timed_out=True) for job in unstarted]
        else:
            self._ready.extendleft(reversed(unstarted))
        effects: list[Effect[WorkT, EndedT]] = [Lost(losses)] if losses else []
        effects += self._fleet.bury(child, reason, now, did_something=bool(child.ended or losses))
        if not self._fleet.closing:
            return effects + self._dispatch(now)
        return effects + self._give_up() + self._closed()

    def _close(self, grace_s: float, now: float) -> list[Effect[WorkT, EndedT]]:
        effects = self._fleet.close(grace_s, now)
        return effects + self._give_up() + self._closed()

    def _closed(self) -> list[Effect[WorkT, EndedT]]:
        return [Closed()] if self._fleet.is_empty() else []

    def _interrupt(self, now: float) -> list[Effect[WorkT, EndedT]]:
        for child in self._children.values():
            if child.batches and not child.kill_reason:
                child.soft_at, child.soft_repeats, child.stopping = now, _SOFT_REPEATS, True
        return self._expire(now)

    # ---- time passes -------------------------------------------------------------------------------

    def _expire(self, now: float) -> list[Effect[WorkT, EndedT]]:
        effects: list[Effect[WorkT, EndedT]] = []
        for child in self._children.values():
            due = child.due()
            if due is not None and due <= now:
                effects += self._expire_child(child, now)
        # Deadlines that were met left self.deadline too early: that costs one Tick, and here it is.
        self._fleet.watch_all()
        return effects

    def _expire_child(self, child: Child[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        def passed(at: float | None) -> bool:
            return at is not None and at <= now

        if passed(child.start_at):
            return [self._fleet.start(child, now)]
        if passed(child.kill_at):
            if child.state is State.STARTING:
                return self._fleet.kill(child, f"not ready after {self._settings.start_timeout_s:g} s")
            still = "its job was still running" if child.batches else "it did not end"
            return self._fleet.kill(child, f"{still} when the pool had to stop")
        if passed(child.hard_at):
            child.timed_out = True
            return self._fleet.kill(
                child, f"the hard time limit of {child.batches[0].jobs[0].hard_limit_s:g} s passed"
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
            effects += self._fleet.recall([child] if child.batches else [])
        return effects
