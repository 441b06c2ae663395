"""Template: the messages of one task's plain calls, of which most was encoded once for all of them.

Two calls of a task differ in their ids, their arguments and their place in a group; the other
headers are the same bytes each time. A template holds those bytes with gaps, and fills the gaps.
What comes out is, byte for byte, what `encode_task` makes of the same call; a call that states
other headers, or wants another serializer or compression, goes that way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from umbel.errors import BadValue
from umbel.wire.call import Embed, TaskHeaders
from umbel.wire.limits import DEFAULT_LIMITS
from umbel.wire.message import Message
from umbel.wire.show import TEXT_MAX, show_args, show_kwargs
from umbel.wire.task import NOTHING_FOLLOWS, encode_body
from umbel.wire.values import are_atoms, is_flat, is_readable

SMALL_BYTES = 200
"""Arguments that take no more are short in every respect: their digits, their text, their repr."""

_to_json = msgspec.json.Encoder().encode
_NULL, _NO_KWARGS, _NO_KWARGS_SHOWN = b"null", b"{}", b'"{}"'
_EMPTY = Embed()
_SURELY_FITS_BYTES = DEFAULT_LIMITS.size_max_bytes // 2


class CallTemplate:
    """`headers` are those that all calls share; what they say of the gaps is not looked at.

    What fills the gaps has limits of its own (ids, names, text to show), so the whole needs none.
    """

    def __init__(self, headers: TaskHeaders, *, text_max: int = TEXT_MAX) -> None:
        self._task = headers.task
        self._text_max = text_max
        self._headers = _with_gaps(headers)

    def message(
        self,
        task_id: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        origin: str,
        root_id: str | None = None,
        parent_id: str | None = None,
        group: str | None = None,
        group_index: int | None = None,
        priority: int = 0,
        reply_to: str = "",
    ) -> Message:
        argsrepr, kwargsrepr, body = _encode_arguments(args, kwargs, self._text_max)
        try:
            quoted_id = _to_json(task_id)
            headers = self._headers % (
                quoted_id,
                _NULL if group is None else _to_json(group),
                _NULL if group_index is None else _to_json(group_index),
                _to_json(root_id) if root_id else quoted_id,
                _NULL if parent_id is None else _to_json(parent_id),
                argsrepr,
                kwargsrepr,
                _to_json(origin),
            )
        except (ValueError, OverflowError, TypeError) as error:
            raise BadValue(f"a header of {self._task!r} cannot be sent: {error}") from error
        return Message(headers, body, priority=priority, correlation_id=task_id, reply_to=reply_to)


_GAPS = ("id", "group", "group_index", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin")


def _with_gaps(headers: TaskHeaders) -> bytes:
    fields: list[bytes] = []
    for name in TaskHeaders.__struct_fields__:
        value = getattr(headers, name)
        if value is not msgspec.UNSET:
            text = b"%b" if name in _GAPS else _to_json(value).replace(b"%", b"%%")
            fields.append(b"%b:%b" % (_to_json(name), text))
    return b"{%b}" % b",".join(fields)


def _encode_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], text_max: int
) -> tuple[bytes, bytes, bytes]:
    """Both as JSON text to show, and the body. Small plain ones, as most are, need few looks."""
    body = b""
    if are_atoms(args) and (not kwargs or is_flat(kwargs)):
        try:
            quoted = _to_json(args)
            named = _to_json(kwargs) if kwargs else _NO_KWARGS
        except ValueError:  # a number too long, or text that is no Unicode
            quoted = named = b""
        if 0 < len(quoted) + len(named) <= (SMALL_BYTES if text_max >= TEXT_MAX else text_max // 4):
            return (
                _to_json(repr(args if type(args) is tuple else tuple(args))),
                _to_json(repr(kwargs)) if kwargs else _NO_KWARGS_SHOWN,
                b"[%b,%b,%b]" % (quoted, named, NOTHING_FOLLOWS),
            )
        if 0 < len(quoted) + len(named) <= _SURELY_FITS_BYTES and is_readable(quoted) and is_readable(named):
            body = b"".join((b"[", quoted, b",", named, b",", NOTHING_FOLLOWS, b"]"))
    body = body or encode_body(list(args), dict(kwargs), _EMPTY)
    return _to_json(show_args(args, text_max)), _to_json(show_kwargs(kwargs, text_max)), body
