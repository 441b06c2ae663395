"""Workers of both election protocols around one broker: at most one acts, and one that can does.

The machines of the workers, and events in every order that a broker may give: each sender's reach each
receiver in order, at any time. What a store decides for those that ask it is the simplest there is: the
first one has it.
"""

import random
from collections import Counter, deque
from collections.abc import Mapping

import pytest

from umbel.protocol.clock import LamportClock
from umbel.protocol.election import classic
from umbel.protocol.election.classic import (
    CLASSIC_VERSION,
    AckReceived,
    ClassicElections,
    ClassicRequest,
    Decided,
    ElectReceived,
    PublishAck,
    PublishElect,
)
from umbel.protocol.election.mixed import Enter, MixedElections
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick

TOPIC, COMMAND = "write", ClassicRequest("e", "write", b"{}")
START, END = Instant(0.0, 1_000_000.0), Instant(classic.DECIDE_S, 1_000_010.0)
STORE = "store"
SEEDS = 60

Message = ClassicRequest | ElectReceived | AckReceived | Enter


class Mixed:
    """`kinds`: by name of a node. "v1" and "v2" can act, "unable" ones cannot, "deaf" ones hear no events."""

    def __init__(self, seed: int, kinds: Mapping[str, str]) -> None:
        self.rng = random.Random(seed)
        self.kinds = kinds
        self.acted: Counter[str] = Counter()
        self.failed: list[object] = []
        self.clocks = {name: LamportClock(self.rng.randrange(1, 5)) for name in kinds}  # they said something
        self.machines: dict[str, ClassicElections | MixedElections] = {}
        self.channels: dict[tuple[str, str], deque[Message]] = {}
        for name, kind in kinds.items():
            self.channels["client", name] = deque([COMMAND])
            if kind.startswith("v2"):
                topics = set() if "unable" in kind else {TOPIC}
                self.machines[name] = MixedElections(name, topics, "always" if "deaf" in kind else "auto")
            else:
                self.machines[name] = machine = ClassicElections(name, 1)
                machine.step(classic.LiveNodes(frozenset(kinds)), START)

    def run(self) -> None:
        while waiting := [channel for channel, messages in sorted(self.channels.items()) if messages]:
            sender, receiver = self.rng.choice(waiting)
            message = self.channels[sender, receiver].popleft()
            if receiver == STORE:
                self.acted[sender] += not any(self.kinds[name].startswith("v2") for name in self.acted)
            else:
                self.deliver(receiver, message)
        for machine in self.machines.values():
            if isinstance(machine, ClassicElections):
                self.failed += machine.step(Tick(), END)

    def deliver(self, name: str, message: Message) -> None:
        machine = self.machines[name]
        if isinstance(message, ElectReceived) and message.node != name and message.version == CLASSIC_VERSION:
            self.clocks[name].adjust(message.clock)
        if isinstance(message, ClassicRequest) and self.kinds[name] == "v1 unable":
            return  # its shell refuses
        assert not isinstance(message, Enter)
        for effect in machine.step(message, START):
            match effect:
                case PublishElect(election_id, topic, action, clock):
                    version = CLASSIC_VERSION if clock is None else 2
                    clock = self.clocks[name].forward() if clock is None else clock
                    self.broadcast(name, ElectReceived(election_id, topic, action, name, 1, clock, version))
                case PublishAck(election_id, lowest):
                    self.broadcast(name, AckReceived(election_id, name, lowest))
                case Enter() if "unable" not in self.kinds[name]:
                    self.channels.setdefault((name, STORE), deque()).append(effect)
                case Decided(mine=True):
                    self.acted[name] += 1

    def broadcast(self, sender: str, message: Message) -> None:
        for receiver, kind in self.kinds.items():
            if "deaf" not in kind:
                self.channels.setdefault((sender, receiver), deque()).append(message)


@pytest.mark.parametrize(
    "kinds",
    [
        ["v1", "v2"],
        ["v1", "v1", "v2"],
        ["v1", "v2", "v2", "v2"],
        ["v1", "v1", "v2 unable"],
        ["v1", "v1", "v2 unable", "v2"],
        ["v1", "v2 deaf"],
        ["v1", "v1", "v2 deaf", "v2"],
        ["v1", "v1", "v2 unable deaf"],
        ["v1 unable", "v2"],
        ["v1 unable", "v1", "v2 unable", "v2"],
    ],
    ids=", ".join,
)
def test_one_worker_acts_and_none_reports_a_failure(kinds: list[str]) -> None:
    named = {f"node{number}": kind for number, kind in enumerate(kinds)}
    for seed in range(SEEDS):
        mixed = Mixed(seed, named)
        mixed.run()
        assert +mixed.acted and mixed.acted.total() == 1, f"seed {seed}: {mixed.acted}"
        assert mixed.failed == [], f"seed {seed}"


def test_where_nobody_can_nobody_does() -> None:
    mixed = Mixed(1, {"a": "v1 unable", "b": "v2 unable"})
    mixed.run()
    assert mixed.acted.total() == 0
