"""Crowd: the processes of a simulated cluster, and the faults that can hit any of them.

A process dies at once and without a word, stands still with its inbox filling up, and comes back as
another process under the same name. What it is a process of (a worker's elections, Celery's rules,
membership) its class says.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from typing import Any, Generic, TypeVar

from umbel.sim.network import Network
from umbel.sim.plan import Fault, Plan
from umbel.sim.world import NodeClock, World


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
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def take(self, event: Any) -> None:
        """One event arrives, and the process is awake."""

    @abstractmethod
    def wake(self) -> None:
        """It stood still and continues: unfinished work comes first, then its inbox."""

    @abstractmethod
    def woken(self) -> None:
        """Its inbox is empty again."""

    def hear(self, event: Any) -> None:
        if not self.up:
            return
        if self.paused:
            self._inbox.append(event)
        else:
            self.take(event)

    def crash(self) -> None:
        self.up = False

    def pause(self, lasts_s: float) -> None:
        if self.up and not self.paused:
            self.paused = True
            self.world.after(lasts_s, self.resume)

    def resume(self) -> None:
        if not (self.up and self.paused):
            return
        self.paused = False
        self.wake()
        inbox, self._inbox = self._inbox, []
        for position, event in enumerate(inbox):
            if self.paused or not self.up:  # it fell again at the first things it did
                self._inbox = inbox[position:] + self._inbox
                return
            self.take(event)
        self.woken()


ProcessT = TypeVar("ProcessT", bound=Process)


class Crowd(ABC, Generic[ProcessT]):
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
    def make_node(self, index: int, pid: int, clock: NodeClock) -> ProcessT: ...

    def populate(self) -> None:
        """Make the nodes, and let them start at about the same time."""
        for index in range(self.plan.nodes):
            self.nodes.append(self._node(index))
            self.world.at(self.world.random.uniform(0.0, 0.4), self.nodes[index].start)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # ---- what befalls it ---------------------------------------------------------------------------

    def befalls(self, point: str, node: Process) -> bool:
        """Whether a fault waits at this point of the protocol; then it happens now."""
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
        if self.nodes[index].up:
            self.nodes[index].crash()
            self.died(self.nodes[index])

    @abstractmethod
    def died(self, node: ProcessT) -> None:
        """A node is dead; the others do not know yet."""

    def restart(self, index: int) -> None:
        if not self.nodes[index].up:
            self.nodes[index] = self._node(index)
            self.nodes[index].start()

    @abstractmethod
    def take_for_lost(self, index: int) -> None:
        """The others take a living node for lost."""

    @abstractmethod
    def set_store_down(self, down: bool) -> None: ...

    @abstractmethod
    def empty_store(self) -> None: ...

    def set_skew(self, index: int, skew_s: float) -> None:
        self._clocks[index].set_skew(skew_s)

    def heal(self) -> None:
        """Fair weather from now on: all nodes up and awake, nothing waiting to befall them."""
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
