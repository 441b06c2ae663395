"""The classic election (E1, E2): who decides, decides the same; one leads; nothing waits for ever."""

import random
from collections import deque

import pytest

from umbel.protocol.clock import LamportClock
from umbel.protocol.election import classic
from umbel.protocol.election.classic import (
    AckReceived,
    Candidate,
    ClassicElections,
    ClassicRequest,
    Decided,
    Effect,
    ElectReceived,
    Event,
    Failed,
    LiveNodes,
    PublishAck,
    PublishElect,
    Shed,
    StopClassic,
)
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick

COMMAND = ClassicRequest("e", "task", b"{}")
ADA, BOB = Candidate(3, "ada.1"), Candidate(5, "bob.2")


def at(seconds: float) -> Instant:
    return Instant(seconds, 1_000_000.0 + seconds)


def elect(candidate: Candidate) -> ElectReceived:
    node, _, pid = candidate.name.rpartition(".")
    return ElectReceived("e", "task", b"{}", node, int(pid), candidate.clock, 1)


def standing(*others: str) -> ClassicElections:
    """Ada stands, and has heard herself."""
    machine = ClassicElections("ada", 1)
    machine.step(LiveNodes(frozenset(others)), at(0.0))
    assert machine.step(COMMAND, at(0.0)) == [PublishElect("e", "task", b"{}")]
    assert machine.step(elect(ADA), at(0.0)) == [PublishAck("e", ADA)]
    return machine


def test_one_node_is_enough() -> None:
    machine = standing()
    assert machine.step(AckReceived("e", "ada"), at(0.1)) == [Decided("e", "task", b"{}", ADA, mine=True)]


def test_the_command_twice_is_one_candidacy() -> None:
    assert standing().step(COMMAND, at(0.1)) == []


def test_every_candidate_is_answered_once() -> None:
    machine = ClassicElections("ada", 1)
    assert machine.step(elect(BOB), at(0.0)) == [PublishAck("e", BOB)]
    assert machine.step(elect(BOB), at(0.0)) == []
    assert machine.step(elect(Candidate(5, "eve.3")), at(0.0)) == [PublishAck("e", BOB)]


def test_acks_count_by_their_sender() -> None:
    machine = standing("bob")
    assert machine.step(AckReceived("e", "ada"), at(0.1)) == []
    assert machine.step(AckReceived("e", "ada"), at(0.1)) == []
    assert len(machine.step(AckReceived("e", "bob"), at(0.1))) == 1


def test_the_lowest_clock_leads_and_equal_clocks_go_by_name() -> None:
    assert min(Candidate(3, "bob.1"), Candidate(3, "ada.2"), Candidate(4, "a.1")) == Candidate(3, "ada.2")
    machine = standing("bob")
    machine.step(elect(Candidate(2, "bob.2")), at(0.1))
    machine.step(AckReceived("e", "ada"), at(0.1))
    (decided,) = machine.step(AckReceived("e", "bob"), at(0.1))
    assert decided == Decided("e", "task", b"{}", Candidate(2, "bob.2"), mine=False)


def test_a_candidate_of_the_stores_rules_has_answered_with_it_and_is_not_answered() -> None:
    machine = standing("bob")
    machine.step(AckReceived("e", "ada"), at(0.1))
    (decided,) = machine.step(ElectReceived("e", "task", b"{}", "bob", 2, 1, version=2), at(0.1))
    assert decided == Decided("e", "task", b"{}", Candidate(1, "bob.2"), mine=False)


def test_an_ack_counts_that_came_before_the_command() -> None:
    machine = ClassicElections("ada", 1)
    machine.step(LiveNodes(frozenset({"bob"})), at(0.0))
    assert machine.step(AckReceived("e", "bob"), at(0.0)) == []
    machine.step(COMMAND, at(0.0))
    machine.step(elect(ADA), at(0.0))
    (decided,) = machine.step(AckReceived("e", "ada"), at(0.1))
    assert isinstance(decided, Decided) and decided.mine


def test_a_latecomer_learns_the_lowest_candidate_from_an_ack() -> None:
    machine = standing("bob")
    machine.step(AckReceived("e", "ada"), at(0.1))
    (decided,) = machine.step(AckReceived("e", "bob", Candidate(1, "eve.3")), at(0.1))
    assert isinstance(decided, Decided) and not decided.mine


