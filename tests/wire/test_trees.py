"""Typed values as trees: the quick way and the thorough way write the same."""

import datetime
import enum
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies
from umbel.errors import BadValue, TooLarge
from umbel.wire.typed import to_tree
from umbel.wire.values import decode_json, encode_json


class Colour(enum.Enum):
    RED = "red"


class Text(str):
    pass


@dataclass
class Inner:
    key: UUID
    took: datetime.timedelta


@dataclass
class Outer:
    inner: list[Inner]
    colours: set[Colour]
    path: Path
    raw: bytes
    price: Decimal


inner = st.builds(Inner, st.uuids(), st.timedeltas())
outer = st.builds(
    Outer,
    st.lists(inner, max_size=2),
    st.sets(st.sampled_from(Colour)),
    strategies.text.map(Path),
    st.binary(max_size=5),
    st.decimals(allow_nan=False),
)


@given(strategies.typed | outer | st.dictionaries(strategies.text, outer, max_size=2))
@strategies.quick
def test_a_tree_is_written_as_the_value_itself_is(value: Any) -> None:
    assert decode_json(encode_json(to_tree({"value": value}))) == decode_json(encode_json({"value": value}))


@pytest.mark.parametrize(
    ("value", "tree"),
    [
        ({datetime.date(2026, 1, 2): UUID(int=1)}, {"2026-01-02": UUID(int=1)}),
        (Text("x"), "x"),
        ({None: 1, True: Text("y")}, {"null": 1, "true": "y"}),
    ],
)
def test_what_msgspec_cannot_write_is_written_too(value: Any, tree: Any) -> None:
    assert msgspec.to_builtins(to_tree({"value": value}), builtin_types=(UUID,)) == {"value": tree}


def test_without_tags_all_but_bytes_is_text() -> None:
    value = {"at": datetime.date(2026, 1, 2), "key": UUID(int=1), "price": Decimal("1.50"), "raw": b"\xff"}
    text = {"at": "2026-01-02", "key": str(UUID(int=1)), "price": "1.50", "raw": b"\xff"}
    assert to_tree(value, tags=False) == text
    assert to_tree({"value": {UUID(int=1): value}}, tags=False) == {"value": {str(UUID(int=1)): text}}


def test_what_cannot_be_sent_is_named_with_its_place() -> None:
    with pytest.raises(BadValue, match=r"order\['inner'\]\[0\]: JSON cannot send a <class 'object'>"):
        to_tree({"order": {"inner": [object()]}})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TooLarge):
        to_tree({"order": endless})
