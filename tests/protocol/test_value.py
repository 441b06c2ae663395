"""A value behaves like a frozen dataclass with slots."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest

from umbel.protocol.machine import Value

T = TypeVar("T")


class Claim(Value):
    node: str
    term: int = 7
    why: str | None = None


class Ack(Value):
    node: str
    term: int = 7
    why: str | None = None


class Nothing(Value):
    """Without fields."""


class Holding(Value, Generic[T]):
    held: tuple[T, ...]

    @property
    def count(self) -> int:
        return len(self.held)


def test_fields_are_given_by_place_or_name_and_have_defaults() -> None:
    assert Claim("a") == Claim(node="a", term=7, why=None) == Claim("a", 7)
    assert Claim("a").replaced(term=8) == Claim("a", 8)
    assert Holding((1, 2)).count == 2


@pytest.mark.parametrize("given", [{}, {"node": "a", "other": 1}])
def test_a_field_that_is_missing_or_unknown_is_refused(given: dict[str, Any]) -> None:
    for _ in range(2):  # the first instance compiles what the second uses
        with pytest.raises(TypeError, match=r"node|other"):
            Claim(**given)


def test_values_are_equal_by_content_within_their_class() -> None:
    assert Claim("a", 1) != Claim("a", 2)
    assert Claim("a", 1) != Ack("a", 1)
    assert Claim("a", 1) != ("a", 1, None)
    assert {Claim("a", 1), Claim("a", 1), Ack("a", 1)} == {Claim("a", 1), Ack("a", 1)}
    assert Nothing() == Nothing() != Holding(())


def test_a_value_cannot_be_changed() -> None:
    claim: Any = Claim("a")
    with pytest.raises(AttributeError, match="term"):
        claim.term = 8
    with pytest.raises(AttributeError, match="term"):
        del claim.term
    with pytest.raises(AttributeError, match="more"):
        claim.more = 1
    assert not hasattr(claim, "__dict__")


def test_a_value_is_shown_as_a_dataclass_is() -> None:
    @dataclass(frozen=True)
    class Shown:
        node: str
        term: int = 7
        why: str | None = None

    assert repr(Claim("a")) == repr(Shown("a")).rpartition(".")[2].replace("Shown", "Claim")
    assert repr(Nothing()) == "Nothing()"


def test_a_value_is_matched_by_place_copied_and_pickled() -> None:
    match Claim("a", 8):
        case Ack():
            pytest.fail("another class")
        case Claim(node, term):
            assert (node, term) == ("a", 8)
    claim = Claim("a", 8)
    assert copy.deepcopy(claim) == claim == pickle.loads(pickle.dumps(claim))
