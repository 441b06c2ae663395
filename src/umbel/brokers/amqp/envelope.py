"""Envelope: a message in AMQP's properties, and back.

Celery's headers are an AMQP table on the wire and JSON inside Umbel. Where the table would not
bring back the same bytes (other spacing, integers beyond 64 bits) the JSON travels too, in a
separate header; it counts only while it says the same as the table, because a Celery worker
that retries a task hands on headers it does not know.

What the broker itself must remember of a message (when it is due, that it may have run) is in the
property `type`, which Celery neither reads nor hands on.

Properties that mean nothing to us (`app_id`, ...) stand in their places. What has none there goes in a header
of ours, so that it is not lost on the way through the delay ladder or the dead letters: a `type` or
`message_id` whose place we need, a `user_id`, which RabbitMQ takes from that user alone, and the exchange.
"""

import struct
from contextlib import suppress
from typing import Any

import msgspec

from umbel.brokers.amqp.frames import FRAME_MAX, FRAME_OVERHEAD, Incoming
from umbel.brokers.amqp.properties import Properties, decode_properties, encode_properties
from umbel.brokers.amqp.table import Table
from umbel.brokers.amqp.topology import TTL_MAX_MS
from umbel.brokers.interface import Broadcast
from umbel.errors import BadMessage, TooLarge
from umbel.wire.instant import LATEST_S
from umbel.wire.limits import EXPIRATION_MAX_MS, NAME_MAX_BYTES, PRIORITY_MAX, Name
from umbel.wire.message import Message, unreadable
from umbel.wire.properties import encode_others, others_of
from umbel.wire.values import UNREADABLE

PERSISTENT, TRANSIENT = 2, 1
PROPERTIES_MAX_BYTES = FRAME_MAX - FRAME_OVERHEAD - 14  # in one frame, behind its class and size
_JSON_HEADER = "umbel-json"
_OTHERS_HEADER = "umbel-properties"
LETTER_HEADER = "umbel-queue"  # a dead letter has it, and an id of ours for its message id
_MARK = "umbel"
_encode = msgspec.json.encode
_decode_hidden = msgspec.json.Decoder(tuple[Name, Name, dict[str, Any]]).decode
_TEXTS = ("message_id", "type", "app_id", "cluster_id")
_OTHERS = (*_TEXTS, "timestamp", "user_id")
_OTHERS_FLAG = b"\x04"  # the lowest of theirs, in the second byte of the flags
_decode: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
# What RabbitMQ adds to a message that it dead-letters, as a step of the delay ladder does.
_DELIVERY_COUNT = "x-delivery-count"  # a quorum queue adds it to what comes again
_OF_RABBITMQ = ("x-death", "x-first-death-exchange", "x-first-death-queue", "x-first-death-reason",
                "x-last-death-exchange", "x-last-death-queue", "x-last-death-reason")  # fmt: skip


class Mark(msgspec.Struct, frozen=True, gc=False):
    """What the broker remembers with a message: when it is due, and that it may have run."""

    due: float = 0.0
    ran: bool = False

    def text(self) -> str:
        return f"{_MARK}:{self.due!r}:{self.ran:d}" if self.due or self.ran else ""


NO_MARK = Mark()


def encode(
    message: Message, mark: Mark = NO_MARK, extra: Table | None = None, *, message_id: str = ""
) -> bytes:
    """The message's properties. A marked message waits by our rules, not by its expiration.

    Nor does one that lives longer than RabbitMQ can say: the worker reads when it expires.
    """
    expires = message.expiration_ms is not None and not mark.due and message.expiration_ms <= TTL_MAX_MS
    headers = table_of(message.headers) if message.headers else {}  # none: it could not be read
    properties = Properties(
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        delivery_mode=PERSISTENT,
        priority=min(max(message.priority, 0), PRIORITY_MAX),
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        expiration=str(max(message.expiration_ms or 0, 0)) if expires else "",
        message_id=message_id,
        type=mark.text(),
    )
    if message.properties or message.exchange:
        extra = _place_others(properties, message) | (extra or {})
    properties.headers = headers if extra is None else headers | extra
    try:
        encoded = encode_properties(properties)
    except OverflowError:
        exact = {_JSON_HEADER: message.headers.decode()}
        properties.headers = _small(headers) | exact | (extra or {})
        encoded = encode_properties(properties)
    if len(encoded) > PROPERTIES_MAX_BYTES:
        raise TooLarge(
            f"the headers have {len(encoded)} bytes; the limit of RabbitMQ is {PROPERTIES_MAX_BYTES}: "
            "send less in headers and stamps"
        )
    return encoded


