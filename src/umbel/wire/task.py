"""Tasks: a call as the message that Celery workers run (protocol v2, wire 1).

Sending: `encode_task` encodes any call; `CallTemplate` encodes the plain calls of one task, whose common
parts are encoded only once. Receiving: `to_v2` rewrites messages of Celery's older formats (v1 and the
hybrid) as v2; `call.py` then reads them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from umbel.errors import BadMessage, BadValue
from umbel.wire.call import (
    HEADER_NAMES,
    OF_ONE_COPY,
    Embed,
    Holding,
    TaskCall,
    TaskHeaders,
    body_bytes,
    check_names,
    decode_task,
    holding_of,
    read_body_map,
    read_header_map,
    read_headers,
)
from umbel.wire.message import (
    DEFAULT_LIMITS,
    HEADER_LIMITS,
    JSON_CONTENT,
    NAME_MAX_BYTES,
    UNREADABLE_CONTENT,
    Limits,
    Message,
    check_size,
    format_instant,
    parse_instant,
)
from umbel.wire.show import TEXT_MAX, brief, show_args, show_kwargs, show_value
from umbel.wire.steps import SignatureMap, check_signature, encode_steps, step_map
from umbel.wire.typed import Lowering
from umbel.wire.values import SERIALIZERS, are_atoms, decode_json, encode_json, is_flat, is_readable

__all__ = [
    "Embed",
    "Holding",
    "SignatureMap",
    "TaskCall",
    "TaskHeaders",
    "check_signature",
    "decode_task",
    "encode_task",
    "format_instant",
    "holding_of",
    "parse_instant",
    "read_headers",
    "show_args",
    "show_kwargs",
    "show_value",
]


# ---- tasks -----------------------------------------------------------------------------------------


_NONE = msgspec.UNSET


def encode_task(
    call: TaskCall,
    *,
    serializer: str = "json",
    compression: str | None = None,
    expiration_ms: int | None = None,
) -> Message:
    """Return the message of a call. Raises WireError if a part of it cannot be sent."""
    form = SERIALIZERS.get(serializer)
    if form is None:
        raise BadValue(f"serializer {serializer!r} is unknown; choose {', '.join(SERIALIZERS)}")
    if form.content_type == JSON_CONTENT:
        body = encode_body(call.args, call.kwargs, call.embed)
    else:
        embed = msgspec.structs.asdict(call.embed)
        embed["chain"] = None if call.embed.chain is None else [step_map(step) for step in call.embed.chain]
        body = form.encode((list(call.args), dict(call.kwargs), embed), "the call")
    headers = completed(call.headers, call.args, call.kwargs)
    mime: str | msgspec.UnsetType = msgspec.UNSET
    if compression is not None:
        from umbel.wire.compression import compress  # imports three libraries that few messages need

        mime, body = compress(body, compression)
    if headers.compression != mime or any(getattr(headers, name) is not _NONE for name in OF_ONE_COPY):
        headers = msgspec.structs.replace(headers, compression=mime, **OF_ONE_COPY)
    return Message(
        encode_headers(headers, call.extra),
        body,
        form.content_type,
        form.content_encoding,
        call.priority,
        headers.id,
        call.reply_to,
        expiration_ms,
    )


def encode_headers(headers: TaskHeaders, extra: dict[str, Any]) -> bytes:
    """Encode the headers, with custom ones in `extra`. Raises WireError."""
    try:
        if headers.stamps:
            lowering = Lowering("json", tags=True, limits=DEFAULT_LIMITS)
            stamps = lowering.lower(headers.stamps, (None, "stamps"), DEFAULT_LIMITS.depth_max - 1)
            headers = msgspec.structs.replace(headers, stamps=stamps)
        data = _to_json(headers)
    except (ValueError, OverflowError, TypeError) as error:
        raise BadValue(f"a header of {headers.task!r} cannot be sent: {error}") from error
    if extra:
        if taken := HEADER_NAMES.intersection(extra):
            named = ", ".join(sorted(taken))
            raise BadValue(f"custom headers must not use names of the protocol: {named}; rename them")
        data = data[:-1] + b"," + encode_json(extra, root="headers")[1:]
    if extra or headers.stamps:
        _check_keys(extra, headers.stamps)
    check_size("the headers", len(data), HEADER_LIMITS)
    return data


def _check_keys(*values: Any) -> None:
    """Refuse names that no AMQP table can hold, for all brokers alike."""
    for value in values:
        if isinstance(value, dict):
            for name in value:
                if len(str(name).encode()) > NAME_MAX_BYTES:
                    raise BadValue(
                        f"the name {brief(name)} in the headers is over the limit of {NAME_MAX_BYTES} bytes"
                    )
            _check_keys(*value.values())
        elif isinstance(value, (list, tuple)):
            _check_keys(*value)


def encode_body(args: list[Any], kwargs: dict[str, Any], embed: Embed) -> bytes:
    """Encode the three parts separately, so that an error names the part and nothing is copied first."""
    follows = NOTHING_FOLLOWS
    if not _is_empty(embed):
        follows = _encode_embed(embed)
    body = b"[%b,%b,%b]" % (
        encode_json(args, root="args", limits=_INSIDE_BODY),
        encode_json(kwargs, root="kwargs", limits=_INSIDE_BODY) if kwargs else b"{}",
        follows,
    )
    check_size("the body", len(body), DEFAULT_LIMITS)
    return body


def _encode_embed(embed: Embed) -> bytes:
    parts = msgspec.structs.asdict(embed)
    if embed.chain is None or not any(isinstance(step, msgspec.Raw) for step in embed.chain):
        return encode_json(parts, root="embed", limits=_INSIDE_BODY)
    # Steps that arrived as bytes are sent as those bytes, between the encoded parts.
    texts = {name: encode_json(parts[name], root=name, limits=_INSIDE_EMBED) for name in _BESIDE_THE_CHAIN}
    return b'{"callbacks":%b,"errbacks":%b,"chain":%b,"chord":%b}' % (
        texts["callbacks"],
        texts["errbacks"],
        encode_steps(embed.chain, _INSIDE_STEPS),
        texts["chord"],
    )


_BESIDE_THE_CHAIN = ("callbacks", "errbacks", "chord")


def _is_empty(embed: Embed) -> bool:
    return embed.callbacks is None and embed.errbacks is None and embed.chain is None and embed.chord is None


def completed(headers: TaskHeaders, args: list[Any], kwargs: dict[str, Any]) -> TaskHeaders:
    """Return the headers with the values that every v2 message has and a caller may omit."""
    if headers.root_id is not None and headers.argsrepr and headers.kwargsrepr:
        return headers
    return msgspec.structs.replace(
        headers,
        root_id=headers.root_id or headers.id,
        argsrepr=headers.argsrepr or show_args(args),
        kwargsrepr=headers.kwargsrepr or show_kwargs(kwargs),
    )


_to_json = msgspec.json.Encoder().encode
NOTHING_FOLLOWS = _to_json(Embed())
# The parts of a body are nested one level deep.
_INSIDE_BODY = Limits(depth_max=DEFAULT_LIMITS.depth_max - 1)
_INSIDE_EMBED = Limits(depth_max=DEFAULT_LIMITS.depth_max - 2)
_INSIDE_STEPS = Limits(depth_max=DEFAULT_LIMITS.depth_max - 3)


# ---- template --------------------------------------------------------------------------------------
#
# Two calls of a task differ in their ids, their arguments and their place in a group; the other headers are
# the same bytes each time. A template holds those bytes with gaps, and fills the gaps. The result is the
# same, byte for byte, as that of `encode_task`. A call with other headers, another serializer or compression
# uses `encode_task`.
#
# If messages are signed, the headers are sorted by name, because that form is signed.

SMALL_BYTES = 200
"""Arguments of this size are below every limit: of digits, of text, of their repr."""

_NULL, _NO_KWARGS, _NO_KWARGS_SHOWN = b"null", b"{}", b'"{}"'
_EMPTY = Embed()
_SURELY_FITS_BYTES = DEFAULT_LIMITS.size_max_bytes // 2


class CallTemplate:
    """The message of one task's plain calls, with gaps. `headers` are those that all calls share.

    The values in the gaps (ids, names, text for display) have separate limits, so the whole is not checked.
    """

    def __init__(self, headers: TaskHeaders, *, text_max: int = TEXT_MAX, is_canonical: bool = False) -> None:
        self._task = headers.task
        self._text_max = text_max
        self._is_canonical = is_canonical
        names = TaskHeaders.__struct_fields__
        self._headers = _with_gaps(headers, sorted(names) if is_canonical else names)

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
        """Return the message of one call. Raises WireError if a part of it cannot be sent."""
        argsrepr, kwargsrepr, body = _encode_arguments(args, kwargs, self._text_max)
        try:
            quoted_id, sender = _to_json(task_id), _to_json(origin)
            root = _to_json(root_id) if root_id else quoted_id
            parent = _NULL if parent_id is None else _to_json(parent_id)
            member = _NULL if group is None else _to_json(group)
            place = _NULL if group_index is None else _to_json(group_index)
            if self._is_canonical:
                gaps = (argsrepr, member, place, quoted_id, kwargsrepr, sender, parent, root)
            else:
                gaps = (quoted_id, member, place, root, parent, argsrepr, kwargsrepr, sender)
            headers = self._headers % gaps
        except (ValueError, OverflowError, TypeError) as error:
            raise BadValue(f"a header of {self._task!r} cannot be sent: {error}") from error
        return Message(headers, body, priority=priority, correlation_id=task_id, reply_to=reply_to)


_GAPS = ("id", "group", "group_index", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin")


def _with_gaps(headers: TaskHeaders, names: Sequence[str]) -> bytes:
    fields: list[bytes] = []
    for name in names:
        value = getattr(headers, name)
        if value is not msgspec.UNSET:
            text = b"%b" if name in _GAPS else _to_json(value).replace(b"%", b"%%")
            fields.append(b"%b:%b" % (_to_json(name), text))
    return b"{%b}" % b",".join(fields)


def _encode_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], text_max: int
) -> tuple[bytes, bytes, bytes]:
    """Return args and kwargs as JSON text for display, and the body. Small plain ones need few checks."""
    body = b""
    if are_atoms(args) and (not kwargs or is_flat(kwargs)):
        try:
            quoted = _to_json(args)
            named = _to_json(kwargs) if kwargs else _NO_KWARGS
        except ValueError:  # a number too long, or text that is not valid Unicode
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


# ---- legacy ----------------------------------------------------------------------------------------
#
# A v1 message has no header `task`; its body is one map with everything. In the hybrid the headers are those
# of v2 and the body is still a map. Messages are rewritten once, on arrival, so no later code knows v1. Only
# JSON is rewritten, because the accepted content types have not been checked at this point.
#
# The flag `utc` of v1 is ignored: times without an offset are UTC, see `message.py`.


def to_v2(message: Message) -> Message:
    """Return the message as v2: the same object if it is v2 already. Raises BadMessage.

    A body that is not plain JSON is left unchanged if the headers are v2; the reader that may decode the body
    finds out whether it is valid.
    """
    if message.content_type == JSON_CONTENT and message.body[:1] == b"[":
        return message
    if message.content_type == UNREADABLE_CONTENT and not message.headers:
        raise BadMessage(f"not a message that Celery or Umbel sends: it begins {message.body[:100]!r}")
    headers = read_header_map(message.headers)
    if "task" not in headers:
        return _rewrite_v1(message, headers)
    if message.content_type != JSON_CONTENT or headers.get("compression"):
        return message
    if message.body.lstrip()[:1] != b"{":
        return message
    body = decode_json(message.body)
    if not isinstance(body, dict):  # a typed value, such as a date, is encoded as a map too
        raise BadMessage(f"the body must be [args, kwargs, embed], not {brief(body)}")
    args, kwargs, embed = read_body_map(body)
    return msgspec.structs.replace(message, body=encode_body(args, kwargs, embed))


def _rewrite_v1(message: Message, old_headers: dict[str, Any]) -> Message:
    if message.content_type != JSON_CONTENT:
        raise BadMessage(
            f"no header 'task', and a body of {message.content_type!r}: a v1 message is read as JSON only"
        )
    body = decode_json(body_bytes(message, old_headers.get("compression"), DEFAULT_LIMITS))
    if not isinstance(body, dict):
        raise BadMessage(f"neither v1 nor v2: no header 'task', and the body is {message.body[:100]!r}")
    args, kwargs, embed = read_body_map(body)
    headers = completed(_headers_from(body), args, kwargs)
    known = TaskHeaders.__struct_fields__
    extra = {name: value for name, value in old_headers.items() if name not in known}
    return msgspec.structs.replace(
        message,
        headers=encode_headers(headers, extra),
        body=encode_body(args, kwargs, embed),
        correlation_id=message.correlation_id or headers.id,
    )


_FROM_BODY = ("task", "id", "group", "group_index", "retries", "eta", "expires", "timelimit")


def _headers_from(body: dict[str, Any]) -> TaskHeaders:
    stated = {name: body[name] for name in _FROM_BODY if body.get(name) is not None}
    if body.get("taskset") is not None:
        stated["group"] = body["taskset"]
    try:
        headers = msgspec.convert(stated, TaskHeaders)
    except msgspec.ValidationError as error:
        raise BadMessage(
            f"not a task message of protocol v1 or v2: {error}; the fields of its body are {brief(stated)}"
        ) from error
    if not headers.task or not headers.id:
        raise BadMessage(
            f"the v1 body has an empty task name or id: task {headers.task!r}, id {headers.id!r}"
        )
    check_names(headers)
    return headers
