"""Properties: what AMQP 0-9-1 says of a message beside its body, as bytes, and back."""

import struct

import msgspec

from umbel.brokers.amqp.forms import encode_alike
from umbel.brokers.amqp.table import NAMES_MAX, Table, decode_short, decode_table, encode_short

_openings: dict[tuple[str, str], bytes] = {}


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


def encode_properties(properties: Properties) -> bytes:
    """Flags, then the properties that are set, in the order of the flags' bits."""
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
    """What a message is written in: hardly ever anything but JSON in UTF-8."""
    if len(_openings) >= NAMES_MAX:
        _openings.clear()
    data = _openings[content] = b"".join(encode_short(text) for text in content if text)
    return data


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


def _decode_passing(data: bytes, at: int) -> tuple[str, int]:
    """A text that is only passed on: whatever it is, the message is good without it."""
    end = at + 1 + (data[at] if at < len(data) else 0)
    return data[at + 1 : end].decode(errors="replace"), end
