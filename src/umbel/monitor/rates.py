"""Rates: task counts, waiting times and run times of the last hour in steps, and the flow of each queue.

An hour is stored in steps of STEP_S seconds, and the last minute in seconds too. Durations are counted in
buckets that grow by a tenth: a percentile is accurate to 5 %, memory is bounded, and steps can be added up.
Steps can be saved and loaded; after a restart the charts continue, with a gap for the time in between.

The flow of a queue and the age of its oldest task come from `task-sent` events, so they are known only if
clients are configured to send these events.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log

import msgspec

from umbel.events.state import ClusterState, Tracked
from umbel.protocol.delivery.states import PENDING

# ---- durations -------------------------------------------------------------------------------------

GROWTH = log(1.1)
SHORTEST_S, LONGEST_S = 1e-5, 1e6
Buckets = dict[int, int]
"""How many durations are in each bucket, by the bucket's number."""


def bucket_of(seconds: float) -> int:
    """Return the number of the bucket in which a duration is counted."""
    return round(log(min(max(seconds, SHORTEST_S), LONGEST_S)) / GROWTH)


def percentile(buckets: Mapping[int, int], share: float) -> float | None:
    """Return the duration that this share of the durations does not exceed; None if none were counted."""
    remaining = share * sum(buckets.values())
    for bucket in sorted(buckets):
        remaining -= buckets[bucket]
        if remaining <= 0:
            return exp(bucket * GROWTH)
    return exp(max(buckets) * GROWTH) if buckets else None


def added(many: Iterable[Mapping[int, int]]) -> Buckets:
    """Return the sum of several sets of buckets."""
    total = Counter[int]()
    for buckets in many:
        total.update(buckets)
    return dict(total)


def _count(buckets: Buckets, seconds: float) -> None:
    bucket = bucket_of(seconds)
    buckets[bucket] = buckets.get(bucket, 0) + 1


# ---- rates -----------------------------------------------------------------------------------------

STEP_S = 5
STEPS_MAX = 3600 // STEP_S
SECONDS_MAX = 60
QUEUES_MAX = 20  # the deepest queues of a step
COUNTED = {
    "task-sent": "sent",
    "task-succeeded": "done",
    "task-failed": "failed",
    "task-retried": "retried",
}
"""The field of a step that counts each type of event; other types count as events only."""


class Step(msgspec.Struct):
    """What happened in one step that begins at `at`; gauges are None if nothing was measured."""

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


class RateBook:
    """The steps of the last hour and the seconds of the last minute; at the limit the oldest are dropped."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=STEPS_MAX)
        self.seconds: deque[Step] = deque(maxlen=SECONDS_MAX)

    def count(self, type_name: str, now: float) -> None:
        """Count an event of this type in the current second and step."""
        counted = COUNTED.get(type_name)
        for step in (_at(self.seconds, int(now)), self._step(now)):
            step.events += 1
            if counted is not None:
                setattr(step, counted, getattr(step, counted) + 1)

    def waited(self, seconds: float, now: float) -> None:
        """Count how long a task waited before it started."""
        _count(self._step(now).wait, seconds)

    def ran(self, seconds: float, now: float) -> None:
        """Count how long a task ran."""
        _count(self._step(now).run, seconds)

    def measured(
        self, now: float, *, ready: Mapping[str, int], oldest_s: float | None, alive: int | None
    ) -> None:
        """Record the depths of the queues, the age of the oldest task and the number of live nodes."""
        step = self._step(now)
        deepest = sorted(ready, key=lambda name: (-ready[name], name))[:QUEUES_MAX]
        step.queues = {name: ready[name] for name in deepest}
        step.ready, step.oldest_s, step.alive = sum(ready.values()), oldest_s, alive

    def restore(self, steps: Iterable[Step]) -> None:
        """Add steps that were saved before a restart; steps of this process take precedence."""
        known = {step.at: step for step in [*steps, *self.steps]}
        self.steps = deque((known[at] for at in sorted(known)), maxlen=STEPS_MAX)

    def recent(self, now: float, over: int) -> list[Step]:
        """Return the last `over` whole seconds."""
        end = int(now)
        return [second for second in self.seconds if end - over <= second.at < end]

    def since(self, at: float) -> list[Step]:
        """Return the steps that begin at this time or later."""
        return [step for step in self.steps if step.at >= at]

    def _step(self, now: float) -> Step:
        return _at(self.steps, int(now) // STEP_S * STEP_S)


def _at(steps: deque[Step], at: int) -> Step:
    """Return the step that begins at this time; if the clock was set back, the newest step."""
    if not steps or steps[-1].at < at:
        steps.append(Step(at))
    return steps[-1]


def grouped(steps: Sequence[Step], step_s: int) -> dict[int, list[Step]]:
    """Return the steps grouped by the longer step that they are part of."""
    groups: dict[int, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.at // step_s * step_s, []).append(step)
    return groups


# ---- queues ----------------------------------------------------------------------------------------

WINDOW_S = 30
FLOWS_MAX = 1000
SCANNED_MAX = 5_000
WAITING_MAX_S = 24 * 3600.0  # an older task has probably ended without an event


class QueueFlow:
    """Counts the messages that enter and leave each queue, per second, over WINDOW_S seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[list[int]]] = {}  # [second, messages in, messages out]

    def entered(self, queue: str | None, now: float) -> None:
        """Count a message that was sent to the queue."""
        self._count(queue, now, 1)

    def left(self, queue: str | None, now: float) -> None:
        """Count a message of the queue whose task started."""
        self._count(queue, now, 2)

    def rates(self, queue: str, now: float) -> tuple[float, float]:
        """Return messages in and out per second, over the last WINDOW_S seconds."""
        recent = [second for second in self._seconds.get(queue, ()) if second[0] >= int(now) - WINDOW_S]
        return sum(second[1] for second in recent) / WINDOW_S, sum(second[2] for second in recent) / WINDOW_S

    def _count(self, queue: str | None, now: float, column: int) -> None:
        if queue is None or (queue not in self._seconds and len(self._seconds) >= FLOWS_MAX):
            return
        seconds = self._seconds.setdefault(queue, deque(maxlen=WINDOW_S + 1))
        if not seconds or seconds[-1][0] < int(now):
            seconds.append([int(now), 0, 0])
        seconds[-1][column] += 1


def oldest_waiting(state: ClusterState, now: float) -> dict[str, float]:
    """Return by queue when the oldest task was sent that no worker has received.

    A task that is not due yet does not wait. Only the SCANNED_MAX oldest unfinished tasks are examined.
    """
    oldest: dict[str, float] = {}
    scanned = 0

    def scan(task: Tracked) -> bool:
        nonlocal scanned
        scanned += 1
        sent = task.sent
        if task.counted == PENDING and sent is not None and sent.queue is not None and sent.eta is None:
            at = sent.timestamp
            if now - WAITING_MAX_S < at < oldest.get(sent.queue, now):
                oldest[sent.queue] = at
        return scanned >= SCANNED_MAX  # the limit of 1 match ends the scan

    state.tasks(finished=False, newest_first=False, limit=1, admits=scan)
    return oldest
