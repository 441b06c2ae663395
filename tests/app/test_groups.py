"""Groups, chords, maps and chunks, in eager mode: composing, results, failures, the wire form."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from umbel import App, GroupResult, chain, chord, group
from umbel.app.canvas.group import Chord
from umbel.app.canvas.signature import signature_from
from umbel.errors import ChordError, ConfigurationError, ResultTimeout

app = App("groups", broker="sqlite:////nowhere/groups.db")


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def same(values: list[int]) -> list[int]:
    return values


@app.task
def fail() -> None:
    raise ValueError("no")


seen: list[str] = []


@app.task
def complain(task_id: str) -> None:
    seen.append(task_id)


@pytest.mark.parametrize(
    ("composed", "value"),
    [
        (lambda: group(add.s(n, n) for n in range(4)), [0, 2, 4, 6]),
        (lambda: group(add.s(1, 1), group(add.s(2, 2), add.s(3, 3))), [2, 4, 6]),
        (lambda: chord([add.s(n, n) for n in range(4)], total.s()), 12),
        (lambda: group(add.s(n, n) for n in range(4)) | total.s(), 12),
        (lambda: group(add.s(n, n) for n in range(4)) | total.s() | add.s(100), 112),
        (lambda: add.s(1, 2) | group(add.s(10), add.s(20)), [13, 23]),
        (lambda: add.s(1, 2) | group(add.s(10), add.s(20)) | total.s(), 36),
        (lambda: chord([add.s(1, 1) | add.s(5), add.s(2, 2)], total.s()), 11),
        (lambda: chord([chord([add.s(1, 1), add.s(2, 2)], total.s()), add.s(3, 3)], total.s()), 12),
        (
            lambda: group(add.s(1, 1), add.s(1, 2) | group(add.s(10), add.s(20)), add.s(2, 2)),
            [2, [13, 23], 4],
        ),
        (
            lambda: chord([add.s(1, 1), add.s(1, 2) | group(add.s(10), add.s(20)), add.s(2, 2)], same.s()),
            [2, [13, 23], 4],
        ),
        (lambda: chord([chord([add.s(1, 1)], total.s() | add.s(1)), add.s(3, 3)], same.s()), [3, 6]),
        (lambda: chord([chord([add.s(1, 1)], same.s() | group(same.s(), same.s()))], same.s()), [[[2], [2]]]),
        (lambda: add.s(1, 2) | group(add.s(10)), 13),
        (lambda: chain(group(add.s(1, 2)), add.s(1)), 4),
        (lambda: group(add.s(1, 2)) | same.s(), [3]),
        (lambda: add.s(1, 2) | group() | add.s(1), 4),
        (lambda: group(add.s(1, 2) | group(add.s(10), add.s(20))), [13, 23]),
        (lambda: chord([], total.s()), 0),
        (lambda: chain(chord([add.s(1, 1)], total.s()), add.s(1)), 3),
        (lambda: add.starmap([(1, 2), (3, 4)]), [3, 7]),
        (lambda: total.map([[1, 2], [3]]), [3, 3]),
        (lambda: add.chunks([(n, n) for n in range(5)], 2), [[0, 2], [4, 6], [8]]),
    ],
)
def test_compositions_give_what_they_say(composed: Any, value: object) -> None:
    with app.eager():
        assert composed().delay().get() == value
        assert signature_from(composed().to_map(), app).delay().get() == value


def test_a_failed_part_fails_the_body_and_calls_its_errback() -> None:
    seen.clear()
    with app.eager():
        body = total.s()
        body.link_error(complain.s())
        result = chord([add.s(1, 1), fail.si()], body).delay()
        with pytest.raises(ChordError, match=r"raised ValueError\('no'\)"):
            result.get()
        assert seen == [result.id]


def test_a_part_whose_chain_failed_before_its_end_fails_the_body_too() -> None:
    with app.eager():
        result = chord([add.s(1, 1), fail.si() | add.s(3)], total.s()).delay()
        with pytest.raises(ChordError):
            result.get()


def test_the_results_of_a_group_are_told_apart_and_together() -> None:
    with app.eager():
        result = group(add.s(1, 1), fail.si(), add.s(2, 2)).delay()
        assert [one.state for one in result] == ["SUCCESS", "FAILURE", "SUCCESS"]  # type: ignore[union-attr]
        assert result.failed()
        assert not result.successful()
        assert result.completed_count() == 2
        with pytest.raises(ValueError, match="no"):
            result.get()
        first, second, third = result.get(propagate=False)
        assert (first, third) == (2, 4)
        assert isinstance(second, ValueError)
        result.forget()
        with pytest.raises(ResultTimeout):
            result.get(timeout=0)


def test_the_results_of_a_group_outlive_eager_mode() -> None:
    with app.eager():
        result, other = (group(add.s(1, 1), add.s(2, 2)).delay() for _ in range(2))
    assert result.get(timeout=0) == [2, 4]
    assert asyncio.run(other.aget(timeout=0)) == [2, 4]


def test_a_member_whose_result_is_ignored_is_not_waited_for() -> None:
    with app.eager():
        result = group(add.s(1, 1).set(ignore_result=True), add.s(2, 2)).delay()
        assert result.get(timeout=0) == [None, 4]


def test_a_member_that_failed_is_told_before_the_others_are_waited_for() -> None:
    with app.eager():
        result = group(fail.si(), add.s(2, 2)).delay()
        pending = GroupResult("g", [app.AsyncResult("never sent"), *result], app=app)
        with pytest.raises(ValueError, match="no"):
            pending.get()
        with pytest.raises(ResultTimeout, match="1 of 3"):
            pending.get(propagate=False)


def test_members_carry_the_group_and_their_place_and_parts_the_body() -> None:
    with app.eager():
        composed = chord([add.s(1, 1), add.s(2, 2) | add.s(3)], total.s())
        composed.freeze()
        composed.prepare()
    plain, chained = composed.header.members
    group_id = composed.header.options["task_id"]
    assert (plain.options["group_id"], plain.options["group_index"]) == (group_id, 0)
    last = chained.steps[-1]  # type: ignore[attr-defined]
    assert (last.options["group_id"], last.options["group_index"]) == (group_id, 1)
    assert plain.options["chord"]["task"] == last.options["chord"]["task"] == total.name
    assert plain.options["chord"]["options"]["group_id"] == group_id  # as Celery has it
    assert "chord" not in chained.steps[0].options  # type: ignore[attr-defined]


def test_a_chord_sent_by_celery_is_understood() -> None:
    # Captured: wire-protocol 1.8
    captured = {
        "task": "celery.chord",
        "args": [],
        "kwargs": {
            "kwargs": {},
            "header": [
                {
                    "task": add.name,
                    "args": [1, 2],
                    "kwargs": {},
                    "options": {},
                    "subtask_type": None,
                    "immutable": False,
                }
            ],
            "body": {
                "task": total.name,
                "args": [],
                "kwargs": {},
                "options": {},
                "subtask_type": None,
                "immutable": False,
            },
        },
        "options": {},
        "subtask_type": "chord",
        "immutable": False,
    }
    found = app.signature(captured)
    assert isinstance(found, Chord)
    with app.eager():
        assert found.delay().get() == 3


def test_chunks_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        add.chunks([(1, 2)], 0)


@pytest.mark.parametrize(
    "part",
    [
        lambda: fail.si() | group(add.si(1, 1), add.si(2, 2)),
        lambda: fail.si() | group(add.si(1, 1) | add.s(1), add.si(2, 2)),
        lambda: add.s(1, 1) | group(fail.si(), add.s(2)),
        lambda: fail.si() | group(add.si(1, 1), add.si(2, 2)) | total.s(),
    ],
)
def test_a_chord_fails_with_a_part_that_is_a_chain_to_several_tasks(part: Any) -> None:
    with app.eager():
        result = chord([add.s(1, 1), part()], total.s()).delay()
        with pytest.raises(ChordError, match=r"raised ValueError\('no'\)"):
            result.get(timeout=1)


EMPTY = [
    group,
    lambda: group([]),
    lambda: group(iter(())),
    lambda: group(group(), chain()),
    lambda: group() | group(),
    lambda: chain(group()),
    lambda: chord([], group()),
]


@pytest.mark.parametrize("compose", EMPTY)
def test_a_group_without_members_needs_no_app_and_is_done_at_once(compose: Any) -> None:
    """As Celery has it: `tests/interop/test_workflows.py` compares the two."""
    results = [compose().delay(), compose().apply_async((1,), countdown=5), compose().apply(), compose()()]
    results += [asyncio.run(compose().adelay()), asyncio.run(compose().aapply_async())]
    for result in results:
        assert isinstance(result, GroupResult) and result
        assert (result.get(timeout=0), list(result), result.completed_count()) == ([], [], 0)
        assert (result.ready(), result.successful(), result.failed()) == (True, True, False)
        assert asyncio.run(result.aget(timeout=0)) == [] and asyncio.run(result.aready())
        result.revoke()
        result.forget()
        asyncio.run(result.arevoke())
        asyncio.run(result.aforget())
        assert result.as_tuple()[1] == []
        with pytest.raises(ConfigurationError, match="has no members"):
            result.save()
    assert len({result.id for result in results}) == len(results)


def test_an_empty_group_among_calls_sends_what_the_others_send(tmp_path: Path) -> None:
    here = App("here", broker=f"sqlite:///{tmp_path}/queue.db")
    one = here.task(name="one")(lambda: None)
    sent: list[Any] = list(here.send_many([group(), group(one.s(), group()), one.s()]))
    assert sent[0].get(timeout=0) == [] and len(sent[1]) == 1
    body = chord([one.s(), one.s()], group()).delay()
    assert body.get(timeout=0) == [] and len(body.parent) == 2
    assert here.control.purge() == 4
    here.close()


def test_a_chord_with_an_empty_body_is_an_empty_list_to_an_outer_one() -> None:
    with app.eager():
        inner = chord([same.s([1]), same.s([2])], group())
        assert chord([add.s(1, 2), inner], same.s()).delay().get() == [3, []]


def test_a_callback_that_is_an_empty_group_sends_nothing() -> None:
    with app.eager():
        assert add.s(1, 2).set(link=group()).delay().get() == 3
        assert (add.s(1, 2) | group() | add.s(5)).delay().get() == 8
