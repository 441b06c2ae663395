"""Envelope: a message in AMQP's properties and headers, and back.

Celery's headers are an AMQP table on the wire and JSON inside Umbel. Where the table would not give back the
same bytes (other spacing, integers beyond 64 bits) the JSON travels too, in a separate header. It counts only
while its content equals the table, because a Celery worker that retries a task passes on headers that it does
not know.

The broker's own state of a message (when it is due, that it may have run) is in the property `type`, which
Celery neither reads nor passes on. Properties without a meaning for Umbel (`app_id`, ...) stay in their
fields. A header of Umbel's holds the values whose field is needed or forbidden, so that they survive the
delay ladder and the dead letters: a `type` or `message_id` whose field Umbel uses, a `user_id`, which
RabbitMQ accepts from that user alone, and the exchange.

Of the thirty headers of a task three or four differ from one message to the next. `encode_alike` therefore
writes a table from the bytes that were the same in all earlier tables with these names; the result is the
same as that of `encode_table`.
"""

import struct
from contextlib import suppress
from itertools import compress
from typing import Any

import msgspec

from umbel.brokers.amqp.frames import (
    FRAME_MAX,
    FRAME_OVERHEAD,
    NAMES_MAX,
    Incoming,
    Table,
    decode_short,
    decode_table,
    encode_short,
    encode_table,
    encode_value,
)
from umbel.brokers.amqp.topology import TTL_MAX_MS
from umbel.brokers.interface import Broadcast
from umbel.errors import BadMessage, TooLarge
from umbel.wire.message import (
    EXPIRATION_MAX_MS,
    LATEST_S,
    NAME_MAX_BYTES,
    PRIORITY_MAX,
    Message,
    Name,
    encode_others,
    others_of,
    unreadable,
)
from umbel.wire.values import UNREADABLE

# ---- forms -----------------------------------------------------------------------------------------

FORMS_MAX = 100
BYTES_MAX = 4096  # of a table that a form is made from
_forms: dict[tuple[str, ...], "Form"] = {}


class Form(msgspec.Struct, frozen=True):
    """Which values were the same in all tables with these names, and their bytes.

    The types must be the same too: 1 equals True.
    """

    is_same: tuple[bool, ...]
    is_other: tuple[bool, ...]
    values: tuple[Any, ...]
    kinds: tuple[type, ...]
    opening: bytes  # up to the name of the first value that differs
    runs: tuple[bytes, ...]  # the constant bytes after each value that differs

    def encode(self, values: tuple[Any, ...]) -> bytes | None:
        """Encode a table of these values; None if a value differs that was the same until now."""
        same = tuple(compress(values, self.is_same))
        if same != self.values or tuple(map(type, same)) != self.kinds:
            return None
        parts = [self.opening]
        for value, run in zip(compress(values, self.is_other), self.runs, strict=True):
            parts += (encode_value(value), run)
        data = b"".join(parts)
        return len(data).to_bytes(4) + data


def encode_alike(table: Table) -> bytes:
    """Encode the table by the form of the earlier tables with these names; the bytes are those of
    `encode_table`.
    """
    names, values = tuple(table), tuple(table.values())
    form = _forms.get(names)
    if form is not None and (encoded := form.encode(values)) is not None:
        return encoded
    encoded = encode_table(table)
    if len(encoded) <= BYTES_MAX:
        if len(_forms) >= FORMS_MAX:
            _forms.clear()
        _forms[names] = _form(names, values, form)
    return encoded


def _form(names: tuple[str, ...], values: tuple[Any, ...], before: Form | None) -> Form:
    """Return the form of this table and all before it: `before` is the form that no longer fits."""
    is_same = tuple(map(_may_be_compared, values))
    if before is not None:
        known = iter(zip(before.values, before.kinds, strict=True))
        is_same = tuple(
            was_same and (value, type(value)) == next(known)
            for was_same, value in zip(before.is_same, values, strict=True)
        )
    runs = [b""]
    for name, value, is_constant in zip(names, values, is_same, strict=True):
        runs[-1] += encode_short(name)
        if is_constant:
            runs[-1] += encode_value(value)
        else:
            runs.append(b"")
    same = tuple(compress(values, is_same))
    kinds = tuple(map(type, same))
    return Form(is_same, tuple(not constant for constant in is_same), same, kinds, runs[0], tuple(runs[1:]))


def _may_be_compared(value: Any) -> bool:
    """Whether equal values are equal bytes. This is not so for 0.0 and -0.0, nor for the items of a list."""
    if isinstance(value, list):
        return all(item is None for item in value)
    return value is None or value == {} or isinstance(value, str | int)


# ---- properties ------------------------------------------------------------------------------------

_openings: dict[tuple[str, str], bytes] = {}


class Properties(msgspec.Struct, gc=False, omit_defaults=True):
    """The basic properties of a message that Umbel or Celery sets or reads."""

    content_type: str = ""
    content_encoding: str = ""
    headers: Table | None = None
    delivery_mode: int = 0
    priority: int | None = None
    correlation_id: str = ""
    reply_to: str = ""
    expiration: str = ""
    message_id: str = ""
    timestamp: int | None = None
    type: str = ""
    user_id: str = ""
    app_id: str = ""
    cluster_id: str = ""


