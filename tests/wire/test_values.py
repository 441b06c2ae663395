import datetime
import enum
import json
import math
import socket
import uuid
from collections import OrderedDict, namedtuple
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import examples, strategies
from umbel.errors import BadMessage, BadValue, TooLarge, WireError
from umbel.wire.message import DEFAULT_LIMITS, Limits
from umbel.wire.values import SERIALIZERS, accepted_serializer, decode_json, encode_json

TYPED_VALUES = {
    "d": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "dd": datetime.date(2026, 1, 2),
    "t": datetime.time(3, 4, 5),
    "dec": Decimal("1.5"),
    "uu": uuid.UUID(int=5),
    "b": b"hi",
    "b2": b"\xff\xfe",
}


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


# ---- the typed maps (wire 1.5) ---------------------------------------------------------------------


def test_the_captured_typed_values_are_read() -> None:
    assert decode_json(examples.TYPED) == TYPED_VALUES


def test_typed_values_are_written_as_captured() -> None:
    assert json.loads(encode_json(TYPED_VALUES)) == json.loads(examples.TYPED)


@given(strategies.values)
@strategies.quick
def test_what_is_sent_is_what_arrives(value: object) -> None:
    assert decode_json(encode_json(value)) == value


@given(strategies.plain_values)
@strategies.quick
def test_plain_values_are_what_pythons_json_reads(value: object) -> None:
    assert json.loads(encode_json(value)) == value


@given(strategies.plain_values)
@strategies.quick
def test_what_pythons_json_writes_is_read(value: object) -> None:
    assert decode_json(json.dumps(value).encode()) == value


def test_types_are_written_deep_inside_anything() -> None:
    @dataclass
    class Order:
        when: datetime.date
        lines: tuple[frozenset[Decimal], ...]

    sent = {"orders": [Order(datetime.date(2026, 1, 2), (frozenset({Decimal("1.5")}),))]}
    read = {"orders": [{"when": datetime.date(2026, 1, 2), "lines": [[Decimal("1.5")]]}]}
    assert decode_json(encode_json(sent)) == read


def test_a_map_with_a_third_key_is_the_users_own() -> None:
    value = {"__type__": "date", "__value__": "2026-01-02", "more": 1}
    assert decode_json(encode_json(value)) == value


@pytest.mark.parametrize("name", ["set", "", None, 3, [], {}])
def test_an_unknown_type_is_refused(name: object) -> None:
    with pytest.raises(BadMessage, match="unknown __type__"):
        decode_json(json.dumps([{"__type__": name, "__value__": "x"}]).encode())


def test_a_type_name_written_with_escapes_is_a_type_name() -> None:
    assert decode_json(rb'{"\u005f\u005Ftype__": "bytes", "__value__": "hi"}') == b"hi"


@pytest.mark.parametrize("name", ["datetime", "date", "time", "decimal", "uuid", "bytes", "base64"])
@pytest.mark.parametrize("content", ["\u00e9!", None, 5, [], [0, [1], 2], {}, {"hex": 5}, {"hex": "zz"}])
def test_a_typed_value_with_the_wrong_content_is_refused(name: str, content: object) -> None:
    if (name, content) == ("bytes", "\u00e9!"):
        return  # any text is the content of bytes
    with pytest.raises(BadMessage, match=f"a {name} in the message or result cannot be read"):
        decode_json(json.dumps({"__type__": name, "__value__": content}).encode())


def test_a_map_that_looks_like_a_typed_value_is_not_sent() -> None:
    with pytest.raises(BadValue, match=r"value\['x'\]: a map of just __type__ and __value__"):
        encode_json({"x": {"__type__": "mine", "__value__": 1}})


# ---- what is made plain ----------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    LARGE = 3


class Name(enum.StrEnum):
    ADA = "ada"


class Point(msgspec.Struct, rename="camel", tag="point"):
    far_left: int
    unset: int | msgspec.UnsetType = msgspec.UNSET


class Packed(msgspec.Struct, array_like=True):
    first: int
    second: str


class Model(pydantic.BaseModel):
    at: datetime.date


class Text(str):
    __slots__ = ()


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ((1, (2,)), [1, [2]]),
        ({3}, [3]),
        (frozenset({3}), [3]),
        (Pair(1, 2), [1, 2]),
        ([Colour.RED, Size.LARGE, Name.ADA], ["red", 3, "ada"]),
        (Point(1), {"type": "point", "farLeft": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (Text("x"), "x"),
        (Path("/a/b"), "/a/b"),
        (datetime.timedelta(days=1, seconds=2), "P1DT2S"),
        (Packed(1, "x"), [1, "x"]),
        (Model(at=datetime.date(2026, 1, 2)), {"at": "2026-01-02"}),
        ({Colour.RED: 1, datetime.date(2026, 1, 2): 2}, {"red": 1, "2026-01-02": 2}),
        ({1: "a", 2.5: "b"}, {"1": "a", "2.5": "b"}),
        ({None: 1, True: 2, 2**70: 3}, {"null": 1, "true": 2, str(2**70): 3}),
        ({Name.ADA: 1, Text("x"): 2}, {"ada": 1, "x": 2}),
        (True, True),
        ("é\u2028", "é\u2028"),
    ],
)
def test_python_values_are_made_plain(sent: object, read: object) -> None:
    assert decode_json(encode_json(sent)) == read


