"""The classic election, complete: every worker stands, every worker answers, the lowest leads.

Whoever gets the command stands as a candidate: a `worker-elect` stamped with its clock. Every
worker acks every candidate once. A candidate that has an ack from each live member decides: the
lowest (clock, name) it knows leads, and if that is itself, it runs the handler.

Why deciders agree while they see the same members: one sender's events arrive in the order it
sent them. A member stood before its first ack, then whoever has that ack has seen it stand; or it
acked somebody first, then hearing of that candidate moved its clock past it, and it is not the
lowest. Our acks also tell the lowest candidate the sender knows, for those who came late.

Where it stops being right: members differ between nodes while one joins or is lost, and a network
that splits gives each side a leader; a leader that dies after it was decided runs nothing, and a
silent member holds everyone up until the deadline ends the election as failed. The store's
elections (`election.py`) have none of these limits.
"""

from dataclasses import dataclass, field

from umbel.protocol.compat.election_v1_events import (
    AckHeard,
    Called,
    Candidate,
    ElectHeard,
    PublishAck,
    PublishElect,
    is_sound,
)
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick
from umbel.protocol.value import Value

DECIDE_S = 10.0
REMEMBER_S = 60.0
RECORDS_MAX = 10_000
ACTION_BYTES_MAX = 64 * 2**20
NODES_MAX = 4_096  # of one election: who stood, and who acked


class Membership(Value):
    """The names of the live members; this node always is one."""

    nodes: frozenset[str]


class Stop(Value):
    """The worker stops: it stands no more and decides nothing."""


class Decided(Value):
    """This node knows the leader. `mine`: it leads, and is to run the topic's handler on the action."""

    election_id: str
    topic: str
    action: bytes
    leader: Candidate
    mine: bool


class Failed(Value):
    """This node stood and could not decide."""

    election_id: str
    topic: str
    reason: str


class Shed(Value):
    """The table is full: this node does not stand."""

    election_id: str


Event = Called | ElectHeard | AckHeard | Membership | Stop
Effect = PublishElect | PublishAck | Decided | Failed | Shed


@dataclass(slots=True)
class _Round:
    """One election. `command` is kept while this node stands and has not decided."""

    ends_s: float = 0.0
    command: Called | None = None
    stood: bool = False
    lowest: Candidate | None = None
    answered: set[Candidate] = field(default_factory=set)
    acks: set[str] = field(default_factory=set)


class ClassicElections:
    def __init__(self, node: str, pid: int) -> None:
        self._node = node
        self._name = f"{node}.{pid}"
        self._members = frozenset({node})
        self._rounds: dict[str, _Round] = {}
        self._next_end_s: float | None = None  # no round ends before; one may end later
        self._action_bytes = 0
        self._stopping = False

    @property
    def deadline(self) -> float | None:
        return self._next_end_s

    def __len__(self) -> int:
        return len(self._rounds)

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        match event:
            case Called():
                return self._stand(event, now)
            case ElectHeard():
                return self._answer(event, now)
            case AckHeard():
                return self._note_ack(event, now)
            case Membership(nodes):
                self._members = nodes | {self._node}
                return [effect for name in list(self._rounds) for effect in self._decide(name, now)]
            case Stop():
                self._stopping, self._next_end_s = True, None
                self._rounds.clear()
                return []
            case Tick():
                return self._expire(now)

    def _stand(self, command: Called, now: Instant) -> list[Effect]:
        if self._stopping or not is_sound(command.election_id, command.topic, command.action):
            return []
        round_ = self._round(command.election_id, now)
        if round_ is None or self._action_bytes + len(command.action) > ACTION_BYTES_MAX:
            return [Shed(command.election_id)]
        if round_.stood:
            return []
        round_.stood, round_.command = True, command
        self._end_at(round_, now.boot_s + DECIDE_S)
        self._action_bytes += len(command.action)
        return [PublishElect(command.election_id, command.topic, command.action)]

    def _answer(self, heard: ElectHeard, now: Instant) -> list[Effect]:
        if self._stopping or not is_sound(heard.election_id, heard.topic, heard.action):
            return []
        round_ = self._round(heard.election_id, now)
        if round_ is None or heard.candidate in round_.answered or len(round_.answered) >= NODES_MAX:
            return []
        round_.answered.add(heard.candidate)
        round_.lowest = _lower(round_.lowest, heard.candidate)
        return [PublishAck(heard.election_id, round_.lowest)]

    def _note_ack(self, heard: AckHeard, now: Instant) -> list[Effect]:
        round_ = self._rounds.get(heard.election_id)
        if round_ is None or len(round_.acks) >= NODES_MAX:
            return []
        round_.acks.add(heard.node)
        round_.lowest = _lower(round_.lowest, heard.lowest)
        return self._decide(heard.election_id, now)

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
        """Keep it to answer those who stand later; it is decided here."""
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
            over = next((name for name, one in self._rounds.items() if one.command is None), None)
            if over is None:
                return None
            del self._rounds[over]
        round_ = self._rounds[election_id] = _Round()
        self._end_at(round_, now.boot_s + REMEMBER_S)
        return round_


def _lower(known: Candidate | None, heard: Candidate | None) -> Candidate | None:
    if known is None or heard is None:
        return known or heard
    return min(known, heard)
