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

TYPE_KEY = "__type__"
VALUE_KEY = "__value__"


def tag(value: object) -> dict[str, Any] | None:
    """Return the map that stands for the value, or None when this is not a type we tag."""
    match value:
        case datetime.datetime():  # before date, which it is too
            return _tagged("datetime", value.isoformat())
        case datetime.date():
            return _tagged("date", value.isoformat())
        case datetime.time():
            return _tagged("time", value.isoformat())
        case Decimal():
            return _tagged("decimal", str(value))
        case uuid.UUID():
            return _tagged("uuid", {"hex": value.hex})
        case bytes():
            return _tag_bytes(value)
        case _:
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


def _tagged(name: str, content: object) -> dict[str, Any]:
    return {TYPE_KEY: name, VALUE_KEY: content}


def _tag_bytes(value: bytes) -> dict[str, Any]:
    try:
        return _tagged("bytes", value.decode("utf-8"))
    except UnicodeDecodeError:
        return _tagged("base64", base64.b64encode(value).decode("ascii"))


def _untag(name: object, content: Any, limits: Limits) -> Any:
    reader = _READERS.get(name) if isinstance(name, str) else None
    if reader is None:
        raise BadMessage(f"unknown {TYPE_KEY} {name!r}; known are {', '.join(_READERS)}")
    if name == "decimal" and isinstance(content, str) and len(content) > limits.number_digits_max:
        raise too_long_a_number("a decimal", len(content), limits)
    try:
        return reader(content)
    # Decimal's own error is an ArithmeticError, and a content of the wrong type shows as one of the others.
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise BadMessage(f"not a {name}: {content!r:.100} ({error})") from error


def _read_bytes(content: str) -> bytes:
    return content.encode("utf-8")


def _read_base64(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _read_decimal(content: str) -> Decimal:
    if not isinstance(content, str):  # Decimal would take a list of digits too
        raise TypeError("expected text")
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
