"""Mixed elections: what our workers say so that Celery's workers beside them stand down.

An election that a Celery client starts reaches every worker in the classic form. Celery's workers
elect the lowest (clock, name) among the candidates they saw; so each of our workers enters with
the lowest clock there is, 1, before it does anything else, and then asks the store as always,
under AT_MOST_ONCE. A Celery worker that saw one of ours stands down; ours never count acks.

A Celery worker that counts its acks over a single candidate dies of it, so that with fewer than
three of ours each enters twice. We ack once, and only where a Celery worker stands.

Where it stops being right: a Celery worker decides when it has N-1 acks, and V of them give V²
among themselves. If V² >= N-1 it may decide before it hears of us, and run the election too: that
is reported as Unfenced and cannot be prevented from outside.
"""

from dataclasses import dataclass

from umbel.protocol.compat.election_v1_events import (
    AckHeard,
    Called,
    ElectHeard,
    PublishAck,
    PublishElect,
    is_sound,
)
from umbel.protocol.leadership.coordination import ElectionRequest, Instant, Policy
from umbel.protocol.value import Value

LOWEST_CLOCK = 1
FEW_OF_OURS = 3
CLASSIC_SEEN_S = 120.0
KNOWN_MAX = 10_000
KNOWN_S = 120.0


class Membership(Value):
    """How many live workers elect by Celery's rules, and how many by the store; ourselves included."""

    classic: int
    ours: int


class Enter(Value):
    """Take part by the store: to be asked of `election.py`."""

    request: ElectionRequest


class Unfenced(Value):
    """A Celery worker may run this election besides the one of ours that will."""

    election_id: str
    classic: int
    ours: int


Event = Called | ElectHeard | AckHeard | Membership
Effect = PublishElect | PublishAck | Enter | Unfenced


@dataclass(slots=True)
class _Known:
    since_s: float
    acked: bool = False


class MixedElections:
    """`compat`: "auto" speaks to Celery's workers while any is or was lately here, else as it says."""

    def __init__(self, node: str, compat: str = "auto") -> None:
        assert compat in {"auto", "always", "never"}
        self._node = node
        self._compat = compat
        self._members = Membership(classic=0, ours=1)
        self._classic_seen_s: float | None = None
        self._known: dict[str, _Known] = {}  # oldest first

    @property
    def deadline(self) -> float | None:
        return None

    def step(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Membership():
                self._members = event
                if event.classic:
                    self._classic_seen_s = now.boot_s
                return []
            case Called(election_id, topic, action):
                return self._enter(election_id, topic, action, now)
            case ElectHeard():
                return self._elect_heard(event, now)
            case AckHeard():
                return []  # the store decides; acks are not counted

    def _elect_heard(self, heard: ElectHeard, now: Instant) -> list[Effect]:
        if heard.version != 1 or heard.node == self._node:
            return []
        self._classic_seen_s = now.boot_s
        effects = self._enter(heard.election_id, heard.topic, heard.action, now)
        known = self._known.get(heard.election_id)
        if known is None or known.acked or not self._speaks(now):
            return effects
        known.acked = True
        return [*effects, PublishAck(heard.election_id)]

    def _enter(self, election_id: str, topic: str, action: bytes, now: Instant) -> list[Effect]:
        self._forget(now)
        if election_id in self._known or not is_sound(election_id, topic, action):
            return []
        self._known[election_id] = _Known(now.boot_s)
        effects: list[Effect] = []
        if self._speaks(now):
            times = 2 if self._members.ours < FEW_OF_OURS else 1
            effects += [PublishElect(election_id, topic, action, LOWEST_CLOCK)] * times
        effects.append(
            Enter(ElectionRequest(election_id, topic, action, Policy.AT_MOST_ONCE, asked_at=now.wall_s))
        )
        if self._is_unfenced():
            effects.append(Unfenced(election_id, self._members.classic, self._members.ours))
        return effects

    def _speaks(self, now: Instant) -> bool:
        if self._compat != "auto":
            return self._compat == "always"
        seen_s = self._classic_seen_s
        return bool(self._members.classic) or (seen_s is not None and now.boot_s - seen_s < CLASSIC_SEEN_S)

    def _is_unfenced(self) -> bool:
        classic, ours = self._members.classic, self._members.ours
        return classic > 0 and classic**2 >= classic + ours - 1

    def _forget(self, now: Instant) -> None:
        while self._known:
            oldest = next(iter(self._known))
            if len(self._known) < KNOWN_MAX and now.boot_s - self._known[oldest].since_s < KNOWN_S:
                return
            del self._known[oldest]
