"""The envelope of Celery's Redis transport: one list element, or one pub/sub payload (wire 2.2).

Headers pass unchanged and the body as base64, so neither is parsed in transit. A body may have megabytes, so
it is cut out of the envelope and inserted as bytes, without the JSON library. Umbel adds one map at the very
front, `{"umbel": {...}, `: how often the message was started, whether it may have run, and when it is due.
Celery ignores the map and keeps it when it restores a message. The map is first and has a fixed spelling, so
that the Lua scripts can find and change it without parsing the rest.

A list element that is not an envelope is returned as a message without headers. The worker makes it a dead
letter with a reason, whereas an exception here would stop the queue.
"""

from binascii import Error as Base64Error
from binascii import a2b_base64
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from pybase64 import b64decode, b64encode

from umbel.wire.message import (
    EXPIRATION_MAX_MS,
    JSON_CONTENT,
    Message,
    Name,
    Priority,
    StoredResult,
    encode_others,
    unreadable,
)
from umbel.wire.values import UNREADABLE

PERSISTENT, TRANSIENT = 2, 1
MARK = b'{"umbel": {'
CUT_FROM_BYTES = 2048
"""In envelopes of at least this size the body is cut out instead of parsed."""
_BEGINNINGS = (b'{"body":"', b'{"body": "')
REDELIVERED = b'{"redelivered": true'
"""The first bytes that the scripts write into the headers of a message that may have run."""


class Opened(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A decoded envelope. `redelivered`: a worker, Umbel's or Celery's, claimed it before."""

    message: Message
    starts: int
    redelivered: bool


def seal(
    message: Message,
    queue: str,
    delivery_tag: str,
    not_before: float = 0.0,
    *,
    redelivered: bool = False,
    exchange: str = "",
    routing_key: str = "",
) -> bytes:
    """Return the envelope of a task message for a queue's list, which it may reach through an exchange."""
    expiration = message.expiration_ms
    key = routing_key if exchange else queue
    properties: _Properties | Raw = _Properties(
        message.correlation_id,
        message.reply_to,
        PERSISTENT,
        _DeliveryInfo(exchange, key, redelivered or UNSET),
        message.priority,
        "base64",
        delivery_tag,
        UNSET if expiration is None else str(expiration),
    )
    # at the front, because the scripts identify an envelope by its end, which contains the tag
    if message.properties:
        properties = Raw(message.properties[:-1] + b"," + _encode(properties)[1:])
    around = _Around(message.content_encoding, message.content_type, Raw(message.headers), properties)
    envelope = _with_body(message.body, around)
    if redelivered:
        due = b', "not_before": %.6f' % not_before if not_before else b""
        return b'{"umbel": {"redelivered": true%b}, ' % due + envelope[1:]
    return envelope if not not_before else b'{"umbel": {"not_before": %.6f}, ' % not_before + envelope[1:]


def seal_result(result: StoredResult, delivery_tag: str) -> bytes:
    """Return a result for the list of the client that waits for it (wire 6.3)."""
    properties = _Properties(
        result.task_id, UNSET, TRANSIENT, _DeliveryInfo("", result.reply_to), 0, "base64", delivery_tag
    )
    return _with_body(result.payload, _Around("utf-8", JSON_CONTENT, Raw(b"{}"), properties))


def unseal(envelope: bytes) -> Opened:
    """Read an envelope; an unreadable one becomes a message without headers."""
    try:
        read, body, others = _cut_out(envelope) if len(envelope) > CUT_FROM_BYTES else (None, b"", b"")
        if read is None:
            try:
                read = _decode(envelope)
            except msgspec.ValidationError:  # perhaps because of a property without a field here
                read, others = _decode_others(envelope)
            body = _decoded(read.body) if read.properties.body_encoding == "base64" else read.body.encode()
        properties = read.properties
        expiration = properties.expiration
        expiration_ms = None if expiration is None else int(float(expiration))
        if expiration_ms is not None and not 0 <= expiration_ms <= EXPIRATION_MAX_MS:
            raise ValueError(expiration_ms)
    except (msgspec.DecodeError, Base64Error, ValueError, OverflowError, RecursionError):
        return Opened(unreadable(envelope), 0, False)
    headers, umbel, info = bytes(read.headers), read.umbel, properties.delivery_info
    if umbel.redelivered and headers.startswith(REDELIVERED):
        headers = b"{" + headers[len(REDELIVERED) :].removeprefix(b", ")
    message = Message(
        headers,
        body,
        read.content_type or JSON_CONTENT,
        read.content_encoding or "utf-8",
        properties.priority or 0,
        properties.correlation_id or "",
        properties.reply_to or "",
        expiration_ms,
        others,
        info.exchange or "",
        (info.exchange and info.routing_key) or "",
    )
    return Opened(message, umbel.starts, umbel.redelivered or info.redelivered is True)


def due_of(envelope: bytes) -> float:
    """Return the time before which the task must not start; 0.0 if none is stated."""
    if not envelope.startswith(MARK):
        return 0.0
    try:
        return _decode_mark(envelope[len(MARK) - 1 : envelope.find(b"}, ") + 1]).not_before
    except UNREADABLE:
        return 0.0


def seal_broadcast(exchange: str, routing_key: str, body: bytes, headers: bytes, delivery_tag: str) -> bytes:
    """Return the payload of an event, a control request or a reply."""
    properties = _Properties(
        UNSET, UNSET, TRANSIENT, _DeliveryInfo(exchange, routing_key), 0, "base64", delivery_tag
    )
    return _with_body(body, _Around("utf-8", JSON_CONTENT, Raw(headers), properties))


def _with_body(body: bytes, around: "_Around") -> bytes:
    return b"".join((_BEGINNINGS[0], b64encode(body), b'",', _encode(around)[1:]))


def _cut_out(envelope: bytes) -> tuple["_ReadEnvelope | None", bytes, bytes]:
    """Return the envelope without its body, the body, and the other properties; None: parse it whole.

    Envelopes of Umbel and Celery begin with the body. Base64 has no escapes, so the body ends at the next
    quote.
    """
    start = next((len(beginning) for beginning in _BEGINNINGS if envelope.startswith(beginning)), 0)
    end = envelope.find(b'"', start) if start else -1
    if end < 0 or not envelope.startswith((b',"', b', "'), end + 1):
        return None, b"", b""
    rest, others = b'{"body":"",' + envelope[end + 2 :], b""
    try:
        read: _ReadEnvelope = _decode(rest)
    except msgspec.ValidationError:
        read, others = _decode_others(rest)
    if read.body or read.properties.body_encoding != "base64":
        return None, b"", b""
    try:
        return read, b64decode(memoryview(envelope)[start:end], None, True), others
    except Base64Error:
        return None, b"", b""


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, None, True)
    except Base64Error:  # perhaps with line breaks, which only this function ignores
        return a2b_base64(text)


