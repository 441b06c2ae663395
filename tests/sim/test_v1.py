"""Celery's rules in the same world: what they elect, and what they cost."""

from umbel.sim.plan import make_plan, parse_faults
from umbel.sim.v1 import V1Tally, rounds_v1, run_v1


def v1(nodes: int, elections: int, faults: str) -> V1Tally:
    tally = V1Tally()
    for one in rounds_v1(nodes, elections, parse_faults(faults), "v1"):
        tally.add(one)
    return tally


def test_v1_elects_one_where_nothing_goes_wrong_at_the_cost_of_n_squared() -> None:
    tally = v1(6, 50, "none")
    assert tally.runs == {"one": 50}
    assert tally.publishes == 50 * (1 + 6 + 36)
    assert tally.deliveries == 50 * (6 + 36 + 216)


def test_v1_elects_none_or_several_under_faults() -> None:
    tally = v1(5, 400, "all")
    assert tally.runs["none"] > 20
    assert tally.runs["several"] > 0
    assert tally.died > 0


def test_v1_with_a_single_node_elects_nobody() -> None:
    assert v1(1, 20, "none").runs == {"none": 20}


def test_v1_replays() -> None:
    plan = make_plan("again", 5, 20, parse_faults("all"))
    assert run_v1(plan) == run_v1(plan)
