"""Redaction: masks secrets and cuts long texts before a record leaves the monitor.

`protocol/delivery/redaction.py` defines what looks like a secret. Text is searched for secrets; a mapping
also loses the whole value under a key that names a secret.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from umbel.events.view import TaskRecord
from umbel.protocol.delivery.redaction import is_secret, redact
from umbel.protocol.delivery.sensitive import MASK, Hides, is_open

LIST_MAX = 500  # characters of a text in a list
DETAIL_MAX = 20_000  # characters of a text on a page about one task
BEYOND = 600  # characters read after the limit: they may show that the text before them is a secret
DEPTH_MAX = 16
CUT = "…"

_TEXTS = ("args", "kwargs", "result", "exception", "traceback")


def redact_text(text: str, limit: int = LIST_MAX) -> str:
    """Return the text with secrets masked, cut to `limit` characters."""
    clean = redact(text[: limit + BEYOND])
    is_whole = len(text) <= limit + BEYOND and len(clean) <= limit
    return clean if is_whole else clean[:limit] + CUT


def redact_data(value: Any, limit: int = DETAIL_MAX, depth: int = 0) -> Any:
    """Return plain data with secrets masked and texts cut; data nested deeper than DEPTH_MAX is masked."""
    if depth > DEPTH_MAX:
        return MASK
    match value:
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
            return redact_text(str(value), limit)


def redact_task(task: TaskRecord, limit: int, hides: Hides) -> TaskRecord:
    """Return the task with its texts redacted and cut; `hides` names the tasks whose arguments are masked."""
    if hides(task.name) and is_open(task.args, task.kwargs):
        task = msgspec.structs.replace(task, args=MASK, kwargs=MASK)
    return msgspec.structs.replace(
        task,
        **{name: redact_text(value, limit) for name in _TEXTS if (value := getattr(task, name)) is not None},
        extra=None if task.extra is None else redact_data(task.extra, limit),
    )


def changed_fields(before: TaskRecord, after: TaskRecord) -> list[str]:
    """Return the names of the texts that redaction changed."""
    return [name for name in _TEXTS if getattr(before, name) != getattr(after, name)]
