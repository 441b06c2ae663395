"""The plan of a simulation as plain data, and the simulated processes.

A process dies without notice, or pauses while its inbox fills, and returns as another process with the same
name. `Crowd` manages the processes; its subclasses run the machines of a worker. `schedule_faults` starts and
ends each fault of a plan. `Alarm` gives a process its Tick when a deadline is due by the process's clock.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Generic, TypeVar

from umbel.errors import ConfigurationError
from umbel.protocol.election.table import RECORDS_MAX
from umbel.protocol.leadership.coordination import EXPIRES_S, Policy
from umbel.sim.world import Network, NodeClock, World

# ---- plan ------------------------------------------------------------------------------------------
#
# A round is one small world: some nodes, a few hundred elections, and faults at chosen times in its first
# minute. Then all faults end and everything must come to its end. A plan together with its seed decides
# everything that happens. It is plain data: it can be printed, replayed and made smaller (`rounds.py`).

STORM_S = 60.0  # faults happen during this time
ASKING_S = 45.0  # clients request elections during this time
DAY_S = 86_400.0
QUICK_S = 0.2  # the longest run of a handler that is not slow

FAULTS = {
    "crash": "a node dies at a random moment and comes back as a new process",
    "crash-after-grant": "a node dies when the store gave it the election",
    "crash-after-start": "a node dies when the store let it start, before it acts",
    "crash-in-handler": "a node dies while its handler runs",
    "crash-after-handler": "a node dies when its handler has ended, before it notices",
    "crash-before-done": "a node dies before it tells the store that it is done",
    "crash-in-renew": "a node dies when it should renew",
    "stop": "a node stops gracefully and comes back",
    "pause": "a node stands still for seconds, up to beyond its ttl",
    "stall": "a node stands still between a decision and its effects",
    "partition": "a node is cut off from broadcasts, from the store, or from both",
    "loss": "broadcasts are lost",
    "duplicate": "broadcasts come twice",
    "delay": "broadcasts come late and overtake one another",
    "store-loss": "calls of the store or their replies are lost",
    "store-duplicate": "calls of the store or their replies come twice",
    "store-delay": "calls of the store or their replies come late and overtake one another",
    "store-outage": "the store is down",
    "amnesia": "the store forgets everything",
    "slow-handlers": "handlers run longer than a ttl",
    "wall-jump": "a node's wall clock jumps, to up to a day before or behind",
    "skew": "wall clocks of nodes and clients differ by up to a day",
    "drift": "clocks run up to 9 % fast or slow",
    "false-lost": "a living node is taken for lost",
    "client-crash": "a client dies between opening an election and telling the workers",
    "client-repeat": "a client asks for the same election again",
    "flood": "more elections than the tables of the nodes hold",
}
WINDOWS = {"loss", "duplicate", "delay", "store-loss", "store-duplicate", "store-delay"}
POINTS = {kind for kind in FAULTS if kind.startswith("crash-")} | {"stall"}
# With only these faults nothing is lost: every election runs once and is done.
HARMLESS = {"duplicate", "client-repeat", "client-crash", "slow-handlers", "skew", "wall-jump", "drift"}
# With only these faults no call has to be repeated either.
THRIFTY = HARMLESS - {"client-crash", "slow-handlers"}
ON_CLIENTS = {"slow-handlers", "client-crash", "client-repeat", "flood"}


@dataclass(frozen=True, slots=True)
class Ask:
    """A client requests one election."""

    at_s: float
    election_id: str
    policy: Policy
    topic: str = "task"
    handler_s: float = 0.05
    succeeds: bool = True
    expires_s: float = EXPIRES_S
    tells: bool = True  # False: the client dies before it broadcasts the request
    again_s: float | None = None  # the time after which the client repeats the request
    skew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `node` is the affected node; at a named point it is the first node that gets there."""

    at_s: float
    kind: str
    node: int = 0
    lasts_s: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One round: its seed, nodes, elections and faults."""

    seed: str
    nodes: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    records_max: int = RECORDS_MAX

    @property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of fault in the plan, including those of clients."""
        return frozenset(
            {fault.kind for fault in self.faults}
            | {"slow-handlers" for ask in self.asks if ask.handler_s > QUICK_S}
            | {"client-crash" for ask in self.asks if not ask.tells}
            | {"client-repeat" for ask in self.asks if ask.again_s is not None}
            | ({"flood"} if self.records_max < len(self.asks) else set())
        )


