"""Redaction: what is taken out of texts and settings before they leave, and how long they may be.

Arguments that a task names as `sensitive` are masked by the worker already. Here goes what nobody
named: values beside a key that reads like a secret (`password`, `api_key`, `token`), and passwords in URLs. A
value that is a list or a map takes the rest of the text with it, as nothing says where it ends.

It stops being right for a secret without a telling key: name it in `sensitive`.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from umbel.events.view import TaskRecord
from umbel.protocol.delivery.sensitive import MASK

TEXT_MAX = 65_536  # no more of a text is looked at
LIST_MAX = 500
DETAIL_MAX = 20_000
DEPTH_MAX = 16
CUT = "…"

KEYS = (
    r"passw(?:or)?d|passphrase|secret|token|api_?key|apikey|auth(?:orization)?|credential|cookie|"
    r"private_?key|access_?key|session_?id|signature"
)
_KEY = re.compile(KEYS, re.IGNORECASE)
_VALUE = re.compile(
    rf"((?:{KEYS})[\w.-]{{0,40}}[\"']?\s{{0,5}}(?:[:=]|,(?=\s{{0,5}}[\"']))\s{{0,5}})"
    r"((?:bearer|basic|digest)\s{1,5}[^\s,;)}\]'\"]+|b?\"(?:[^\"\\]|\\.)*\"?|b?'(?:[^'\\]|\\.)*'?|[\[({][\s\S]*|[^\s,;)}\]]+)",
    re.IGNORECASE,
)
_URL = re.compile(r"(://[^\s:/@]{0,200}:)[^\s@/]{1,500}(@)")
_TEXTS = ("args", "kwargs", "result", "exception", "traceback")


def redact(text: str) -> str:
    """The text without what reads like a secret, and not longer than TEXT_MAX."""
    text = text[:TEXT_MAX]
    return _URL.sub(rf"\1{MASK}\2", _VALUE.sub(rf"\1{MASK}", text))


def shown(text: str, limit: int) -> str:
    clean = redact(text)
    return clean if len(clean) <= limit else clean[:limit] + CUT


def redact_data(value: Any, limit: int = DETAIL_MAX, depth: int = 0) -> Any:
    """Plain data: values beside telling keys are masked, texts are redacted and cut."""
    if depth > DEPTH_MAX:
        return MASK
    match value:
        case str():
            return shown(value, limit)
        case Mapping():
            return {
                str(key): MASK if is_secret(str(key)) and one else redact_data(one, limit, depth + 1)
                for key, one in value.items()
            }
        case list() | tuple():
            return [redact_data(one, limit, depth + 1) for one in value]
        case bool() | int() | float() | None:
            return value
        case _:
            return shown(str(value), limit)


def is_secret(key: str) -> bool:
    return _KEY.search(key) is not None


def redact_task(task: TaskRecord, limit: int) -> TaskRecord:
    return msgspec.structs.replace(
        task,
        **{name: shown(value, limit) for name in _TEXTS if (value := getattr(task, name)) is not None},
        extra=None if task.extra is None else redact_data(task.extra, limit),
    )


def changed_fields(before: TaskRecord, after: TaskRecord) -> list[str]:
    return [name for name in _TEXTS if getattr(before, name) != getattr(after, name)]
