"""Frames: AMQP 0-9-1 as bytes, and back: typed values and tables, methods, frames.

Pure: bytes in, `Incoming` out; the asynchronous link and the blocking one both use it. The codec is Umbel's
and not a library's, because decoding a delivery is the largest cost of consuming
(`docs/decisions/0012-amqp-client.md`).

Every method is a number, class and method in one, and a text that spells its fields: B H L Q are numbers of
1, 2, 4, 8 bytes, s and S short and long strings, F a table, b one bit of a shared byte.

Tables hold only what RabbitMQ and Celery put on the wire (wire-protocol 1.2): decimals and byte strings are
read as text, and text that is not UTF-8 is a ValueError. An integer beyond 64 bits is an OverflowError;
`envelope.py` sends it another way.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Self

import msgspec

from umbel.errors import TooLarge

# ---- tables ----------------------------------------------------------------------------------------

Table = dict[str, Any]

NAMES_MAX = 1000
_SHORT_MAX = 255
_names: dict[str, bytes] = {}
_read_names: dict[bytes, str] = {}
_unpack_long = struct.Struct(">L").unpack_from
_pack_long = struct.Struct(">L").pack
_FIXED = {
    ord("b"): struct.Struct(">b"),
    ord("B"): struct.Struct(">B"),
    ord("s"): struct.Struct(">h"),
    ord("u"): struct.Struct(">H"),
    ord("I"): struct.Struct(">l"),
    ord("i"): struct.Struct(">L"),
    ord("l"): struct.Struct(">q"),
    ord("L"): struct.Struct(">q"),
    ord("T"): struct.Struct(">Q"),
    ord("f"): struct.Struct(">f"),
    ord("d"): struct.Struct(">d"),
}
_TEXT, _VOID, _BOOL, _TABLE, _ARRAY, _BYTES, _DECIMAL = b"SVtFAxD"


# -- encoding ----------------------------------------------------------------------------------------


def encode_short(text: str) -> bytes:
    """Encode a name or id with its length in front; raise TooLarge beyond 255 bytes."""
    data = text.encode()
    if len(data) > _SHORT_MAX:
        raise TooLarge(f"{text[:40]!r}… has {len(data)} bytes; AMQP allows {_SHORT_MAX} for names and ids")
    return bytes((len(data),)) + data


def encode_table(table: Table) -> bytes:
    """Encode a table with its length in front; raise OverflowError for an integer beyond 64 bits."""
    parts: list[bytes] = []
    for name, value in table.items():
        parts.append(_names.get(name) or _encode_name(name))
        # The two commonest kinds of a Celery header are written in place.
        if value is None:
            parts.append(b"V")
        elif type(value) is str:
            text = value.encode()
            parts += (b"S", _pack_long(len(text)), text)
        else:
            parts.append(encode_value(value))
    data = b"".join(parts)
    return _pack_long(len(data)) + data


def _encode_name(name: str) -> bytes:
    """Encode a header's name, from a cache: the same few names are in every message."""
    if len(_names) >= NAMES_MAX:
        _names.clear()
    data = _names[name] = encode_short(name)
    return data


def encode_value(value: Any) -> bytes:
    """Encode one value with the letter of its type in front, in the types that Celery writes."""
    if isinstance(value, str):
        data = value.encode()
        return b"S" + _pack_long(len(data)) + data
    if value is None:
        return b"V"
    if isinstance(value, bool):
        return b"t\x01" if value else b"t\x00"
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return b"I" + struct.pack(">l", value)
        if not -(2**63) <= value < 2**63:
            raise OverflowError(
                f"the header value {value} has more than 64 bits, which AMQP cannot carry; send it as text"
            )
        return b"l" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"d" + struct.pack(">d", value)
    if isinstance(value, dict):
        return b"F" + encode_table(value)
    if isinstance(value, bytes):
        return b"x" + _pack_long(len(value)) + value
    data = b"".join(map(encode_value, value))
    return b"A" + _pack_long(len(data)) + data


# -- decoding ----------------------------------------------------------------------------------------


