"""Delivery: what happens to a message between its claim and its end, for one consumer.

`ClaimAhead` limits how many messages a worker claims before it can start them. `AdmissionPolicy` checks a
claimed message before it runs: is it known, revoked, expired, due, within its rate, poisonous? `after_loss`
and `after_failure` decide about a message whose run was lost, timed out or failed. Together they ensure
at-least-once delivery: every claimed message is run, parked, or refused with a reason.

Everything here is a decision about one message; the machines in `pool/` decide which child runs it.
"""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from umbel.protocol.delivery.limits import ClusterLimit, TokenBucket
from umbel.protocol.delivery.sensitive import Sensitive
from umbel.protocol.machine import Value

if TYPE_CHECKING:
    from umbel.protocol.delivery.revoked import RevokedTasks

# ---- claim-ahead -----------------------------------------------------------------------------------
#
# A worker claims more messages than it can start at once, so that its children never wait for the broker: as
# many as should start within about 30 ms, by recent run times (`protocol/pool/slots.py`). That is a guess. A
# single slow task delays all messages claimed after it, while another worker may be idle. So the guess has a
# deadline: if a message has not started `patience_s` after it was submitted to the pool, the pool is stalled.
# Then every message that has not started returns to its queue, in its old order and without a counted start,
# and until a task ends the worker claims only what it can start at once. If a child is idle, it is about to
# get that message, and the worker checks again `patience_s` later.
#
# This bounds the wait: a message starts or returns within `patience_s` plus `GRAIN_S`, twice that if a child
# was idle, and a stalled worker does not claim it again. No worker has to ask another, so the rule also works
# with workers that do not implement it. The cost is a second claim for each returned message, at most once
# per `patience_s` in which the pool made no progress, even if no other worker is idle. The bound does not
# hold while the broker is unreachable: then a message waits until the broker replies.

PATIENCE_S = 0.3
GRAIN_S = 0.05  # claims within this time of one another share the deadline of the first


class ClaimAhead:
    """The jobs that were submitted to the pool and have not started; their numbers increase."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self.is_stalled = False
        self._patience_s = patience_s
        self._submitted: deque[tuple[float, int]] = deque()  # at most patience_s / GRAIN_S + 1 entries

    @property
    def deadline(self) -> float | None:
        """Return when to check next which jobs have not started; None if there are none."""
        return self._submitted[0][0] + self._patience_s if self._submitted else None

    def submit(self, last: int, now: float) -> None:
        """Record that jobs up to this number were submitted to the pool."""
        if self._submitted and now - self._submitted[-1][0] < GRAIN_S:
            began, before = self._submitted[-1]
            self._submitted[-1] = (began, max(before, last))
        else:
            self._submitted.append((now, last))

    def overdue(self, now: float) -> int:
        """Return the highest number of a job that should have started by now; 0 if there is none."""
        last = 0
        while (deadline := self.deadline) is not None and deadline <= now:
            last = max(last, self._submitted.popleft()[1])
        return last

    def stall(self) -> None:
        """Record that an overdue job has not started: the pool is stalled, and its jobs are no longer
        tracked.
        """
        self.is_stalled = True
        self._submitted.clear()

    def move(self) -> None:
        """Record progress: a task ended, or a child process started or ended."""
        self.is_stalled = False

    def claimable(self, *, room: int, free: int) -> int:
        """Return how many messages to claim: the pool's room, or while stalled, what it can start at once."""
        return min(room, free) if self.is_stalled else room


# ---- delivery --------------------------------------------------------------------------------------
#
# A start is counted only when a process died while running the message, so other messages in a crashed
# process are not charged. A message whose former *worker* died is suspect, because it is unknown whether it
# ran. It runs alone, and its start is counted in the broker before it runs. So a task that crashes its whole
# worker is stopped by the same limit, one delivery later.


class TaskRules(Value):
    """What a worker must know about a registered task.

    `acks_early`: acknowledge before the job is submitted to the pool. `acks_taken`: acknowledge when a child
    is known to run the job, or with its outcome, whichever comes first. The fields `redelivers_*` and
    `rejects_*` decide how a run ends (`after_loss`, `after_failure`).
    """

    acks_early: bool = False
    rate_per_second: float = 0.0
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
    is_async: bool = False
    hides: Sensitive | None = None  # arguments that are masked wherever they are shown
    acks_taken: bool = False
    redelivers_lost: bool = True  # redeliver after the process died; otherwise the task has failed
    redelivers_timed_out: bool = False  # redeliver after the hard limit too; the failure is stored as well
    rejects_failed: bool = False  # a failure makes the message a dead letter
    # dead letters go where the queue's settings say, if the broker supports that
    rejects_by_queue: bool = False
    limit: ClusterLimit | None = None  # for the whole cluster; `rate_per_second` is for this worker
    keeps_failed: bool = False  # store the message of a failed task, so that it can be retried

    @property
    def acks_before(self) -> bool:
        """Return whether the message is acknowledged before its task ends, so that it runs at most once."""
        return self.acks_early or self.acks_taken

    @property
    def has_limits(self) -> bool:
        """Return whether a run of the task has a soft or a hard time limit."""
        return self.soft_limit_s is not None or self.hard_limit_s is not None


class Arrival(NamedTuple):
    """The properties of a claimed message that admission needs. Times are Unix seconds; 0 means never."""

    task: str
    task_id: str
    due: float = 0.0
    expires_at: float = 0.0
    starts: int = 0
    redelivered: bool = False
    stamps: Mapping[str, Any] | None = None


