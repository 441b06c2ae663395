"""Delivery: what happens to a message between its claim and its end, for one consumer.

`ClaimAhead` says how many messages a worker claims before it can start them. `AdmissionPolicy` judges a
claimed message before it runs: known, revoked, expired, due, within its rate, poisonous. `after_loss` and
`after_failure` judge a message whose run was lost, timed out or failed. Everything here is a decision about
one message; the machines in `pool/` decide which child runs it.
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
# How long a claimed message may wait for its start, and how much a worker may claim.
#
# A worker claims more messages than it can start at once, so that its children never wait for the broker:
# as many as should start within some 30 ms, by how long tasks took lately (`protocol/pool/slots.py`). That
# is a guess. One task that takes long makes all messages claimed after it wait, while another worker may be
# idle. So the guess has a deadline: when a message that was handed to the pool `patience_s` ago has not
# started, the pool is stalled. Then everything that has not started goes back to its queue, without a
# counted start and in its old order, and until a task ends the worker claims only what it can start at
# once. While a child is idle it is about to get that message, and the worker checks again `patience_s`
# later.
#
# Why this bounds the wait: a message either starts or goes back within `patience_s` plus `GRAIN_S`, twice
# that where a child was idle, and a stalled worker does not claim it again. No worker has to ask another,
# so the rule also works next to workers that do not know it. It costs a second claim for each message that
# went back, at most once for every `patience_s` in which the pool did not move, also where no other worker
# is idle. It stops being right where the broker cannot be reached: then a message waits until the broker
# replies.

PATIENCE_S = 0.3
GRAIN_S = 0.05  # claims within this time of one another share the deadline of the first


class ClaimAhead:
    """The jobs that were given to the pool and have not started; their numbers rise in that order."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self.is_stalled = False
        self._patience_s = patience_s
        self._submitted: deque[tuple[float, int]] = deque()  # at most patience_s / GRAIN_S, and one more

    @property
    def deadline(self) -> float | None:
        """When to check next which jobs have not started; None when there are none."""
        return self._submitted[0][0] + self._patience_s if self._submitted else None

    def submit(self, last: int, now: float) -> None:
        """Note that the pool got jobs up to this number."""
        if self._submitted and now - self._submitted[-1][0] < GRAIN_S:
            began, before = self._submitted[-1]
            self._submitted[-1] = (began, max(before, last))
        else:
            self._submitted.append((now, last))

    def overdue(self, now: float) -> int:
        """Return the highest number among the jobs that should have started by now; 0 if there is none."""
        last = 0
        while (deadline := self.deadline) is not None and deadline <= now:
            last = max(last, self._submitted.popleft()[1])
        return last

    def stall(self) -> None:
        """Note that an overdue job has not started: the pool is stalled, and no job in it is waited for."""
        self.is_stalled = True
        self._submitted.clear()

    def move(self) -> None:
        """Note that a task ended, or a child process came or went: the pool works again."""
        self.is_stalled = False

    def claimable(self, *, room: int, free: int) -> int:
        """How many messages to claim: what the pool has room for; what it can start at once while stalled."""
        return min(room, free) if self.is_stalled else room


# ---- delivery --------------------------------------------------------------------------------------
#
# What happens to a message between its claim and its end, for one consumer.
#
# `admit` judges a claimed message before it runs: unknown, revoked, expired, not due, over its rate,
# poisonous? `after_loss` and `after_failure` judge a message whose run was lost or failed. Together they
# ensure at-least-once: every claimed message leaves here run, parked, or refused with a reason.
#
# A start is counted only when a process died running the message, so messages next to it in a crashed
# process are not charged. A message whose former *worker* died is suspect: it is unknown whether it ran. It
# runs alone, and its start is counted in the broker before it runs, so a task that takes its whole worker
# down is stopped by the same limit, one delivery later.


class TaskRules(Value):
    """What a worker must know about a registered task.

    `acks_early`: acknowledged before it is handed to the pool. `acks_taken`: acknowledged when a child is
    known to run it, or with its outcome, whichever comes first. The fields `redelivers_*` and `rejects_*`
    decide how a run ends (`after_loss`, `after_failure`).
    """

    acks_early: bool = False
    rate_per_second: float = 0.0
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
    is_async: bool = False
    hides: Sensitive | None = None  # arguments that are masked wherever they are shown
    acks_taken: bool = False
    redelivers_lost: bool = True  # redelivered after its process died; otherwise it failed
    redelivers_timed_out: bool = False  # redelivered after its hard limit, too; the failure is stored as well
    rejects_failed: bool = False  # a failure makes its message a dead letter
    rejects_by_queue: bool = False  # dead letters go where their queue says, if the broker has that
    limit: ClusterLimit | None = None  # for the whole cluster; `rate_per_second` is for this worker
    keeps_failed: bool = False  # the message of a failed task is retained, so that it can be retried

    @property
    def acks_before(self) -> bool:
        """Whether the message is acknowledged before its task ends: it runs at most once."""
        return self.acks_early or self.acks_taken

    @property
    def has_limits(self) -> bool:
        """Whether a run of the task has a soft or a hard time limit."""
        return self.soft_limit_s is not None or self.hard_limit_s is not None