def decode_short(data: bytes, at: int) -> tuple[str, int]:
    """Return the name or id at this place, and the place behind it."""
    end = at + 1 + data[at]
    return data[at + 1 : end].decode(), end


def decode_table(data: bytes, at: int) -> tuple[Table, int]:
    """Return the table at this place, and the place behind it; raise ValueError for a type that Umbel cannot
    read.
    """
    end = at + 4 + _unpack_long(data, at)[0]
    at += 4
    table: Table = {}
    while at < end:
        name_end = at + 1 + data[at]
        name = _read_names.get(data[at:name_end]) or _decode_name(data[at:name_end])
        # The two commonest kinds of a Celery header are read in place.
        kind = data[name_end]
        at = name_end + 1
        if kind == _TEXT:
            text_end = at + 4 + _unpack_long(data, at)[0]
            table[name] = data[at + 4 : text_end].decode()
            at = text_end
        elif kind == _VOID:
            table[name] = None
        else:
            table[name], at = decode_value(kind, data, at)
    return table, end


def _decode_name(short: bytes) -> str:
    """Decode a header's name, from a cache: every message has the same few names, and foreign names are few
    too.
    """
    if len(_read_names) >= NAMES_MAX:
        _read_names.clear()
    name = _read_names[short] = short[1:].decode()
    return name


def decode_value(kind: int, data: bytes, at: int) -> tuple[Any, int]:
    """Return the value of this type at this place, and the place behind it."""
    if (fixed := _FIXED.get(kind)) is not None:
        return fixed.unpack_from(data, at)[0], at + fixed.size
    if kind == _BOOL:
        return data[at] != 0, at + 1
    if kind == _VOID:
        return None, at
    if kind == _TABLE:
        return decode_table(data, at)
    if kind == _DECIMAL:
        scale, number = data[at], struct.unpack_from(">l", data, at + 1)[0]
        return f"{number}e-{scale}", at + 5
    end = at + 4 + _unpack_long(data, at)[0]
    at += 4
    if kind in (_TEXT, _BYTES):
        return data[at:end].decode(), end
    if kind != _ARRAY:
        raise ValueError(
            f"a header of the message has the AMQP type {chr(kind)!r}, which Umbel cannot read; correct the "
            "program that sent the message"
        )
    items = []
    while at < end:
        item, at = decode_value(data[at], data, at + 1)
        items.append(item)
    return items, end


# ---- frames ----------------------------------------------------------------------------------------

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
FRAME_MAX = 131_072
FRAME_OVERHEAD = 8
MESSAGE_MAX_BYTES = 512 * 1024 * 1024  # no RabbitMQ can be set to take more (`max_message_size`)
HEARTBEAT_FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"

_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8
_END = 0xCE
_BASIC = 60
_frame_head = struct.Struct(">BHL")
_method_head = struct.Struct(">BHLL")
_content_head = struct.Struct(">BHLHHQ")
_ack_frame = struct.Struct(">BHLLQBB")
_NUMBERS = {
    "B": struct.Struct(">B"),
    "H": struct.Struct(">H"),
    "L": struct.Struct(">L"),
    "Q": struct.Struct(">Q"),
}


