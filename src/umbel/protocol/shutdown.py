"""Shutdown: how a worker stops, from the first request to the last message (rule F7); and outages of its
broker.

Each request makes the shutdown more urgent. First (warm): claim no more messages and finish the running
tasks, for up to `grace_s`. Second (soft): the running tasks are interrupted, and have `soft_s` to clean up.
Third, or at the end of the time (cold): tasks that still run are ended and their messages returned. A request
to quit is cold at once.

No message is lost, because a message is acknowledged when its task has ended, and returned otherwise. Tasks
that were ended run again elsewhere, so only those that `Cut` counts run twice. Limit: this does not apply to
tasks that are acknowledged before they run (`acks_early`).
"""

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import assert_never

from umbel.protocol.machine import Tick, Value

# ---- shutdown --------------------------------------------------------------------------------------


class ShutdownPhase(Enum):
    """The phase of the shutdown; `status` and `health` show the values."""

    RUNNING = "running"
    WARM = "draining"
    SOFT = "interrupting"
    COLD = "returning"
    DONE = "stopped"


class StopRequested(Value):
    """The worker was asked to stop, by a signal or by remote control."""


class QuitRequested(Value):
    """The worker was asked to stop at once, without waiting for tasks."""


class TasksRunning(Value):
    """The number of running tasks, of those that were running when the worker was asked to stop."""

    count: int


class StopTaking(Value):
    """Claim no more messages, and return messages that have not started."""


class InterruptTasks(Value):
    """Interrupt the running tasks: they may clean up, then their messages are returned."""


class Cut(Value):
    """End the children and return the messages of their jobs: `count` tasks will run twice."""

    count: int


class Drained(Value):
    """No task is running any more."""


Event = StopRequested | QuitRequested | TasksRunning
Effect = StopTaking | InterruptTasks | Cut | Drained


class Shutdown:
    """The shutdown of one worker: its phase, its deadline and the number of running tasks."""

    def __init__(self, *, grace_s: float, soft_s: float) -> None:
        self.phase = ShutdownPhase.RUNNING
        self.deadline: float | None = None
        self.cut = 0  # number of tasks that were ended
        self._grace_s = grace_s
        self._soft_s = soft_s
        self._running = 0

    @property
    def is_stopping(self) -> bool:
        """Return whether the worker was asked to stop."""
        return self.phase is not ShutdownPhase.RUNNING

    @property
    def running(self) -> int:
        """Return how many tasks still run, as last reported."""
        return self._running

    def left_s(self, now: float) -> float | None:
        """Return how much time the running tasks have; None if there is no deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - now)

    def describe(self, now: float) -> dict[str, object]:
        """Return phase, running tasks and remaining seconds for `status` and `health`."""
        return {"phase": self.phase.value, "running": self._running, "left_s": self.left_s(now)}

    def step(self, event: Event | Tick, now: float) -> list[Effect]:
        """Process one event; return what the worker must do next."""
        match event:
            case TasksRunning(count):
                return self._note(count)
            case StopRequested():
                return self._press(now)
            case QuitRequested():
                first: list[Effect] = [] if self.is_stopping else [StopTaking()]
                return first + self._cut()
            case Tick():
                is_due = self.deadline is not None and now >= self.deadline
                return self._cut() if is_due else []
            case _:
                assert_never(event)

    def _note(self, count: int) -> list[Effect]:
        self._running = count
        if count or self.phase in (ShutdownPhase.RUNNING, ShutdownPhase.DONE):
            return []
        self.phase, self.deadline = ShutdownPhase.DONE, None
        return [Drained()]

    def _press(self, now: float) -> list[Effect]:
        match self.phase:
            case ShutdownPhase.RUNNING:
                self.phase, self.deadline = ShutdownPhase.WARM, now + self._grace_s
                return [StopTaking()]
            case ShutdownPhase.WARM:
                # Never later than the end of the first request's grace period.
                soft_by = now + self._soft_s
                self.phase = ShutdownPhase.SOFT
                self.deadline = soft_by if self.deadline is None else min(self.deadline, soft_by)
                return [InterruptTasks()]
            case ShutdownPhase.SOFT:
                return self._cut()
            case _:
                return []

    def _cut(self) -> list[Effect]:
        if self.phase in (ShutdownPhase.COLD, ShutdownPhase.DONE):
            return []
        self.phase, self.deadline = ShutdownPhase.COLD, None
        self.cut = self._running
        return [Cut(self._running)]


# ---- outage ----------------------------------------------------------------------------------------
#
# A worker uses several connections to its broker, and many parts of it make calls. Each part notices
# separately that the broker is unavailable, and that it is back. So this machine reports one outage for all
# of them: it begins with the first lost link or failed call, and ends when every link is restored and every
# part that failed works again.
#
# Parts notice the end of a long outage at different times: a link may find out that it is dead when the
# network is already back. So the end of a long outage is reported after `settle_s` without failures. A short
# outage, such as a connection that was closed and reopened, needs only SHORT_S: what remains to reconcile (a
# redelivered message, a hello) is known by then. A part that has to reconcile something reports it
# (`Reconciling`), and the end of the outage waits for it.
#
# Limit: a part that failed and never calls again must send `Closed`, or the outage does not end.

SHORT_S = 1.0


class LinkLost(Value):
    """A connection, or its subscription, ended without being closed here."""

    link: str
    why: str
    ends_claims: bool = False  # messages claimed on it belong to the broker again


class LinkRestored(Value):
    """The connection or subscription is restored; this counts as one reconnect."""

    link: str


class Closed(Value):
    """The link or part is no longer needed."""

    name: str


class CallFailed(Value):
    """A part's call to the broker failed."""

    part: str
    why: str


