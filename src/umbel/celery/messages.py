"""Messages: from what Celery hands to its producer to ours, and from ours to what Celery's tracer takes."""

from contextlib import suppress
from typing import Any

import msgspec
from kombu.compression import decompress
from kombu.serialization import loads

from umbel.wire.call import read_header_map
from umbel.wire.instant import parse_instant
from umbel.wire.message import JSON_CONTENT, Message, Outgoing
from umbel.wire.properties import delivery_info_of, encode_others, properties_of

KOMBUS_MARK = b"__type__"  # in a body with values that JSON has no form for


def outgoing_from(producer: Any, body: Any, headers: dict[str, Any], options: dict[str, Any]) -> Outgoing:
    """A message as `kombu.Producer.publish` gets it. Its values must be what JSON can say, as kombu's are."""
    data, content_type, content_encoding = producer._prepare(
        body, options.get("serializer"), compression=options.get("compression"), headers=headers
    )
    message = Message(
        msgspec.json.encode(headers, enc_hook=str),
        data.encode() if isinstance(data, str) else bytes(data),
        content_type,
        content_encoding,
        options.get("priority") or 0,
        options.get("correlation_id") or "",
        options.get("reply_to") or "",
        _milliseconds(options.get("expiration")),
        encode_others({name: value for name, value in options.items() if name not in _NOT_PROPERTIES}),
    )
    eta = headers.get("eta")
    due = parse_instant(eta) if eta else 0.0
    exchange, routing_key = options.get("exchange"), options.get("routing_key") or ""
    name = getattr(exchange, "name", exchange) or ""
    if not name:
        return Outgoing(routing_key, message, due)
    return Outgoing("", message, due, exchange=name, routing_key=routing_key)


# What `publish` is told about sending, not about the message.
_NOT_PROPERTIES = frozenset(
    ("exchange", "routing_key", "serializer", "compression", "retry", "retry_policy", "declare", "timeout",
     "confirm_timeout", "mandatory", "immediate")
)  # fmt: skip


def call_of(
    message: Message, accept: Any
) -> tuple[dict[str, Any], list[Any], dict[str, Any], dict[str, Any]]:
    """(headers, args, kwargs, embed). Raises what kombu raises for content that is not accepted."""
    headers = read_header_map(message.headers)
    args, kwargs, embed = body_of(message, accept, headers.get("compression"))
    return headers, args, kwargs, embed or {}


def body_of(message: Message, accept: Any, compression: str | None = None) -> Any:
    if not compression and message.content_type == JSON_CONTENT and JSON_CONTENT in accept:
        # Most are plain JSON, which this reads as kombu does in a sixth of the time; not what kombu marks.
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            if KOMBUS_MARK not in message.body:
                return msgspec.json.decode(message.body)
    body = decompress(message.body, compression) if compression else message.body
    return loads(body, message.content_type, message.content_encoding, accept=accept)


def request_of(
    headers: dict[str, Any],
    message: Message,
    *,
    queue: str,
    hostname: str,
    redelivered: bool,
) -> dict[str, Any]:
    """What Celery's worker makes of a message's headers and properties for `Task.request`."""
    headers["properties"] = properties_of(message)
    headers["reply_to"] = message.reply_to
    headers["correlation_id"] = message.correlation_id
    headers["hostname"] = hostname
    headers["is_eager"] = False
    headers["delivery_info"] = delivery_info_of(message, queue, redelivered=redelivered)
    return headers


def _milliseconds(expiration_s: float | None) -> int | None:
    return None if expiration_s is None else max(0, int(expiration_s * 1000))
