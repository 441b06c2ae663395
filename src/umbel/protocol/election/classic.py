"""The classic election, Celery's (v1): every worker is a candidate and acknowledges all, and the lowest clock
leads.

The file begins with its messages, as Celery's workers send and read them; then follows the complete
algorithm, which is used with `election_protocol = v1`. `mixed.py` is for workers that elect by the store
alongside Celery's workers.
"""

from dataclasses import dataclass, field

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick, Value

# ---- election v1 events ----------------------------------------------------------------------------
#
# Names are names of nodes (`name@host`). Candidates are compared by clock and, if clocks are equal, by the
# text `name@host.pid`.

CLASSIC_VERSION = 1  # the `cver` of Umbel's candidates; Celery's candidates have none
NAME_BYTES_MAX = 128
ACTION_BYTES_MAX = 1 << 20
CLOCK_MAX = 2**53 - 1


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A candidate of a classic election; the lowest candidate leads."""

    clock: int
    name: str  # name@host.pid


# ---- events ----------------------------------------------------------------------------------------


class ClassicRequest(Value):
    """The control command `election` arrived in its classic form: only id, topic and action."""

    election_id: str
    topic: str
    action: bytes  # JSON


class ElectReceived(Value):
    """A `worker-elect` event, perhaps this node's. `version` is its `cver`, or 1 if it has none."""

    election_id: str
    topic: str
    action: bytes
    node: str
    pid: int
    clock: int
    version: int

    @property
    def candidate(self) -> Candidate:
        """Return the candidate in comparable form."""
        return Candidate(self.clock, f"{self.node}.{self.pid}")


class AckReceived(Value):
    """A `worker-elect-ack` event, perhaps this node's. Umbel's acks include the lowest candidate that the
    sender knows.
    """

    election_id: str
    node: str
    lowest: Candidate | None = None


# ---- effects ---------------------------------------------------------------------------------------


class PublishElect(Value):
    """Broadcast `worker-elect`. If `clock` is None, it is stamped like any event."""

    election_id: str
    topic: str
    action: bytes
    clock: int | None = None


class PublishAck(Value):
    """Broadcast `worker-elect-ack`."""

    election_id: str
    lowest: Candidate | None = None


def is_sound(election_id: str, topic: str, action: bytes) -> bool:
    """Return whether an election's names and action are within the limits of a table."""
    try:
        sizes = len(election_id.encode()), len(topic.encode())
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return all(0 < size <= NAME_BYTES_MAX for size in sizes) and len(action) <= ACTION_BYTES_MAX


# ---- the classic election, complete ----------------------------------------------------------------
#
# A node that receives the command becomes a candidate: it sends a `worker-elect` stamped with its clock.
# Every worker acks every candidate once. A candidate that has an ack from each live member decides: the
# lowest (clock, name) that it knows leads. If it is the lowest itself, it runs the handler.
#
# Why all nodes decide alike while they see the same members: events of one sender arrive in the order in
# which it sent them. If a member was a candidate before its first ack, each node that has the ack knows the
# candidate. If it acked another candidate first, receiving that candidacy advanced its clock past it, so the
# member is not the lowest. Umbel's acks also include the lowest candidate that the sender knows, for nodes
# that joined late.
#
# A node that elects by the store (`mixed.py`) has one candidacy, with the lowest or the highest possible
# clock. The candidacy counts as its ack, since a node that receives no events cannot ack. It is not
# acknowledged: its clock has no meaning, so an ack caused by it could precede a lower candidacy of the ack's
# sender.
#
# Limits: the view of members differs between nodes while a node joins or is lost, and a partition elects a
# leader on each side. A leader that dies after the decision runs nothing. A silent member delays all nodes
# until the deadline ends the election as failed. The store's elections (`election.py`) have none of these
# limits.

DECIDE_S = 10.0
REMEMBER_S = 60.0
RECORDS_MAX = 10_000
ALL_ACTIONS_BYTES_MAX = 64 * 2**20
NODES_MAX = 4_096  # per election: candidates, and nodes that acknowledged


class LiveNodes(Value):
    """The names of the live members, including this node."""

    nodes: frozenset[str]


class StopClassic(Value):
    """The worker stops: it is no longer a candidate and decides nothing."""


class Decided(Value):
    """This node knows the leader. `mine`: it leads, and must run the topic's handler on the action."""

    election_id: str
    topic: str
    action: bytes
    leader: Candidate
    mine: bool


class Failed(Value):
    """This node was a candidate and could not decide."""

    election_id: str
    topic: str
    reason: str


class Shed(Value):
    """The table is full, so this node does not become a candidate."""

    election_id: str


Event = ClassicRequest | ElectReceived | AckReceived | LiveNodes | StopClassic
Effect = PublishElect | PublishAck | Decided | Failed | Shed


@dataclass(slots=True)
class _Round:
    """One election. `command` is set while this node is a candidate and has not decided."""

    ends_s: float = 0.0
    command: ClassicRequest | None = None
    stood: bool = False
    lowest: Candidate | None = None
    answered: set[Candidate] = field(default_factory=set)
    acks: set[str] = field(default_factory=set)


