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
from collections.abc import Iterable, Sequence
from typing import Generic, assert_never

from umbel.protocol.machine import Tick
from umbel.protocol.pace import Paces
from umbel.protocol.slot_child import Child, State, holder_of, least_useful, takers_of
from umbel.protocol.slot_events import (
    Began,
    ChildDied,
    ChildReady,
    Close,
    Closed,
    Dismiss,
    Effect,
    EndedT,
    Event,
    Failed,
    Finished,
    Interrupt,
    Kill,
    Loss,
    Lost,
    Open,
    Recall,
    Recalled,
    Reported,
    Resize,
    Retire,
    Send,
    SignalSoftLimit,
    SlotSettings,
    Start,
    Submit,
    Withdraw,
    Withdrawn,
    WorkT,
)

_SOFT_REPEAT_S, _SOFT_REPEATS = 0.25, 8  # a signal may come a moment before the job it is meant for
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.1, 10.0
_SHORT_LIFE_S = 1.0  # a child that dies sooner, without a job, did not really start


class Slots(Generic[WorkT, EndedT]):
    def __init__(self, settings: SlotSettings) -> None:
        assert 1 <= settings.batch_max <= 1024, "two batches of tokens fit into the smallest pipe"
        self.deadline: float | None = None
        self._settings = settings
        self._children: dict[int, Child[WorkT]] = {n: Child(n) for n in range(settings.children)}
        self._ready: deque[WorkT] = deque()  # bounded by the worker, which submits what room() allows
        self._paces = Paces(batch_target_s=settings.batch_target_s, batch_max=settings.batch_max)
        self._withdrawing: set[int] | None = None  # children whose tokens a withdrawal waits for
        self._failed_starts = 0  # in a row
        self._going: set[int] = set()  # children that nobody follows
        self._closing = False

    def step(self, event: Event[WorkT, EndedT] | Tick, now: float) -> list[Effect[WorkT, EndedT]]:
        match event:
            case Finished(child, outcomes):
                return self._finish(self._children[child], outcomes, now)
            case Submit(jobs):
                return self._submit(jobs, now)
            case Tick():
                return self._expire(now)
            case Recalled(child, tokens):
                return self._take_back(self._children[child], tokens, now)
            case ChildReady(child):
                return self._welcome(self._children[child], now)
            case ChildDied(child, tokens, reason):
                return self._bury(self._children[child], tokens, reason, now)
            case Withdraw():
                return self._withdraw()
            case Interrupt():
                return self._interrupt(now)
            case Retire(child):
                return self._retire(self._children[child], now)
            case Open():
                return [self._start(child, now) for child in self._children.values()]
            case Resize(children):
                return self._resize(children, now)
            case Close(grace_s):
                return self._close(grace_s, now)
            case _:
                assert_never(event)

    def room(self) -> int:
        """How many more jobs would be of use now."""
        if self._closing:
            return 0
        wanted = self._paces.wanted_per_child()
        room = -len(self._ready)
        for child in self._children.values():
            if child.state is not State.READY or child.recalled:
                continue
            room += min(wanted, 2) - 1 if child.single else wanted - child.outstanding()
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
        return self._give_up() if self._closing else self._dispatch(now)

    def _dispatch(self, now: float) -> list[Effect[WorkT, EndedT]]:
        if not self._ready or self._closing or self._withdrawing is not None:
            return []
        effects: list[Effect[WorkT, EndedT]] = []
        takers = takers_of(self._children.values(), now)
        for position, child in enumerate(takers):
            if not self._ready:
                break
            jobs = self._next_batch(share=-(-len(self._ready) // (len(takers) - position)))
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
        self._watch(child)
        return Send(child.number, batch.number, tuple(jobs))

    # ---- and come back -----------------------------------------------------------------------------

    def _finish(
        self, child: Child[WorkT], outcomes: Sequence[EndedT], now: float
    ) -> list[Effect[WorkT, EndedT]]:
        known = child.finish(outcomes, self._paces, now + self._settings.batch_patience_s)
        if not child.batches:
            self._rest(child, now)
        # The child's next work first: the listener may take its time.
        effects = self._dispatch(now)
        if known == len(outcomes):
            effects.append(Reported(child.number, outcomes))
            return effects
        effects.append(Reported(child.number, outcomes[:known]))
        stray = outcomes[known].number
        return effects + self._kill(child, f"it answered for job {stray}, which it had not been given")

    def _rest(self, child: Child[WorkT], now: float) -> None:
        child.calm()
        if child.state is State.LEAVING and not child.kill_reason:
            child.kill_at = now + self._settings.stop_grace_s
            self._watch(child)

    def _take_back(self, child: Child[WorkT], tokens: bytes, now: float) -> list[Effect[WorkT, EndedT]]:
        self._ready.extendleft(reversed(child.take_back(tokens)))
        effects: list[Effect[WorkT, EndedT]] = []
        if child.batches:
            effects.append(Began(child.number, child.batches[-1].jobs[-1].number))
        else:
            self._rest(child, now)
        if self._withdrawing is not None:
            self._withdrawing.discard(child.number)
            return effects + self._end_withdrawal()
        return effects + (self._give_up() if self._closing else self._dispatch(now))

    def _withdraw(self) -> list[Effect[WorkT, EndedT]]:
        if self._withdrawing is not None:
            return []  # one is under way, and will bring everything
        holders = [child for child in self._children.values() if child.batches and not child.single]
        self._withdrawing = {child.number for child in holders}
        return self._recall(holders) or self._end_withdrawal()

    def _end_withdrawal(self) -> list[Effect[WorkT, EndedT]]:
        if self._withdrawing:
            return []
        jobs = tuple(self._ready)
        self._ready.clear()
        self._withdrawing = None
        return [Withdrawn(jobs)]

    def _recall(self, children: Iterable[Child[WorkT]]) -> list[Effect[WorkT, EndedT]]:
        effects: list[Effect[WorkT, EndedT]] = []
        for child in children:
            child.recalled, child.recall_at = True, None
            effects.append(Recall(child.number))
        return effects

    def _give_up(self) -> list[Effect[WorkT, EndedT]]:
        losses = [
            Loss(job.number, False, False, "the pool was stopped before it started") for job in self._ready
        ]
        self._ready.clear()
        return [Lost(losses)] if losses else []

    # ---- children come and go ----------------------------------------------------------------------

    def _start(self, child: Child[WorkT], now: float) -> Start:
        child.state = State.STARTING
        child.start_at, child.kill_at = None, now + self._settings.start_timeout_s
        self._watch(child)
        return Start(child.number)

    def _welcome(self, child: Child[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        if child.state is not State.STARTING:  # killed meanwhile
            return []
        child.state, child.ready_at, child.kill_at = State.READY, now, None
        return self._dispatch(now)

    def _bury(
        self, child: Child[WorkT], tokens: bytes, reason: str, now: float
    ) -> list[Effect[WorkT, EndedT]]:
        self._ready.extendleft(reversed(child.take_back(tokens)))
        # Who is killed because the pool stops did no harm.
        innocent = self._closing and bool(child.kill_reason) and not child.timed_out
        losses = child.losses(child.kill_reason or reason, charge=not innocent)
        effects: list[Effect[WorkT, EndedT]] = [Lost(losses)] if losses else []
        heir = self._children[child.number] = Child(child.number)
        if child.number in self._going and not self._closing:
            self._going.discard(child.number)
            del self._children[child.number]
            return effects + self._dispatch(now)
        if self._closing:
            effects += self._give_up()
            gone = all(other.state is State.ABSENT for other in self._children.values())
            return [*effects, Closed()] if gone else effects
        lived = child.ready_at is not None and (
            child.ended or losses or now - child.ready_at >= _SHORT_LIFE_S
        )
        if lived:
            self._failed_starts = 0
            return [*effects, self._start(heir, now), *self._dispatch(now)]
        self._failed_starts += 1
        heir.start_at = now + min(_BACKOFF_FIRST_S * 2.0 ** min(self._failed_starts - 1, 10), _BACKOFF_MAX_S)
        self._watch(heir)
        if self._failed_starts == self._settings.start_attempts:
            effects.append(Failed(child.kill_reason or reason))
        return effects + self._dispatch(now)

    def _kill(self, child: Child[WorkT], reason: str) -> list[Effect[WorkT, EndedT]]:
        if child.kill_reason:
            return []
        child.calm()
        child.state, child.kill_reason, child.kill_at = State.LEAVING, reason, None
        return [Kill(child.number, reason)]

    def _retire(self, child: Child[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        if child.state is not State.READY:
            return []
        child.state = State.LEAVING
        if not child.batches:
            self._rest(child, now)
        waiting = child.batches and not (child.single or child.recalled)
        return [*self._recall([child] if waiting else []), Dismiss(child.number)]

    def _resize(self, wanted: int, now: float) -> list[Effect[WorkT, EndedT]]:
        assert wanted >= 1, "a pool has at least one child"
        staying = [child for child in self._children.values() if child.number not in self._going]
        effects: list[Effect[WorkT, EndedT]] = []
        for child in least_useful(staying, len(staying) - wanted):
            if child.state is State.ABSENT:
                del self._children[child.number]
                continue
            self._going.add(child.number)
            is_new = child.state is State.STARTING
            effects += self._kill(child, "the pool shrinks") if is_new else self._retire(child, now)
        number = 0
        for _ in range(0 if self._closing else wanted - len(staying)):
            while number in self._children:
                number += 1
            self._children[number] = Child(number)
            effects.append(self._start(self._children[number], now))
        return effects

    def _close(self, grace_s: float, now: float) -> list[Effect[WorkT, EndedT]]:
        self._closing = True
        children = self._children.values()
        holders = [child for child in children if child.batches and not (child.single or child.recalled)]
        effects = self._recall(holders) + self._give_up()
        for child in children:
            child.start_at = None
            if child.state is State.STARTING:
                effects += self._kill(child, "the pool was stopped")
            elif child.state is State.READY:
                child.state = State.LEAVING
                effects.append(Dismiss(child.number))
            if child.state is State.LEAVING and not child.kill_reason:
                leave_by = now + (grace_s if child.batches else self._settings.stop_grace_s)
                child.kill_at = leave_by if child.kill_at is None else min(child.kill_at, leave_by)
            self._watch(child)
        if all(child.state is State.ABSENT for child in children):
            effects.append(Closed())
        return effects

    def _interrupt(self, now: float) -> list[Effect[WorkT, EndedT]]:
        for child in self._children.values():
            if child.batches and not child.kill_reason:
                child.soft_at, child.soft_repeats, child.stopping = now, _SOFT_REPEATS, True
        return self._expire(now)

    # ---- time passes -------------------------------------------------------------------------------

    def _watch(self, child: Child[WorkT]) -> None:
        due = child.due()
        if due is not None and (self.deadline is None or due < self.deadline):
            self.deadline = due

    def _expire(self, now: float) -> list[Effect[WorkT, EndedT]]:
        effects: list[Effect[WorkT, EndedT]] = []
        for child in self._children.values():
            due = child.due()
            if due is not None and due <= now:
                effects += self._expire_child(child, now)
        # Deadlines that were met left self.deadline too early: that costs one Tick, and here it is.
        self.deadline = None
        for child in self._children.values():
            self._watch(child)
        return effects

    def _expire_child(self, child: Child[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        def passed(at: float | None) -> bool:
            return at is not None and at <= now

        if passed(child.start_at):
            return [self._start(child, now)]
        if passed(child.kill_at):
            if child.state is State.STARTING:
                return self._kill(child, f"not ready after {self._settings.start_timeout_s:g} s")
            still = "its job was still running" if child.batches else "it did not end"
            return self._kill(child, f"{still} when the pool had to stop")
        if passed(child.hard_at):
            child.timed_out = True
            return self._kill(
                child, f"the hard time limit of {child.batches[0].jobs[0].hard_limit_s:g} s passed"
            )
        effects: list[Effect[WorkT, EndedT]] = []
        if passed(child.soft_at):
            if (job := child.running()) is not None:
                effects.append(SignalSoftLimit(child.number, job.number, child.stopping))
            child.soft_repeats -= 1
            child.soft_at = now + _SOFT_REPEAT_S if child.soft_repeats else None
        if passed(child.recall_at):
            child.recall_at = None
            effects += self._recall([child] if child.batches else [])
        return effects
