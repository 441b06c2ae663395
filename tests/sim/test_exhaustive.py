"""Every course of one election on two nodes keeps the promises; the full budget runs in `make sim`."""

import pytest

from tests.sim.courses import Budget
from tests.sim.exhaustive import explore
from tests.sim.mutants import ActsBeforeStart, CountsFromTheAnswer
from umbel.protocol.leadership.coordination import Policy

BUDGETS = [
    Budget(crashes=1, losses=1, duplicates=0, expiries=1),
    Budget(crashes=0, losses=1, duplicates=1, expiries=1),
    Budget(crashes=0, losses=0, duplicates=0, expiries=2),
]


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_course_is_safe(policy: Policy, budget: Budget) -> None:
    explored = explore(policy, budget)
    assert explored.violation is None
    assert explored.complete
    assert explored.endings > 100  # many of them do end


def test_a_search_that_was_cut_short_says_so() -> None:
    assert not explore(Policy.AT_MOST_ONCE, states_max=100).complete


def test_acting_before_the_store_said_yes_is_found() -> None:
    explored = explore(Policy.AT_MOST_ONCE, Budget(0, 0, 0, 0), machine=ActsBeforeStart)
    assert explored.violation is not None and explored.violation.startswith("KS1")


def test_counting_from_the_answer_is_found() -> None:
    explored = explore(Policy.AT_LEAST_ONCE, Budget(0, 0, 0, 2), machine=CountsFromTheAnswer)
    assert explored.violation is not None and explored.violation.startswith("KS2")
