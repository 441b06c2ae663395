"""Outage: when a broker counts as away, told once for all parts of a worker that use it.

A worker reaches its broker over several links, and many parts of it call. Each notices by itself
that the broker is away, and that it is back. An outage begins with the first link that is lost or
the first call that fails. It ends when every link is restored and every part that failed works.

The parts of a long outage notice its end at different times: a link may find out that it is dead
when the network is back already. So the end of one that lasted is told after `settle_s` of quiet.
A short one, a connection that was closed and made again, needs SHORT_S of quiet: what it leaves
to reconcile (a message that is redelivered, a hello) is known by then.

A part that has to reconcile something says so (`Reconciling`), and is waited for like one that failed.

It stops being right where a part that failed never calls again: such a part must say `Closed`.
"""

from collections import Counter
from collections.abc import Mapping
from typing import assert_never

from umbel.protocol.machine import Tick
from umbel.protocol.value import Value

SHORT_S = 1.0


class LinkLost(Value):
    """A connection, or the subscription on one, ended without being closed here."""

    link: str
    why: str
    ends_claims: bool = False  # what was claimed on it is the broker's again


class LinkRestored(Value):
    """The same is there again: one reconnect."""

    link: str


class Closed(Value):
    """The link or part is not needed any more."""

    name: str


class CallFailed(Value):
    part: str
    why: str


class CallWorked(Value):
    part: str


class Reconciling(Value):
    """The part has to make up for what it missed, and says `CallWorked` when it has."""

    part: str


class Began(Value):
    part: str
    why: str


class Ended(Value):
    """`reconnects`: by link. `failures`: calls that failed since it began."""

    after_s: float
    reconnects: tuple[tuple[str, int], ...]
    failures: int


LinkChange = LinkLost | LinkRestored | Closed
Event = LinkChange | CallFailed | CallWorked | Reconciling
Effect = Began | Ended


class Outage:
    def __init__(self, *, settle_s: float) -> None:
        self.deadline: float | None = None
        self.began: Began | None = None
        self.reconnects: Counter[str] = Counter()  # by link, of all outages
        self._settle_s = settle_s
        self._down: Counter[str] = Counter()  # two subscriptions may have one name
        self._failing: set[str] = set()
        self._began_at = self._over_at = 0.0
        self._before: Mapping[str, int] = {}
        self._failures = 0

    @property
    def is_linked(self) -> bool:
        """Every link is there."""
        return not self._down

    def is_down(self, link: str) -> bool:
        return link in self._down

    def is_failing(self, part: str) -> bool:
        """Whether this part has to say when it works again."""
        return part in self._failing

    def step(self, event: Event | Tick, now: float) -> list[Effect]:
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

    def _begin(self, part: str, why: str, now: float) -> list[Effect]:
        self.deadline = None
        if self.began is not None:
            return []
        self._began_at, self._before = now, dict(self.reconnects)
        self.began = Began(part, why)
        return [self.began]

    def _wait_for(self, part: str) -> list[Effect]:
        if self.began is not None:
            self._failing.add(part)
            self.deadline = None
        return []

    def _look_for_end(self, now: float) -> list[Effect]:
        if self.began is None or self._down or self._failing:
            return []
        if self.deadline is None:
            self._over_at = now
            is_short = now - self._began_at <= SHORT_S
            self.deadline = now + (SHORT_S if is_short else self._settle_s)
        if now < self.deadline:
            return []
        return [self._end()]

    def _end(self) -> Ended:
        made = self.reconnects - Counter(self._before)
        ended = Ended(self._over_at - self._began_at, tuple(sorted(made.items())), self._failures)
        self.deadline, self.began, self._failures = None, None, 0
        return ended
