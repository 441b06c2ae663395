"""Layouts: messages read without decoding their headers, because an earlier message had the same headers.

The messages of one kind of client differ in a few texts (ids, arguments) and otherwise have the same headers,
of the same types, in the same order. A layout is a regular expression (the constant bytes, and a group for
each text) and JSON with a place for each text. Matching it takes a tenth of the time of decoding the headers.
It reads the same as `envelope.decode`. A message that fits no layout is decoded, and may become the next
layout.
"""

import re
from collections.abc import Iterator

import msgspec

from umbel.brokers.amqp.envelope import NO_STATE, MessageState, decode
from umbel.brokers.amqp.frames import Incoming, decode_value
from umbel.wire.message import Message

LAYOUTS_MAX = 8
LEARN_EVERY = 200
LEARNED_MAX_BYTES = 8192
HEADERS_MAX = 64
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = 0x80, 0x40, 0x20  # in the first byte of the flags
_DELIVERY_MODE, _PRIORITY, _CORRELATION_ID, _REPLY_TO = 0x10, 0x08, 0x04, 0x02
_SAFE = rb"[ !#-\[\]-~]"  # characters that JSON does not escape
# The first three bytes of a length are constant, because longer texts are left to the decoder. The
# run of safe bytes ends where the next header begins: with the length of its name, a control byte.
_TEXT = rb"S\x00\x00\x00(.)(" + _SAFE + rb"{0,255}+)"
_NUMBERS = {ord("I"): rb"I()(.{4})", ord("l"): rb"l()(.{8})"}
_to_json = msgspec.json.encode


class Layout(msgspec.Struct, frozen=True):
    """A regular expression for properties (the constant bytes, and groups for the rest) and their JSON.

    The groups are the table's length, a length and a value for each place, then two of the properties. A
    layout fits complete properties only, and a text only if it is as long as its length field says.
    """

    expression: re.Pattern[bytes]
    json: bytes
    numbers: frozenset[int]  # the places of values that are numbers
    outside_bytes: int  # of the properties, outside of what the table's length counts
    like: Message

    def read(self, properties: bytes, body: bytes, exchange: str = "", key: str = "") -> Message | None:
        """Return the message with these properties; None if they do not fit this layout."""
        match = self.expression.fullmatch(properties)
        if match is None:
            return None
        groups = match.groups()
        values = texts = groups[2:-2:2]
        if self.numbers:
            texts = tuple(value for place, value in enumerate(values) if place not in self.numbers)
            values = tuple(
                int.from_bytes(value, signed=True) if place in self.numbers else value
                for place, value in enumerate(values)
            )
        if b"".join(groups[1:-2:2]) != bytes(map(len, texts)):
            return None
        if int.from_bytes(groups[0]) != len(properties) - self.outside_bytes:
            return None
        like = self.like
        return Message(
            self.json % values,
            body,
            like.content_type,
            like.content_encoding,
            like.priority,
            groups[-2].decode(),
            groups[-1].decode(),
            like.expiration_ms,
            like.properties,
            exchange,
            key if exchange else "",
        )


class Layouts:
    """The layouts used most recently, the latest first.

    A message that fits none is decoded, and may become the next layout. That happens at most once in
    LEARN_EVERY messages, because it costs as much as decoding thirty. Texts that JSON would have to escape,
    long texts, and headers with a meaning for brokers never fit.
    """

    def __init__(self) -> None:
        self._known: list[Layout] = []
        self._until_learning = 0

    def __len__(self) -> int:
        return len(self._known)

    def read(self, incoming: Incoming, exchange: str = "", key: str = "") -> tuple[Message, MessageState]:
        """Return the message and its state, like `envelope.decode`."""
        properties = incoming.properties
        for place, layout in enumerate(self._known):
            if (message := layout.read(properties, incoming.body, exchange, key)) is not None:
                if place:
                    self._known.insert(0, self._known.pop(place))
                return message, NO_STATE
        message, state, ours = decode(incoming, exchange, key)
        if self._until_learning:
            self._until_learning -= 1
        elif message.headers and state is NO_STATE and not ours:
            self._until_learning = LEARN_EVERY
            if (learnt := layout_of(properties, message)) is not None:
                self._known = [learnt, *self._known[: LAYOUTS_MAX - 1]]
        return message, state


def layout_of(properties: bytes, like: Message) -> Layout | None:
    """Return the layout of properties that were decoded into this message; None if they cannot have one."""
    if len(properties) > LEARNED_MAX_BYTES or not properties[0] & _HEADERS:
        return None
    table = 2
    for flag in (_CONTENT_TYPE, _CONTENT_ENCODING):
        if properties[0] & flag:
            table += 1 + properties[table]
    end = table + 4 + int.from_bytes(properties[table : table + 4])
    headers = list(_headers(properties, table + 4, end))
    if len(headers) > HEADERS_MAX:
        return None
    places = [header for header in headers if header.pattern]
    layout = Layout(
        expression=re.compile(
            re.escape(properties[:table])
            + rb"(.{4})"
            + b"".join(
                re.escape(entry.opening) + (entry.pattern or re.escape(entry.value)) for entry in headers
            )
            + _after_table(properties, end),
            re.DOTALL,
        ),
        json=b"{" + b",".join(entry.json for entry in headers) + b"}",
        numbers=frozenset(place for place, entry in enumerate(places) if entry.pattern != _TEXT),
        outside_bytes=table + 4 + len(properties) - end,
        like=like,
    )
    # It does not read the same for a name that occurs twice, for headers with a meaning for brokers, which
    # the message does not contain, and for a text whose end cannot be recognised.
    return layout if layout.read(properties, like.body, like.exchange, like.routing_key) == like else None


class _Header(msgspec.Struct, frozen=True):
    """One header in a layout."""

    opening: bytes  # its name
    value: bytes  # with its kind
    pattern: bytes  # empty if only this very value fits
    json: bytes


def _headers(properties: bytes, at: int, end: int) -> Iterator[_Header]:
    """Yield the headers of a table, in order."""
    while at < end:
        start = at + 1 + properties[at]
        kind = properties[start]
        value, stop = decode_value(kind, properties, start + 1)
        pattern, place = b"", _to_json(value).replace(b"%", b"%%")
        if kind == ord("S"):
            pattern, place = _TEXT, b'"%b"'
        elif value and kind in _NUMBERS:  # most numbers are always zero, which is part of the expression
            pattern, place = _NUMBERS[kind], b"%d"
        json = _to_json(properties[at + 1 : start].decode()).replace(b"%", b"%%") + b":" + place
        yield _Header(properties[at:start], properties[start:stop], pattern, json)
        at = stop


def _after_table(properties: bytes, at: int) -> bytes:
    """Return the expression for the bytes behind the headers: only the ids of task and sender differ, never
    in length.
    """
    flags = properties[0]
    ids_at = at + bool(flags & _DELIVERY_MODE) + bool(flags & _PRIORITY)
    expression = re.escape(properties[at:ids_at])
    for flag in (_CORRELATION_ID, _REPLY_TO):
        if flags & flag:
            size = properties[ids_at]
            expression += b"%b(%b{%d})" % (re.escape(properties[ids_at : ids_at + 1]), _SAFE, size)
            ids_at += 1 + size
        else:
            expression += b"()"
    return expression + re.escape(properties[ids_at:])