class Method(IntEnum):
    """The methods of AMQP 0-9-1 that Umbel sends or reads.

    The number has the class in its upper half and the method in its lower half. `fields` spells the fields.
    """

    fields: str

    def __new__(cls, number: int, fields: str) -> Self:
        """Create a member from its number and the spelling of its fields."""
        method = int.__new__(cls, number)
        method._value_ = number
        method.fields = fields
        return method

    CONNECTION_START = 0x000A000A, "BBFSS"
    CONNECTION_START_OK = 0x000A000B, "FsSs"
    CONNECTION_TUNE = 0x000A001E, "HLH"
    CONNECTION_TUNE_OK = 0x000A001F, "HLH"
    CONNECTION_OPEN = 0x000A0028, "ssb"
    CONNECTION_OPEN_OK = 0x000A0029, "s"
    CONNECTION_CLOSE = 0x000A0032, "HsHH"
    CONNECTION_CLOSE_OK = 0x000A0033, ""
    CONNECTION_BLOCKED = 0x000A003C, "s"
    CONNECTION_UNBLOCKED = 0x000A003D, ""
    CHANNEL_OPEN = 0x0014000A, "s"
    CHANNEL_OPEN_OK = 0x0014000B, "S"
    CHANNEL_FLOW = 0x00140014, "b"
    CHANNEL_FLOW_OK = 0x00140015, "b"
    CHANNEL_CLOSE = 0x00140028, "HsHH"
    CHANNEL_CLOSE_OK = 0x00140029, ""
    EXCHANGE_DECLARE = 0x0028000A, "HssbbbbbF"
    EXCHANGE_DECLARE_OK = 0x0028000B, ""
    EXCHANGE_BIND = 0x0028001E, "HsssbF"
    EXCHANGE_BIND_OK = 0x0028001F, ""
    QUEUE_DECLARE = 0x0032000A, "HsbbbbbF"
    QUEUE_DECLARE_OK = 0x0032000B, "sLL"
    QUEUE_BIND = 0x00320014, "HsssbF"
    QUEUE_BIND_OK = 0x00320015, ""
    QUEUE_UNBIND = 0x00320032, "HsssF"
    QUEUE_UNBIND_OK = 0x00320033, ""
    QUEUE_PURGE = 0x0032001E, "Hsb"
    QUEUE_PURGE_OK = 0x0032001F, "L"
    QUEUE_DELETE = 0x00320028, "Hsbbb"
    QUEUE_DELETE_OK = 0x00320029, "L"
    BASIC_QOS = 0x003C000A, "LHb"
    BASIC_QOS_OK = 0x003C000B, ""
    BASIC_CONSUME = 0x003C0014, "HssbbbbF"
    BASIC_CONSUME_OK = 0x003C0015, "s"
    BASIC_CANCEL = 0x003C001E, "sb"
    BASIC_CANCEL_OK = 0x003C001F, "s"
    BASIC_PUBLISH = 0x003C0028, "Hssbb"
    BASIC_RETURN = 0x003C0032, "Hsss"
    BASIC_DELIVER = 0x003C003C, "sQbss"
    BASIC_GET = 0x003C0046, "Hsb"
    BASIC_GET_OK = 0x003C0047, "QbssL"
    BASIC_GET_EMPTY = 0x003C0048, "s"
    BASIC_ACK = 0x003C0050, "Qb"
    BASIC_REJECT = 0x003C005A, "Qb"
    BASIC_NACK = 0x003C0078, "Qbb"
    CONFIRM_SELECT = 0x0055000A, "b"
    CONFIRM_SELECT_OK = 0x0055000B, ""


_FIELDS: dict[int, str] = {method.value: method.fields for method in Method}
_DELIVER = int(Method.BASIC_DELIVER)
_DELIVER_BYTES = _DELIVER.to_bytes(4)
_WITH_CONTENT = frozenset({_DELIVER, int(Method.BASIC_GET_OK), int(Method.BASIC_RETURN)})


class Incoming(msgspec.Struct, gc=False):
    """One method of a channel, with its content if it has any; the properties are still encoded."""

    channel: int
    method: int
    fields: tuple[Any, ...]
    properties: bytes = b""
    body: bytes = b""


class BadFrames(ValueError):
    """The bytes are not AMQP: the connection cannot be used any further."""


# -- encoding ----------------------------------------------------------------------------------------


def encode_method(channel: int, method: Method, *fields: Any) -> bytes:
    """Encode the frame of one method; `fields` are in the order in which the protocol spells them."""
    parts, bits, bit = [], 0, 0
    for kind, value in zip(_FIELDS[method], fields, strict=True):
        if kind == "b":
            bits |= bool(value) << bit
            bit += 1
            continue
        if bit:
            parts.append(bytes((bits,)))
            bits = bit = 0
        parts.append(_encode_field(kind, value))
    if bit:
        parts.append(bytes((bits,)))
    payload = b"".join(parts)
    return _method_head.pack(_METHOD, channel, len(payload) + 4, method) + payload + b"\xce"


