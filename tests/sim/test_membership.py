"""Membership in the simulator: nobody lost without silence, each seen once, all agree in the end (S5)."""

import pytest

from umbel.protocol.membership.gossip import Membership
from umbel.protocol.membership.observers import Views
from umbel.sim.membership import AUDIBLE, MemberOutcome, run_membership
from umbel.sim.plan import Fault, Plan, make_plan

LOUD = frozenset({*AUDIBLE, "loss", "delay", "partition", "false-lost"})

SHORT_PAUSES = Plan("pause", 6, (), tuple(Fault(5.0 + 8 * node, "pause", node, 3.0) for node in range(6)))


def assert_kept(outcome: MemberOutcome, seed: str) -> None:
    assert outcome.violation is None, f"seed {seed}: {outcome.violation}"


@pytest.mark.parametrize("observed", [False, True], ids=["full", "observed"])
@pytest.mark.parametrize("nodes", [2, 5, 9])
def test_nobody_is_lost_without_silence_and_all_agree(nodes: int, observed: bool) -> None:
    for number in range(3):
        seed = f"audible {nodes} {number}"
        assert_kept(run_membership(make_plan(seed, nodes, 0, AUDIBLE), observed=observed), seed)


@pytest.mark.parametrize("nodes", [3, 6])
def test_all_agree_when_the_weather_is_fair_again(nodes: int) -> None:
    for number in range(4):
        seed = f"loud {nodes} {number}"
        assert_kept(run_membership(make_plan(seed, nodes, 0, LOUD), observed=False), seed)


@pytest.mark.parametrize("observed", [False, True], ids=["full", "observed"])
def test_the_promises_hold_where_lost_nodes_are_looked_for_every_five_seconds(observed: bool) -> None:
    for number in range(3):
        for seed, kinds in ((f"audible 5 {number}", AUDIBLE), (f"loud 6 {number}", LOUD)):
            plan = make_plan(seed, int(seed.split()[1]), 0, kinds)
            assert_kept(run_membership(plan, observed=observed, interval_s=5.0), seed)


@pytest.mark.parametrize("seed", ["loud 6 1", "loud 12 1", "loud 8 0", "loud 8 1"])
def test_who_hears_no_heartbeats_finds_out_what_it_missed(seed: str) -> None:
    """Without views, nodes stayed wrong about one another in the first two of these."""
    plan = make_plan(seed, int(seed.split()[1]), 0, LOUD)
    assert_kept(run_membership(plan, observed=True), seed)


@pytest.mark.parametrize("seed", ["audible 6 16", "audible 12 4"])
def test_a_node_whose_clock_was_set_back_is_neither_given_up_nor_left_out(seed: str) -> None:
    """Observers take it for an older run of itself, for a minute."""
    plan = make_plan(seed, int(seed.split()[1]), 0, AUDIBLE)
    assert_kept(run_membership(plan, observed=True), seed)


def test_a_pause_of_three_seconds_costs_nobody_its_membership() -> None:
    outcome = run_membership(SHORT_PAUSES, observed=False)
    assert_kept(outcome, SHORT_PAUSES.seed)
    assert "lost" not in outcome.counts


def test_a_node_that_hears_nobody_suspects_itself() -> None:
    """The quorum guard: cut off for ten seconds, it gives up nobody."""
    plan = Plan("cut off", 8, (), (Fault(10.0, "partition", 3, 10.0, 0.5),))
    outcome = run_membership(plan, observed=False)
    assert_kept(outcome, plan.seed)
    assert outcome.counts["Degraded"] == 1
    assert outcome.counts["lost"] <= 7  # the others give it up, as they must


def test_a_crash_is_noticed_by_all_and_a_goodbye_is_no_loss() -> None:
    plan = Plan("ends", 5, (), (Fault(10.0, "crash", 1, 200.0), Fault(20.0, "stop", 2, 200.0)))
    counts = run_membership(plan, observed=False).counts
    assert counts["lost"] == 4 and counts["left"] == 3


def test_the_checkers_notice_when_no_views_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Views, "tell", lambda self, on, now_s: None)
    for seed in ("loud 6 1", "loud 12 1"):
        plan = make_plan(seed, int(seed.split()[1]), 0, LOUD)
        violation = run_membership(plan, observed=True).violation
        assert violation is not None and violation.promise == "M3"


def test_a_seed_replays() -> None:
    plan = make_plan("again", 6, 0, LOUD)
    hashes = {run_membership(plan, observed=True).trace_hash for _ in range(2)}
    assert len(hashes) == 1


def test_the_checkers_notice_a_node_that_is_given_up_at_its_first_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Membership, "_suspect", Membership._condemn)
    violation = run_membership(SHORT_PAUSES, observed=False).violation
    assert violation is not None and violation.promise == "M2"


def test_the_checkers_notice_a_node_that_joins_with_every_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("umbel.protocol.membership.gossip.is_same_run", lambda record, heard: False)
    violation = run_membership(SHORT_PAUSES, observed=False).violation
    assert violation is not None and violation.promise in ("M1", "M2")
