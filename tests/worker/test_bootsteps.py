"""S1: the order of the steps comes from what each requires; stopping is the reverse."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel import App
from umbel.errors import BadBootsteps, BrokerUnavailable
from umbel.launch.loading import FoundApp
from umbel.launch.workers import make_worker
from umbel.pools.interface import HostSpec
from umbel.worker.bootsteps import Step, starting_order
from umbel.worker.worker import Worker


def step(name: str, *requires: str) -> Step:
    kind = type(name.title(), (Step,), {"name": name, "requires": requires})
    made: Step = kind(None)
    return made


def names(steps: Sequence[Step]) -> list[str]:
    return [one.name for one in steps]


@pytest.mark.parametrize(
    "odd", [object, "cache", type("A", (), {"name": "two words"}), type("B", (), {"name": 3})]
)
def test_a_users_step_without_a_name_is_refused_where_it_is_added(odd: Any) -> None:
    with pytest.raises(BadBootsteps, match="is not a class with a name"):
        App("tests").steps.add(odd)


def test_what_a_users_step_requires_is_a_list_of_names() -> None:
    with pytest.raises(BadBootsteps, match="is 'tasks'; it must be a tuple of names"):
        App("tests").steps.add(type("Mine", (), {"name": "mine", "requires": "tasks"}))


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


# -- the worker stops in the reverse order ---------------------------------------------------------


def worker_of(tmp_path: Path, steps: Sequence[Step]) -> Worker:
    """A real worker whose steps are these."""
    app = App("tests", broker=f"sqlite:///{tmp_path}/umbel.db", worker_pool="solo")
    found = FoundApp(app, HostSpec("no.such:loader", "app"))
    worker = make_worker(found, app.settings, node="w@host", run_directory=tmp_path / "run")
    worker._steps = list(steps)
    return worker


def telling(name: str, story: list[str], *requires: str, broken: bool = False) -> Step:
    class Telling(Step):
        async def start(self) -> None:
            story.append(f"start {name}")
            if broken:
                raise BrokerUnavailable(f"{name} is broken")

        async def stop(self) -> None:
            story.append(f"stop {name}")

    Telling.name, Telling.requires = name, requires
    return Telling(cast(Any, None))


def run_and_stop(tmp_path: Path, steps: Sequence[Step]) -> None:
    async def scenario() -> None:
        worker = worker_of(tmp_path, steps)
        worker.request_stop()
        async with asyncio.timeout(10.0):
            await worker.run()

    asyncio.run(scenario())


def test_a_worker_stops_its_steps_in_the_reverse_of_their_start(tmp_path: Path) -> None:
    story: list[str] = []
    run_and_stop(tmp_path, [telling("c", story, "b"), telling("a", story), telling("b", story, "a")])
    assert story == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]


def test_a_step_that_cannot_start_stops_with_those_before_it_and_says_why(tmp_path: Path) -> None:
    story: list[str] = []
    steps = [telling("a", story), telling("b", story, "a", broken=True), telling("c", story, "b")]
    with pytest.raises(BrokerUnavailable, match="b is broken"):
        run_and_stop(tmp_path, steps)
    assert story == ["start a", "start b", "stop b", "stop a"]


def test_a_worker_refuses_a_circle_before_it_starts_anything(tmp_path: Path) -> None:
    story: list[str] = []
    with pytest.raises(BadBootsteps, match="in a circle"):
        run_and_stop(tmp_path, [telling("x", story), telling("a", story, "b"), telling("b", story, "a")])
    assert story == []