def encode_publish(
    channel: int, exchange: str, routing_key: str, properties: bytes, body: bytes, *, mandatory: bool = False
) -> bytes:
    """Encode all frames of one message: method, header and body, the body in pieces that fit a frame."""
    route = encode_short(exchange) + encode_short(routing_key)
    parts = [
        _method_head.pack(_METHOD, channel, len(route) + 7, Method.BASIC_PUBLISH),
        b"\x00\x00",
        route,
        b"\x01\xce" if mandatory else b"\x00\xce",
        _content_head.pack(_HEADER, channel, len(properties) + 12, _BASIC, 0, len(body)),
        properties,
        b"\xce",
    ]
    piece_max = FRAME_MAX - FRAME_OVERHEAD
    for start in range(0, len(body), piece_max):
        piece = body[start : start + piece_max]
        parts += (_frame_head.pack(_BODY, channel, len(piece)), piece, b"\xce")
    return b"".join(parts)


def encode_ack(channel: int, tag: int, *, multiple: bool = False) -> bytes:
    """Encode the frame that acknowledges one delivery, or with `multiple` all up to it."""
    return _ack_frame.pack(_METHOD, channel, 13, Method.BASIC_ACK, tag, multiple, _END)


def _encode_field(kind: str, value: Any) -> bytes:
    if (number := _NUMBERS.get(kind)) is not None:
        return number.pack(value)
    if kind == "s":
        return encode_short(value)
    if kind == "S":
        data: bytes = value.encode() if isinstance(value, str) else value
        return struct.pack(">L", len(data)) + data
    return encode_table(value)


# -- decoding ----------------------------------------------------------------------------------------


class _Content(msgspec.Struct, gc=False):
    """A message of which some frames are still missing."""

    method: int
    fields: tuple[Any, ...]
    properties: bytes = b""
    missing: int = -1
    pieces: list[bytes] = []


