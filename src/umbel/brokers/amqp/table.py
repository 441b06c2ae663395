"""Tables and properties: AMQP 0-9-1's typed values as bytes, and back.

Only what RabbitMQ and Celery put on the wire (wire-protocol 1.2): decimals and byte strings are
read as text, and text that is not UTF-8 is a ValueError. An integer beyond 64 bits is an
OverflowError; who must send one finds another way (`envelope.py` does).
"""

import struct
from typing import Any

import msgspec

from umbel.errors import TooLarge

Table = dict[str, Any]

NAMES_MAX = 1000
_SHORT_MAX = 255
_names: dict[str, bytes] = {}
_read_names: dict[bytes, str] = {}
_openings: dict[tuple[str, str], bytes] = {}
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


class Properties(msgspec.Struct, gc=False, omit_defaults=True):
    """The basic properties of a message that anybody here sets or reads."""

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


# -- encoding ----------------------------------------------------------------------------------------


def encode_short(text: str) -> bytes:
    data = text.encode()
    if len(data) > _SHORT_MAX:
        raise TooLarge(f"{text[:40]!r}… has {len(data)} bytes; AMQP allows {_SHORT_MAX} for names and ids")
    return bytes((len(data),)) + data


def encode_table(table: Table) -> bytes:
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
            parts.append(_encode_value(value))
    data = b"".join(parts)
    return _pack_long(len(data)) + data


def encode_properties(properties: Properties) -> bytes:
    """Flags, then the properties that are set, in the order of the flags' bits."""
    flags, parts = 0, []
    content = (properties.content_type, properties.content_encoding)
    if content[0] or content[1]:
        flags = (0x8000 if content[0] else 0) | (0x4000 if content[1] else 0)
        parts.append(_openings.get(content) or _encode_opening(content))
    if properties.headers is not None:
        flags |= 1 << 13
        parts.append(encode_table(properties.headers))
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
    """What a message is written in: hardly ever anything but JSON in UTF-8."""
    if len(_openings) >= NAMES_MAX:
        _openings.clear()
    data = _openings[content] = b"".join(encode_short(text) for text in content if text)
    return data


def _encode_name(name: str) -> bytes:
    """Headers have the same few names in every message."""
    if len(_names) >= NAMES_MAX:
        _names.clear()
    data = _names[name] = encode_short(name)
    return data


def _encode_value(value: Any) -> bytes:
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
    data = b"".join(map(_encode_value, value))
    return b"A" + _pack_long(len(data)) + data


# -- decoding ----------------------------------------------------------------------------------------


def decode_short(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end].decode(), end


def _decode_passing(data: bytes, at: int) -> tuple[str, int]:
    """A text that is only passed on: whatever it is, the message is good without it."""
    end = at + 1 + (data[at] if at < len(data) else 0)
    return data[at + 1 : end].decode(errors="replace"), end


def decode_table(data: bytes, at: int) -> tuple[Table, int]:
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
    """As for encoding: the same few names come with every message, and strangers' names are few too."""
    if len(_read_names) >= NAMES_MAX:
        _read_names.clear()
    name = _read_names[short] = short[1:].decode()
    return name


def decode_properties(data: bytes) -> Properties:
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


def decode_value(kind: int, data: bytes, at: int) -> tuple[Any, int]:
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
        raise ValueError(f"a header of the message has the unknown AMQP type {chr(kind)!r}")
    items = []
    while at < end:
        item, at = decode_value(data[at], data, at + 1)
        items.append(item)
    return items, end
