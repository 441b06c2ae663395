"""Celery's election (v1) for all nodes, to compare its guarantees with those of Umbel's elections.

A small model of its rules as seen from outside (`wire-protocol.md` 4.5 of the specification). A node that
receives the command sends `worker-elect` with its clock. Every node answers each `worker-elect`, including
its own, with an ack. A node counts acks for an id it entered, from any sender. It decides when it has as many
acks as there are other nodes that it believes alive: the lowest (clock, name) of the elects it has seen
leads, and a node that leads acts. A node that decides over a single elect crashes.

There is no deadline and no retry. So an election ends with one run, with none, or with several, and the
client cannot know which.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from umbel.sim.plan import ASKING_S, STORM_S, Crowd, Plan, Process, make_plan, schedule_faults
from umbel.sim.world import NEAR_S, Listener, Network, NodeClock, World

BEAT_S = 2.0
ALIVE_S = 4.0  # twice the interval of heartbeats
ENDING_S = 20.0  # v1 has no deadline; after this time without faults nothing more happens
BACK_S = 5.0  # time until a node that crashed by itself is restarted
ROUND_ELECTIONS = 50


@dataclass(frozen=True, slots=True)
class Command:
    """The command `election`."""

    election_id: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat message."""

    sender: str
    clock: int


@dataclass(frozen=True, slots=True)
class Elect:
    """The message of a candidate."""

    election_id: str
    sender: str
    clock: int


@dataclass(frozen=True, slots=True)
class Ack:
    """The acknowledgement of a candidate."""

    election_id: str
    sender: str
    clock: int


@dataclass(slots=True)
class V1Tally:
    """How many elections ended with none, one or several runs, and what they cost."""

    elections: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    died: int = 0
    publishes: int = 0
    deliveries: int = 0

    def add(self, other: "V1Tally") -> None:
        """Add the counts of another tally."""
        self.elections += other.elections
        self.runs.update(other.runs)
        self.died += other.died
        self.publishes += other.publishes
        self.deliveries += other.deliveries


class OrderedNetwork(Network):
    """Without faults all nodes receive messages in the broker's order, as v1 requires."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._last: dict[int, float] = {}

    def broadcast(self, sender: int, message: Any, listeners: Iterable[Listener]) -> None:
        """Send to the broker, which forwards the message."""
        self._world.after(self._world.random.uniform(*NEAR_S), self._pass_on, sender, message, listeners)

    def _pass_on(self, sender: int, message: Any, listeners: Iterable[Listener]) -> None:
        if not self.broadcasts.fair or self.broadcasts.cut_off:
            super().broadcast(sender, message, listeners)
            return
        self.sent += 1
        for listener in listeners:
            self.delivered += 1
            soonest = self._world.now + self._world.random.uniform(*NEAR_S)
            arrival = max(soonest, self._last.get(listener.index, 0.0))
            self._last[listener.index] = arrival
            self._world.at(arrival, listener.hear, message)


class V1Node(Process):
    """A process with Celery's rules."""

    def __init__(self, crowd: "V1Crowd", index: int, pid: int, clock: NodeClock) -> None:
        super().__init__(crowd.world, index, pid, clock)
        self._crowd = crowd
        self._clock = 0
        self._heard: dict[str, float] = {}
        self._elects: dict[str, list[tuple[int, str]]] = {}
        self._acks: dict[str, int] = {}

    def start(self) -> None:
        """Begin to send heartbeats."""
        self._beat()

    def stop(self) -> None:
        """Do nothing: the other nodes notice the end of its heartbeats."""

    def wake(self) -> None:
        """Do nothing: there is no unfinished work."""

    def woken(self) -> None:
        """Do nothing: its heartbeats continue."""

    def take(self, event: Any) -> None:
        """Handle a message by v1's rules."""
        match event:
            case Command(election_id):
                self._acks[election_id] = 0
                self._send(Elect(election_id, self.holder, self._forward()))
            case Elect(election_id, sender, clock):
                self._elects.setdefault(election_id, []).append((clock, sender))
                self._send(Ack(election_id, self.holder, self._forward()))
            case Ack(election_id):
                self._count(election_id)
            case Beat(sender, clock) if sender != self.holder:
                self._clock = max(self._clock, clock) + 1
                self._heard[sender] = self.world.now

    def _count(self, election_id: str) -> None:
        if election_id not in self._acks:
            return
        self._acks[election_id] += 1
        alive = sum(self.world.now - heard_at < ALIVE_S for heard_at in self._heard.values())
        if self._acks[election_id] < alive:
            return
        del self._acks[election_id]
        elects = self._elects.pop(election_id, [])
        if len(elects) < 2:
            self._crowd.died_by_itself(self)
        elif min(elects)[1] == self.holder:
            self._crowd.runs[election_id] += 1

    def _beat(self) -> None:
        if self.up:
            self.world.after(BEAT_S, self._beat)
            if not self.paused:
                self._send(Beat(self.holder, self._forward()))

    def _forward(self) -> int:
        self._clock += 1
        return self._clock

    def _send(self, message: Beat | Elect | Ack) -> None:
        self._crowd.beats += isinstance(message, Beat)
        self._crowd.network.broadcast(self.index, message, self._crowd.nodes)


class V1Crowd(Crowd[V1Node]):
    """The nodes of a v1 simulation. `beats` counts heartbeats, which are not a cost of elections."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.runs: Counter[str] = Counter()
        self.deaths = 0
        self.beats = 0
        self.network = OrderedNetwork(self.world)
        self.populate()
        for ask in plan.asks:
            # Only after all nodes have received heartbeats of one another: v1 counts the nodes it knows.
            self.world.at(ask.at_s + ALIVE_S, self._ask, ask.election_id)

    def make_node(self, index: int, pid: int, clock: NodeClock) -> V1Node:
        """Return a process with this place, process id and clock."""
        return V1Node(self, index, pid, clock)

    def died_by_itself(self, node: V1Node) -> None:
        """Crash a node that decided over a single candidate, and restart it later."""
        self.deaths += 1
        self.crash(node.index)
        self.world.after(BACK_S, self.restart, node.index)

    def died(self, node: V1Node) -> None:
        """Do nothing: the other nodes notice the silence."""

    def take_for_lost(self, index: int) -> None:
        """Do nothing: in v1 only silence makes a node lost."""

    def set_store_down(self, down: bool) -> None:
        """Do nothing: v1 has no store."""

    def empty_store(self) -> None:
        """Do nothing: v1 has no store."""

    def _ask(self, election_id: str) -> None:
        self.network.broadcast(-1, Command(election_id), self.nodes)


def run_v1(plan: Plan) -> V1Tally:
    """Run one plan under v1's rules."""
    crowd = V1Crowd(plan)
    if plan.faults:
        schedule_faults(crowd)
    crowd.world.run(max(STORM_S if plan.faults else 0.0, ASKING_S) + ENDING_S)
    names = {0: "none", 1: "one"}
    return V1Tally(
        elections=len(plan.asks),
        runs=Counter(names.get(crowd.runs[ask.election_id], "several") for ask in plan.asks),
        died=crowd.deaths,
        publishes=crowd.network.sent - crowd.beats,
        deliveries=crowd.network.delivered - crowd.beats * plan.nodes,
    )


def rounds_v1(nodes: int, elections: int, faults: frozenset[str], seed: str) -> Iterator[V1Tally]:
    """Yield the tallies of rounds until `elections` were requested."""
    number = 0
    while elections > 0:
        size = min(ROUND_ELECTIONS, elections)
        yield run_v1(make_plan(f"{seed}:{number}", nodes, size, faults))
        elections -= size
        number += 1