def test_numbers_beyond_64_bits_arrive_whole() -> None:
    numbers = [2**63, -(2**63) - 1, 2**64, 10**4299, -(10**4298)]
    assert decode_json(encode_json(numbers)) == numbers


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused_by_path(value: float) -> None:
    with pytest.raises(BadValue, match=rf"kwargs\['x'\]\[1\]: json has no {value}"):
        encode_json({"x": [1.5, value]}, root="kwargs")


def test_what_cannot_be_sent_is_refused_by_path() -> None:
    with socket.socket() as unsendable, pytest.raises(BadValue) as caught:
        encode_json({"x": [0, 1, 2, unsendable]}, root="kwargs")
    assert str(caught.value) == (
        "kwargs['x'][3]: json cannot send a <class 'socket.socket'>; "
        "send plain values, or serializer='pickle' with 'pickle' in accept_content"
    )


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({(1, 2): 3}, r"value\[\(1, 2\)\]: a key must be text or a number, not a <class 'tuple'>"),
        ({math.nan: 3}, r"value\[nan\]: a key must be text"),
        ({1: "a", "1": "b"}, "two keys of the map become the same text"),
        (["\ud800"], r"value\[0\]: '\\ud800' is not Unicode"),
        ({"\ud800": 1}, r"value\['\\ud800'\]: '\\ud800' is not Unicode"),
        (object, "cannot send a <class 'type'>"),
        (Colour, "cannot send a <class 'enum.EnumType'>"),
        (range(3), "cannot send a <class 'range'>"),
    ],
)
def test_a_value_without_a_form_is_refused(value: object, problem: str) -> None:
    with pytest.raises(BadValue, match=problem):
        encode_json(value)


# ---- limits ----------------------------------------------------------------------------------------


@given(strategies.any_bytes)
@strategies.quick
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for serializer in ("json", "msgpack"):
        with suppress(BadMessage, TooLarge):
            SERIALIZERS[serializer].decode(data, DEFAULT_LIMITS)


@given(strategies.values, st.integers(0, 6))
@strategies.quick
def test_what_the_sender_lets_pass_the_reader_does_too(value: object, depth_max: int) -> None:
    limits = Limits(depth_max=depth_max)
    try:
        data = encode_json(value, limits=limits)
    except TooLarge:
        with pytest.raises(TooLarge):
            decode_json(encode_json(value), limits=limits)
    else:
        assert decode_json(data, limits=limits) == value


def test_nesting_is_allowed_up_to_the_limit() -> None:
    assert decode_json(encode_json(nest(64))) == nest(64)
    brackets_in_text = ["[{" * 100, nest(62)]
    assert decode_json(encode_json(brackets_in_text)) == brackets_in_text


