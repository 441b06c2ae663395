"""The elections of the workers, in the simulator, under every fault: promises KS1-KS4, KL1, KM1, KC1."""

import pytest

from umbel.sim.plan import FAULTS, make_plan, parse_faults
from umbel.sim.rounds import Outcome, rounds, run_plan

EVERY_FAULT = frozenset(FAULTS)


def assert_kept(outcome: Outcome) -> None:
    assert outcome.violation is None, f"seed {outcome.plan.seed}: {outcome.violation}"


@pytest.mark.parametrize(
    ("nodes", "elections"), [(1, 1000), (2, 1000), (3, 1000), (5, 800), (9, 600), (50, 100)]
)
def test_every_promise_holds_under_every_fault(nodes: int, elections: int) -> None:
    for outcome in rounds(nodes, elections, EVERY_FAULT, f"slice {nodes}"):
        assert_kept(outcome)


def test_answers_that_come_twice_and_a_late_sweep_run_nothing_twice() -> None:
    """The round in which they once did (KS2)."""
    assert_kept(run_plan(make_plan("full 9 20000:0", 9, 200, EVERY_FAULT)))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_promise_holds_under_each_fault_alone(fault: str) -> None:
    for outcome in rounds(4, 300, frozenset({fault}), f"alone {fault}"):
        assert_kept(outcome)


def test_without_faults_each_election_costs_three_broadcasts_and_about_four_calls() -> None:
    for outcome in rounds(5, 400, parse_faults("none"), "calm"):
        assert_kept(outcome)
        assert outcome.tally.runs == outcome.tally.elections
        assert outcome.tally.publishes == 3 * outcome.tally.elections + outcome.tally.resent
        assert outcome.tally.store_calls < 4.3 * outcome.tally.elections


def test_a_seed_replays_to_the_same_trace() -> None:
    plans = [make_plan("replay", 4, 60, EVERY_FAULT) for _ in range(2)]
    assert plans[0] == plans[1]
    assert len({run_plan(plan).trace_hash for plan in plans}) == 1
    assert run_plan(make_plan("another", 4, 60, EVERY_FAULT)).trace_hash != run_plan(plans[0]).trace_hash
