"""JSON lowering: values that are not plain (`values.py` says which are), rewritten into plain ones.

msgspec writes a datetime as bare text, bytes as base64, NaN as null: no error, but not what a
Celery peer reads back. `Lowering` rewrites such a value into one that is written as the protocol
wants it, or refuses it with the path that leads to it.

Lowering forgets: a tuple, a set and a list arrive as lists, an enum as its value, a dataclass, a
`msgspec.Struct` and a model of pydantic as maps, a path and a timedelta as text. Who says the type of a
parameter gets it back (`trees.py`).
"""

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import partial
from pathlib import PurePath
from typing import Any, NoReturn

import msgspec

from umbel.errors import BadValue
from umbel.wire.foreign import attempt
from umbel.wire.limits import Limits, too_deep, too_long_a_number
from umbel.wire.show import brief
from umbel.wire.typed import TAGGED_TYPES, TYPE_KEY, VALUE_KEY, as_text, is_tagged, tag

SIGNED_64_MIN, UNSIGNED_64_MAX = -(2**63), 2**64 - 1
BITS_PER_DIGIT = math.log2(10)

Path = tuple[Any, object]
"""Where a value lies inside what is sent: (path of its container, key). At the root: (None, name)."""


class Lowering(msgspec.Struct, frozen=True):
    """Rewrites values for one serializer. `tags`: it knows the typed maps, and only finite numbers.

    Without tags (msgpack) bytes and NaN are its own to write, and whole numbers end at 64 bits.
    """

    serializer: str
    tags: bool
    limits: Limits

    def lower(self, value: Any, path: Path, levels: int) -> Any:
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
            case enum.Enum():  # before the plain types that some enums are too
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
                return msgspec.to_builtins(value)  # ISO 8601, as pydantic has it too
            case msgspec.Struct():
                return self.lower(_struct_fields(value), path, levels)
        if (serializer := getattr(type(value), "__pydantic_serializer__", None)) is not None:
            dump = partial(serializer.to_python, **PYDANTIC_FORM)
            return self.lower(attempt(dump, value, lambda error: _refuse(path, error)), path, levels)
        if is_dataclass(value) and not isinstance(value, type):
            shallow = {field.name: getattr(value, field.name) for field in fields(value)}
            return self._map(shallow, path, levels)
        if (as_json := getattr(type(value), "__json__", None)) is not None:  # a signature, say
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
        return str.__str__(value)  # of a subclass only the text goes

    def _whole_number(self, value: int, path: Path) -> int:
        number = int.__int__(value)
        if not self.tags and not SIGNED_64_MIN <= number <= UNSIGNED_64_MAX:
            raise BadValue(
                f"{show_path(path)}: {self.serializer} cannot carry a number of more than 64 bits; "
                "use serializer='json'"
            )
        # By bits first: counting the digits of a number is what takes so long.
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
        """Return the text that Python's json makes of a key."""
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
    """Whether the text of a whole number, its sign included, keeps to the limit."""
    ceiling: int = 10**limits.number_digits_max
    return -ceiling < number * (1 if number > 0 else 10) < ceiling


def show_path(path: Path) -> str:
    """Write a path as Python would: `kwargs['x'][3]`."""
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
"""How models of pydantic are written: as their own JSON, so that they read it again."""


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