def encode_properties(properties: Properties) -> bytes:
    """Encode the flags, then the properties that are set, in the order of the flags' bits."""
    flags, parts = 0, []
    content = (properties.content_type, properties.content_encoding)
    if content[0] or content[1]:
        flags = (0x8000 if content[0] else 0) | (0x4000 if content[1] else 0)
        parts.append(_openings.get(content) or _encode_opening(content))
    if properties.headers is not None:
        flags |= 1 << 13
        parts.append(encode_alike(properties.headers))
    if properties.delivery_mode:
        flags |= 1 << 12
        parts.append(bytes((properties.delivery_mode,)))
    if properties.priority is not None:
        flags |= 1 << 11
        parts.append(bytes((properties.priority,)))
    if properties.correlation_id:
        flags |= 1 << 10
        parts.append(encode_short(properties.correlation_id))
    if properties.reply_to:
        flags |= 1 << 9
        parts.append(encode_short(properties.reply_to))
    if properties.expiration:
        flags |= 1 << 8
        parts.append(encode_short(properties.expiration))
    if properties.message_id:
        flags |= 1 << 7
        parts.append(encode_short(properties.message_id))
    if properties.timestamp is not None:
        flags |= 1 << 6
        parts.append(struct.pack(">Q", properties.timestamp))
    if properties.type:
        flags |= 1 << 5
        parts.append(encode_short(properties.type))
    for bit, text in ((4, properties.user_id), (3, properties.app_id), (2, properties.cluster_id)):
        if text:
            flags |= 1 << bit
            parts.append(encode_short(text))
    return flags.to_bytes(2) + b"".join(parts)


def _encode_opening(content: tuple[str, str]) -> bytes:
    """Encode content type and encoding, from a cache: nearly always JSON in UTF-8."""
    if len(_openings) >= NAMES_MAX:
        _openings.clear()
    data = _openings[content] = b"".join(encode_short(text) for text in content if text)
    return data


def decode_properties(data: bytes) -> Properties:
    """Decode the properties of a message; raise ValueError, IndexError or struct.error for malformed
    bytes.
    """
    flags, at = int.from_bytes(data[:2]), 2
    found = Properties()
    if flags & 0x8000:
        found.content_type, at = decode_short(data, at)
    if flags & 0x4000:
        found.content_encoding, at = decode_short(data, at)
    if flags & 0x2000:
        found.headers, at = decode_table(data, at)
    if flags & 0x1000:
        found.delivery_mode, at = data[at], at + 1
    if flags & 0x0800:
        found.priority, at = data[at], at + 1
    if flags & 0x0400:
        found.correlation_id, at = decode_short(data, at)
    if flags & 0x0200:
        found.reply_to, at = decode_short(data, at)
    if flags & 0x0100:
        found.expiration, at = decode_short(data, at)
    if flags & 0x0080:
        found.message_id, at = decode_short(data, at)
    if flags & 0x0040:
        found.timestamp, at = struct.unpack_from(">Q", data, at)[0], at + 8
    if flags & 0x0020:
        found.type, at = decode_short(data, at)
    if flags & 0x0010:
        found.user_id, at = _decode_passing(data, at)
    if flags & 0x0008:
        found.app_id, at = _decode_passing(data, at)
    if flags & 0x0004:
        found.cluster_id, at = _decode_passing(data, at)
    return found


def _decode_passing(data: bytes, at: int) -> tuple[str, int]:
    """Decode a text that is only passed on: a malformed one does not make the message unreadable."""
    end = at + 1 + (data[at] if at < len(data) else 0)
    return data[at + 1 : end].decode(errors="replace"), end


# ---- envelope --------------------------------------------------------------------------------------

PERSISTENT, TRANSIENT = 2, 1
PROPERTIES_MAX_BYTES = FRAME_MAX - FRAME_OVERHEAD - 14  # in one frame, behind class and size
_JSON_HEADER = "umbel-json"
_OTHERS_HEADER = "umbel-properties"
_SINCE_HEADER = "umbel-since"
LETTER_HEADER = "umbel-queue"  # every dead letter has it, and an id of Umbel's as message id
_TYPE_PREFIX = "umbel"
_encode = msgspec.json.encode
_decode_hidden = msgspec.json.Decoder(tuple[Name, Name, dict[str, Any]]).decode
_TEXTS = ("message_id", "type", "app_id", "cluster_id")
_OTHERS = (*_TEXTS, "timestamp", "user_id")
_OTHERS_FLAG = b"\x04"  # their lowest flag, in the second byte of the flags
_decode: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
# What RabbitMQ adds to a message that it dead-letters, as each level of the delay ladder does.
_DELIVERY_COUNT = "x-delivery-count"  # a quorum queue adds it to a redelivered message
_OF_RABBITMQ = ("x-death", "x-first-death-exchange", "x-first-death-queue", "x-first-death-reason",
                "x-last-death-exchange", "x-last-death-queue", "x-last-death-reason")  # fmt: skip


