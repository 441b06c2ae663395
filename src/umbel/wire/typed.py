"""Typed values: Python values that JSON cannot represent, as maps that state their type, and back.

    datetime(2026, 1, 2)  <->  {"__type__": "datetime", "__value__": "2026-01-02T00:00:00"}

The forms were captured from Celery (wire 1.5). A map is read as a typed value only if it has exactly these
two keys; any other map belongs to the user.

`Lowering` rewrites values that are not plain into plain ones before they are encoded, and refuses values that
would not arrive as they were sent. `to_tree` and `from_tree` convert values of annotated types into plain
containers and back:

    Order(7, {Path("a")}, due)  <->  {"number": 7, "files": ["a"], "due": due}

A tree is the input of a serializer: maps, lists and plain values, and those that JSON tags. msgpack has no
tags, so there the tagged values are text, and the reader knows the type. Both directions are compiled code of
msgspec. A value that msgspec cannot write is rewritten by the lowering below, which defines the form of every
value.
"""

import base64
import datetime
import enum
import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from decimal import Decimal
from functools import partial
from pathlib import PurePath
from typing import Any, NoReturn

import msgspec

from umbel.errors import BadMessage, BadValue
from umbel.wire.message import DEFAULT_LIMITS, Limits, too_deep, too_long_a_number
from umbel.wire.show import attempt, brief

# ---- typed -----------------------------------------------------------------------------------------

TYPE_KEY = "__type__"
VALUE_KEY = "__value__"


def tag(value: object) -> dict[str, Any] | None:
    """Return the map that represents the value, or None if its type is not tagged."""
    writer = _WRITERS.get(type(value))
    if writer is not None:
        return writer(value)
    for kind, writer in _WRITERS.items():
        if isinstance(value, kind):
            return writer(value)
    return None


def as_text(value: object) -> str | None:
    """Return the text of a value of a tagged type, for readers that know its type; None for other types."""
    match value:
        case datetime.date() | datetime.time():
            return value.isoformat()
        case Decimal() | uuid.UUID():
            return str(value)
    return None


def is_tagged(value: dict[str, Any]) -> bool:
    """Return whether a map has exactly the two keys of a typed value."""
    return len(value) == 2 and TYPE_KEY in value and VALUE_KEY in value


def restore(tree: Any, limits: Limits) -> Any:
    """Replace the tagged maps inside a decoded tree by the values that they represent, in place.

    The caller has checked the depth of the tree.
    """
    kind = type(tree)
    if kind is dict:
        if is_tagged(tree):
            return _untag(tree[TYPE_KEY], tree[VALUE_KEY], limits)
        for key, item in tree.items():
            if type(item) is dict or type(item) is list:
                tree[key] = restore(item, limits)
    elif kind is list:
        for index, item in enumerate(tree):
            if type(item) is dict or type(item) is list:
                tree[index] = restore(item, limits)
    return tree


def _write_moment(value: datetime.datetime) -> dict[str, Any]:
    return {TYPE_KEY: "datetime", VALUE_KEY: value.isoformat()}


def _write_date(value: datetime.date) -> dict[str, Any]:
    return {TYPE_KEY: "date", VALUE_KEY: value.isoformat()}


def _write_time(value: datetime.time) -> dict[str, Any]:
    return {TYPE_KEY: "time", VALUE_KEY: value.isoformat()}


def _write_decimal(value: Decimal) -> dict[str, Any]:
    return {TYPE_KEY: "decimal", VALUE_KEY: str(value)}


def _write_uuid(value: uuid.UUID) -> dict[str, Any]:
    return {TYPE_KEY: "uuid", VALUE_KEY: {"hex": value.hex}}


def _write_bytes(value: bytes) -> dict[str, Any]:
    try:
        return {TYPE_KEY: "bytes", VALUE_KEY: value.decode("utf-8")}
    except UnicodeDecodeError:
        return {TYPE_KEY: "base64", VALUE_KEY: base64.b64encode(value).decode("ascii")}


_WRITERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    datetime.datetime: _write_moment,  # before date, of which it is a subclass
    datetime.date: _write_date,
    datetime.time: _write_time,
    Decimal: _write_decimal,
    uuid.UUID: _write_uuid,
    bytes: _write_bytes,
}

TAGGED_TYPES = frozenset(_WRITERS)


def _untag(name: object, content: Any, limits: Limits) -> Any:
    reader = _READERS.get(name) if isinstance(name, str) else None
    if reader is None:
        raise BadMessage(
            f"unknown {TYPE_KEY} {name!r} in the message or result; "
            f"its sender must use one of those that Umbel reads: {', '.join(_READERS)}"
        )
    if name == "decimal" and isinstance(content, str) and len(content) > limits.number_digits_max:
        raise too_long_a_number("a decimal", len(content), limits)
    try:
        return reader(content)
    # Decimal raises an ArithmeticError; content of the wrong type raises one of the others.
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise BadMessage(
            f"a {name} in the message or result cannot be read: {brief(content)} ({error})"
        ) from error


def _read_bytes(content: str) -> bytes:
    return content.encode("utf-8")


def _read_base64(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _read_decimal(content: str) -> Decimal:
    if not isinstance(content, str):  # Decimal would accept a list of digits too
        raise TypeError("a decimal must be written as text")
    return Decimal(content)


def _read_uuid(content: dict[str, str]) -> uuid.UUID:
    return uuid.UUID(hex=content["hex"])


_READERS: dict[str, Callable[[Any], Any]] = {
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "decimal": _read_decimal,
    "uuid": _read_uuid,
    "bytes": _read_bytes,
    "base64": _read_base64,
}


# ---- json lowering ---------------------------------------------------------------------------------
#
# Without lowering, msgspec would write a datetime as bare text, bytes as base64, and NaN as null: no error,
# but not what a Celery peer reads back. `Lowering` rewrites such a value as the protocol requires, or refuses
# it with the path that leads to it.
#
# Lowering loses types: a tuple, a set and a list arrive as lists; an enum as its value; a dataclass, a
# `msgspec.Struct` and a model of pydantic as maps; a path and a timedelta as text. A task that annotates its
# parameters gets their types back (section on trees).

SIGNED_64_MIN, UNSIGNED_64_MAX = -(2**63), 2**64 - 1
BITS_PER_DIGIT = math.log2(10)

Path = tuple[Any, object]
"""The place of a value inside the data: (path of its container, key). At the root: (None, name)."""


class Lowering(msgspec.Struct, frozen=True):
    """Rewrites values for one serializer. `tags`: it supports typed maps, and only finite numbers.

    Without tags (msgpack) the serializer writes bytes and NaN itself, and integers are limited to 64 bits.
    """

    serializer: str
    tags: bool
    limits: Limits

    def lower(self, value: Any, path: Path, levels: int) -> Any:
        """Return the rewritten value, at most `levels` deep; `path` is for errors. Raises BadValue or
        TooLarge.
        """
        kind = type(value)
        if kind is str:
            return value if value.isascii() else self._text(value, path)
        if kind is int:
            return value if SIGNED_64_MIN <= value <= UNSIGNED_64_MAX else self._whole_number(value, path)
        if kind is bool or value is None:
            return value
        if kind is dict:
            return self._map(value, path, levels)
        if kind is list or kind is tuple:
            return self._list(value, path, levels)
        if kind in TAGGED_TYPES and self.tags:
            return self._tag(value, path, levels)
        return self._lower_rare(value, path, levels)

    def _lower_rare(self, value: object, path: Path, levels: int) -> Any:
        match value:
            case float():
                return self._float(value, path)
            case enum.Enum():  # before the plain types, because some enums are subclasses of them
                return self.lower(value.value, path, levels)
            case str():
                return self._text(value, path)
            case int():
                return self._whole_number(value, path)
            case bytes() if not self.tags:
                return bytes(value)
            case dict():
                return self._map(value, path, levels)
            case list() | tuple() | set() | frozenset():
                return self._list(value, path, levels)
            case PurePath():
                return self._text(str(value), path)
            case timedelta():
                return msgspec.to_builtins(value)  # ISO 8601, as in pydantic
            case msgspec.Struct():
                return self.lower(_struct_fields(value), path, levels)
        if (serializer := getattr(type(value), "__pydantic_serializer__", None)) is not None:
            dump = partial(serializer.to_python, **PYDANTIC_FORM)
            return self.lower(attempt(dump, value, lambda error: _refuse(path, error)), path, levels)
        if is_dataclass(value) and not isinstance(value, type):
            shallow = {field.name: getattr(value, field.name) for field in fields(value)}
            return self._map(shallow, path, levels)
        if (as_json := getattr(type(value), "__json__", None)) is not None:  # for example a signature
            return self.lower(attempt(as_json, value, lambda error: _refuse(path, error)), path, levels)
        return self._tag(value, path, levels)

    def _check_room(self, path: Path, levels: int) -> None:
        if levels <= 0:
            raise too_deep(_root(path), self.limits)

    def _text(self, value: str, path: Path) -> str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadValue(f"{show_path(path)}: {brief(value)} is not Unicode ({error.reason})") from error
        return str.__str__(value)  # only the text of an instance of a subclass is sent

    def _whole_number(self, value: int, path: Path) -> int:
        number = int.__int__(value)
        if not self.tags and not SIGNED_64_MIN <= number <= UNSIGNED_64_MAX:
            raise BadValue(
                f"{show_path(path)}: {self.serializer} cannot carry a number of more than 64 bits; "
                "use serializer='json'"
            )
        # By bits first, because counting the digits of a large number is slow.
        digits = int(number.bit_length() / BITS_PER_DIGIT) + 1
        if digits >= self.limits.number_digits_max - 1 and not is_short_enough(number, self.limits):
            raise too_long_a_number(f"the number at {show_path(path)}", digits, self.limits)
        return number

    def _float(self, value: float, path: Path) -> float:
        number = float.__float__(value)
        if self.tags and not math.isfinite(number):
            raise BadValue(f"{show_path(path)}: {self.serializer} has no {number}; send None or text instead")
        return number

    def _list(self, value: Iterable[Any], path: Path, levels: int) -> list[Any]:
        self._check_room(path, levels)
        return [self.lower(item, (path, index), levels - 1) for index, item in enumerate(value)]

    def _map(self, value: dict[Any, Any], path: Path, levels: int) -> dict[str, Any]:
        self._check_room(path, levels)
        if self.tags and is_tagged(value):
            raise BadValue(
                f"{show_path(path)}: a map of just {TYPE_KEY} and {VALUE_KEY} would be read "
                "as a typed value; add another key"
            )
        lowered = {
            self._key(key, path): self.lower(item, (path, key), levels - 1) for key, item in value.items()
        }
        if len(lowered) != len(value):
            raise BadValue(
                f"{show_path(path)}: two keys of the map become the same text, as 1 and '1' do; rename one"
            )
        return lowered

    def _key(self, key: object, path: Path) -> str:
        """Return the text that Python's json makes from a key."""
        match key:
            case str():
                return self._text(key, (path, key))
            case None:
                return "null"
            case bool():
                return "true" if key else "false"
            case int():
                return str(self._whole_number(key, (path, key)))
            case float() if math.isfinite(key):
                return float.__repr__(key)
            case enum.Enum():
                return self._key(key.value, path)
            case _:
                if (text := as_text(key)) is not None:
                    return text
                raise BadValue(f"{show_path((path, key))}: a key must be text or a number, not a {type(key)}")

    def _tag(self, value: object, path: Path, levels: int) -> Any:
        tagged = tag(value) if self.tags else None
        if tagged is None:
            raise BadValue(
                f"{show_path(path)}: {self.serializer} cannot send a {type(value)}; "
                "send plain values, or serializer='pickle' with 'pickle' in accept_content"
            )
        content = tagged[VALUE_KEY]
        self._check_room(path, levels - isinstance(content, dict))
        if tagged[TYPE_KEY] == "decimal" and len(content) > self.limits.number_digits_max:
            raise too_long_a_number(f"the decimal at {show_path(path)}", len(content), self.limits)
        return tagged


def _refuse(path: Path, error: Exception) -> NoReturn:
    raise BadValue(f"{show_path(path)} cannot be sent: converting it to JSON raised {error!r}") from error


def is_short_enough(number: int, limits: Limits) -> bool:
    """Return whether the text of an integer, including its sign, is within the limit."""
    ceiling: int = 10**limits.number_digits_max
    return -ceiling < number * (1 if number > 0 else 10) < ceiling


def show_path(path: Path) -> str:
    """Return a path as Python would write it: `kwargs['x'][3]`."""
    steps = []
    container, key = path
    while container is not None:
        steps.append(f"[{brief(key)}]")
        container, key = container
    return "".join([str(key), *reversed(steps)])


def _root(path: Path) -> str:
    while path[0] is not None:
        path = path[0]
    return str(path[1])


PYDANTIC_FORM: Mapping[str, Any] = {"mode": "json", "by_alias": True, "round_trip": True}
"""How models of pydantic are written: as their JSON, which they can read again."""


def _struct_fields(value: msgspec.Struct) -> dict[str, Any] | list[Any]:
    config = value.__struct_config__
    found: dict[str, Any] = {}
    if config.tag_field is not None:
        found[config.tag_field] = config.tag
    for field in msgspec.structs.fields(value):
        content = getattr(value, field.name)
        if content is not msgspec.UNSET:
            found[field.encode_name] = content
    return list(found.values()) if config.array_like else found


# ---- trees -----------------------------------------------------------------------------------------

Maker = Callable[[type[Any], Any], Any]
"""Makes a value of a type that msgspec does not know; raises TypeError or ValueError if it cannot."""


def to_tree(values: Mapping[str, Any], *, tags: bool = True) -> dict[str, Any]:
    """Return the values by name as trees; raise BadValue that names the value and the place in it.

    `tags`: the serializer tags values that JSON cannot represent.
    """
    tree: dict[str, Any]
    retained = _TAGGED if tags else _BYTES
    try:
        tree = msgspec.to_builtins(values, builtin_types=retained, str_keys=True, enc_hook=_lowered)
    except (TypeError, ValueError, RecursionError):
        # A key of an unusual type, a subclass of a plain type: rare, and not supported by msgspec.
        lowering, depth = _Keeping("JSON", False, DEFAULT_LIMITS, retained), DEFAULT_LIMITS.depth_max
        return {name: lowering.lower(value, (None, name), depth) for name, value in values.items()}
    return tree


def from_tree(tree: Mapping[str, Any], kind: type[msgspec.Struct], make: Maker) -> Any:
    """Return the Struct with the fields of the tree; `msgspec.ValidationError` names the wrong one."""
    return msgspec.convert(tree, kind, str_keys=True, builtin_types=_BYTES, dec_hook=make)


class _Keeping(Lowering, frozen=True):
    """A lowering that leaves values of some types to the serializer, which tags or writes them."""

    kept: tuple[type, ...]

    def _tag(self, value: object, path: Path, levels: int) -> Any:
        if isinstance(value, self.kept):
            return value
        text = as_text(value)
        return super()._tag(value, path, levels) if text is None else text

    def _whole_number(self, value: int, path: Path) -> int:
        return int.__int__(value)


_TAGGED = tuple(TAGGED_TYPES)
_BYTES = (bytes,)  # they arrive as bytes, so text is not read as base64


def _lowered(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if (serializer := getattr(type(value), "__pydantic_serializer__", None)) is not None:
        return serializer.to_python(value, **PYDANTIC_FORM)
    raise TypeError(
        f"a {type(value).__name__} cannot be sent as JSON; convert it, to text or a dict for example"
    )