class Refusal(Enum):
    """The reasons for not running a message."""

    UNKNOWN = "unknown"
    REVOKED = "revoked"
    EXPIRED = "expired"
    POISONOUS = "poisonous"


class Admit(Value):
    """Run the message. `alone`: with no job queued behind it; `count_start`: first count the start in the
    broker.
    """

    rules: TaskRules
    alone: bool = False
    count_start: bool = False


class Park(Value):
    """Delay the message until this time, in Unix seconds."""

    until: float


class Refuse(Value):
    """Do not run the message, for this reason."""

    why: Refusal


Decision = Admit | Park | Refuse

# A message that is due within this time counts as due: parking it would take longer than the wait.
DUE_SLACK_S = 0.001
# Limit on tokens reserved for parked messages. Beyond it the oldest reservation is dropped, and its message
# waits for another token.
PROMISES_MAX = 10_000


class AdmissionPolicy:
    """Decides about the messages of one worker. It owns the rate buckets; the caller owns the revoked set."""

    def __init__(self, rules: Mapping[str, TaskRules], *, max_deliveries: int) -> None:
        self.rules: dict[str, TaskRules] = {}
        self._max_deliveries = max_deliveries
        self._buckets: dict[str, TokenBucket] = {}
        self._promised: dict[str, bool] = {}
        self._plain_runs: dict[str, Admit] = {}
        for name, rule in rules.items():
            self.change(name, rule)

    def change(self, task: str, rules: TaskRules) -> None:
        """Set the task's rules from now on; running tasks keep the rules they started with."""
        known = self.rules.get(task)
        self.rules[task] = rules
        self._plain_runs[task] = Admit(rules, alone=rules.has_limits)
        if known is None or known.rate_per_second != rules.rate_per_second:
            self._buckets.pop(task, None)
            if rules.rate_per_second > 0:
                self._buckets[task] = TokenBucket(rules.rate_per_second)

    def admit(self, arrival: Arrival, revoked: "RevokedTasks", now: float) -> Decision:
        """Decide whether a claimed message runs now, waits, or is refused."""
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
            return Admit(plain.rules, alone=True, count_start=True)
        return plain

    def _rate_wait_s(self, arrival: Arrival, now: float) -> float:
        bucket = self._buckets.get(arrival.task)
        if bucket is None or self._promised.pop(arrival.task_id, False):
            return 0.0
        wait_s = bucket.take(now)
        if wait_s > 0:
            # A token is reserved: when the message returns, it must not take another.
            self._promised[arrival.task_id] = True
            if len(self._promised) > PROMISES_MAX:
                del self._promised[next(iter(self._promised))]
        return wait_s

    def is_poisonous_after(self, arrival: Arrival) -> bool:
        """Return whether a message has no starts remaining after its process died while running it."""
        return arrival.starts + 1 >= self._max_deliveries


# ---- ending ----------------------------------------------------------------------------------------
#
# A message that is acknowledged before its task ends (`TaskRules.acks_before`) runs at most once: whatever
# ends its run is a failure, and only a message that has not run returns to its queue. All others are
# redelivered after a loss by default; a task may ask for a failure instead. Each redelivery that the run
# itself has caused counts as a start, so a message that crashes its process, or always exceeds its limit,
# becomes a dead letter in the end.
#
# A run that is interrupted because the worker stops is not at fault: its message returns and no start is
# counted.


class Loss(Value):
    """A run without an outcome.

    `started`: it was running when its process ended, and may be the cause. `ran`: it ran or may have run, at
    least in part. `timed_out`: it was ended at its hard limit.
    """

    ran: bool
    started: bool = False
    timed_out: bool = False


class Fate(Enum):
    """What happens to a message whose run ended without success."""

    GIVE_BACK = "give back"  # returned to its queue; no start is counted
    REDELIVER = "redeliver"  # returned to its queue; a start is counted
    FAIL = "fail"  # the failure is stored and the message acknowledged
    REJECT = "reject"  # the failure is stored and the message becomes a dead letter
    FAIL_AND_REDELIVER = "fail and redeliver"  # the failure is stored and the message is redelivered
    BURY = "bury"  # no starts remain: the failure is stored and the message becomes a dead letter


def after_loss(rules: TaskRules, loss: Loss, *, last_chance: bool, stopping: bool) -> Fate:
    """Decide about a run without an outcome. `last_chance`: another counted start would exceed the limit."""
    if loss.timed_out:
        return _after_limit(rules, last_chance=last_chance)
    if not loss.ran:
        return Fate.GIVE_BACK
    if rules.acks_before:
        return Fate.FAIL
    if stopping:
        return Fate.GIVE_BACK
    if not rules.redelivers_lost:
        return after_failure(rules)
    return Fate.BURY if loss.started and last_chance else Fate.REDELIVER


def after_failure(rules: TaskRules) -> Fate:
    """Decide about a task that raised an exception, or whose loss counts as a failure."""
    return Fate.REJECT if rules.rejects_failed and not rules.acks_before else Fate.FAIL


def _after_limit(rules: TaskRules, *, last_chance: bool) -> Fate:
    if rules.acks_before or not rules.redelivers_timed_out:
        return Fate.FAIL
    return Fate.BURY if last_chance else Fate.FAIL_AND_REDELIVER
