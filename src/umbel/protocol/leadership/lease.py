"""Lease: a leader that lasts, under a term that fences what it does.

A follower asks for the lease when its holder's time is over. A leader renews it, and believes in
it for nine tenths of a ttl, counted from when it asked for its last good renewal: that moment
lies before the store's, so its belief ends before the store's lease does, as long as their clocks
run at rates that differ by less than a tenth. Whatever wakes a leader, it looks at that first.

Where it stops being right: a leader can stand still between that look and its effect. Effects
that must not double carry the term, and whoever takes them compares it (`fenced_publish`).

One Lease serves one campaign, under a holder name of its own: a release that is still on its way
would otherwise end what the same holder has taken again under the same term.
"""

from collections.abc import Callable
from enum import StrEnum

from umbel.protocol.leadership.coordination import LEASE_TTL_S, Instant, LeaseReply
from umbel.protocol.machine import Tick
from umbel.protocol.value import Value

SAFE_SHARE = 0.9
RENEW_JITTER = 0.2
RELEASED_WAIT_S = 0.5


class Role(StrEnum):
    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"


class LeaseSettings(Value):
    """`wait_s`: how far followers spread their asking once the lease is free.

    `ask_every_s` is for followers that hear of no release: they ask at least so often.
    """

    ttl_s: float = LEASE_TTL_S
    renew_s: float = 5.0
    rpc_timeout_s: float = 1.0
    wait_s: float = 2.0
    ask_every_s: float | None = None


# ---- events ----------------------------------------------------------------------------------------


class Campaign(Value):
    """From now on this node wants the lease, until Stop. Comes once."""


class AcquireReplied(Value):
    sent_s: float
    reply: LeaseReply


class RenewReplied(Value):
    term: int
    sent_s: float
    ok: bool


class ReleaseHeard(Value):
    """The leader says that it gave the lease up."""


class Stop(Value):
    """Give the lease up if it is ours, and want it no more."""


# ---- effects ---------------------------------------------------------------------------------------


class CallAcquire(Value):
    """`acquire_lease(name, holder, ttl_s)`; answer with AcquireReplied."""

    name: str
    holder: str
    ttl_s: float
    sent_s: float


class CallRenew(Value):
    """`renew_lease(name, holder, term, ttl_s)`; answer with RenewReplied."""

    name: str
    holder: str
    term: int
    ttl_s: float
    sent_s: float


class CallRelease(Value):
    """`release_lease(name, holder, term)`; needs no answer."""

    name: str
    holder: str
    term: int


class Acquired(Value):
    """This node leads. `data` is what the last leader left."""

    term: int
    data: bytes


class Lost(Value):
    term: int
    reason: str


class Released(Value):
    term: int


Event = Campaign | AcquireReplied | RenewReplied | ReleaseHeard | Stop
Effect = CallAcquire | CallRenew | CallRelease | Acquired | Lost | Released


