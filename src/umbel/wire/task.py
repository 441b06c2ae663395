"""Tasks: a call as the message that Celery workers run (protocol v2, wire 1).

Sending: `encode_task` here, or `template.py` for a plain call. Receiving: `to_v2` of `compat/legacy.py`,
then, of `call.py`, `read_headers` in the worker's main process and `decode_task` in the child.
"""

from typing import Any

import msgspec

from umbel.errors import BadValue
from umbel.wire.call import HEADER_NAMES, Embed, TaskCall, TaskHeaders, decode_task, read_headers
from umbel.wire.instant import format_instant, parse_instant
from umbel.wire.json_lowering import Lowering
from umbel.wire.limits import DEFAULT_LIMITS, HEADER_LIMITS, NAME_MAX_BYTES, Limits, check_size
from umbel.wire.message import JSON_CONTENT, Message
from umbel.wire.show import brief, show_args, show_kwargs, show_value
from umbel.wire.signature import SignatureMap, check_signature
from umbel.wire.steps import encode_steps, step_map
from umbel.wire.values import SERIALIZERS, encode_json

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
        embed["chain"] = None if call.embed.chain is None else [step_map(one) for one in call.embed.chain]
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


def encode_headers(headers: TaskHeaders, extra: dict[str, Any]) -> bytes:
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
            raise BadValue(f"custom headers must not have names of the protocol: {named}; rename them")
        data = data[:-1] + b"," + encode_json(extra, root="headers")[1:]
    if extra or headers.stamps:
        _check_keys(extra, headers.stamps)
    check_size("the headers", len(data), HEADER_LIMITS)
    return data


def _check_keys(*values: Any) -> None:
    """Refuse what no table of AMQP can hold, for all brokers alike."""
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
    """Encode the three parts apart, so that an error names the part, and nothing is copied first."""
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
    # Its steps came as bytes, and leave as those, between what is encoded.
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
    """Fill in what every v2 message states and a caller may leave out."""
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
# The parts of a body lie one level down.
_INSIDE_BODY = Limits(depth_max=DEFAULT_LIMITS.depth_max - 1)
_INSIDE_EMBED = Limits(depth_max=DEFAULT_LIMITS.depth_max - 2)
_INSIDE_STEPS = Limits(depth_max=DEFAULT_LIMITS.depth_max - 3)