class _DeliveryInfo(msgspec.Struct, frozen=True, gc=False):
    exchange: str
    routing_key: str
    redelivered: bool | UnsetType = UNSET


class _Properties(msgspec.Struct, frozen=True, gc=False):
    correlation_id: str | UnsetType
    reply_to: str | UnsetType
    delivery_mode: int
    delivery_info: _DeliveryInfo
    priority: int
    body_encoding: str
    delivery_tag: str
    expiration: str | UnsetType = UNSET


class _Around(msgspec.Struct, frozen=True, gc=False):
    """The fields after the body, in Celery's order and with Celery's names."""

    content_encoding: str = msgspec.field(name="content-encoding")
    content_type: str = msgspec.field(name="content-type")
    headers: Raw
    properties: _Properties | Raw


class _ReadInfo(msgspec.Struct, frozen=True, gc=False):
    redelivered: bool | None = None
    exchange: Name | None = None
    routing_key: Name | None = None


class _LooseProperties(msgspec.Struct, frozen=True, gc=False):
    """The properties; those that peers may omit, or send as null, have defaults."""

    correlation_id: Name | None = None
    reply_to: Name | None = None
    priority: Priority | None = None
    body_encoding: str | None = None
    expiration: str | int | float | None = None
    delivery_info: _ReadInfo = _ReadInfo()


class _ReadProperties(_LooseProperties, frozen=True, gc=False, forbid_unknown_fields=True):
    """The properties of most messages, all of which have a field here."""

    delivery_mode: Raw | UnsetType = UNSET
    delivery_tag: Raw | UnsetType = UNSET


class _Mark(msgspec.Struct, frozen=True, gc=False):
    """The map `umbel`, with the limits of `is_mark` in `messages.lua`; a map beyond them is not Umbel's."""

    starts: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    redelivered: bool = False
    not_before: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0


class _ReadEnvelope(msgspec.Struct, frozen=True, gc=False):
    body: str
    headers: Raw = Raw(b"{}")
    properties: _LooseProperties = _LooseProperties()
    content_encoding: str | None = msgspec.field(name="content-encoding", default=None)
    content_type: str | None = msgspec.field(name="content-type", default=None)
    umbel: _Mark = _Mark()


class _PlainEnvelope(_ReadEnvelope, frozen=True, gc=False):
    """An envelope whose properties all have fields, as in most messages: it is read in one pass."""

    properties: _ReadProperties = _ReadProperties()


class _OtherProperties(msgspec.Struct, frozen=True, gc=False):
    properties: dict[str, Any] = {}


def _decode_others(envelope: bytes) -> tuple[_ReadEnvelope, bytes]:
    """Read an envelope, and separately the properties that have no field here."""
    return _decode_loosely(envelope), encode_others(_decode_properties(envelope).properties)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_PlainEnvelope).decode
_decode_mark = msgspec.json.Decoder(_Mark).decode
_decode_loosely = msgspec.json.Decoder(_ReadEnvelope).decode
_decode_properties = msgspec.json.Decoder(_OtherProperties).decode