@pytest.mark.parametrize("depth", [65, 900, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"x":', b"}")])
def test_nesting_beyond_the_limit_is_refused(depth: int, opening: bytes, closing: bytes) -> None:
    data = opening * depth + b"1" + closing * depth
    with pytest.raises(TooLarge, match="JSON is nested deeper than the limit of 64 levels"):
        decode_json(data)
    with pytest.raises(TooLarge, match="limit of 64 levels"):
        decode_json(b'[{"__type__": "bytes", "__value__": "hi"},' + data + b"]")


def test_nesting_beyond_the_limit_is_not_sent() -> None:
    endless: list[Any] = [datetime.date(2026, 1, 2)]
    endless.append(endless)
    for value in (nest(65), {"x": nest(64)}, endless):
        with pytest.raises(TooLarge, match="args is nested deeper than the limit of 64 levels"):
            encode_json(value, root="args")


def test_a_number_too_long_is_refused_both_ways() -> None:
    with pytest.raises(TooLarge, match="a number in JSON has 4301 digits; the limit is 4300"):
        decode_json(b"[1, " + b"1" * 4301 + b"]")
    with pytest.raises(TooLarge, match="a number in JSON has 4301 digits; the limit is 4300"):
        decode_json(b"-" + b"1" * 4300)
    with pytest.raises(TooLarge, match=r"the number at value\[0\] has 4300 digits"):
        encode_json([-(10**4299)])
    with pytest.raises(TooLarge, match=r"the number at value\[1\] has 4301 digits; the limit is 4300"):
        encode_json([1, 10**4300])
    with pytest.raises(TooLarge, match="has 5000 digits"):
        decode_json(b'{"__type__": "decimal", "__value__": "' + b"1" * 5000 + b'"}')
    with pytest.raises(TooLarge, match="the decimal at value has 5000 digits"):
        encode_json(Decimal("1" * 5000))


def test_the_limit_of_digits_can_be_lowered() -> None:
    limits = Limits(number_digits_max=5)
    assert decode_json(b'[99999, -9999, "1234567", 1.2345678]', limits=limits)[0] == 99999
    assert encode_json([99999, 1.2345678], limits=limits)
    for data in (b"100000", b"[-99999]", b'{"x": 100000}'):
        with pytest.raises(TooLarge, match="6 digits; the limit is 5"):
            decode_json(data, limits=limits)


def test_text_of_many_digits_is_only_text() -> None:
    digits = "1" * 10_000
    assert decode_json(encode_json([digits])) == [digits]
    with pytest.raises(BadMessage, match="malformed"):
        decode_json(f'["{digits}", oh]'.encode())


def test_size_is_refused_both_ways() -> None:
    limits = Limits(size_max_bytes=100)
    with pytest.raises(TooLarge, match="JSON has 102 bytes; the limit is 100"):
        decode_json(b'"' + b"x" * 100 + b'"', limits=limits)
    with pytest.raises(TooLarge, match="args has 102 bytes; the limit is 100"):
        encode_json("x" * 100, root="args", limits=limits)


@pytest.mark.parametrize(
    "data",
    [b"", b"nope", b"[1", b"1 2", b'"\xff"', rb'"\ud800"', b"NaN", b"1e999", b"\xef\xbb\xbf1", b"\x00"],
)
def test_what_is_not_json_is_refused_and_shown(data: bytes) -> None:
    with pytest.raises(BadMessage, match="JSON cannot be decoded"):
        decode_json(data)


# ---- the other serializers -------------------------------------------------------------------------


@given(strategies.msgpack_values)
@strategies.quick
def test_msgpack_carries_plain_values_and_bytes(value: object) -> None:
    msgpack = SERIALIZERS["msgpack"]
    assert msgpack.decode(msgpack.encode(value, "value"), DEFAULT_LIMITS) == value


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 2), 2**64, uuid.UUID(int=5), Decimal(1)])
def test_msgpack_refuses_what_its_readers_would_not_understand(value: object) -> None:
    with pytest.raises(BadValue, match=r"value\[0\]: msgpack cannot"):
        SERIALIZERS["msgpack"].encode([value], "value")


def test_msgpack_has_the_same_limits() -> None:
    msgpack = SERIALIZERS["msgpack"]
    assert msgpack.decode(msgpack.encode(nest(64), "value"), DEFAULT_LIMITS) == nest(64)
    with pytest.raises(TooLarge, match="limit of 64 levels"):
        msgpack.encode(nest(65), "value")
    for depth in (65, 100_000):
        with pytest.raises(TooLarge, match="limit of 64 levels"):
            msgpack.decode(b"\x91" * depth + b"\x01", DEFAULT_LIMITS)
    with pytest.raises(TooLarge, match="has 5 bytes; the limit is 4"):
        msgpack.decode(b"\xa4abcd", Limits(size_max_bytes=4))


def test_pickle_keeps_the_very_types() -> None:
    pickle = SERIALIZERS["pickle"]
    value = (Colour.RED, {1: {2}}, datetime.timedelta(1))
    assert pickle.decode(pickle.encode(value, "value"), DEFAULT_LIMITS) == value


class Explosive:
    def __reduce__(self) -> str:
        raise ZeroDivisionError("not today")

    @staticmethod
    def explode() -> None:
        raise LookupError("on arrival")


class Delayed:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return Explosive.explode, ()


def test_pickle_errors_of_any_kind_are_wire_errors() -> None:
    pickle = SERIALIZERS["pickle"]
    with pytest.raises(BadValue, match="args cannot be pickled: ZeroDivisionError"):
        pickle.encode(Explosive(), "args")
    with pytest.raises(BadMessage, match="LookupError"):
        pickle.decode(pickle.encode(Delayed(), "args"), DEFAULT_LIMITS)
    with pytest.raises(WireError):
        pickle.decode(b"\x80\x04nonsense", DEFAULT_LIMITS)


@pytest.mark.parametrize("accept", [("json", "pickle"), ("application/x-python-serialize",), {"pickle"}])
def test_a_content_type_is_accepted_by_its_name_or_itself(accept: tuple[str, ...]) -> None:
    assert accepted_serializer("application/x-python-serialize", accept) is SERIALIZERS["pickle"]


def test_a_content_type_that_is_not_accepted_names_the_setting() -> None:
    with pytest.raises(
        BadMessage, match=r"'application/x-python-serialize' is not accepted.*'pickle'.*accept_content"
    ):
        accepted_serializer("application/x-python-serialize", ("json",))
    with pytest.raises(BadMessage, match="'application/x-yaml' is unknown"):
        accepted_serializer("application/x-yaml", ("json", "yaml"))