class ClassicElections:
    """One node's part in the classic elections; at most RECORDS_MAX are open at a time."""

    def __init__(self, node: str, pid: int) -> None:
        self._node = node
        self._name = f"{node}.{pid}"
        self._members = frozenset({node})
        self._rounds: dict[str, _Round] = {}
        self._next_end_s: float | None = None  # no election ends earlier; all may end later
        self._action_bytes = 0
        self._stopping = False

    @property
    def deadline(self) -> float | None:
        """Return when the next election ends undecided or is forgotten; None for never."""
        return self._next_end_s

    def __len__(self) -> int:
        return len(self._rounds)

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        """Process one event; return the messages to publish and the decisions reached."""
        match event:
            case ClassicRequest():
                return self._stand(event, now)
            case ElectReceived():
                return self._answer(event, now)
            case AckReceived():
                return self._note_ack(event, now)
            case LiveNodes(nodes):
                self._members = nodes | {self._node}
                return [effect for name in list(self._rounds) for effect in self._decide(name, now)]
            case StopClassic():
                self._stopping, self._next_end_s = True, None
                self._rounds.clear()
                return []
            case Tick():
                return self._expire(now)

    def _stand(self, command: ClassicRequest, now: Instant) -> list[Effect]:
        if self._stopping or not is_sound(command.election_id, command.topic, command.action):
            return []
        round_ = self._round(command.election_id, now)
        if round_ is None or self._action_bytes + len(command.action) > ALL_ACTIONS_BYTES_MAX:
            return [Shed(command.election_id)]
        if round_.stood:
            return []
        round_.stood, round_.command = True, command
        self._end_at(round_, now.boot_s + DECIDE_S)
        self._action_bytes += len(command.action)
        return [PublishElect(command.election_id, command.topic, command.action)]

    def _answer(self, elect: ElectReceived, now: Instant) -> list[Effect]:
        if self._stopping or not is_sound(elect.election_id, elect.topic, elect.action):
            return []
        round_ = self._round(elect.election_id, now)
        if round_ is None or elect.candidate in round_.answered or len(round_.answered) >= NODES_MAX:
            return []
        round_.answered.add(elect.candidate)
        round_.lowest = _lower(round_.lowest, elect.candidate)
        if elect.version == CLASSIC_VERSION:
            return [PublishAck(elect.election_id, round_.lowest)]
        round_.acks.add(elect.node)
        return self._decide(elect.election_id, now)

    def _note_ack(self, ack: AckReceived, now: Instant) -> list[Effect]:
        if self._stopping or not is_sound(ack.election_id, ack.election_id, b""):
            return []
        round_ = self._round(
            ack.election_id, now
        )  # an ack may arrive before the command and before every candidate
        if round_ is None or len(round_.acks) >= NODES_MAX:
            return []
        round_.acks.add(ack.node)
        round_.lowest = _lower(round_.lowest, ack.lowest)
        return self._decide(ack.election_id, now)

    def _decide(self, election_id: str, now: Instant) -> list[Effect]:
        round_ = self._rounds[election_id]
        command = round_.command
        if command is None or round_.lowest is None or not self._members <= round_.acks:
            return []
        self._conclude(round_, now)
        mine = round_.lowest.name == self._name
        return [Decided(election_id, command.topic, command.action, round_.lowest, mine)]

    def _expire(self, now: Instant) -> list[Effect]:
        if self._next_end_s is None or now.boot_s < self._next_end_s:
            return []
        effects: list[Effect] = []
        for election_id, round_ in list(self._rounds.items()):
            if now.boot_s < round_.ends_s:
                continue
            if round_.command is None:
                del self._rounds[election_id]
                continue
            silent = ", ".join(sorted(self._members - round_.acks)[:5])
            topic = round_.command.topic
            self._conclude(round_, now)
            effects.append(Failed(election_id, topic, f"no answer within {DECIDE_S:.0f} s from {silent}"))
        self._next_end_s = min((round_.ends_s for round_ in self._rounds.values()), default=None)
        return effects

    def _conclude(self, round_: _Round, now: Instant) -> None:
        """Keep a decided election, so that later candidates get an ack."""
        if round_.command is not None:
            self._action_bytes -= len(round_.command.action)
        round_.command = None
        self._end_at(round_, now.boot_s + REMEMBER_S)

    def _end_at(self, round_: _Round, ends_s: float) -> None:
        round_.ends_s = ends_s
        if self._next_end_s is None or ends_s < self._next_end_s:
            self._next_end_s = ends_s

    def _round(self, election_id: str, now: Instant) -> _Round | None:
        known = self._rounds.get(election_id)
        if known is not None:
            return known
        if len(self._rounds) >= RECORDS_MAX:
            over = next(
                (name for name, other in self._rounds.items() if other.command is None),
                None,
            )
            if over is None:
                return None
            del self._rounds[over]
        round_ = self._rounds[election_id] = _Round()
        self._end_at(round_, now.boot_s + REMEMBER_S)
        return round_


def _lower(known: Candidate | None, received: Candidate | None) -> Candidate | None:
    if known is None or received is None:
        return known or received
    return min(known, received)
