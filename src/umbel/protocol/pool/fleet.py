"""Fleet: the children of a pool as they come and go; `slots.py` decides about their jobs.

A slot whose child ends is filled again, at once after a life and later after a failed start. A child
that is asked to leave runs the job it is at to its end and gets no other, so a child that is retired,
recycled or replaced takes nothing with it. Replacing all of them goes on only while every slot is
filled: a pool whose new children do not start keeps its old ones.

A child is recycled (F5) by the number of jobs it ran and the memory it uses. It is given no more jobs
than it may still run, so the last of them is known when it is sent and nothing has to be taken back.
Memory is looked at when a job ends, at most every `_PAUSE_S`, and every `_EVERY_S` while one runs: a child
that idles is not looked at. Over the first limit the child runs its job to the end and goes; over the
hard one it is killed, because the kernel would choose its victim with less care. That stops being right
for a job that takes all there is in less than half a second.
"""

from collections.abc import Iterable
from typing import Generic

from umbel.protocol.pool.child import Child, State, is_down, least_useful
from umbel.protocol.pool.events import (
    Dismiss,
    Effect,
    EndedT,
    Failed,
    Kill,
    Recall,
    SignalSoftLimit,
    SlotSettings,
    Start,
    Weigh,
    WorkT,
)
from umbel.protocol.pool.starts import Starts

_SHRINKS = "pool shrinking"
_SHORT_LIFE_S = 1.0  # a child that dies sooner, without a job, did not really start
_SOFT_REPEAT_S = 0.25  # a signal may come a moment before the job it is meant for
_EVERY_S, _PAUSE_S = 0.5, 0.05
_MIB = 1024 * 1024


class Fleet(Generic[WorkT, EndedT]):
    def __init__(self, settings: SlotSettings) -> None:
        self.deadline: float | None = None
        self.closing = False
        self.rolling = False  # children are being replaced, one after the other
        self.children: dict[int, Child[WorkT]] = {n: Child(n) for n in range(settings.children)}
        self._settings = settings
        self._starts = Starts(settings)
        self._going: set[int] = set()  # children that nobody follows

    def is_empty(self) -> bool:
        return all(child.state is State.ABSENT for child in self.children.values())

    # ---- they come ---------------------------------------------------------------------------------

    def start(self, child: Child[WorkT], now: float) -> Start:
        child.state, child.begun_at = State.STARTING, now
        child.start_at, child.kill_at = None, now + self._settings.start_timeout_s
        self.watch(child)
        return Start(child.number)

    def welcome(self, child: Child[WorkT], now: float) -> None:
        if child.state is State.STARTING:  # else it was killed meanwhile
            child.state, child.ready_at, child.kill_at = State.READY, now, None
            self._starts.seen_alive(now)

    def bury(
        self, child: Child[WorkT], reason: str, now: float, *, did_something: bool
    ) -> list[Effect[WorkT, EndedT]]:
        """It is gone; another takes its place, unless nobody is to follow."""
        heir = self.children[child.number] = Child(child.number)
        if self.closing:
            return []
        if child.number in self._going:
            self._going.discard(child.number)
            del self.children[child.number]
            return []
        if child.ready_at is not None:
            self._starts.seen_alive(now)
            if did_something or now - child.ready_at >= _SHORT_LIFE_S or child.state is State.LEAVING:
                self._starts.succeeded()
                return [self.start(heir, now)]
        heir.start_at = self._starts.failed(begun_at=child.begun_at, now=now)
        self.watch(heir)
        if any(other.state is State.READY for other in self.children.values()):
            return []
        given_up = self._starts.given_up(now)
        return [Failed(given_up + (child.kill_reason or reason))] if given_up else []

    # ---- and go ------------------------------------------------------------------------------------

    def kill(self, child: Child[WorkT], reason: str) -> list[Effect[WorkT, EndedT]]:
        if child.kill_reason:
            return []
        child.calm()
        child.state, child.kill_reason, child.kill_at, child.weigh_at = State.LEAVING, reason, None, None
        return [Kill(child.number, reason)]

    def retire(self, child: Child[WorkT], reason: str, now: float) -> list[Effect[WorkT, EndedT]]:
        if child.state is not State.READY:
            return []
        child.state = State.LEAVING
        if not child.batches:
            self.rest(child, now)
        waiting = child.batches and not (child.single or child.recalled)
        return [*self.recall([child] if waiting else []), Dismiss(child.number, reason)]

    def rest(self, child: Child[WorkT], now: float) -> None:
        """It has nothing to do any more."""
        child.calm()
        if child.state is State.LEAVING and not child.kill_reason:
            child.kill_at = now + self._settings.stop_grace_s
            self.watch(child)

    def recall(self, children: Iterable[Child[WorkT]]) -> list[Effect[WorkT, EndedT]]:
        effects: list[Effect[WorkT, EndedT]] = []
        for child in children:
            child.recalled, child.recall_at = True, None
            effects.append(Recall(child.number))
        return effects

    def replace(self) -> None:
        for child in self.children.values():
            child.stale = child.state is not State.ABSENT
        self.rolling = True

    def roll(self, now: float) -> list[Effect[WorkT, EndedT]]:
        """Retire one child that is to be replaced and idles, if every slot is filled."""
        self.rolling = not self.closing and any(child.stale for child in self.children.values())
        if not self.rolling or any(is_down(child) for child in self.children.values()):
            return []
        for child in self.children.values():
            if child.stale and child.state is State.READY and not child.batches:
                return self.retire(child, "pool restart", now)
        return []

    def resize(self, wanted: int, now: float) -> list[Effect[WorkT, EndedT]]:
        assert wanted >= 1, "a pool has at least one child"
        staying = [child for child in self.children.values() if child.number not in self._going]
        effects: list[Effect[WorkT, EndedT]] = []
        for child in least_useful(staying, len(staying) - wanted):
            if child.state is State.ABSENT:
                del self.children[child.number]
                continue
            self._going.add(child.number)
            is_new = child.state is State.STARTING
            effects += self.kill(child, _SHRINKS) if is_new else self.retire(child, _SHRINKS, now)
        number = 0
        for _ in range(0 if self.closing else wanted - len(staying)):
            while number in self.children:
                number += 1
            self.children[number] = Child(number)
            effects.append(self.start(self.children[number], now))
        return effects

    def close(self, grace_s: float, now: float) -> list[Effect[WorkT, EndedT]]:
        self.closing = True
        children = self.children.values()
        effects = self.recall(
            child for child in children if child.batches and not (child.single or child.recalled)
        )
        for child in children:
            child.start_at = None
            if child.state is State.STARTING:
                effects += self.kill(child, "pool shutdown")
            elif child.state is State.READY:
                child.state = State.LEAVING
                effects.append(Dismiss(child.number, "pool shutdown"))
            if child.state is State.LEAVING and not child.kill_reason:
                leave_by = now + (grace_s if child.batches else self._settings.stop_grace_s)
                child.kill_at = leave_by if child.kill_at is None else min(child.kill_at, leave_by)
            self.watch(child)
        return effects

    # ---- time passes -------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Effect[WorkT, EndedT]]:
        effects: list[Effect[WorkT, EndedT]] = []
        for child in self.children.values():
            due = child.due()
            if due is not None and due <= now:
                effects += self._expire_child(child, now)
        # Deadlines that were met left `deadline` too early: that costs one Tick, and here it is.
        self.watch_all()
        return effects

    def _expire_child(self, child: Child[WorkT], now: float) -> list[Effect[WorkT, EndedT]]:
        def passed(at: float | None) -> bool:
            return at is not None and at <= now

        if passed(child.start_at):
            return [self.start(child, now)]
        if passed(child.kill_at):
            if child.state is State.STARTING:
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
        due = child.due()
        if due is not None and (self.deadline is None or due < self.deadline):
            self.deadline = due

    def watch_all(self) -> None:
        self.deadline = None
        for child in self.children.values():
            self.watch(child)


