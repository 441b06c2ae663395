"""Cluster: the workers, the store and the clients of one round of elections."""

from collections.abc import Callable
from dataclasses import dataclass

from umbel.protocol.election.election import Elections
from umbel.protocol.election.events import Asked, HolderLost
from umbel.protocol.election.table import ElectionSettings
from umbel.protocol.leadership.coordination import ElectionRecord, ElectionRequest, election_key
from umbel.protocol.leadership.lease import Lease, LeaseSettings
from umbel.sim.checkers import Checkers
from umbel.sim.crowd import Crowd, Process
from umbel.sim.network import Network
from umbel.sim.node import Node
from umbel.sim.plan import Ask, Plan
from umbel.sim.store import Store
from umbel.sim.sweeper import Sweeper
from umbel.sim.world import EPOCH_S, NodeClock, World

NAMESPACE = "celery"
TOPICS = frozenset({"task"})
ALL_TOPICS = frozenset({"task", "rare"})
RARE_EVERY = 3  # every third node has a handler for the topic `rare`
CLIENT = -1
CLIENT_WAITS_S = 1.0
CLIENT_TRIES_MAX = 60
NOTICED_S = (4.0, 20.0)  # how long until the others take a crashed node for lost

Uniform = Callable[[float, float], float]
MakeElections = Callable[[str, str, frozenset[str], ElectionSettings, Uniform], Elections]
MakeLease = Callable[[str, str, LeaseSettings, Uniform], Lease]
MakeStore = Callable[[World, Network, Checkers], Store]


@dataclass(frozen=True, slots=True)
class Variant:
    """What is put into the world: the real machines, or mutants of them."""

    elections: MakeElections = Elections
    lease: MakeLease = Lease
    store: MakeStore = Store


REAL = Variant()


class Cluster(Crowd[Node]):
    def __init__(self, plan: Plan, variant: Variant = REAL) -> None:
        super().__init__(plan)
        self.asks = {ask.election_id: ask for ask in plan.asks}
        self.checkers = Checkers(self.world, self.asks, nodes=plan.nodes)
        self.store = variant.store(self.world, self.network, self.checkers)
        self._variant = variant
        self._settings = ElectionSettings(namespace=NAMESPACE, records_max=plan.records_max)
        self._strict = all(fault.kind.startswith("crash") for fault in plan.faults)
        self.populate()
        for ask in plan.asks:
            self.world.at(ask.at_s, self._ask, ask)

    def make_node(self, index: int, pid: int, clock: NodeClock) -> Node:
        return Node(self, index, pid, clock)

    def make_elections(self, node: Node) -> Elections:
        topics = ALL_TOPICS if node.index % RARE_EVERY == 0 else TOPICS
        machine = self._variant.elections(
            node.name, node.holder, topics, self._settings, self.world.random.uniform
        )
        machine.nodes = self.plan.nodes
        return machine

    def make_lease(self, name: str, node: Process) -> Lease:
        return self._variant.lease(name, node.holder, LeaseSettings(), self.world.random.uniform)

    def sweepers(self) -> list[Sweeper]:
        return [node.sweeper for node in self.nodes]

    def stepped(self, node: Node) -> None:
        self.checkers.sized(node.holder, len(node.elections), self.plan.records_max)

    # ---- what befalls it ---------------------------------------------------------------------------

    def died(self, node: Node) -> None:
        for other in self.nodes:
            if other is not node and other.up:
                self.world.after(self.world.random.uniform(*NOTICED_S), other.hear, HolderLost(node.holder))

    def take_for_lost(self, index: int) -> None:
        for node in self.nodes:
            node.hear(HolderLost(self.nodes[index].holder))

    def set_store_down(self, down: bool) -> None:
        self.store.down = down

    def empty_store(self) -> None:
        self.store.forget_everything()

    # ---- clients -----------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        asked_at = EPOCH_S + self.world.now + ask.skew_s
        request = ElectionRequest(ask.election_id, ask.topic, b"{}", ask.policy, asked_at, ask.expires_s)
        self._open(ask, request, 1, [])
        if ask.again_s is not None:
            self.world.after(ask.again_s, self._open, ask, request, 1, [])

    def _open(self, ask: Ask, request: ElectionRequest, tries: int, opened: list[bool]) -> None:
        """Ask the store until it answers, as a client with a timeout does."""
        if opened:
            return
        key = election_key(NAMESPACE, ask.election_id)
        self.store.call(CLIENT, self.store.open, (key, request), self._opened, (ask, opened))
        if tries < CLIENT_TRIES_MAX:
            self.world.after(CLIENT_WAITS_S, self._open, ask, request, tries + 1, opened)

    def _opened(self, context: tuple[Ask, list[bool]], record: ElectionRecord) -> None:
        ask, opened = context
        if opened:
            return
        opened.append(True)
        if not ask.tells:
            return
        case = self.checkers.cases[ask.election_id]
        if self._strict and case.knowers is None:
            case.knowers = {node.holder for node in self.nodes if node.up and self._takes(node, ask)}
        self.network.broadcast(CLIENT, Asked(record.request), self.nodes)

    def _takes(self, node: Node, ask: Ask) -> bool:
        return ask.topic in (ALL_TOPICS if node.index % RARE_EVERY == 0 else TOPICS)
