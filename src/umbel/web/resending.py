"""Resending: whether a task can be sent again from what its events say, and with which arguments.

Events carry arguments as text. Where the text is whole, is a literal, and nothing in it was masked, it is the
arguments; anything else is refused by name, because a task that runs with half its arguments is worse than
one that does not run.
"""

import ast
import json
import shlex
from typing import Any

import msgspec

from umbel.events.view import TaskRecord
from umbel.protocol.delivery.sensitive import MASK

UNSURE = ("...", "…", MASK)
TEXT_MAX = 65_536


class Call(msgspec.Struct, frozen=True):
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str | None


def call_of(task: TaskRecord) -> Call | str:
    """The call to send, or why it cannot be known."""
    if not task.name:
        return "its name is not known: neither its sending nor its receipt was heard"
    args, kwargs = _literal(task.args or "()"), _literal(task.kwargs or "{}")
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        return "its arguments are not known whole: they were cut, masked, or are no plain data"
    return Call(task.name, list(args), kwargs, task.queue)


def as_command(call: Call) -> str:
    """What a person would type to send it again; "" where the arguments are no JSON."""
    words = ["umbel", "call", call.name]
    try:
        words += ["--args", json.dumps(call.args)] if call.args else []
        words += ["--kwargs", json.dumps(call.kwargs)] if call.kwargs else []
    except (TypeError, ValueError):
        return ""
    return shlex.join(words + (["-q", call.queue] if call.queue else []))


def _literal(text: str) -> Any:
    if len(text) > TEXT_MAX or any(one in text for one in UNSURE):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
