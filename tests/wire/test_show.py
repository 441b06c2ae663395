from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies
from umbel.wire.show import brief, show_args, show_kwargs, show_value


class Broken:
    def __repr__(self) -> str:
        raise ZeroDivisionError


class Wrong:
    def __repr__(self) -> str:
        return 5  # type: ignore[return-value]


class NotUnicode:
    def __repr__(self) -> str:
        return "\ud800é"


def test_args_and_kwargs_are_shown_as_python_writes_them() -> None:  # wire 1.4
    assert show_args([2]) == "(2,)"
    assert show_args([]) == "()"
    assert show_args((1, "a", None, 2.5)) == "(1, 'a', None, 2.5)"
    assert show_kwargs({"y": 3}) == "{'y': 3}"
    assert show_kwargs({}) == "{}"
    assert show_value(5) == "5"


flat = strategies.atoms | st.binary(max_size=5)
two_levels = st.lists(
    flat | st.lists(flat, max_size=2) | st.tuples(flat) | st.frozensets(st.integers(), max_size=2), max_size=3
)


@given(two_levels)
@strategies.quick
def test_what_is_short_is_shown_whole(value: list[Any]) -> None:
    if len(repr(value)) < 1000:
        assert show_value(value) == repr(value)
        assert show_args(value) == repr(tuple(value))
        assert show_kwargs({"x": value}) == repr({"x": value})


def test_deep_values_are_cut_at_the_third_level() -> None:
    assert show_value([[[[1]]]]) == "[[[[...]]]]"
    assert show_value({"a": {"b": {"c": {"d": 1}}}}) == "{'a': {'b': {'c': {...}}}}"
    assert show_value([[[[]]]]) == "[[[[]]]]"


@pytest.mark.parametrize(
    "value",
    [
        "x" * 5000,
        b"\xff" * 5000,
        list(range(5000)),
        {n: n for n in range(5000)},
        ["x" * 600] * 3,
        {"x" * 5000: 1},
    ],
)
def test_long_values_are_cut(value: Any) -> None:
    for shown in (show_value(value), show_args([value]), show_kwargs({"x": value})):
        assert 1000 < len(shown) <= 1035  # as long as Celery's longest
        assert shown.endswith("...")


def test_a_long_list_is_not_walked_to_its_end() -> None:
    class Reluctant:
        shown = 0

        def __repr__(self) -> str:
            Reluctant.shown += 1
            return "reluctant"

    show_value([Reluctant()] * 1_000_000)
    show_args([Reluctant()] * 1_000_000)
    assert Reluctant.shown < 300


def test_a_value_whose_repr_raises_is_named_by_its_type() -> None:
    assert show_args([1, Broken()]) == "(1, <Broken that has no repr>)"
    assert show_kwargs({"x": [Wrong()]}) == "{'x': [<Wrong that has no repr>]}"
    assert show_value(OrderedDict(x=Broken())) == "<OrderedDict that has no repr>"
    assert show_value(10**5000) == "<int that has no repr>"
    assert show_args([10**5000, 1]) == "(<int that has no repr>, 1)"


def test_what_is_shown_can_always_be_sent() -> None:
    for value in (NotUnicode(), "\ud800", ["\ud800"], {"\ud800": "\ud800"}):
        assert show_value(value).encode("utf-8")
        assert show_kwargs({"x": value}).encode("utf-8")


def test_a_value_that_holds_itself_is_shown() -> None:
    value: list[Any] = [1]
    value.append(value)
    assert show_value(value) == "[1, [1, [1, [...]]]]"


def test_errors_show_one_line_of_a_value() -> None:
    assert brief("x") == "'x'"
    assert len(brief(["x" * 1000])) <= 103
    assert "\n" not in brief("a\nb")
