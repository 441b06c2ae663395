"""Plain: which values a serializer writes as the protocol wants them, and how others are lowered.

msgspec writes a datetime as bare text, bytes as base64, NaN as null: no error, but not what a
Celery peer reads back. So nothing goes to it before `is_plain` has seen that it is made of
plain types only. That is quick, because the items of a container are judged by the set of their
types. What is not plain is rewritten by `lower` into something that is, or refused with the
path that leads to it.

Lowering forgets: a tuple, a set and a list arrive as lists, an enum as its value, a dataclass
as a map. Who needs the very types back chooses pickle.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any

import msgspec

from umbel.errors import BadValue
from umbel.wire.limits import Limits, too_deep, too_long_a_number
from umbel.wire.typed import TYPE_KEY, VALUE_KEY, is_tagged, tag

ATOMS = frozenset({str, int, bool, NoneType})
SIGNED_64_MIN, UNSIGNED_64_MAX = -(2**63), 2**64 - 1
BITS_PER_DIGIT = math.log2(10)


@dataclass(frozen=True, slots=True)
class Path:
    """Where a value lies inside what is sent: `kwargs['x'][3]`. Made into text only for an error."""

    step: str | tuple[object]
    parent: "Path | None" = None

    def __truediv__(self, key: object) -> "Path":
        return Path((key,), self)

    def __str__(self) -> str:
        own = self.step if isinstance(self.step, str) else f"[{self.step[0]!r:.80}]"
        return own if self.parent is None else f"{self.parent}{own}"


def is_plain(value: object, levels: int) -> bool:
    """Whether the value is of plain types only, and nested at most that many levels deep.

    Numbers too long and text that is no Unicode pass: the serializer itself refuses those.
    """
    kind = type(value)
    items: Iterable[object]
    if kind is dict:
        assert isinstance(value, dict)
        if is_tagged(value) or (value and set(map(type, value)) != _TEXT_ONLY):
            return False
        items = value.values()
    elif kind is list or kind is tuple:
        assert isinstance(value, (list, tuple))
        items = value
    else:
        return kind in ATOMS or (kind is float and math.isfinite(value))  # type: ignore[arg-type]
    if levels <= 0:
        return False
    if set(map(type, items)) <= ATOMS:
        return True
    return all(type(item) in ATOMS or is_plain(item, levels - 1) for item in items)


@dataclass(frozen=True, slots=True)
class Lowering:
    """Rewrites values for one serializer. `tags`: it knows the typed maps, and only finite numbers.

    Without tags (msgpack) bytes and NaN are its own to write, and whole numbers end at 64 bits.
    """

    serializer: str
    tags: bool
    limits: Limits

    def lower(self, value: object, path: Path, levels: int) -> Any:
        match value:
            case None | bool():
                return value
            case enum.Enum():  # before the plain types that some enums are too
                return self.lower(value.value, path, levels)
            case str():
                return self._text(value, path)
            case int():
                return self._whole_number(value, path)
            case float():
                return self._float(value, path)
            case bytes() if not self.tags:
                return value
            case dict():
                return self._map(value, path, levels)
            case list() | tuple() | set() | frozenset():
                self._check_room(levels)
                return [self.lower(item, path / index, levels - 1) for index, item in enumerate(value)]
            case msgspec.Struct():
                return self._map(_struct_fields(value), path, levels)
        if is_dataclass(value) and not isinstance(value, type):
            shallow = {field.name: getattr(value, field.name) for field in fields(value)}
            return self._map(shallow, path, levels)
        return self._tag(value, path, levels)

    def _check_room(self, levels: int) -> None:
        if levels <= 0:
            raise too_deep("the value", self.limits)

    def _text(self, value: str, path: Path) -> str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadValue(f"{path}: {value!r:.100} is not Unicode text ({error.reason})") from error
        return str.__str__(value)  # of a subclass only the text goes

    def _whole_number(self, value: int, path: Path) -> int:
        number = int.__int__(value)
        if not self.tags and not SIGNED_64_MIN <= number <= UNSIGNED_64_MAX:
            raise BadValue(
                f"{path}: {self.serializer} cannot carry a number of more than 64 bits; use serializer='json'"
            )
        # By bits first: counting the digits of a number is what takes so long.
        digits = int(number.bit_length() / BITS_PER_DIGIT)
        if digits >= self.limits.number_digits_max - 1 and abs(number) >= 10**self.limits.number_digits_max:
            raise too_long_a_number(f"the number at {path}", digits, self.limits)
        return number

    def _float(self, value: float, path: Path) -> float:
        number = float.__float__(value)
        if self.tags and not math.isfinite(number):
            raise BadValue(f"{path}: {self.serializer} has no {number}; send None or text instead")
        return number

    def _map(self, value: dict[Any, Any], path: Path, levels: int) -> dict[str, Any]:
        self._check_room(levels)
        if self.tags and is_tagged(value):
            raise BadValue(
                f"{path}: a map of just {TYPE_KEY} and {VALUE_KEY} would be read as a typed value; "
                "add another key"
            )
        lowered = {
            self._key(key, path): self.lower(item, path / key, levels - 1) for key, item in value.items()
        }
        if len(lowered) != len(value):
            raise BadValue(f"{path}: two keys of the map become the same text, as 1 and '1' do")
        return lowered

    def _key(self, key: object, path: Path) -> str:
        """Return the text that Python's json makes of a key."""
        match key:
            case str():
                return self._text(key, path / key)
            case None:
                return "null"
            case bool():
                return "true" if key else "false"
            case int():
                return str(self._whole_number(key, path / key))
            case float() if math.isfinite(key):
                return float.__repr__(key)
            case _:
                raise BadValue(f"{path}: a key is {key!r:.80}, a {type(key)}; keys must be text or numbers")

    def _tag(self, value: object, path: Path, levels: int) -> dict[str, Any]:
        tagged = tag(value) if self.tags else None
        if tagged is None:
            raise BadValue(
                f"{path}: {self.serializer} cannot send a {type(value)}; "
                "send plain values or choose serializer='pickle'"
            )
        content = tagged[VALUE_KEY]
        self._check_room(levels - isinstance(content, dict))
        if tagged[TYPE_KEY] == "decimal" and len(content) > self.limits.number_digits_max:
            raise too_long_a_number(f"the decimal at {path}", len(content), self.limits)
        return tagged


_TEXT_ONLY = {str}


def _struct_fields(value: msgspec.Struct) -> dict[str, Any]:
    config = value.__struct_config__
    found: dict[str, Any] = {}
    if config.tag_field is not None:
        found[config.tag_field] = config.tag
    for field in msgspec.structs.fields(value):
        content = getattr(value, field.name)
        if content is not msgspec.UNSET:
            found[field.encode_name] = content
    return found
