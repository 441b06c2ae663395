"""Shutdown: how a worker stops, from the first request to the last message (F7).

Each request makes it more urgent. The first: claim nothing more and finish what runs, for up to `grace_s`
(warm). The second: the running tasks are interrupted, and have `soft_s` to clean up (soft). The third, or the
end of the time: what still runs is cut off and its message returned (cold). An order to quit is cold at once.

Why that loses nothing: a message is acknowledged when its task has ended, and returned otherwise; no phase
does neither. What was cut off runs again elsewhere, so the only repeats are those that `Cut` counts. It stops
being right where tasks are acknowledged before they run (`acks_early`).
"""

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import assert_never

from umbel.protocol.machine import Tick, Value

# ---- shutdown --------------------------------------------------------------------------------------
#
# How a worker stops, from the first request to the last message (F7).
#
# Each request makes it more urgent. The first: claim nothing more and finish what runs, for up to `grace_s`
# (warm). The second: the running tasks are interrupted, and have `soft_s` to clean up (soft). The third, or
# the end of the time: what still runs is cut off and its message returned (cold). An order to quit is cold
# at once.
#
# Why that loses nothing: a message is acknowledged when its task has ended, and returned otherwise; no
# phase does neither. What was cut off runs again elsewhere, so the only repeats are those that `Cut`
# counts. It stops being right where tasks are acknowledged before they run (`acks_early`).


class ShutdownPhase(Enum):
    """How far the shutdown is; the values are shown by `status` and `health`."""

    RUNNING = "running"
    WARM = "draining"
    SOFT = "interrupting"
    COLD = "returning"
    DONE = "stopped"


class StopRequested(Value):
    """The worker was asked to stop, by a signal or by remote control."""


class QuitRequested(Value):
    """The worker was asked to stop at once and to wait for nothing."""


class TasksRunning(Value):
    """How many tasks run, of those that were running when the worker was asked to stop."""

    count: int


class StopTaking(Value):
    """Claim nothing more, and return messages that have not started."""


class InterruptTasks(Value):
    """Interrupt the running tasks: they may clean up, then their messages are returned."""


class Cut(Value):
    """End the children and return the messages they ran: `count` tasks will run twice."""

    count: int


class Drained(Value):
    """No task runs any more."""


Event = StopRequested | QuitRequested | TasksRunning
Effect = StopTaking | InterruptTasks | Cut | Drained


class Shutdown:
    """The shutdown of one worker: its phase, its deadline and how many tasks still run."""

    def __init__(self, *, grace_s: float, soft_s: float) -> None:
        self.phase = ShutdownPhase.RUNNING
        self.deadline: float | None = None
        self.cut = 0  # how many tasks were cut off
        self._grace_s = grace_s
        self._soft_s = soft_s
        self._running = 0

    @property
    def is_stopping(self) -> bool:
        """Whether the worker was asked to stop."""
        return self.phase is not ShutdownPhase.RUNNING

    @property
    def running(self) -> int:
        """How many tasks still run, as last reported."""
        return self._running

    def left_s(self, now: float) -> float | None:
        """How long the running tasks still have; None when there is no deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - now)

    def describe(self, now: float) -> dict[str, object]:
        """Return phase, running tasks and remaining seconds for `status` and `health`."""
        return {"phase": self.phase.value, "running": self._running, "left_s": self.left_s(now)}

    def step(self, event: Event | Tick, now: float) -> list[Effect]:
        """Take one event and return what the worker must do next."""
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
                # Never later than the grace that the first request gave.
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
# When a broker counts as unreachable, reported once for all parts of a worker that use it.
#
# A worker reaches its broker over several links, and many parts of it make calls. Each part notices
# separately that the broker is away, and that it is back. An outage begins with the first link that is lost
# or the first call that fails. It ends when every link is restored and every part that failed works.
#
# The parts of a long outage notice its end at different times: a link may find out that it is dead when the
# network is already back. So the end of a long outage is reported after `settle_s` of quiet. A short one, a
# connection that was closed and reopened, needs SHORT_S of quiet: what it leaves to reconcile (a
# redelivered message, a hello) is known by then.
#
# A part that has to reconcile something reports it (`Reconciling`), and is waited for like a part that
# failed.
#
# It stops being right where a part that failed never calls again: such a part must send `Closed`.

SHORT_S = 1.0


class LinkLost(Value):
    """A connection, or the subscription on one, ended without being closed here."""

    link: str
    why: str
    ends_claims: bool = False  # what was claimed on it is the broker's again


class LinkRestored(Value):
    """The connection or subscription is there again: one reconnect."""

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
    """The part has to make up for what it missed, and sends `CallWorked` when it has."""

    part: str


class OutageBegan(Value):
    """An outage has begun, noticed by this part first."""

    part: str
    why: str


class OutageEnded(Value):
    """The outage is over. `reconnects`: by link. `failures`: calls that failed since it began."""

    after_s: float
    reconnects: tuple[tuple[str, int], ...]
    failures: int


LinkChange = LinkLost | LinkRestored | Closed
OutageEvent = LinkChange | CallFailed | CallWorked | Reconciling
OutageEffect = OutageBegan | OutageEnded


class Outage:
    """The links that are down and the parts that fail, as one outage with a beginning and an end."""

    def __init__(self, *, settle_s: float) -> None:
        self.deadline: float | None = None
        self.began: OutageBegan | None = None
        self.reconnects: Counter[str] = Counter()  # by link, of all outages
        self._settle_s = settle_s
        self._down: Counter[str] = Counter()  # two subscriptions may have one name
        self._failing: set[str] = set()
        self._began_at = self._over_at = 0.0
        self._before: Mapping[str, int] = {}
        self._failures = 0

    @property
    def is_linked(self) -> bool:
        """Whether every link is up."""
        return not self._down

    def is_down(self, link: str) -> bool:
        """Whether this link is down."""
        return link in self._down

    def is_failing(self, part: str) -> bool:
        """Whether this part's last call failed, so that it has to report when it works again."""
        return part in self._failing

    def step(self, event: OutageEvent | Tick, now: float) -> list[OutageEffect]:
        """Take one event and return that an outage began or ended, if it did."""
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
