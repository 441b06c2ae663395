"""Cluster: the nodes, the network, the store and the clients of one round, and what befalls them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from umbel.protocol.coordination import ElectionRecord, ElectionRequest, election_key
from umbel.protocol.election import Elections, ElectionSettings
from umbel.protocol.election_events import Asked, HolderLost
from umbel.protocol.lease import Lease, LeaseSettings
from umbel.sim.checkers import Checkers
from umbel.sim.network import Network
from umbel.sim.node import Node
from umbel.sim.plan import Ask, Fault, Plan
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


class Cluster:
    def __init__(self, plan: Plan, variant: Variant = REAL) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        self.network = Network(self.world)
        self.asks = {ask.election_id: ask for ask in plan.asks}
        self.checkers = Checkers(self.world, self.asks, nodes=plan.nodes)
        self.store = variant.store(self.world, self.network, self.checkers)
        self.counts: Counter[str] = Counter()
        self.armed: dict[str, list[Fault]] = {}
        self.stalled: dict[str, bool] = {}
        self._variant = variant
        self._settings = ElectionSettings(namespace=NAMESPACE, records_max=plan.records_max)
        self._pids = 100
        self._clocks = [self._clock(index) for index in range(plan.nodes)]
        self.nodes = [self._node(index) for index in range(plan.nodes)]
        self._strict = all(fault.kind.startswith("crash") for fault in plan.faults)
        for ask in plan.asks:
            self.world.at(ask.at_s, self._ask, ask)
        for node in self.nodes:
            self.world.at(self.world.random.uniform(0.0, 0.4), node.sweeper.start)

    def make_elections(self, node: Node) -> Elections:
        topics = ALL_TOPICS if node.index % RARE_EVERY == 0 else TOPICS
        machine = self._variant.elections(
            node.name, node.holder, topics, self._settings, self.world.random.uniform
        )
        machine.nodes = self.plan.nodes
        return machine

    def make_lease(self, name: str, node: Node) -> Lease:
        return self._variant.lease(name, node.holder, LeaseSettings(), self.world.random.uniform)

    def sweepers(self) -> list[Sweeper]:
        return [node.sweeper for node in self.nodes]

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def stepped(self, node: Node) -> None:
        self.checkers.sized(node.holder, len(node.elections), self.plan.records_max)

    # ---- what befalls nodes ------------------------------------------------------------------------

    def befalls(self, point: str, node: Node) -> bool:
        """Whether a fault waits at this point of the protocol; then it happens now."""
        waiting = self.armed.get(point)
        if not waiting:
            return False
        fault = waiting[-1]
        waiting[-1] = replace(fault, amount=fault.amount - 1)
        if waiting[-1].amount < 1:
            waiting.pop()
            if not waiting:
                del self.armed[point]
        self.count(point)
        if point == "stall":
            self.stalled[node.holder] = True
            node.pause(fault.lasts_s)
        else:
            self.crash(node.index)
            self.world.after(fault.lasts_s, self.restart, node.index)
        return True

    def crash(self, index: int) -> None:
        node = self.nodes[index]
        if node.up:
            node.crash()
            for other in self.nodes:
                if other is not node and other.up:
                    delay_s = self.world.random.uniform(*NOTICED_S)
                    self.world.after(delay_s, other.hear, HolderLost(node.holder))

    def restart(self, index: int) -> None:
        if not self.nodes[index].up:
            self.nodes[index] = self._node(index)
            self.nodes[index].sweeper.start()

    def heal(self) -> None:
        """Fair weather from now on: all nodes up and awake, nothing waiting to befall them."""
        self.armed.clear()
        for index in range(len(self.nodes)):
            self.restart(index)
            self.nodes[index].resume()

    def clock(self, index: int) -> NodeClock:
        return self._clocks[index]

    def _node(self, index: int) -> Node:
        self._pids += 1
        return Node(self, index, self._pids, self._clocks[index])

    def _clock(self, index: int) -> NodeClock:
        own = {fault.kind: fault.amount for fault in self.plan.faults if fault.node == index}
        return NodeClock(
            rate=own.get("drift", 1.0),
            boot_s=self.world.random.uniform(10.0, 10_000_000.0),
            skew_s=own.get("skew", 0.0),
        )

    # ---- clients -----------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        asked_at = EPOCH_S + self.world.now + ask.skew_s
        request = ElectionRequest(ask.election_id, ask.topic, b"{}", ask.policy, asked_at, ask.expires_s)
        self._open(ask, request, 1, [])
        if ask.again_s is not None:
            self.world.after(ask.again_s, self._open, ask, request, 1, [])

    def _open(self, ask: Ask, request: ElectionRequest, tries: int, opened: list[bool]) -> None:
        """Ask the store until it answers, as a client does that was told to wait."""
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
