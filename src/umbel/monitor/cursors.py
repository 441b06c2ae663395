"""Cursors: where a page of tasks ended, as text that a URL carries. What is no cursor is refused."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from typing import TypeVar

import msgspec

from umbel.errors import ConfigurationError
from umbel.events.order import Key

T = TypeVar("T")
CURSOR_MAX = 2000


def shown_key(key: Key) -> str:
    return _shown(key)


def read_key(cursor: str) -> Key:
    return _read(cursor, tuple[int, int, str, int, str])


def shown_time(at_us: int, uuid: str) -> str:
    return _shown((at_us, uuid))


def read_time(cursor: str) -> tuple[int, str]:
    return _read(cursor, tuple[int, str])


def _shown(value: object) -> str:
    return urlsafe_b64encode(msgspec.json.encode(value)).decode("ascii").rstrip("=")


def _read(cursor: str, kind: type[T]) -> T:
    try:
        plain = urlsafe_b64decode(cursor[:CURSOR_MAX] + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(plain, type=kind)
    except (Error, ValueError, msgspec.MsgspecError):
        raise ConfigurationError(
            f"{cursor[:50]!r} is not a valid cursor; use `next` of the previous page"
        ) from None
