"""Rates: how much happened in each step of the last hour, how long tasks waited and ran, and the flow of each
queue.

An hour is stored in steps of STEP_S seconds, and the last minute in seconds too. Durations are counted in
buckets that grow by a tenth, so a percentile is right to 5 % at a bounded cost, and steps can be added up.
Steps can be saved and loaded: after a restart the charts continue with a gap for the time in between.

The flow of a queue and the age of its oldest task are known only from `task-sent` events, which clients send
if they are configured to. A task that is not due yet does not wait.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log

import msgspec

from umbel.events.state import ClusterState, Tracked
from umbel.protocol.delivery.states import PENDING

# ---- rates -----------------------------------------------------------------------------------------
#
# How much happened in each step of the last hour, and how long tasks waited and ran.
#
# An hour is stored in steps of STEP_S seconds, the last minute in seconds too. Durations are counted in
# buckets that grow by a tenth, so a percentile is right to 5 % at a bounded cost, and steps can be added
# up. Steps can be saved and loaded: after a restart the charts continue, with a gap for the time in
# between.

STEP_S = 5
STEPS_MAX = 3600 // STEP_S
SECONDS_MAX = 60
QUEUES_MAX = 20  # the deepest queues of a step
GROWTH = log(1.1)
SHORTEST_S, LONGEST_S = 1e-5, 1e6
Buckets = dict[int, int]


def bucket_of(seconds: float) -> int:
    """Return the number of the bucket in which a duration is counted."""
    return round(log(min(max(seconds, SHORTEST_S), LONGEST_S)) / GROWTH)


def percentile(buckets: Mapping[int, int], share: float) -> float | None:
    """Return the duration that this share of the counted ones did not exceed; None if none were counted."""
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
    """Return the sum of several sets of buckets."""
    total: Buckets = {}
    for buckets in many:
        for bucket, count in buckets.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


class Step(msgspec.Struct):
    """What happened from `at` on, for one step; gauges are None where nothing was measured."""

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
    """The steps of the last hour and the seconds of the last minute; at the limit the oldest are dropped."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=STEPS_MAX)
        self.seconds: deque[Step] = deque(maxlen=SECONDS_MAX)

    def count(self, type_name: str, now: float) -> None:
        """Count an event of this type in the current second and step."""
        counted = COUNTED.get(type_name)
        for step in (self._at(self.seconds, int(now)), self._at(self.steps, int(now) // STEP_S * STEP_S)):
            step.events += 1
            if counted is not None:
                setattr(step, counted, getattr(step, counted) + 1)

    def waited(self, seconds: float, now: float) -> None:
        """Count how long a task waited before it started."""
        _note(self._at(self.steps, int(now) // STEP_S * STEP_S).wait, seconds)

    def ran(self, seconds: float, now: float) -> None:
        """Count how long a task ran."""
        _note(self._at(self.steps, int(now) // STEP_S * STEP_S).run, seconds)

    def looked(
        self, now: float, *, ready: Mapping[str, int], oldest_s: float | None, alive: int | None
    ) -> None:
        """Record the depths of the queues, the age of the oldest task and the number of live nodes."""
        step = self._at(self.steps, int(now) // STEP_S * STEP_S)
        deepest = sorted(ready, key=lambda name: (-ready[name], name))[:QUEUES_MAX]
        step.queues = {name: ready[name] for name in deepest}
        step.ready, step.oldest_s, step.alive = sum(ready.values()), oldest_s, alive

    def restore(self, steps: Iterable[Step]) -> None:
        """Add steps that were saved before a restart; those of this process take precedence."""
        known = {step.at: step for step in [*steps, *self.steps]}
        self.steps = deque((known[at] for at in sorted(known)), maxlen=STEPS_MAX)

    def recent(self, now: float, over: int) -> list[Step]:
        """Return the last `over` whole seconds."""
        end = int(now)
        return [second for second in self.seconds if end - over <= second.at < end]

    def since(self, at: float) -> list[Step]:
        """Return the steps that begin at this time or later."""
        return [step for step in self.steps if step.at >= at]

    def _at(self, steps: deque[Step], at: int) -> Step:
        """Return the step of that moment; if the clock was set back, the newest one."""
        if not steps or steps[-1].at < at:
            steps.append(Step(at))
        return steps[-1]


def grouped(steps: Sequence[Step], step_s: int) -> dict[int, list[Step]]:
    """Return the steps grouped by the longer step that they are part of."""
    groups: dict[int, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.at // step_s * step_s, []).append(step)
    return groups


def _note(buckets: Buckets, seconds: float) -> None:
    bucket = bucket_of(seconds)
    buckets[bucket] = buckets.get(bucket, 0) + 1


# ---- queue flow ------------------------------------------------------------------------------------
#
# How many messages entered and left each queue in the last seconds.
#
# Only `task-sent` events say which queue a task went into, so the flow is 0 unless clients send them.

WINDOW_S = 30
FLOWS_MAX = 1000


class QueueFlow:
    """Counts the messages that enter and leave each queue, second by second, over WINDOW_S seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[list[int]]] = {}  # [second, came, went]

    def came(self, queue: str | None, now: float) -> None:
        """Count a message that was sent to the queue."""
        self._note(queue, now, 1)

    def went(self, queue: str | None, now: float) -> None:
        """Count a message of the queue that was started."""
        self._note(queue, now, 2)

    def rates(self, queue: str, now: float) -> tuple[float, float]:
        """Return messages in and out per second, over the last WINDOW_S seconds."""
        recent = [second for second in self._seconds.get(queue, ()) if second[0] >= int(now) - WINDOW_S]
        return sum(second[1] for second in recent) / WINDOW_S, sum(second[2] for second in recent) / WINDOW_S

    def _note(self, queue: str | None, now: float, column: int) -> None:
        if queue is None:
            return
        seconds = self._seconds.get(queue)
        if seconds is None:
            if len(self._seconds) >= FLOWS_MAX:
                return
            seconds = self._seconds[queue] = deque(maxlen=WINDOW_S + 1)
        if not seconds or seconds[-1][0] < int(now):
            seconds.append([int(now), 0, 0])
        seconds[-1][column] += 1


# ---- waiting ---------------------------------------------------------------------------------------
#
# How long the oldest waiting task of each queue has waited.
#
# Only tasks with a `task-sent` event are known to wait, which clients send if they are configured to. A
# task that is not due yet does not wait.

LOOKED_AT_MAX = 5_000
KNOWN_S = 24 * 3600.0  # an older task has probably ended without an event


def oldest_waiting(state: ClusterState, now: float) -> dict[str, float]:
    """Return by queue when the oldest task was sent that no worker has received."""
    oldest: dict[str, float] = {}
    looked_at = 0

    def look(task: Tracked) -> bool:
        nonlocal looked_at
        looked_at += 1
        sent = task.sent
        if task.counted == PENDING and sent is not None and sent.queue is not None and sent.eta is None:
            at = sent.timestamp
            if now - KNOWN_S < at < oldest.get(sent.queue, now):
                oldest[sent.queue] = at
        return looked_at >= LOOKED_AT_MAX

    state.tasks(finished=False, newest_first=False, limit=1, admits=look)
    return oldest
