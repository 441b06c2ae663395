"""Typed: Python values that JSON does not know, as maps that say their type.

    datetime(2026, 1, 2)  <->  {"__type__": "datetime", "__value__": "2026-01-02T00:00:00"}

The forms are those captured from Celery (wire 1.5). A map is read as a typed value only when it
has exactly these two keys; any other map is the user's own.
"""

import base64
import datetime
import uuid  # for the type alone: ids come in as arguments
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from umbel.errors import BadMessage
from umbel.wire.limits import Limits, too_long_a_number
from umbel.wire.show import brief

TYPE_KEY = "__type__"
VALUE_KEY = "__value__"


def tag(value: object) -> dict[str, Any] | None:
    """Return the map that stands for the value, or None when this is not a type we tag."""
    writer = _WRITERS.get(type(value))
    if writer is not None:
        return writer(value)
    for kind, writer in _WRITERS.items():
        if isinstance(value, kind):
            return writer(value)
    return None


def as_text(value: object) -> str | None:
    """The text of a value that we tag, for where its type is known; None when it is none of these."""
    match value:
        case datetime.date() | datetime.time():
            return value.isoformat()
        case Decimal() | uuid.UUID():
            return str(value)
    return None


def is_tagged(value: dict[str, Any]) -> bool:
    return len(value) == 2 and TYPE_KEY in value and VALUE_KEY in value


def restore(tree: Any, limits: Limits) -> Any:
    """Replace the tagged maps inside a decoded tree by the values they stand for, in place.

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
    datetime.datetime: _write_moment,  # before date, which it is too
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
    # Decimal's own error is an ArithmeticError, and a content of the wrong type shows as one of the others.
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise BadMessage(
            f"a {name} in the message or result cannot be read: {brief(content)} ({error})"
        ) from error


def _read_bytes(content: str) -> bytes:
    return content.encode("utf-8")


def _read_base64(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _read_decimal(content: str) -> Decimal:
    if not isinstance(content, str):  # Decimal would take a list of digits too
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
