"""Messages: from what Celery hands to its producer to ours, and from ours to what Celery's tracer takes."""

from typing import Any

import msgspec
from kombu.compression import decompress
from kombu.serialization import loads

from umbel.wire.call import read_header_map
from umbel.wire.instant import parse_instant
from umbel.wire.message import Message, Outgoing


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
    )
    eta = headers.get("eta")
    return Outgoing(_queue(options), message, parse_instant(eta) if eta else 0.0)


def call_of(
    message: Message, accept: Any
) -> tuple[dict[str, Any], list[Any], dict[str, Any], dict[str, Any]]:
    """(headers, args, kwargs, embed). Raises what kombu raises for content that is not accepted."""
    headers = read_header_map(message.headers)
    body: Any = message.body
    compression = headers.get("compression")
    if compression:
        body = decompress(body, compression)
    args, kwargs, embed = loads(body, message.content_type, message.content_encoding, accept=accept)
    return headers, args, kwargs, embed or {}


def request_of(
    headers: dict[str, Any],
    message: Message,
    *,
    queue: str,
    hostname: str,
    redelivered: bool,
) -> dict[str, Any]:
    """What Celery's worker makes of a message's headers and properties for `Task.request`."""
    properties = {
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "priority": message.priority,
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
    }
    headers["properties"] = properties
    headers["reply_to"] = message.reply_to
    headers["correlation_id"] = message.correlation_id
    headers["hostname"] = hostname
    headers["is_eager"] = False
    headers["delivery_info"] = {
        "exchange": "",
        "routing_key": queue,
        "priority": message.priority,
        "redelivered": redelivered,
    }
    return headers


def _queue(options: dict[str, Any]) -> str:
    return str(options.get("routing_key") or "")


def _milliseconds(expiration_s: float | None) -> int | None:
    return None if expiration_s is None else max(0, int(expiration_s * 1000))