class MessageState(msgspec.Struct, frozen=True, gc=False):
    """The broker's own state of a message: when it is due, and that it may have run.

    `since`: when it was learned that it may have run, for a message that inherits this from its sender; 0:
    when it arrives.
    """

    due: float = 0.0
    ran: bool = False
    since: float = 0.0

    def text(self) -> str:
        """Return the property `type` that carries this; empty if there is nothing to remember."""
        return f"{_TYPE_PREFIX}:{self.due!r}:{self.ran:d}" if self.due or self.ran else ""


NO_STATE = MessageState()


def encode(
    message: Message, state: MessageState = NO_STATE, extra: Table | None = None, *, message_id: str = ""
) -> bytes:
    """Encode the message's properties; raise TooLarge if they do not fit one frame.

    A message with a due time gets no expiration of RabbitMQ's, nor does one whose expiration is longer than
    RabbitMQ can express: the worker checks when it expires.
    """
    expires = message.expiration_ms is not None and not state.due and message.expiration_ms <= TTL_MAX_MS
    headers = table_of(message.headers) if message.headers else {}  # empty if the message could not be read
    properties = Properties(
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        delivery_mode=PERSISTENT,
        priority=min(max(message.priority, 0), PRIORITY_MAX),
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        expiration=str(max(message.expiration_ms or 0, 0)) if expires else "",
        message_id=message_id,
        type=state.text(),
    )
    if state.since:
        extra = {_SINCE_HEADER: int(state.since)} | (extra or {})
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


def decode(incoming: Incoming, exchange: str = "", key: str = "") -> tuple[Message, MessageState, Table]:
    """Return the message, the broker's state of it, and Umbel's headers; an unreadable message for malformed
    properties.
    """
    try:
        properties = decode_properties(incoming.properties)
    except (ValueError, IndexError, struct.error, RecursionError):
        # Not a valid AMQP table: the worker dead-letters an unreadable message.
        return unreadable(incoming.body), NO_STATE, {}
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
        return unreadable(incoming.body), NO_STATE, {}
    state = _state(properties.type, ours.pop(_SINCE_HEADER, 0)) if properties.type else NO_STATE
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
    return message, state, ours


def encode_broadcast(broadcast: Broadcast, ttl_s: float) -> bytes:
    """Encode the properties of a broadcast, which RabbitMQ drops from a queue after `ttl_s`."""
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
    """Return the broadcast that arrived from this exchange."""
    message, _, _ = decode(incoming)
    return Broadcast(exchange, incoming.fields[3], incoming.body, message.headers)


def table_of(headers: bytes) -> Table:
    """Return JSON headers as a table, with the exact JSON in a header if the table alone would lose it; raise
    BadMessage.
    """
    try:
        table = _decode.decode(headers)
    except UNREADABLE as error:
        raise BadMessage(f"the headers must be a JSON object: {error}") from None
    if _encode(table) != headers:
        table[_JSON_HEADER] = headers.decode()
    return table


def json_of(table: Table, ours: Table) -> bytes:
    """Return the headers of a table as JSON: the exact text from Umbel's header while it still equals the
    table.
    """
    exact = ours.pop(_JSON_HEADER, None)
    if isinstance(exact, str):
        try:
            if _small(_decode.decode(exact)) == table:
                return exact.encode()
        except UNREADABLE:
            pass
    return _encode(table)


def _place_others(properties: Properties, message: Message) -> Table:
    """Set the properties that can stay in their fields; return the header for the rest."""
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
    """Return the properties that a message has no field for, and the exchange, which a parked message has in
    a header.
    """
    others: dict[str, Any] = {}
    for name in _OTHERS:
        if value := getattr(properties, name):
            others[name] = value
    if "message_id" in others and LETTER_HEADER in ours:
        del others["message_id"]
    if "type" in others and properties.type.startswith(f"{_TYPE_PREFIX}:"):
        del others["type"]
    hidden = ours.pop(_OTHERS_HEADER, None)
    if isinstance(hidden, str):
        with suppress(*UNREADABLE):
            came_by, came_with, rest = _decode_hidden(hidden)
            others |= rest
            exchange, key = (exchange, key) if exchange else (came_by, came_with)
    return encode_others(others), exchange, key


def _small(value: Any) -> Any:
    """Return the value, with integers that AMQP cannot hold as text."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    if isinstance(value, list):
        return [_small(item) for item in value]
    if isinstance(value, dict):
        return {name: _small(item) for name, item in value.items()}
    return value


def _state(text: str, since: Any) -> MessageState:
    """Return the state in the property `type`; NO_STATE if it is not Umbel's or not well formed."""
    kind, _, rest = text.partition(":")
    due, _, ran = rest.partition(":")
    if kind != _TYPE_PREFIX:
        return NO_STATE
    try:
        known_since = float(since) if type(since) is int and since > 0 else 0.0
        state = MessageState(float(due), ran == "1", known_since)
    except (ValueError, OverflowError):
        return NO_STATE
    return state if 0 <= state.due <= LATEST_S else NO_STATE
