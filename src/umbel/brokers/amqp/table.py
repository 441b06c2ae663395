"""Tables: AMQP 0-9-1's typed values as bytes, and back.

Only what RabbitMQ and Celery put on the wire (wire-protocol 1.2): decimals and byte strings are
read as text, and text that is not UTF-8 is a ValueError. An integer beyond 64 bits is an
OverflowError; who must send one finds another way (`envelope.py` does).
"""

import struct
from typing import Any

from umbel.errors import TooLarge

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
            parts.append(encode_value(value))
    data = b"".join(parts)
    return _pack_long(len(data)) + data


def _encode_name(name: str) -> bytes:
    """Headers have the same few names in every message."""
    if len(_names) >= NAMES_MAX:
        _names.clear()
    data = _names[name] = encode_short(name)
    return data


def encode_value(value: Any) -> bytes:
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
    end = at + 1 + data[at]
    return data[at + 1 : end].decode(), end


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
        raise ValueError(
            f"a header of the message has the AMQP type {chr(kind)!r}, which Umbel cannot read; correct the "
            "program that sent the message"
        )
    items = []
    while at < end:
        item, at = decode_value(data[at], data, at + 1)
        items.append(item)
    return items, end
