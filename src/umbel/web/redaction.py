"""Redaction: what is taken out of texts and settings before they leave, and how long they may be.

Arguments that a task names as `sensitive` are masked by the worker already. Here goes what nobody
named: values beside a key that reads like a secret (`password`, `api_key`, `token`), and passwords in URLs. A
value that is a list or a map takes the rest of the text with it, as nothing says where it ends. Where a text
can be read in two ways, more of it goes.

It stops being right for a secret without a telling key: name it in `sensitive`.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from umbel.events.view import TaskRecord
from umbel.protocol.delivery.sensitive import MASK, Hides, is_open

TEXT_MAX = 65_536  # no more of a text is looked at
LIST_MAX = 500
DETAIL_MAX = 20_000
BEYOND = 600  # what is behind the limit may tell that something before it is a secret
DEPTH_MAX = 16
CUT = "…"

HINTS = ("pass", "pwd", "secret", "token", "key", "auth", "cred", "cookie", "session", "signature", "://")
KEYS = (
    r"passw(?:or)?d|passphrase|passcode|pwd|(?<![a-z])pass(?![a-z])|secret|token|api[\s_-]?key|"
    r"auth(?:orization)?|credential|cookie|private[\s_-]?key|access[\s_-]?key|session[\s_-]?id|signature"
)
_QUOTE = r"(?:\\{0,8}[\"'])"  # with backslashes: JSON within JSON
_SPACE = r"\s{0,5}"
_KEY = re.compile(KEYS, re.IGNORECASE)
_VALUE = re.compile(
    rf"((?:{KEYS})[\w.-]{{0,40}}"
    rf"(?:{_QUOTE}?{_SPACE}[:=]|{_QUOTE}{_SPACE},|{_SPACE},(?={_SPACE}[\"'])){_SPACE})"
    r"(?:(?:bearer|basic|digest|token|apikey|negotiate)\s{1,5}[^\s,;)}\]'\"]+"
    r"|(?P<slashes>\\{1,8})(?P<quote>[\"'])"
    r"(?:(?!(?<!\\)(?P=slashes)(?P=quote))[\s\S])*(?:(?P=slashes)(?P=quote))?"
    r"|b?\"(?:[^\"\\]|\\[\s\S])*\"?|b?'(?:[^'\\]|\\[\s\S])*'?|[\[({][\s\S]*|[^\s,;)}\]]+)",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"((?<![\w-])--?[\w-]{{0,40}}?(?:{KEYS})[\w-]{{0,40}}\s{{1,5}})"
    r"(?:\"[^\"]*\"?|'[^']*'?|[^\s\-\"',;)}\]][^\s\"',;)}\]]*)",
    re.IGNORECASE,
)
_PORT = r"\d{1,5}(?:[/?#\s\"',;:)}\]>…]|\.(?:\s|$)|$)"
_URL = re.compile(  # to the last `@`; without one it was cut, if it is no port
    rf"(://[^\s:/@\[]{{0,200}}:)(?:[^\s\"']{{1,1000}}(?=@)|(?!{_PORT})[^\s\"'@]{{1,1000}})"
)
_TEXTS = ("args", "kwargs", "result", "exception", "traceback")


def redact(text: str) -> str:
    """The text without what reads like a secret, and not longer than TEXT_MAX."""
    text = text[:TEXT_MAX]
    lower = text.lower()
    if not any(hint in lower for hint in HINTS):
        return text
    for pattern in (_VALUE, _OPTION, _URL):
        text = pattern.sub(rf"\1{MASK}", text)
    return text


def shown(text: str, limit: int) -> str:
    clean = redact(text[: limit + BEYOND])
    is_whole = len(text) <= limit + BEYOND and len(clean) <= limit
    return clean if is_whole else clean[:limit] + CUT


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


def redact_task(task: TaskRecord, limit: int, hides: Hides) -> TaskRecord:
    if hides(task.name) and is_open(task.args, task.kwargs):
        task = msgspec.structs.replace(task, args=MASK, kwargs=MASK)
    return msgspec.structs.replace(
        task,
        **{name: shown(value, limit) for name in _TEXTS if (value := getattr(task, name)) is not None},
        extra=None if task.extra is None else redact_data(task.extra, limit),
    )


def changed_fields(before: TaskRecord, after: TaskRecord) -> list[str]:
    return [name for name in _TEXTS if getattr(before, name) != getattr(after, name)]