def test_a_member_that_is_gone_is_not_waited_for() -> None:
    machine = standing("bob")
    machine.step(AckReceived("e", "ada"), at(0.1))
    (decided,) = machine.step(LiveNodes(frozenset({"ada"})), at(0.2))
    assert isinstance(decided, Decided) and decided.mine


def test_a_deadline_ends_what_a_silent_member_holds_up() -> None:
    machine = standing("bob")
    machine.step(AckReceived("e", "ada"), at(0.1))
    assert machine.deadline == 10.0
    (failed,) = machine.step(Tick(), at(10.0))
    assert isinstance(failed, Failed) and "bob" in failed.reason
    assert machine.step(AckReceived("e", "bob"), at(10.1)) == []


def test_a_decided_election_still_answers_and_is_then_forgotten() -> None:
    machine = standing()
    machine.step(AckReceived("e", "ada"), at(0.1))
    assert machine.step(elect(BOB), at(1.0)) == [PublishAck("e", ADA)]
    assert machine.step(COMMAND, at(1.0)) == []
    for second in (10.0, 60.1):
        assert machine.step(Tick(), at(second)) == []
    assert len(machine) == 0 and machine.deadline is None


def test_a_full_table_forgets_the_decided_and_sheds_what_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic, "RECORDS_MAX", 2)
    machine = ClassicElections("ada", 1)
    machine.step(elect(BOB), at(0.0))
    for name in ("f", "g"):
        assert len(machine.step(ClassicRequest(name, "task", b"{}"), at(0.0))) == 1
    assert machine.step(ClassicRequest("h", "task", b"{}"), at(0.0)) == [Shed("h")]
    assert len(machine) == 2


@pytest.mark.parametrize("name", ["", "x" * 129, "\ud800"])
def test_names_that_no_table_may_keep_are_ignored(name: str) -> None:
    machine = ClassicElections("ada", 1)
    assert machine.step(ClassicRequest(name, "task", b"{}"), at(0.0)) == []
    assert machine.step(ElectReceived(name, "task", b"{}", "bob", 2, 5, 1), at(0.0)) == []
    assert machine.step(AckReceived(name, "bob"), at(0.0)) == []
    assert len(machine) == 0


def test_a_stopped_node_stands_no_more() -> None:
    machine = standing("bob")
    machine.step(StopClassic(), at(0.1))
    assert machine.step(ClassicRequest("f", "task", b"{}"), at(0.2)) == [] and machine.deadline is None


class Network:
    """Nodes with real clocks; each sender's events reach each receiver in order, at any time."""

    def __init__(self, seed: int, size: int) -> None:
        self.rng = random.Random(seed)
        names = frozenset(f"node{number}" for number in range(size))
        self.machines = {name: ClassicElections(name, 1) for name in names}
        self.clocks = {name: LamportClock(self.rng.randrange(5)) for name in sorted(names)}
        self.channels: dict[tuple[str, str], deque[Event]] = {}
        self.decided: dict[str, Decided] = {}
        for name, machine in self.machines.items():
            machine.step(LiveNodes(names), at(0.0))
            self.channels["client", name] = deque([COMMAND])

    def run(self) -> None:
        while waiting := [channel for channel, events in sorted(self.channels.items()) if events]:
            sender, receiver = self.rng.choice(waiting)
            event = self.channels[sender, receiver].popleft()
            if isinstance(event, ElectReceived) and event.node != receiver:
                self.clocks[receiver].adjust(event.clock)
            for effect in self.machines[receiver].step(event, at(0.0)):
                self.perform(receiver, effect)

    def perform(self, node: str, effect: Effect) -> None:
        event: Event
        match effect:
            case PublishElect(election_id, topic, action):
                clock = self.clocks[node].forward()
                event = ElectReceived(election_id, topic, action, node, 1, clock, 1)
            case PublishAck(election_id, lowest):
                # Celery's acks say nothing of the lowest: it must work without.
                event = AckReceived(election_id, node, lowest if self.rng.random() < 0.5 else None)
            case Decided():
                assert node not in self.decided
                self.decided[node] = effect
                return
            case _:
                raise AssertionError(effect)
        for receiver in self.machines:
            self.channels.setdefault((node, receiver), deque()).append(event)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_decide_the_same_and_one_of_them_leads_e2(size: int) -> None:
    for seed in range(60):
        network = Network(seed, size)
        network.run()
        assert len(network.decided) == size, f"seed {seed}"
        assert len({decided.leader for decided in network.decided.values()}) == 1, f"seed {seed}"
        assert sum(decided.mine for decided in network.decided.values()) == 1, f"seed {seed}"