class CallWorked(Value):
    """A part's call to the broker succeeded."""

    part: str


class Reconciling(Value):
    """The part has to process what it missed, and sends `CallWorked` when it has."""

    part: str


class OutageBegan(Value):
    """An outage has begun; this part noticed it first."""

    part: str
    why: str


class OutageEnded(Value):
    """The outage is over. `reconnects`: by link. `failures`: calls that failed during it."""

    after_s: float
    reconnects: tuple[tuple[str, int], ...]
    failures: int


LinkChange = LinkLost | LinkRestored | Closed
OutageEvent = LinkChange | CallFailed | CallWorked | Reconciling
OutageEffect = OutageBegan | OutageEnded


class Outage:
    """Combines failed links and parts into one outage with a beginning and an end."""

    def __init__(self, *, settle_s: float) -> None:
        self.deadline: float | None = None
        self.began: OutageBegan | None = None
        self.reconnects: Counter[str] = Counter()  # by link, over all outages
        self._settle_s = settle_s
        self._down: Counter[str] = Counter()  # a counter, because two subscriptions may have the same name
        self._failing: set[str] = set()
        self._began_at = self._over_at = 0.0
        self._before: Mapping[str, int] = {}
        self._failures = 0

    @property
    def is_linked(self) -> bool:
        """Return whether every link is up."""
        return not self._down

    def is_down(self, link: str) -> bool:
        """Return whether this link is down."""
        return link in self._down

    def is_failing(self, part: str) -> bool:
        """Return whether this part's last call failed, so that it has to report when it works again."""
        return part in self._failing

    def step(self, event: OutageEvent | Tick, now: float) -> list[OutageEffect]:
        """Process one event; return that an outage began or ended, if it did."""
        match event:
            case LinkLost(link, why, _):
                self._down[link] += 1
                return self._begin(link, why, now)
            case LinkRestored(link):
                self.reconnects[link] += 1
                self._take_from_down(link)
            case Closed(name):
                self._failing.discard(name)
                self._take_from_down(name)
            case CallFailed(part, why):
                self._failing.add(part)
                self._failures += 1
                return self._begin(part, why, now)
            case CallWorked(part):
                self._failing.discard(part)
            case Reconciling(part):
                return self._wait_for(part)
            case Tick():
                pass
            case _:
                assert_never(event)
        return self._look_for_end(now)

    def _take_from_down(self, link: str) -> None:
        self._down[link] -= 1
        if self._down[link] <= 0:
            del self._down[link]

    def _begin(self, part: str, why: str, now: float) -> list[OutageEffect]:
        self.deadline = None
        if self.began is not None:
            return []
        self._began_at, self._before = now, dict(self.reconnects)
        self.began = OutageBegan(part, why)
        return [self.began]

    def _wait_for(self, part: str) -> list[OutageEffect]:
        if self.began is not None:
            self._failing.add(part)
            self.deadline = None
        return []

    def _look_for_end(self, now: float) -> list[OutageEffect]:
        if self.began is None or self._down or self._failing:
            return []
        if self.deadline is None:
            self._over_at = now
            is_short = now - self._began_at <= SHORT_S
            self.deadline = now + (SHORT_S if is_short else self._settle_s)
        if now < self.deadline:
            return []
        return [self._end()]

    def _end(self) -> OutageEnded:
        made = self.reconnects - Counter(self._before)
        ended = OutageEnded(self._over_at - self._began_at, tuple(sorted(made.items())), self._failures)
        self.deadline, self.began, self._failures = None, None, 0
        return ended
