"""Fleet: the children of a pool as they come and go; `slots.py` decides about their jobs.

A slot whose child ends is filled again, at once after a life and later after a failed start. A child
that is asked to leave runs the job it is at to its end and gets no other, so whoever is retired,
recycled or replaced takes nothing with it. Replacing all of them goes on only while every slot is
filled: a pool whose new children do not start keeps its old ones.
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
    SlotSettings,
    Start,
    WorkT,
)
from umbel.protocol.pool.starts import Starts

_SHRINKS = "pool shrinking"
_SHORT_LIFE_S = 1.0  # a child that dies sooner, without a job, did not really start


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
                return self.retire(child, "the pool is started anew", now)
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
                effects += self.kill(child, "the pool was stopped")
            elif child.state is State.READY:
                child.state = State.LEAVING
                effects.append(Dismiss(child.number, "pool shutdown"))
            if child.state is State.LEAVING and not child.kill_reason:
                leave_by = now + (grace_s if child.batches else self._settings.stop_grace_s)
                child.kill_at = leave_by if child.kill_at is None else min(child.kill_at, leave_by)
            self.watch(child)
        return effects

    # ---- time passes -------------------------------------------------------------------------------

    def watch(self, child: Child[WorkT]) -> None:
        due = child.due()
        if due is not None and (self.deadline is None or due < self.deadline):
            self.deadline = due

    def watch_all(self) -> None:
        self.deadline = None
        for child in self.children.values():
            self.watch(child)