def decode(incoming: Incoming, exchange: str = "", key: str = "") -> tuple[Message, Mark, Table]:
    """The message, its mark, and the headers that are ours. Whatever came, this answers."""
    try:
        properties = decode_properties(incoming.properties)
    except (ValueError, IndexError, struct.error, RecursionError):
        # Not a table as AMQP has it: the worker will bury what it cannot read.
        return unreadable(incoming.body), NO_MARK, {}
    table = properties.headers or {}
    ours: Table = {}
    table.pop(_DELIVERY_COUNT, None)
    if "x-death" in table:
        for name in _OF_RABBITMQ:
            table.pop(name, None)
    for name in [name for name in table if name[:6] == "umbel-"]:
        ours[name] = table.pop(name)
    expiration = properties.expiration
    expiration_ms = int(expiration) if expiration.isascii() and expiration.isdecimal() else None
    if expiration_ms is not None and expiration_ms > EXPIRATION_MAX_MS:
        return unreadable(incoming.body), NO_MARK, {}
    others = b""
    if ours or incoming.properties[1:2] >= _OTHERS_FLAG:
        others, exchange, key = _read_others(properties, ours, exchange, key)
    message = Message(
        json_of(table, ours),
        incoming.body,
        properties.content_type,
        properties.content_encoding,
        properties.priority or 0,
        properties.correlation_id,
        properties.reply_to,
        expiration_ms,
        others,
        exchange,
        key if exchange else "",
    )
    return message, _mark(properties.type) if properties.type else NO_MARK, ours


def encode_broadcast(broadcast: Broadcast, ttl_s: float) -> bytes:
    return encode_properties(
        Properties(
            content_type="application/json",
            content_encoding="utf-8",
            headers=table_of(broadcast.headers),
            delivery_mode=TRANSIENT,
            priority=0,
            expiration=str(max(1, round(ttl_s * 1000))),
        )
    )


def decode_broadcast(incoming: Incoming, exchange: str) -> Broadcast:
    message, _, _ = decode(incoming)
    return Broadcast(exchange, incoming.fields[3], incoming.body, message.headers)


def table_of(headers: bytes) -> Table:
    try:
        table = _decode.decode(headers)
    except UNREADABLE as error:
        raise BadMessage(f"the headers must be a JSON object: {error}") from None
    if _encode(table) != headers:
        table[_JSON_HEADER] = headers.decode()
    return table


def json_of(table: Table, ours: Table) -> bytes:
    exact = ours.pop(_JSON_HEADER, None)
    if isinstance(exact, str):
        try:
            if _small(_decode.decode(exact)) == table:
                return exact.encode()
        except UNREADABLE:
            pass
    return _encode(table)


def _place_others(properties: Properties, message: Message) -> Table:
    """Set the properties that can stand in their places; the header for the rest."""
    rest: dict[str, Any] = {}
    for name, value in others_of(message).items():
        is_text = name in _TEXTS and isinstance(value, str) and len(value.encode()) <= NAME_MAX_BYTES
        is_time = name == "timestamp" and type(value) is int and 0 <= value < 2**63
        if (is_text or is_time) and not getattr(properties, name):
            setattr(properties, name, value)
        else:
            rest[name] = value
    if not rest and not message.exchange:
        return {}
    return {_OTHERS_HEADER: _encode((message.exchange, message.routing_key, rest)).decode()}


def _read_others(properties: Properties, ours: Table, exchange: str, key: str) -> tuple[bytes, str, str]:
    """What has no field in a message; and the exchange, which a message that was parked has in a header."""
    others: dict[str, Any] = {}
    for name in _OTHERS:
        if value := getattr(properties, name):
            others[name] = value
    if "message_id" in others and LETTER_HEADER in ours:
        del others["message_id"]
    if "type" in others and properties.type.startswith(f"{_MARK}:"):
        del others["type"]
    hidden = ours.pop(_OTHERS_HEADER, None)
    if isinstance(hidden, str):
        with suppress(*UNREADABLE):
            came_by, came_with, rest = _decode_hidden(hidden)
            others |= rest
            exchange, key = (exchange, key) if exchange else (came_by, came_with)
    return encode_others(others), exchange, key


def _small(value: Any) -> Any:
    """The value with the numbers that AMQP cannot hold as text."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    if isinstance(value, list):
        return [_small(item) for item in value]
    if isinstance(value, dict):
        return {name: _small(item) for name, item in value.items()}
    return value


def _mark(text: str) -> Mark:
    """A mark that is not ours, or not well formed, marks nothing."""
    kind, _, rest = text.partition(":")
    due, _, ran = rest.partition(":")
    if kind != _MARK:
        return NO_MARK
    try:
        mark = Mark(float(due), ran == "1")
    except ValueError:
        return NO_MARK
    return mark if 0 <= mark.due <= LATEST_S else NO_MARK