def parse_faults(text: str) -> frozenset[str]:
    """Return the kinds for `none`, `all`, or names joined by commas; `x-` or `x*` means all that begin with
    it.
    """
    chosen: set[str] = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name == "none":
            continue
        family = {kind for kind in FAULTS if name == "all" or kind.startswith(name.rstrip("*"))}
        found = {name} if name in FAULTS else family if name == "all" or name[-1] in "*-" else set()
        if not found:
            raise ConfigurationError(
                f"unknown fault {name!r} in --faults; choose the faults to simulate from {', '.join(FAULTS)}"
            )
        chosen |= found
    return frozenset(chosen)


def make_plan(seed: str, nodes: int, elections: int, faults: Collection[str]) -> Plan:
    """Return the plan for a seed."""
    chance = Random(f"plan {seed}")
    flood = "flood" in faults and chance.random() < (1.0 if len(faults) <= 3 else 0.1)
    asks = tuple(
        sorted((_ask(chance, f"e{number}", nodes, faults) for number in range(elections)), key=_when)
    )
    return Plan(
        seed=seed,
        nodes=nodes,
        asks=asks,
        faults=tuple(sorted(_faults(chance, nodes, faults), key=_when)),
        records_max=max(4, elections // 10) if flood else RECORDS_MAX,
    )


def _when(item: Ask | Fault) -> float:
    return item.at_s


def _ask(chance: Random, election_id: str, nodes: int, faults: Collection[str]) -> Ask:
    slow = "slow-handlers" in faults and chance.random() < 0.1
    return Ask(
        at_s=chance.uniform(0.5, ASKING_S),
        election_id=election_id,
        policy=Policy.AT_MOST_ONCE if chance.random() < 0.5 else Policy.AT_LEAST_ONCE,
        topic="rare" if nodes > 1 and chance.random() < 0.1 else "task",
        handler_s=chance.uniform(4.0, 25.0) if slow else chance.uniform(0.001, QUICK_S),
        succeeds=chance.random() < 0.9,
        tells=not ("client-crash" in faults and chance.random() < 0.05),
        again_s=chance.uniform(0.1, 15.0) if "client-repeat" in faults and chance.random() < 0.05 else None,
        skew_s=_skew(chance) if "skew" in faults else 0.0,
    )


def _faults(chance: Random, nodes: int, kinds: Collection[str]) -> list[Fault]:
    scripted = [kind for kind in FAULTS if kind in kinds and kind not in ON_CLIENTS]
    made: list[Fault] = []
    for kind in scripted:
        if kind in ("skew", "drift"):
            if chance.random() < 0.5:
                amount = _skew if kind == "skew" else _rate
                made += [Fault(0.0, kind, node, 0.0, amount(chance)) for node in range(nodes)]
            continue
        made += [_fault(chance, kind, nodes) for _ in range(_times(chance, kind, alone=len(scripted) <= 3))]
    return made


def _times(chance: Random, kind: str, *, alone: bool) -> int:
    """Return how often a kind of fault occurs: a round has some kinds, often several, rarely all."""
    if alone:
        return chance.randint(1, 4)
    if kind == "amnesia":  # it ends most running elections, which hides the effects of other faults
        return chance.choice((0, 0, 0, 0, 1))
    return chance.choice((0, 0, 0, 1, 1, 2, 3))


def _fault(chance: Random, kind: str, nodes: int) -> Fault:
    at_s, node = chance.uniform(1.0, STORM_S * 0.8), chance.randrange(nodes)
    match kind:
        case "amnesia":
            return Fault(at_s, kind)
        case "wall-jump":
            return Fault(at_s, kind, node, 0.0, _skew(chance))
        case "pause" | "stall":
            return Fault(at_s, kind, node, chance.choice((3.0, 8.0, 9.5, 11.0, 16.0, 25.0)))
        case "loss" | "store-loss":
            return Fault(at_s, kind, node, chance.uniform(1.0, 15.0), chance.choice((0.05, 0.3, 0.7, 1.0)))
        case kind if kind in WINDOWS:
            return Fault(at_s, kind, node, chance.uniform(1.0, 20.0), chance.choice((0.1, 0.5, 1.0)))
        case kind if kind in POINTS:
            # `amount` is how many nodes it affects.
            return Fault(at_s, kind, node, chance.uniform(0.1, 20.0), float(chance.choice((1, 1, 2, 6))))
        case _:
            return Fault(at_s, kind, node, chance.uniform(0.1, 20.0), chance.random())


def _skew(chance: Random) -> float:
    return chance.choice((0.0, chance.uniform(-3.0, 3.0), chance.uniform(-DAY_S, DAY_S)))


def _rate(chance: Random) -> float:
    return chance.uniform(0.92, 1.09)


# ---- crowd -----------------------------------------------------------------------------------------


class Process(ABC):
    """One process. `index` is its place in the crowd, which its successor takes over."""

    def __init__(self, world: World, index: int, pid: int, clock: NodeClock) -> None:
        self.index = index
        self.up = True
        self.paused = False
        self.clock = clock
        self.name = f"w{index}@sim"
        self.holder = f"{self.name}.{pid}.{int(clock.read(world.now).wall_s * 1e6)}"
        self.world = world
        self._inbox: list[Any] = []

    @abstractmethod
    def start(self) -> None:
        """Begin to work."""

    @abstractmethod
    def stop(self) -> None:
        """Begin a graceful shutdown."""

    @abstractmethod
    def take(self, event: Any) -> None:
        """Handle an event that arrives while the process runs."""

    @abstractmethod
    def wake(self) -> None:
        """Continue after a pause: unfinished work first, then the inbox."""

    @abstractmethod
    def woken(self) -> None:
        """Continue after the messages that arrived during a pause have been handled."""

    def hear(self, event: Any) -> None:
        """Receive an event: handle it, queue it during a pause, or drop it if the process is dead."""
        if not self.up:
            return
        if self.paused:
            self._inbox.append(event)
        else:
            self.take(event)

    def crash(self) -> None:
        """Die at once."""
        self.up = False

    def pause(self, lasts_s: float) -> None:
        """Pause for this long."""
        if self.up and not self.paused:
            self.paused = True
            self.world.after(lasts_s, self.resume)

    def resume(self) -> None:
        """End a pause, if there is one."""
        if not (self.up and self.paused):
            return
        self.paused = False
        self.wake()
        inbox, self._inbox = self._inbox, []
        for position, event in enumerate(inbox):
            if self.paused or not self.up:  # it crashed or paused again while it was catching up
                self._inbox = inbox[position:] + self._inbox
                return
            self.take(event)
        self.woken()


ProcessT = TypeVar("ProcessT", bound=Process)


class Crowd(ABC, Generic[ProcessT]):
    """The processes of one simulation, their world and network; subclasses define what the processes run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        self.network = Network(self.world)
        self.counts: Counter[str] = Counter()
        self.armed: dict[str, list[Fault]] = {}
        self.stalled: dict[str, bool] = {}
        self._pids = 100
        self._clocks = [self._clock(index) for index in range(plan.nodes)]
        self.nodes: list[ProcessT] = []

    @abstractmethod
    def make_node(self, index: int, pid: int, clock: NodeClock) -> ProcessT:
        """Return a process with this place, process id and clock."""

    def populate(self) -> None:
        """Create the nodes, and start them at about the same time."""
        for index in range(self.plan.nodes):
            self.nodes.append(self._node(index))
            self.world.at(self.world.random.uniform(0.0, 0.4), self.nodes[index].start)

    def count(self, what: str) -> None:
        """Count an occurrence for the tally."""
        self.counts[what] += 1

    # ---- faults ------------------------------------------------------------------------------------

    def befalls(self, point: str, node: Process) -> bool:
        """Return whether a fault is armed at this point of the protocol; if so, it happens now."""
        waiting = self.armed.get(point)
        if not waiting:
            return False
        fault = waiting.pop()
        if fault.amount > 1:
            waiting.append(replace(fault, amount=fault.amount - 1))
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
        """Crash the node at this place."""
        if self.nodes[index].up:
            self.nodes[index].crash()
            self.died(self.nodes[index])

    @abstractmethod
    def died(self, node: ProcessT) -> None:
        """React to the death of a node; the other nodes do not know of it yet."""

    def restart(self, index: int) -> None:
        """Start a new process at the place of a dead one."""
        if not self.nodes[index].up:
            self.nodes[index] = self._node(index)
            self.nodes[index].start()

    @abstractmethod
    def take_for_lost(self, index: int) -> None:
        """Make the other nodes believe that a living node is lost."""

    @abstractmethod
    def set_store_down(self, down: bool) -> None:
        """Make the store unreachable, or reachable again."""

    @abstractmethod
    def empty_store(self) -> None:
        """Let the store lose all data."""

    def set_skew(self, index: int, skew_s: float) -> None:
        """Set a node's wall clock this far off."""
        self._clocks[index].set_skew(skew_s)

    def heal(self) -> None:
        """End all faults: normal network, all nodes up and running, no fault armed."""
        self.armed.clear()
        self.set_store_down(False)
        self.network.clear_up()
        for index in range(len(self.nodes)):
            self.restart(index)
            self.nodes[index].resume()

    def _node(self, index: int) -> ProcessT:
        self._pids += 1
        return self.make_node(index, self._pids, self._clocks[index])

    def _clock(self, index: int) -> NodeClock:
        own = {fault.kind: fault.amount for fault in self.plan.faults if fault.node == index}
        return NodeClock(
            rate=own.get("drift", 1.0),
            boot_s=self.world.random.uniform(10.0, 10_000_000.0),
            skew_s=own.get("skew", 0.0),
        )


# ---- alarm -----------------------------------------------------------------------------------------

SOON_S = 1e-6  # added so that rounding never makes a tick early
NEVER = float("inf")


class Alarm:
    """Fires once; its owner sets it again. It does not fire for a node that is down or paused."""

    def __init__(self, node: Process, ring: Callable[[], None]) -> None:
        self._node = node
        self._ring = ring
        self._due_at = NEVER  # the newest entry in the world's heap; older entries are ignored

    def set(self, deadline: float | None) -> None:
        """Fire at this deadline of the node's clock, unless an earlier one is set."""
        node = self._node
        if deadline is None or not node.up or node.paused:
            return
        when = max(node.clock.when(deadline), node.world.now) + SOON_S
        if when < self._due_at:
            self._due_at = when
            node.world.at(when, self._due, when)

    def set_anew(self, deadline: float | None) -> None:
        """Set the alarm after a pause of the node; earlier settings no longer count."""
        self._due_at = NEVER
        self.set(deadline)

    def _due(self, when: float) -> None:
        if when == self._due_at:
            self._due_at = NEVER
            if self._node.up and not self._node.paused:
                self._ring()


# ---- faults ----------------------------------------------------------------------------------------

AnyCrowd = Crowd[Any]
STOPPING_S = 3.0  # how long the handlers of a node continue that stops gracefully


def schedule_faults(crowd: AnyCrowd) -> None:
    """Schedule the faults of the plan, and the end of all of them."""
    for fault in crowd.plan.faults:
        if fault.kind not in ("skew", "drift"):  # these apply from the beginning
            crowd.world.at(fault.at_s, _begin, crowd, fault)
    crowd.world.at(STORM_S, crowd.heal)


def _begin(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.count(f"fault {fault.kind}")
    crowd.world.trace.note(f"{crowd.world.now:.6f} fault {fault.kind} {fault.node}")
    if fault.kind in POINTS:
        crowd.armed.setdefault(fault.kind, []).append(fault)
    elif fault.kind in WINDOWS:
        _set_weather(crowd, fault, fault.amount)
        crowd.world.after(fault.lasts_s, _set_weather, crowd, fault, 0.0)
    else:
        _ACTIONS[fault.kind](crowd, fault)


def _set_weather(crowd: AnyCrowd, fault: Fault, amount: float) -> None:
    weather = crowd.network.calls if fault.kind.startswith("store-") else crowd.network.broadcasts
    match fault.kind.removeprefix("store-"):
        case "loss":
            weather.lost = amount
        case "duplicate":
            weather.doubled = amount
        case _:
            weather.delayed = amount


def _crash(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.crash(fault.node)
    crowd.world.after(fault.lasts_s, crowd.restart, fault.node)


def _stop(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.nodes[fault.node].stop()
    crowd.world.after(STOPPING_S, _crash, crowd, fault)


def _pause(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.nodes[fault.node].pause(fault.lasts_s)


def _partition(crowd: AnyCrowd, fault: Fault) -> None:
    """Partition a node: from the broadcasts, from the store, or from both, each in a third of the cases."""
    network = crowd.network
    cut = [network.broadcasts] * (fault.amount < 0.67) + [network.calls] * (fault.amount > 0.33)
    for weather in cut:
        weather.cut_off.add(fault.node)
        crowd.world.after(fault.lasts_s, weather.cut_off.discard, fault.node)


def _outage(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.set_store_down(True)
    crowd.world.after(fault.lasts_s, crowd.set_store_down, False)


def _forget(crowd: AnyCrowd, _fault: Fault) -> None:
    crowd.empty_store()


def _jump(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.set_skew(fault.node, fault.amount)


def _false_lost(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.take_for_lost(fault.node)


_ACTIONS: dict[str, Callable[[AnyCrowd, Fault], None]] = {
    "crash": _crash,
    "stop": _stop,
    "pause": _pause,
    "partition": _partition,
    "store-outage": _outage,
    "amnesia": _forget,
    "wall-jump": _jump,
    "false-lost": _false_lost,
}
