"""Elections and the lease of the sweeper, narrated: the simulator's cluster with the workers' own machines.

What is said comes from the effects that the machines return and from what the simulated store keeps. The
simulator's checkers judge every step meanwhile; a broken promise is said as well.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

from tests.scenarios.transcripts import Simulation, Step, phrase
from umbel.protocol.election import events as election
from umbel.protocol.election.election import Elections
from umbel.protocol.election.table import ElectionSettings
from umbel.protocol.leadership import lease
from umbel.protocol.leadership.coordination import Busy, Instant, Policy
from umbel.protocol.leadership.lease import Lease, LeaseSettings
from umbel.protocol.machine import Tick
from umbel.sim.plan import Ask, Plan
from umbel.sim.rounds import Cluster, Variant

Say = Callable[[str], None]
Uniform = Callable[[float, float], float]
ASKS = re.compile(r"client asks for (\w+), (at_most_once|at_least_once), which takes ([\d.]+) s")


class NarratedElections(Elections):
    def __init__(
        self,
        say: Say,
        node: str,
        holder: str,
        topics: frozenset[str],
        settings: ElectionSettings,
        uniform: Uniform,
    ) -> None:
        super().__init__(node, holder, topics, settings, uniform)
        self._say, self._name = say, node_of(holder)

    def step(self, event: election.Event | Tick, now: Instant) -> list[election.Effect]:
        match event:
            case election.HolderLost(holder):
                self._say(f"{self._name} takes {node_of(holder)} for lost")
            case election.ClaimReplied(election_id=name, reply=Busy(holder=holder)):
                self._say(f"{self._name} is told that {node_of(holder)} holds {name}")
            case _:
                pass
        effects = super().step(event, now)
        for effect in effects:
            self._narrate(effect)
        return effects

    def _narrate(self, effect: election.Effect) -> None:
        match effect:
            case election.CallClaim(election_id=name):
                self._say(f"{self._name} claims {name}")
            case election.PublishElected(phase=election.Phase.ELECTED, election_id=name, attempt=attempt):
                self._say(f"{self._name} tells that it won {name}, attempt {attempt}")
            case election.PublishElected(phase=phase, election_id=name):
                self._say(f"{self._name} tells that {name} is {phase}")
            case election.RunHandler(request=request):
                self._say(f"{self._name} runs the handler of {request.election_id}")
            case election.CancelHandler(election_id=name, reason=reason):
                self._say(f"{self._name} stops the handler of {name}: {reason}")
            case _:
                pass  # renewals, and what only one node knows


class NarratedLease(Lease):
    def __init__(self, say: Say, name: str, holder: str, settings: LeaseSettings, uniform: Uniform) -> None:
        super().__init__(name, holder, settings, uniform)
        self._say, self._node = say, node_of(holder)

    def step(self, event: lease.Event | Tick, now: Instant) -> list[lease.Effect]:
        effects = super().step(event, now)
        for effect in effects:
            match effect:
                case lease.LeaseAcquired():
                    self._say(f"{self._node} acquires the lease {self.name}")
                case lease.LeadershipLost(reason=reason):
                    self._say(f"{self._node} loses the lease {self.name}: {reason}")
                case lease.LeaseReleased():
                    self._say(f"{self._node} releases the lease {self.name}")
                case _:
                    pass  # calls of the store
        return effects


class SimulatedElections(Simulation):
    def __init__(self, arguments: Sequence[str], steps: Sequence[Step]) -> None:
        """`arguments`: how many nodes, and a seed for the delays of messages."""
        super().__init__()
        nodes, seed = arguments
        asks = tuple(_ask(step, found) for step in steps if (found := ASKS.fullmatch(step.text)))
        narrated = Variant(
            elections=partial(NarratedElections, self.say), lease=partial(NarratedLease, self.say)
        )
        self._cluster = Cluster(Plan(seed, int(nodes), asks, faults=()), narrated)

    @property
    def now(self) -> float:
        return self._cluster.world.now

    def run(self, until: float) -> None:
        self._cluster.world.run(until)

    @phrase("the nodes start")
    def _start(self) -> None:
        """All at about the same time."""

    @phrase(ASKS.pattern)
    def _ask(self, *_: str) -> None:
        """The plan has it: the simulator's client asks at this time."""

    @phrase(r"w(\d) dies")
    def _crash(self, node: str) -> None:
        self._cluster.crash(int(node))

    @phrase(r"w(\d) stops")
    def _stop(self, node: str) -> None:
        self._cluster.nodes[int(node)].stop()

    @phrase(r"w(\d) stands still for (\d+) s")
    def _pause(self, node: str, lasts_s: str) -> None:
        self._cluster.nodes[int(node)].pause(float(lasts_s))

    @phrase(r"what does the store know\?")
    def _look(self) -> None:
        for record in self._cluster.store.elections.values():
            name, holder = record.request.election_id, node_of(record.holder)
            self.say(f"{name}: {record.state.name}, holder {holder}, attempt {record.attempt}")
        for name, held in self._cluster.store.leases.items():
            self.say(f"lease {name}: holder {node_of(held.holder) or 'none'}")
        broken = self._cluster.checkers.violation
        self.say(f"broken: {broken}" if broken else "every promise is kept")


def _ask(step: Step, found: re.Match[str]) -> Ask:
    name, policy, handler_s = found.groups()
    return Ask(step.at_s, name, Policy[policy.upper()], handler_s=float(handler_s))


def node_of(holder: str) -> str:
    """`w0` of `w0@sim.101.1800000000000000`."""
    return holder.partition("@")[0]
