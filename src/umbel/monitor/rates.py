"""Rates: how much happened in each step of the last hour, and how long tasks waited and ran.

An hour is kept in steps of STEP_S seconds, the last minute in seconds too. Durations are counted in buckets
that grow by a tenth, so a percentile is right to 5 % at a bounded cost, and steps can be added up. Steps can
be written down and read again: after a restart the charts go on where they ended, with a gap for the time
in between.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log

import msgspec

STEP_S = 5
STEPS_MAX = 3600 // STEP_S
SECONDS_MAX = 60
QUEUES_MAX = 20  # the deepest queues of a step are kept
GROWTH = log(1.1)
SHORTEST_S, LONGEST_S = 1e-5, 1e6
Buckets = dict[int, int]


def bucket_of(seconds: float) -> int:
    return round(log(min(max(seconds, SHORTEST_S), LONGEST_S)) / GROWTH)


def percentile(buckets: Mapping[int, int], share: float) -> float | None:
    """At most this long took that share of what was counted; None if nothing was."""
    total = sum(buckets.values())
    if not total:
        return None
    left = share * total
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return exp(bucket * GROWTH)
    return exp(max(buckets) * GROWTH)


def added(many: Iterable[Mapping[int, int]]) -> Buckets:
    total: Buckets = {}
    for one in many:
        for bucket, count in one.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


class Step(msgspec.Struct):
    """What happened from `at` on, for one step; None where nobody looked."""

    at: int
    events: int = 0
    sent: int = 0
    done: int = 0
    failed: int = 0
    retried: int = 0
    wait: Buckets = {}
    run: Buckets = {}
    ready: int | None = None
    oldest_s: float | None = None
    alive: int | None = None
    queues: dict[str, int] = {}


COUNTED = {
    "task-sent": "sent",
    "task-succeeded": "done",
    "task-failed": "failed",
    "task-retried": "retried",
}


class RateBook:
    """Steps and seconds, both with a limit; the oldest go."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=STEPS_MAX)
        self.seconds: deque[Step] = deque(maxlen=SECONDS_MAX)

    def count(self, type_name: str, now: float) -> None:
        counted = COUNTED.get(type_name)
        for step in (self._at(self.seconds, int(now)), self._at(self.steps, int(now) // STEP_S * STEP_S)):
            step.events += 1
            if counted is not None:
                setattr(step, counted, getattr(step, counted) + 1)

    def waited(self, seconds: float, now: float) -> None:
        _note(self._at(self.steps, int(now) // STEP_S * STEP_S).wait, seconds)

    def ran(self, seconds: float, now: float) -> None:
        _note(self._at(self.steps, int(now) // STEP_S * STEP_S).run, seconds)

    def looked(
        self, now: float, *, ready: Mapping[str, int], oldest_s: float | None, alive: int | None
    ) -> None:
        """What a look at the queues and the nodes found."""
        step = self._at(self.steps, int(now) // STEP_S * STEP_S)
        deepest = sorted(ready, key=lambda name: (-ready[name], name))[:QUEUES_MAX]
        step.queues = {name: ready[name] for name in deepest}
        step.ready, step.oldest_s, step.alive = sum(ready.values()), oldest_s, alive

    def restore(self, steps: Iterable[Step]) -> None:
        """Steps that were written down before; those that are known already stay as they are."""
        known = {step.at: step for step in [*steps, *self.steps]}
        self.steps = deque((known[at] for at in sorted(known)), maxlen=STEPS_MAX)

    def recent(self, now: float, over: int) -> list[Step]:
        """The last whole seconds."""
        end = int(now)
        return [one for one in self.seconds if end - over <= one.at < end]

    def since(self, at: float) -> list[Step]:
        return [step for step in self.steps if step.at >= at]

    def _at(self, steps: deque[Step], at: int) -> Step:
        """The step of that moment; a clock that was set back counts for the newest."""
        if not steps or steps[-1].at < at:
            steps.append(Step(at))
        return steps[-1]


def grouped(steps: Sequence[Step], step_s: int) -> dict[int, list[Step]]:
    """Steps by the longer step that they are part of."""
    groups: dict[int, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.at // step_s * step_s, []).append(step)
    return groups


def _note(buckets: Buckets, seconds: float) -> None:
    bucket = bucket_of(seconds)
    buckets[bucket] = buckets.get(bucket, 0) + 1
