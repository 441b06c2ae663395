"""Tasks: a call as the message that Celery workers run, and back (protocol v2, wire 1).

Sending: `encode_task`. Receiving: `to_v2`, then `read_headers` in the worker's main process,
then `decode_task` in the child. Whatever a peer sent, these raise nothing but WireError, and the
error names the value that is wrong.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from umbel.errors import BadMessage, BadValue
from umbel.wire.call import (
    HEADER_NAMES,
    Embed,
    TaskCall,
    TaskHeaders,
    body_bytes,
    check_kwargs,
    completed,
    encode_body,
    encode_headers,
    read_embed,
    read_header_map,
    read_headers,
)
from umbel.wire.compat.legacy import read_body_map, to_v2
from umbel.wire.instant import format_instant, parse_instant
from umbel.wire.limits import DEFAULT_LIMITS, Limits
from umbel.wire.message import JSON_CONTENT, Message
from umbel.wire.show import brief, show_args, show_kwargs, show_value
from umbel.wire.signature import SignatureMap, check_signature
from umbel.wire.values import SERIALIZERS, Serializer, accepted_serializer, decode_json_as

__all__ = [
    "Embed",
    "SignatureMap",
    "TaskCall",
    "TaskHeaders",
    "check_signature",
    "decode_task",
    "encode_task",
    "format_instant",
    "parse_instant",
    "read_headers",
    "show_args",
    "show_kwargs",
    "show_value",
    "to_v2",
]


_NONE = msgspec.UNSET


def encode_task(
    call: TaskCall,
    *,
    serializer: str = "json",
    compression: str | None = None,
    expiration_ms: int | None = None,
) -> Message:
    form = SERIALIZERS.get(serializer)
    if form is None:
        raise BadValue(f"serializer {serializer!r} is unknown; choose {', '.join(SERIALIZERS)}")
    if form.content_type == JSON_CONTENT:
        body = encode_body(call.args, call.kwargs, call.embed)
    else:
        embed = msgspec.structs.asdict(call.embed)
        body = form.encode((list(call.args), dict(call.kwargs), embed), "the call")
    headers = completed(call.headers, call.args, call.kwargs)
    mime: str | msgspec.UnsetType = msgspec.UNSET
    if compression is not None:
        from umbel.wire.compression import compress  # three libraries that few messages need

        mime, body = compress(body, compression)
    if (headers.compression, headers.redelivered, headers.umbel_signature) != (mime, _NONE, _NONE):
        headers = msgspec.structs.replace(headers, compression=mime, redelivered=_NONE, umbel_signature=_NONE)
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


def decode_task(
    message: Message, *, accept: Collection[str] = ("json",), limits: Limits = DEFAULT_LIMITS
) -> TaskCall:
    form = accepted_serializer(message.content_type, accept)
    headers = read_headers(message)
    args, kwargs, embed = _read_body(form, body_bytes(message, headers.compression, limits), limits)
    return TaskCall(headers, args, kwargs, embed, _extra(message.headers), message.reply_to, message.priority)


_Body = tuple[list[Any], dict[str, Any], dict[str, Any] | None] | dict[str, Any]
_BODY: msgspec.json.Decoder[_Body] = msgspec.json.Decoder(_Body)


def _read_body(form: Serializer, data: bytes, limits: Limits) -> tuple[list[Any], dict[str, Any], Embed]:
    if form.content_type == JSON_CONTENT:
        found: Any = decode_json_as(_BODY, data, what="the body", limits=limits)
    else:
        found = form.decode(data, limits)
    if isinstance(found, dict):
        return read_body_map(found)
    if not isinstance(found, (list, tuple)) or len(found) != 3:
        raise BadMessage(f"the body must be [args, kwargs, embed], not {brief(found)}")
    args, kwargs, embed = found
    if not isinstance(args, (list, tuple)):
        raise BadMessage(f"the args of the call must be a list, not {brief(args)}")
    return list(args), check_kwargs(kwargs), read_embed(embed)


class _KnownOnly(TaskHeaders, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    pass


_KNOWN_ONLY = msgspec.json.Decoder(_KnownOnly)


def _extra(data: bytes) -> dict[str, Any]:
    try:
        # Mostly there are none, and this tells so for a tenth of what a map of all headers costs.
        _KNOWN_ONLY.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = read_header_map(data)
        return {name: value for name, value in found.items() if name not in HEADER_NAMES}
    return {}
