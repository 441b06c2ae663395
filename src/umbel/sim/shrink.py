"""Shrink: make a plan that breaks a promise as small as it can be while it still breaks one.

Faults, elections and nodes are dropped in ever smaller pieces, and each smaller plan is run again:
what remains is the script to read. Any broken promise counts, not only the first one, because the
smaller script is the one that a person has to understand.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from umbel.sim.cluster import REAL, Variant
from umbel.sim.plan import Plan
from umbel.sim.rounds import Outcome, run_plan

TRIES_MAX = 600
COURSES = 3
OneT = TypeVar("OneT")


def shrink(outcome: Outcome, variant: Variant = REAL, *, tries_max: int = TRIES_MAX) -> Outcome:
    """The smallest failing outcome that this many tries find."""
    tries = 0

    def fails(plan: Plan) -> Outcome | None:
        nonlocal tries
        # Leaving something out changes every delay after it, so a few other courses are tried too.
        for seed in (plan.seed, *(f"{outcome.plan.seed}~{number}" for number in range(COURSES))):
            tries += 1
            if tries > tries_max:
                return None
            tried = run_plan(replace(plan, seed=seed), variant)
            if tried.violation is not None:
                return tried
        return None

    smallest = outcome
    improved = True
    while improved and tries < tries_max:
        improved = False
        for make in (_fewer_asks, _fewer_faults, _fewer_nodes):
            found = _first_failing(smallest.plan, make, fails)
            while found is not None:
                smallest, improved = found, True
                found = _first_failing(smallest.plan, make, fails)
    return smallest


def _first_failing(
    plan: Plan, make: Callable[[Plan], Iterator[Plan]], fails: Callable[[Plan], Outcome | None]
) -> Outcome | None:
    return next((found for smaller in make(plan) if (found := fails(smaller)) is not None), None)


def _fewer_asks(plan: Plan) -> Iterator[Plan]:
    for asks in _without_pieces(plan.asks):
        if asks:
            yield replace(plan, asks=asks)


def _fewer_faults(plan: Plan) -> Iterator[Plan]:
    for faults in _without_pieces(plan.faults):
        yield replace(plan, faults=faults)


def _fewer_nodes(plan: Plan) -> Iterator[Plan]:
    for nodes in dict.fromkeys((plan.nodes // 2, plan.nodes - 1)):
        if nodes >= 1:
            faults = tuple(fault for fault in plan.faults if fault.node < nodes)
            yield replace(plan, nodes=nodes, faults=faults)


def _without_pieces(whole: tuple[OneT, ...]) -> Iterator[tuple[OneT, ...]]:
    """Leave out halves, then quarters, and so on down to single ones."""
    size = len(whole)
    while size >= 1:
        size = size // 2 if size > 1 else 0
        step = max(size, 1)
        for start in range(0, len(whole), step):
            yield whole[:start] + whole[start + step :]
        if step == 1:
            return
