"""Properties of a message beyond those that `Message` has fields for, and all of them as Celery shows them.

AMQP knows fourteen properties, and Redis takes whatever a sender gives. Those that mean something on a
message's way are fields of `Message`. The others (`app_id`, `type`, `message_id`, ...) pass with it
as one JSON object, because task code may read them; most messages have none.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from umbel.wire.message import Message

# Fields of Message, and what a broker writes anew with every copy.
OWN = frozenset(
    ("content_type", "content_encoding", "headers", "application_headers", "delivery_mode", "priority",
     "correlation_id", "reply_to", "expiration", "delivery_info", "delivery_tag", "body_encoding")
)  # fmt: skip
OTHER_MAX_BYTES = 16 * 1024  # more than that is no property but a load; it is dropped

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def encode_others(properties: Mapping[str, Any]) -> bytes:
    """`Message.properties` of a message with these properties: those that have no field there."""
    others = {name: value for name, value in properties.items() if name not in OWN and value is not None}
    encoded = _encode(others) if others else b""
    return encoded if len(encoded) <= OTHER_MAX_BYTES else b""


def others_of(message: Message) -> dict[str, Any]:
    """The properties that have no field."""
    return _decode(message.properties) if message.properties else {}


def properties_of(message: Message) -> dict[str, Any]:
    """All of them under the names of AMQP, as Celery's requests have them; what is not set is left out."""
    found: dict[str, Any] = {
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
        "priority": message.priority,
        "delivery_mode": 2,
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
    }
    if message.expiration_ms is not None:
        found["expiration"] = str(message.expiration_ms)
    return found | others_of(message)


def delivery_info_of(message: Message, queue: str, *, redelivered: bool) -> dict[str, Any]:
    """How it came, as Celery's requests say it."""
    return {
        "exchange": message.exchange,
        "routing_key": message.routing_key if message.exchange else queue,
        "priority": message.priority,
        "redelivered": redelivered,
    }