class FrameReader:
    """Cuts a stream of bytes into methods with their contents.

    It buffers at most one frame and, per channel, one incomplete message. `message_max_bytes` bounds the
    message, because its size is only the sender's claim.
    """

    def __init__(self, *, message_max_bytes: int = MESSAGE_MAX_BYTES) -> None:
        self._rest = b""
        self._contents: dict[int, _Content] = {}
        self._message_max_bytes = message_max_bytes
        self._whole_max_bytes = min(message_max_bytes, FRAME_MAX)

    def feed(self, data: bytes) -> list[Incoming]:
        """Return the methods that these bytes complete; raise BadFrames if the bytes are not AMQP."""
        incoming: list[Incoming] = []
        try:
            self._cut(self._rest + data if self._rest else data, incoming)
        except (UnicodeDecodeError, IndexError, KeyError, struct.error) as error:
            raise BadFrames(f"received a malformed AMQP frame: {error!r} (is this an AMQP port?)") from error
        return incoming

    def _cut(self, data: bytes, incoming: list[Incoming]) -> None:
        at, size = 0, len(data)
        while size - at >= FRAME_OVERHEAD:
            kind, channel, length = _frame_head.unpack_from(data, at)
            start, end = at + 7, at + 7 + length
            if length > FRAME_MAX:
                raise BadFrames(
                    f"received a frame of {length} bytes; the limit is {FRAME_MAX} (is this an AMQP port?)"
                )
            if end >= size:
                break
            if data[end] != _END:
                raise BadFrames("received a frame without its end byte (is this an AMQP port?)")
            if kind == _METHOD:
                if data.startswith(_DELIVER_BYTES, start) and (
                    after := self._delivery(channel, data, start, end + 1, incoming)
                ):
                    at = after
                    continue
                self._method(channel, data, start, incoming)
            elif kind == _HEADER:
                self._header(channel, data, start, end, incoming)
            elif kind == _BODY:
                self._body(channel, data[start:end], incoming)
            elif kind != _HEARTBEAT:
                raise BadFrames(f"unknown AMQP frame type {kind} (is this an AMQP port?)")
            at = end + 1
        self._rest = data[at:]

    def _delivery(self, channel: int, data: bytes, start: int, head: int, incoming: list[Incoming]) -> int:
        """Read the three frames of a usual message at once; return the place behind them.

        0 if they have not all arrived, or have another shape: then each frame is read separately.
        """
        size = len(data)
        if size - head < _content_head.size:
            return 0
        kind, of, length, _, _, body_bytes = _content_head.unpack_from(data, head)
        body = head + FRAME_OVERHEAD + length
        end: int = body + 7 + body_bytes
        if (
            (kind, of) != (_HEADER, channel)
            or not 0 < body_bytes <= self._whole_max_bytes
            or end >= size
            or data[body - 1] != _END
            or data[end] != _END
            or _frame_head.unpack_from(data, body) != (_BODY, channel, body_bytes)
        ):
            return 0
        properties = data[head + _content_head.size : body - 1]
        fields = _deliver_fields(data, start + 4)
        incoming.append(Incoming(channel, _DELIVER, fields, properties, data[body + 7 : end]))
        return end + 1

    def _method(self, channel: int, data: bytes, start: int, incoming: list[Incoming]) -> None:
        method = int.from_bytes(data[start : start + 4])
        if method == _DELIVER:
            self._contents[channel] = _Content(_DELIVER, _deliver_fields(data, start + 4))
            return
        spelling = _FIELDS.get(method)
        if spelling is None:
            raise BadFrames(
                f"unknown AMQP method {method >> 16}.{method & 0xFFFF} (is this an AMQP 0-9-1 port?)"
            )
        fields = tuple(_fields(spelling, data, start + 4))
        if method in _WITH_CONTENT:
            self._contents[channel] = _Content(method, fields)
        else:
            incoming.append(Incoming(channel, method, fields))

    def _header(self, channel: int, data: bytes, start: int, end: int, incoming: list[Incoming]) -> None:
        content = self._contents[channel]
        size = int.from_bytes(data[start + 4 : start + 12])
        if size > self._message_max_bytes:
            raise BadFrames(
                f"received a message of {size} bytes; the limit is {self._message_max_bytes}: remove it from "
                "its queue with RabbitMQ's tools, and send a reference to the data instead"
            )
        content.properties, content.missing = data[start + 12 : end], size
        if not size:
            self._complete(channel, content, b"", incoming)

    def _body(self, channel: int, piece: bytes, incoming: list[Incoming]) -> None:
        content = self._contents[channel]
        content.missing -= len(piece)
        if content.missing > 0:
            content.pieces.append(piece)
        else:
            self._complete(channel, content, b"".join((*content.pieces, piece)), incoming)

    def _complete(self, channel: int, content: _Content, body: bytes, incoming: list[Incoming]) -> None:
        del self._contents[channel]
        incoming.append(Incoming(channel, content.method, content.fields, content.properties, body))


def _deliver_fields(data: bytes, at: int) -> tuple[str, int, bool, str, str]:
    """Return consumer tag, delivery tag, redelivered, routing key and exchange of a delivery."""
    end = at + 1 + data[at]
    key = end + 10 + data[end + 9]
    return (
        str(data[at + 1 : end], "ascii"),
        int.from_bytes(data[end : end + 8]),
        data[end + 8] != 0,
        str(data[key + 1 : key + 1 + data[key]], "utf-8", "replace"),
        str(data[end + 10 : key], "utf-8", "replace") if data[end + 9] else "",
    )


def _fields(spelling: str, data: bytes, at: int) -> Iterator[Any]:
    """Yield the fields of a method, read by its spelling."""
    bit = 0
    for kind in spelling:
        if kind == "b":
            yield bool(data[at] >> bit & 1)
            bit += 1
            continue
        if bit:
            at, bit = at + 1, 0
        value: str | int | bytes | Table
        if (number := _NUMBERS.get(kind)) is not None:
            value, at = number.unpack_from(data, at)[0], at + number.size
        elif kind == "s":
            value, at = decode_short(data, at)
        elif kind == "S":
            end = at + 4 + int.from_bytes(data[at : at + 4])
            value, at = data[at + 4 : end], end
        else:
            value, at = decode_table(data, at)
        yield value
