"""Messages: from what Celery hands to its producer to ours, and from ours to what Celery's tracer takes."""

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


def body_of(message: Message, accept: Any, compression: str | None = None) -> Any:
    if not compression and message.content_type == JSON_CONTENT and JSON_CONTENT in accept:
        # Most are plain JSON, which this reads as kombu does in a sixth of the time; not what kombu marks.
        try:
            if KOMBUS_MARK not in message.body:
                return msgspec.json.decode(message.body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass  # kombu says what is wrong with it
    body = decompress(message.body, compression) if compression else message.body
    return loads(body, message.content_type, message.content_encoding, accept=accept)


def request_of(
    message: Message, accept: Any, *, queue: str, hostname: str, redelivered: bool = False
) -> dict[str, Any]:
    """What Celery's worker makes of a message for `Task.request`, arguments and embedded signatures included.

    Raises what kombu raises for content that is not accepted, and anything for what is no task.
    """
    request = read_header_map(message.headers)
    args, kwargs, embed = body_of(message, accept, request.get("compression"))
    request["properties"] = properties_of(message)
    request["reply_to"] = message.reply_to
    request["correlation_id"] = message.correlation_id
    request["hostname"] = hostname
    request["is_eager"] = False
    request["delivery_info"] = delivery_info_of(message, queue, redelivered=redelivered)
    request.update(embed or {}, args=args, kwargs=kwargs)
    return request


def keeps_errors(app: Any, task: Any, context: Any) -> bool:
    """Whether a failure of this call is stored; `task` is None where it is not known."""
    ignored = context.ignore_result
    if ignored is None:
        ignored = task.ignore_result if task is not None else app.conf.task_ignore_result
    return not ignored or bool(task is not None and task.store_errors_even_if_ignored)


def _milliseconds(expiration_s: float | None) -> int | None:
    return None if expiration_s is None else max(0, int(expiration_s * 1000))
