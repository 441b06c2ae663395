"""Redaction: secrets are masked in tasks and settings, and long texts are cut, before they leave the
dashboard.

`protocol/delivery/redaction.py` defines what looks like a secret. In a mapping, the whole value under such a
key is masked; everything else is treated as text.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from umbel.events.view import TaskRecord
from umbel.protocol.delivery.redaction import is_secret, redact
from umbel.protocol.delivery.sensitive import MASK, Hides, is_open

LIST_MAX = 500
DETAIL_MAX = 20_000
BEYOND = 600  # characters after the limit that are read too: a secret may be recognized only by them
DEPTH_MAX = 16
CUT = "…"

_TEXTS = ("args", "kwargs", "result", "exception", "traceback")


def shown(text: str, limit: int) -> str:
    """Return the text redacted, and cut to `limit` characters."""
    clean = redact(text[: limit + BEYOND])
    is_whole = len(text) <= limit + BEYOND and len(clean) <= limit
    return clean if is_whole else clean[:limit] + CUT


def redact_data(value: Any, limit: int = DETAIL_MAX, depth: int = 0) -> Any:
    """Return plain data with the values of secret keys masked, and texts redacted and cut."""
    if depth > DEPTH_MAX:
        return MASK
    match value:
        case str():
            return shown(value, limit)
        case Mapping():
            return {
                str(key): MASK if is_secret(str(key)) and item else redact_data(item, limit, depth + 1)
                for key, item in value.items()
            }
        case list() | tuple():
            return [redact_data(item, limit, depth + 1) for item in value]
        case bool() | int() | float() | None:
            return value
        case _:
            return shown(str(value), limit)


def redact_task(task: TaskRecord, limit: int, hides: Hides) -> TaskRecord:
    """Return the task with its texts redacted and cut; arguments of a task that `hides` them are masked."""
    if hides(task.name) and is_open(task.args, task.kwargs):
        task = msgspec.structs.replace(task, args=MASK, kwargs=MASK)
    return msgspec.structs.replace(
        task,
        **{name: shown(value, limit) for name in _TEXTS if (value := getattr(task, name)) is not None},
        extra=None if task.extra is None else redact_data(task.extra, limit),
    )


def changed_fields(before: TaskRecord, after: TaskRecord) -> list[str]:
    """Return the names of the texts that redaction changed."""
    return [name for name in _TEXTS if getattr(before, name) != getattr(after, name)]
