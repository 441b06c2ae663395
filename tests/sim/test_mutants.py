"""A checker is worth what it catches: every broken rule is found, and the real machines pass the hunt."""

import pytest

from tests.sim.mutants import MUTANTS, Mutant
from umbel.sim.rounds import shrink


def by_name(mutant: Mutant) -> str:
    return mutant.name


def test_there_are_enough_mutants_and_they_break_every_promise() -> None:
    assert len(MUTANTS) >= 12
    broken = frozenset[str]().union(*(mutant.breaks for mutant in MUTANTS))
    assert broken == {"KS1", "KS2", "KS3", "KS4", "KL1", "KM1", "KC1", "L1"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=by_name)
def test_a_mutant_is_caught_where_the_real_machines_are_not(mutant: Mutant) -> None:
    caught = mutant.hunt()
    assert caught is not None, "no round of the hunt broke a promise"
    assert caught.violation is not None and caught.violation.promise in mutant.breaks, caught.violation
    assert mutant.hunt_real(2) is None


def test_a_failing_script_shrinks_to_what_matters() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "finishes for anyone")
    caught = mutant.hunt()
    assert caught is not None
    small = shrink(caught, mutant.variant)
    assert small.violation is not None
    assert len(small.plan.asks) <= 4 and len(small.plan.faults) <= 2
