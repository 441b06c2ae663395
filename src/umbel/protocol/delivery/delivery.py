"""Delivery: what happens to a message between its claim and its end, for one consumer.

`admit` judges a claimed message before it runs: known, revoked, expired, due, allowed by its rate,
poisonous? `ending.py` judges a message whose run was lost or failed. Together they keep at-least-once:
every claimed message leaves here run, parked, or with a reason, never in silence.

A start is charged only when a process died running the message, so the neighbours of a crash are
innocent. A message whose former *worker* died is suspect: nobody knows whether it ran. It runs
alone, and its start is counted in the broker before it runs, so a task that takes its whole
worker down is stopped by the same limit, one delivery later.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol

from umbel.protocol.delivery.limits import ClusterLimit
from umbel.protocol.delivery.rate import TokenBucket
from umbel.protocol.delivery.sensitive import Sensitive
from umbel.protocol.value import Value


class TaskRules(Value):
    """What the worker must know of a registered task.

    `acks_early`: acknowledged before it is handed to the pool. `acks_taken`: when a child is known to run
    it, or with its outcome, whichever comes first. The four after `hides` say how a run ends (`ending.py`).
    """

    acks_early: bool = False
    rate_per_second: float = 0.0
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
    is_async: bool = False
    hides: Sensitive | None = None  # arguments that nobody may read
    acks_taken: bool = False
    redelivers_lost: bool = True  # after its process died; else it has failed
    redelivers_timed_out: bool = False  # after its hard limit too; the failure is stored all the same
    rejects_failed: bool = False  # a failure makes its message a dead letter
    rejects_by_queue: bool = False  # dead letters go where their queue says, if the broker has that
    limit: ClusterLimit | None = None  # of the whole cluster; the rate is this worker's
    keeps_failed: bool = False  # the message of a failure is kept, so that it can be retried

    @property
    def acks_before(self) -> bool:
        """Acknowledged before the task ends: it runs at most once."""
        return self.acks_early or self.acks_taken

    @property
    def has_limits(self) -> bool:
        return self.soft_limit_s is not None or self.hard_limit_s is not None


class Arrival(NamedTuple):
    """A claimed message, as far as its fate depends on it. Instants are Unix seconds; 0 is never."""

    task: str
    task_id: str
    due: float = 0.0
    expires_at: float = 0.0
    starts: int = 0
    redelivered: bool = False
    stamps: Mapping[str, Any] | None = None


class Revocations(Protocol):
    """What must not start: see `revoked.RevokedTasks`."""

    def covers(self, task_id: str, stamps: Mapping[str, Any] | None) -> bool: ...


class Refusal(Enum):
    UNKNOWN = "unknown"
    REVOKED = "revoked"
    EXPIRED = "expired"
    POISONOUS = "poisonous"


class Run(Value):
    """Run it. `alone`: with nothing behind it; `count_start`: count the start in the broker first."""

    rules: TaskRules
    alone: bool = False
    count_start: bool = False


class Park(Value):
    until: float


class Refuse(Value):
    why: Refusal


Decision = Run | Park | Refuse

# Due a moment from now is due: parking it would cost more than it waits.
DUE_SLACK_S = 0.001
# Tokens set aside for parked messages; past this the oldest is forgotten and waits for another.
PROMISES_MAX = 10_000


class AdmissionPolicy:
    """Judges the messages of one worker. Holds the rate buckets; the revoked set is the caller's."""

    def __init__(self, rules: Mapping[str, TaskRules], *, max_deliveries: int) -> None:
        self.rules: dict[str, TaskRules] = {}
        self._max_deliveries = max_deliveries
        self._buckets: dict[str, TokenBucket] = {}
        self._promised: dict[str, bool] = {}
        self._plain_runs: dict[str, Run] = {}
        for name, rule in rules.items():
            self.change(name, rule)

    def change(self, task: str, rules: TaskRules) -> None:
        """From now on the task has these rules; what runs already keeps those it began with."""
        known = self.rules.get(task)
        self.rules[task] = rules
        self._plain_runs[task] = Run(rules, alone=rules.has_limits)
        if known is None or known.rate_per_second != rules.rate_per_second:
            self._buckets.pop(task, None)
            if rules.rate_per_second > 0:
                self._buckets[task] = TokenBucket(rules.rate_per_second)

    def admit(self, arrival: Arrival, revoked: Revocations, now: float) -> Decision:
        plain = self._plain_runs.get(arrival.task)
        if revoked.covers(arrival.task_id, arrival.stamps):
            return Refuse(Refusal.REVOKED)
        if plain is None:
            return Refuse(Refusal.UNKNOWN)
        if arrival.expires_at and now > arrival.expires_at:
            return Refuse(Refusal.EXPIRED)
        if arrival.starts >= self._max_deliveries:
            return Refuse(Refusal.POISONOUS)
        if arrival.due > now + DUE_SLACK_S:
            return Park(arrival.due)
        wait_s = self._rate_wait_s(arrival, now)
        if wait_s > 0:
            return Park(now + wait_s)
        if arrival.redelivered:
            return Run(plain.rules, alone=True, count_start=True)
        return plain

    def _rate_wait_s(self, arrival: Arrival, now: float) -> float:
        bucket = self._buckets.get(arrival.task)
        if bucket is None or self._promised.pop(arrival.task_id, False):
            return 0.0
        wait_s = bucket.take(now)
        if wait_s > 0:
            # Its token is set aside: when it comes back it must not pay again.
            self._promised[arrival.task_id] = True
            if len(self._promised) > PROMISES_MAX:
                del self._promised[next(iter(self._promised))]
        return wait_s

    def is_poisonous_after(self, arrival: Arrival) -> bool:
        """Whether a message whose process just died running it has had its last chance."""
        return arrival.starts + 1 >= self._max_deliveries
