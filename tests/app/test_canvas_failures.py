"""What fails in a canvas, and who learns of it: nobody waits for a task that will never run."""

from collections.abc import Callable
from typing import Any

import pytest

from umbel import App, chain, chord, group
from umbel.app.canvas.signature import Signature, signature_from
from umbel.errors import ChordError

app = App("failures", broker="sqlite:////nowhere/failures.db")
told: list[tuple[Any, ...]] = []


@app.task
def same(value: Any) -> Any:
    return value


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def fail(*_: Any) -> None:
    raise ValueError("no")


@app.task
def complain(task_id: str) -> None:
    told.append((task_id,))


@app.task
def explain(request: Any, error: Exception, traceback: str) -> None:
    told.append((request.id, type(error), type(error.__cause__)))


@app.task
def stumble(request: Any, error: Exception, traceback: str) -> None:
    told.append((request.id,))
    raise KeyError("the errback itself")


@pytest.fixture(autouse=True)
def _forget() -> None:
    told.clear()


def both_ways(composed: Callable[[], Signature[Any]]) -> list[Signature[Any]]:
    """As it was written, and as it arrives in a message."""
    return [composed(), signature_from(composed().to_map(), app)]


@pytest.mark.parametrize(
    "composed",
    [
        lambda: fail.s() | group(same.s(), same.s()) | total.s(),
        lambda: fail.s() | group(same.s(), same.s()),
        lambda: fail.s() | chord([same.s() | group(same.s(), same.s())], total.s() | same.s()) | same.s(),
        lambda: group(same.s(1), fail.s()) | group(same.s(), same.s()),
        lambda: group(same.s(1), fail.s()) | group(same.s() | same.s(), same.s()),
    ],
)
def test_all_that_comes_behind_a_failure_fails_with_it(composed: Callable[[], Signature[Any]]) -> None:
    for whole in both_ways(composed):
        with app.eager():
            result: Any = whole.delay()
            with pytest.raises(ValueError, match="no"):
                result.get(timeout=0)
            assert result.failed()


@pytest.mark.parametrize(
    "composed",
    [
        lambda: group(same.s(1), fail.s()) | total.s(),
        lambda: group(same.s(1), fail.s()) | total.s() | same.s(),
        lambda: chord([same.s(1), fail.s() | same.s()], total.s()),
        lambda: chord([chord([same.s(1), fail.s()], total.s()), same.s(2)], same.s()),
        lambda: chord([chord([same.s(1), fail.s()], total.s() | same.s()), same.s(2)], same.s()),
        lambda: chord([chord([fail.s()], group(same.s(), same.s())), same.s(2)], same.s() | same.s()),
        lambda: chord([same.s(1) | chord([fail.s()], total.s()) | same.s(), same.s(2)], same.s()),
    ],
)
def test_a_chord_whose_part_fails_ends_and_names_the_cause(composed: Callable[[], Signature[Any]]) -> None:
    for whole in both_ways(composed):
        with app.eager(), pytest.raises(ChordError, match=r"Dependency \S+ raised .*ValueError\('no'\)"):
            whole.delay().get(timeout=0)


def test_a_failed_body_takes_the_steps_with_it_that_its_message_names() -> None:
    """Celery's clients do not put what follows a chord into its body."""
    step = same.s().set(task_id="behind")
    with app.eager():
        app.signature(chord([fail.s()], total.s()).to_map(), chain=[step.to_map()]).apply_async()
        with pytest.raises(ChordError):
            app.AsyncResult("behind").get(timeout=0)


def test_an_errback_of_a_body_is_called_with_the_error_and_its_cause() -> None:
    with app.eager():
        header = group(same.s(1), fail.s())
        result: Any = chord(header.members, total.s().on_error(explain.s())).delay()
        with pytest.raises(ChordError):
            result.get(timeout=0)
        assert told == [(result.id, ChordError, ValueError)]
        assert [one.state for one in result.parent] == ["SUCCESS", "FAILURE"]  # no part suffers for it


def test_an_errback_that_raises_leaves_all_others_their_end() -> None:
    with app.eager():
        body = total.s().on_error(stumble.s()).on_error(complain.s())
        result: Any = chord([fail.s(), same.s(1)], body).delay()
        with pytest.raises(ChordError):
            result.get(timeout=0)
        assert told == [(result.id,), (result.id,)]
        assert [one.state for one in result.parent] == ["FAILURE", "SUCCESS"]


def test_errbacks_of_a_body_that_is_a_chain_are_those_of_the_whole() -> None:
    with app.eager():
        body = (total.s() | same.s()).on_error(explain.s())
        result = chord([fail.s()], body).delay()
        assert told == [(result.parent.id, ChordError, ValueError)]


def test_each_member_of_a_body_that_is_a_group_has_its_errbacks_called_with_the_cause() -> None:
    with app.eager():
        body = group(same.s(), same.s().on_error(complain.s()))
        body.link_error(explain.s())
        result: Any = chord([fail.s(), same.s(1)], body).delay()
        first, second = (one.id for one in result)
        assert told == [(first, ValueError, type(None)), (second, ValueError, type(None)), (second,)]


def test_an_errback_of_a_chord_is_linked_to_its_body_and_to_chords_inside() -> None:
    inner = chord([fail.s()], total.s())
    whole = chord([inner, same.s(1)], total.s())
    assert whole.link_error(complain.s()) == complain.s()
    with app.eager():
        result = whole.delay()
    assert [task_id for (task_id,) in told] == [told[0][0], result.id]


# ---- what a group is linked to -----------------------------------------------------------------------


def test_a_callback_of_a_group_follows_its_first_member_without_its_result() -> None:
    members = group(same.s(1), same.s(2))
    members.link(complain.s("done"))
    with app.eager():
        assert members.delay().get() == [1, 2]
    assert told == [("done",)]


def test_an_errback_of_a_group_follows_each_member() -> None:
    members = group(fail.s(), same.s(1), fail.s())
    assert len(members.link_error(complain.s())) == 3
    with app.eager():
        first, _, third = members.delay()
    assert told == [(first.id,), (third.id,)]


def test_links_that_were_set_as_options_of_a_group_reach_its_members() -> None:
    members = group(same.s(1), fail.s()).set(link=complain.s("done"), link_error=complain.s())
    for whole in (members, signature_from(members.to_map(), app)):
        told.clear()
        with app.eager():
            result: Any = whole.delay()
        assert sorted(told) == sorted([("done",), (result[1].id,)])


def test_an_errback_of_a_chain_reaches_the_members_of_a_group_in_it() -> None:
    with app.eager():
        chain(same.s(1), group(fail.s(), fail.s())).apply_async(link_error=complain.s())
    assert len(told) == 2


def test_a_callback_of_a_chord_does_not_replace_those_of_its_body() -> None:
    body = total.s()
    body.link(complain.s())
    whole = chord([same.s(1), same.s(2)], body)
    with app.eager():
        whole.apply_async(link=complain.s())  # the same: called once
        whole.apply_async(link=complain.si("other"))
    assert told == [(3,), (3,), ("other",)]


def test_a_group_refuses_callbacks_for_all_of_it() -> None:
    with pytest.raises(TypeError, match="a group has no callbacks: make a chord"):
        group(same.s(1)).apply_async(link=complain.s())