class Arrival(NamedTuple):
    """A claimed message, as far as admission needs it. Instants are Unix seconds; 0 is never."""

    task: str
    task_id: str
    due: float = 0.0
    expires_at: float = 0.0
    starts: int = 0
    redelivered: bool = False
    stamps: Mapping[str, Any] | None = None


class Refusal(Enum):
    """Why a message is not run."""

    UNKNOWN = "unknown"
    REVOKED = "revoked"
    EXPIRED = "expired"
    POISONOUS = "poisonous"


class Admit(Value):
    """Run the message. `alone`: with no job queued behind it; `count_start`: count the start in the broker
    first.
    """

    rules: TaskRules
    alone: bool = False
    count_start: bool = False


class Park(Value):
    """Hold the message back until this time, in Unix seconds."""

    until: float


class Refuse(Value):
    """Do not run the message, for this reason."""

    why: Refusal


Decision = Admit | Park | Refuse

# A message that is due within this time is due: parking it would cost more than the wait.
DUE_SLACK_S = 0.001
# Tokens reserved for parked messages. Beyond this number the oldest reservation is dropped, and its message
# waits for another token.
PROMISES_MAX = 10_000


class AdmissionPolicy:
    """Judges the messages of one worker. Holds the rate buckets; the revoked set is the caller's."""

    def __init__(self, rules: Mapping[str, TaskRules], *, max_deliveries: int) -> None:
        self.rules: dict[str, TaskRules] = {}
        self._max_deliveries = max_deliveries
        self._buckets: dict[str, TokenBucket] = {}
        self._promised: dict[str, bool] = {}
        self._plain_runs: dict[str, Admit] = {}
        for name, rule in rules.items():
            self.change(name, rule)

    def change(self, task: str, rules: TaskRules) -> None:
        """Give the task these rules from now on; runs in progress keep the rules they began with."""
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
            # Its token is reserved: when the message returns, it must not take another.
            self._promised[arrival.task_id] = True
            if len(self._promised) > PROMISES_MAX:
                del self._promised[next(iter(self._promised))]
        return wait_s

    def is_poisonous_after(self, arrival: Arrival) -> bool:
        """Whether a message whose process just died while running it has no starts left."""
        return arrival.starts + 1 >= self._max_deliveries


# ---- ending ----------------------------------------------------------------------------------------
#
# What becomes of a message whose run was lost, timed out or failed, by the rules of its task.
#
# A message that is acknowledged before its task ends (`TaskRules.acks_before`) runs at most once: whatever
# ends its run is a failure, and only a message that has not run goes back. All others are redelivered after
# a loss by default; a task may ask for a failure instead. Each redelivery that the run itself has caused
# counts as a start, so that a message that kills its process, or never ends in time, becomes a dead letter
# in the end.
#
# A run that the stopping worker cuts off is not to blame: its message goes back and no start is counted.


class Loss(Value):
    """A run without an outcome.

    `started`: it was running when its process ended, and may be the cause. `ran`: it ran or may have run, at
    least in part. `timed_out`: its hard limit ended it.
    """

    ran: bool
    started: bool = False
    timed_out: bool = False


class Fate(Enum):
    """What becomes of a message whose run ended without success."""

    GIVE_BACK = "give back"  # returned to its queue; no start is counted
    REDELIVER = "redeliver"  # returned to its queue; a start is counted
    FAIL = "fail"  # the failure is stored and the message acknowledged
    REJECT = "reject"  # the failure is stored and the message becomes a dead letter
    FAIL_AND_REDELIVER = "fail and redeliver"  # the failure is stored and the message is redelivered
    BURY = "bury"  # no starts remain: the failure is stored and the message becomes a dead letter


def after_loss(rules: TaskRules, loss: Loss, *, last_chance: bool, stopping: bool) -> Fate:
    """Decide about a run without an outcome. `last_chance`: one more counted start would exceed the limit."""
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
    """Decide about a task that raised, or whose loss counts as a failure."""
    return Fate.REJECT if rules.rejects_failed and not rules.acks_before else Fate.FAIL


def _after_limit(rules: TaskRules, *, last_chance: bool) -> Fate:
    if rules.acks_before or not rules.redelivers_timed_out:
        return Fate.FAIL
    return Fate.BURY if last_chance else Fate.FAIL_AND_REDELIVER
