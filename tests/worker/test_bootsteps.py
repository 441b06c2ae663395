"""S1: the order of the steps comes from what each requires; stopping is the reverse."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.errors import BadBootsteps
from umbel.worker.bootsteps import Step, starting_order


def step(name: str, *requires: str) -> Step:
    kind = type(name.title(), (Step,), {"name": name, "requires": requires})
    made: Step = kind()
    return made


def names(steps: Sequence[Step]) -> list[str]:
    return [one.name for one in steps]


def test_a_step_starts_after_all_it_requires() -> None:
    given_steps = [
        step("gossip", "mingle"),
        step("mingle", "events"),
        step("tasks", "pool", "gossip"),
        step("events", "connection"),
        step("pool"),
        step("connection"),
    ]
    order = names(starting_order(given_steps))
    assert order == ["pool", "connection", "events", "mingle", "gossip", "tasks"]
    assert order.index("mingle") < order.index("gossip")


def test_independent_steps_start_in_the_order_given() -> None:
    assert names(starting_order([step("c"), step("a"), step("b")])) == ["c", "a", "b"]
    assert names(starting_order([step("b"), step("c"), step("a")])) == ["b", "c", "a"]


def test_no_steps_have_no_order() -> None:
    assert starting_order([]) == []


def test_a_circle_is_refused_with_its_names() -> None:
    with pytest.raises(BadBootsteps, match="in a circle") as caught:
        starting_order([step("alone"), step("a", "b"), step("b", "c"), step("c", "a")])
    text = str(caught.value)
    assert all(f" {name}" in text for name in "abc")
    assert "alone" not in text


def test_a_step_that_requires_itself_is_a_circle() -> None:
    with pytest.raises(BadBootsteps, match="a -> a"):
        starting_order([step("a", "a")])


def test_an_unknown_requirement_is_refused_with_both_names_and_those_known() -> None:
    with pytest.raises(
        BadBootsteps, match=r"'gossip' requires 'mingel', which is not among \['gossip', 'mingle'\]"
    ):
        starting_order([step("gossip", "mingel"), step("mingle")])


def test_two_steps_of_one_name_are_refused() -> None:
    with pytest.raises(BadBootsteps, match="two bootsteps are named 'a'"):
        starting_order([step("a"), step("a")])


@st.composite
def graphs(draw: st.DrawFn) -> list[Step]:
    """Steps that require only others of lower number, in any order."""
    count = draw(st.integers(1, 8))
    steps = []
    for number in range(count):
        required = draw(st.sets(st.integers(0, number - 1))) if number else set[int]()
        steps.append(step(f"s{number}", *(f"s{one}" for one in required)))
    return draw(st.permutations(steps))


@given(graphs())
def test_any_graph_without_a_circle_has_an_order_that_keeps_it(steps: list[Step]) -> None:
    order = starting_order(steps)
    assert sorted(names(order)) == sorted(names(steps))
    for place, one in enumerate(order):
        assert set(one.requires) <= set(names(order[:place]))
    assert names(starting_order(steps)) == names(order)


# -- a step and what it runs -----------------------------------------------------------------------


def test_stopping_a_step_ends_what_it_runs_in_the_background() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def scenario() -> None:
        one = step("a")
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
            one.adopt(group)
            running = asyncio.Event()
            one.run_in_background(work())
            one.run_in_background(_announce(running))
            await running.wait()
            await one.stop()
            await one.stop()  # twice is as good as once

    asyncio.run(scenario())
    assert ended == ["work"]


async def _announce(running: asyncio.Event) -> None:
    running.set()
    await asyncio.Event().wait()


def test_an_error_in_the_background_ends_the_group_that_owns_it() -> None:
    async def fail() -> None:
        raise ConnectionResetError("gone")

    async def scenario() -> Any:
        one = step("a")
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
            one.adopt(group)
            one.run_in_background(fail())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    assert caught.group_contains(ConnectionResetError)