class Lease:
    """One node and one lease. `holder_seen` and `term` tell who leads as far as this node knows."""

    def __init__(
        self,
        name: str,
        holder: str,
        settings: LeaseSettings,
        uniform: Callable[[float, float], float],
    ) -> None:
        self.name = name
        self.role = Role.FOLLOWER
        self.term = 0
        self.holder_seen = ""
        self.give_up_s = 0.0
        self._holder = holder
        self._settings = settings
        self._uniform = uniform
        self._wanted = False
        self._stopped = False
        self._timer_s: float | None = None

    @property
    def deadline(self) -> float | None:
        if self.role is Role.LEADER:
            return self.give_up_s if self._timer_s is None else min(self._timer_s, self.give_up_s)
        return self._timer_s

    def still_mine(self, now: Instant) -> bool:
        return self.role is Role.LEADER and now.boot_s < self.give_up_s

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        lost: list[Effect] = []
        if self.role is Role.LEADER and now.boot_s >= self.give_up_s:
            lost = self._follow("not renewed in time", now, self._settings.ttl_s * (1 - SAFE_SHARE))
        return [*lost, *self._decide(event, now)]

    def _decide(self, event: Event | Tick, now: Instant) -> list[Effect]:
        match event:
            case Campaign():
                return self._campaign(now)
            case AcquireReplied(sent_s, reply):
                return self._answered(sent_s, reply, now)
            case RenewReplied():
                return self._renewed(event, now)
            case ReleaseHeard():
                if self.role is Role.FOLLOWER and self._wanted:
                    self.holder_seen = ""
                    self._arm(now, self._uniform(0.0, RELEASED_WAIT_S))
                return []
            case Stop():
                return self._stop()
            case Tick():
                return self._fire(now)

    def _campaign(self, now: Instant) -> list[Effect]:
        if self._wanted or self._stopped:
            return []
        self._wanted = True
        return self._ask(now)

    def _fire(self, now: Instant) -> list[Effect]:
        if self._timer_s is None or now.boot_s < self._timer_s:
            return []
        if self.role is not Role.LEADER:
            return self._ask(now)
        self._arm(now, self._settings.rpc_timeout_s)  # without an answer, again
        return [CallRenew(self.name, self._holder, self.term, self._settings.ttl_s, now.boot_s)]

    def _ask(self, now: Instant) -> list[Effect]:
        self.role = Role.CANDIDATE
        self._arm(now, self._settings.rpc_timeout_s * self._uniform(1.0, 1.5))
        return [CallAcquire(self.name, self._holder, self._settings.ttl_s, now.boot_s)]

    def _answered(self, sent_s: float, reply: LeaseReply, now: Instant) -> list[Effect]:
        if reply.granted and not self._wanted:  # it came after Stop
            return [CallRelease(self.name, self._holder, reply.term)]
        if self.role is not Role.CANDIDATE:
            return []
        self.term, self.holder_seen = reply.term, reply.holder
        give_up_s = sent_s + SAFE_SHARE * self._settings.ttl_s
        if not reply.granted or now.boot_s >= give_up_s:
            self.role = Role.FOLLOWER
            self._await_turn(now, 0.0 if reply.granted else reply.left_s)
            return []
        self.role, self.give_up_s = Role.LEADER, give_up_s
        self._arm_renewal(sent_s)
        return [Acquired(reply.term, reply.data)]

    def _renewed(self, replied: RenewReplied, now: Instant) -> list[Effect]:
        if self.role is not Role.LEADER or replied.term != self.term:
            return []
        if not replied.ok:
            return self._follow("the store gave it to another", now, 0.0)
        give_up_s = replied.sent_s + SAFE_SHARE * self._settings.ttl_s
        if give_up_s > self.give_up_s:
            self.give_up_s = give_up_s
            self._arm_renewal(replied.sent_s)
        return []

    def _follow(self, reason: str, now: Instant, left_s: float) -> list[Effect]:
        self.role, self.holder_seen = Role.FOLLOWER, ""
        self._await_turn(now, left_s)
        return [Lost(self.term, reason)]

    def _await_turn(self, now: Instant, left_s: float) -> None:
        wait_s = left_s + self._uniform(0.0, self._settings.wait_s)
        most_s = self._settings.ask_every_s
        self._arm(now, wait_s if most_s is None else min(wait_s, most_s))

    def _stop(self) -> list[Effect]:
        led = self.role is Role.LEADER
        self._wanted, self._stopped = False, True
        self._timer_s, self.role = None, Role.FOLLOWER
        if not led:
            return []
        self.holder_seen = ""
        return [CallRelease(self.name, self._holder, self.term), Released(self.term)]

    def _arm(self, now: Instant, wait_s: float) -> None:
        self._timer_s = now.boot_s + wait_s

    def _arm_renewal(self, sent_s: float) -> None:
        jitter = self._uniform(1 - RENEW_JITTER, 1 + RENEW_JITTER)
        self._timer_s = sent_s + self._settings.renew_s * jitter
