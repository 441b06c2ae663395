"""Mixed elections: messages that make workers of the classic rules give way to workers that elect by the
store.

An election of the classic form reaches every worker: Celery's, Umbel's with `election_protocol = v1`, and
Umbel's that elect by the store. Classic workers elect the lowest (clock, name) among the candidates that they
saw. So each worker of the store's rules enters with the lowest possible clock, 1, and then asks the store as
usual, under AT_MOST_ONCE. A classic worker that saw such a candidate does not act. Workers of the store's
rules never count acks.

A classic worker waits for the acks of all members. So a worker of the store's rules acks once if there is a
classic candidate, and always after its own candidacy: a node that counts the ack knows the candidate. A
worker that cannot act, because it has no handler for the topic or is stopping, does not become a candidate,
and only acks.

A Celery worker that counts acks while it knows only one candidate crashes. So if Celery workers are present,
a worker that cannot act becomes a candidate too, with the highest possible clock. And if there are fewer than
three Umbel workers, each enters twice.

Limits: a Celery worker decides when it has N-1 acks from any senders, and V of them exchange V² acks. If V²
>= N-1, it may decide before it receives our candidacy, and run the election too. That is reported as Unfenced
and cannot be prevented from outside. Umbel's classic workers count acks by sender. A classic worker that does
not know a worker of the store's rules as a member does not wait for it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from umbel.protocol.clock import CLOCK_MAX
from umbel.protocol.election.classic import (
    CLASSIC_VERSION,
    AckReceived,
    ClassicRequest,
    ElectReceived,
    PublishAck,
    PublishElect,
    is_sound,
)
from umbel.protocol.leadership.coordination import ElectionRequest, Instant, Policy
from umbel.protocol.machine import Value

LOWEST_CLOCK, HIGHEST_CLOCK = 1, CLOCK_MAX
FEW_OF_OURS = 3
CLASSIC_SEEN_S = 120.0
KNOWN_MAX = 10_000
KNOWN_S = 120.0


class WorkerCounts(Value):
    """How many live workers elect by Celery's rules, and how many by the store, including this worker."""

    classic: int
    ours: int


class StopMixed(Value):
    """The worker is stopping; it ignores later elections."""


class Enter(Value):
    """Take part by the store's rules, in `election.py`."""

    request: ElectionRequest


class Unfenced(Value):
    """A Celery worker may run this election in addition to an Umbel worker."""

    election_id: str
    classic: int
    ours: int


Event = ClassicRequest | ElectReceived | AckReceived | WorkerCounts | StopMixed
Effect = PublishElect | PublishAck | Enter | Unfenced


@dataclass(slots=True)
class _Known:
    since_s: float
    clock: int  # of this node's candidacy, by the topics it could handle when it entered
    stood: bool = False
    acked: bool = False


class MixedElections:
    """This node's part in classic elections while it elects by the store.

    `compat`: "auto" publishes to classic workers while any is present or was present recently; the others
    mean always and never. `topics`: those that this node has a handler for.
    """

    def __init__(self, node: str, topics: Collection[str], compat: str = "auto") -> None:
        assert compat in {"auto", "always", "never"}
        self._node = node
        self._topics = frozenset(topics)
        self._compat = compat
        self._members = WorkerCounts(classic=0, ours=1)
        self._classic_seen_s: float | None = None
        self._known: dict[str, _Known] = {}  # oldest first

    @property
    def deadline(self) -> float | None:
        """Return None: no decision here waits for time."""
        return None

    def step(self, event: Event, now: Instant) -> list[Effect]:
        """Process one event; return what to publish, enter or report."""
        match event:
            case WorkerCounts():
                self._members = event
                if event.classic:
                    self._classic_seen_s = now.boot_s
                return []
            case StopMixed():
                self._topics = frozenset()
                return []
            case ClassicRequest(election_id, topic, action):
                return self._enter(election_id, topic, action, now)
            case ElectReceived():
                return self._elect_heard(event, now)
            case AckReceived():
                return []  # the store decides, so acks are not counted

    def _elect_heard(self, elect: ElectReceived, now: Instant) -> list[Effect]:
        if elect.version != CLASSIC_VERSION or elect.node == self._node:
            return []
        self._classic_seen_s = now.boot_s
        effects = self._enter(elect.election_id, elect.topic, elect.action, now)
        known = self._known.get(elect.election_id)
        if known is None or known.acked or not self._speaks(now):
            return effects
        if not known.stood:  # this node entered before it knew of a classic worker
            effects += self._stand(known, elect.election_id, elect.topic, elect.action)
        known.acked = True
        return [*effects, PublishAck(elect.election_id)]

    def _stand(self, known: _Known, election_id: str, topic: str, action: bytes) -> list[Effect]:
        known.stood = True
        if known.clock == HIGHEST_CLOCK and not self._members.classic and self._compat != "always":
            return []
        times = 2 if self._members.ours < FEW_OF_OURS else 1
        return [PublishElect(election_id, topic, action, known.clock)] * times

    def _enter(self, election_id: str, topic: str, action: bytes, now: Instant) -> list[Effect]:
        self._forget(now)
        if election_id in self._known or not is_sound(election_id, topic, action):
            return []
        clock = LOWEST_CLOCK if topic in self._topics else HIGHEST_CLOCK
        known = self._known[election_id] = _Known(now.boot_s, clock)
        effects = self._stand(known, election_id, topic, action) if self._speaks(now) else []
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