class Recycling:
    def __init__(self, settings: SlotSettings) -> None:
        self._jobs_max = settings.jobs_max
        self._max_bytes = settings.memory_max_bytes
        self._hard_bytes = settings.memory_hard_bytes
        self._weighs = self._max_bytes is not None or self._hard_bytes is not None

    def allowance(self, child: Child[WorkT], wanted: int) -> int:
        """How many of so many more jobs the child may be given."""
        if self._jobs_max is None:
            return wanted
        return max(0, min(wanted, self._jobs_max - child.ended - child.outstanding()))

    def job_limit_reached(self, child: Child[WorkT]) -> str:
        """Why it goes now, or nothing."""
        if self._jobs_max is not None and child.ended >= self._jobs_max:
            return f"max_tasks_per_child reached after {child.ended} tasks"
        return ""

    def job_sent(self, child: Child[WorkT], now: float) -> None:
        if self._weighs and child.weigh_at is None:
            child.weigh_at = now + _EVERY_S

    def is_to_be_weighed(self, child: Child[WorkT], now: float) -> bool:
        """A job has ended: look now, or soon if somebody looked a moment ago."""
        if not self._weighs:
            return False
        child.weigh_at = child.weighed_at + _PAUSE_S
        if child.weigh_at > now:
            return False
        child.weigh_at = None
        return True

    def weighed(self, child: Child[WorkT], now: float) -> None:
        child.weighed_at = now
        child.weigh_at = now + _EVERY_S if child.batches else None

    def over_memory_limit(self, size_bytes: int) -> str:
        """Why it is replaced when its job has ended, or nothing."""
        if self._max_bytes is None or size_bytes <= self._max_bytes:
            return self.over_hard_limit(size_bytes)  # idle: the next job must not pay for the last one
        return f"memory use of {_shown(size_bytes)} exceeds max_memory_per_child of {_shown(self._max_bytes)}"

    def over_hard_limit(self, size_bytes: int) -> str:
        """Why it is killed, or nothing."""
        if self._hard_bytes is None or size_bytes <= self._hard_bytes:
            return ""
        return f"memory use of {_shown(size_bytes)} exceeds max_memory_hard of {_shown(self._hard_bytes)}"


def _shown(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.0f} MiB"
