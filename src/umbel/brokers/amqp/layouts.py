"""Layouts: read a message at a glance when its properties look like those of an earlier one.

The messages of one kind of client differ in a few texts (ids, arguments) and have the same headers
otherwise, of the same kinds, in the same order; the id of the process or thread that sends is one of
those texts, so that a layout serves any number of clients. Such a layout is kept as a regular expression (the
bytes that stay the same, and a group for each text) and as JSON with a place for each text. To match
it takes a tenth of the time that decoding the table takes.

What a layout reads is what `envelope.decode` reads: it fits whole properties only, and a text only
if it is as long as it says. Whatever fits no layout is decoded, and may become the next layout, not
more often than every LEARN_EVERY times, because that costs as much as decoding thirty messages.
Texts that JSON would have to escape, long ones, and headers with a meaning for brokers never fit.
"""

import re
from collections.abc import Iterator

import msgspec

from umbel.brokers.amqp.envelope import NO_MARK, Mark, decode
from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.table import decode_value
from umbel.wire.message import Message

LAYOUTS_MAX = 8
LEARN_EVERY = 200
PROPERTIES_MAX_BYTES = 8192
HEADERS_MAX = 64
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = 0x80, 0x40, 0x20  # in the first byte of the flags
_DELIVERY_MODE, _PRIORITY, _CORRELATION_ID, _REPLY_TO = 0x10, 0x08, 0x04, 0x02
_SAFE = rb"[ !#-\[\]-~]"  # stands for itself in JSON
# The first three bytes of a length are constant, because longer texts are left to the decoder. The
# run of safe bytes ends where the next header begins: with the length of its name, a control byte.
_TEXT = rb"S\x00\x00\x00(.)(" + _SAFE + rb"{0,255}+)"
_NUMBERS = {ord("I"): rb"I()(.{4})", ord("l"): rb"l()(.{8})"}
_to_json = msgspec.json.encode


class Layout(msgspec.Struct, frozen=True):
    """The groups: the table's length, a length and a value for each place, then two of the properties."""

    expression: re.Pattern[bytes]
    json: bytes
    numbers: frozenset[int]  # which of the values are no texts
    outside_bytes: int  # of the properties, before and after what the table's length counts
    like: Message

    def read(self, properties: bytes, body: bytes, exchange: str = "", key: str = "") -> Message | None:
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
    """Those that were last of use, the latest first."""

    def __init__(self) -> None:
        self._known: list[Layout] = []
        self._until_learning = 0

    def __len__(self) -> int:
        return len(self._known)

    def read(self, incoming: Incoming, exchange: str = "", key: str = "") -> tuple[Message, Mark]:
        """What `envelope.decode` says of it."""
        properties = incoming.properties
        for place, layout in enumerate(self._known):
            if (message := layout.read(properties, incoming.body, exchange, key)) is not None:
                if place:
                    self._known.insert(0, self._known.pop(place))
                return message, NO_MARK
        message, mark, ours = decode(incoming, exchange, key)
        if self._until_learning:
            self._until_learning -= 1
        elif message.headers and mark is NO_MARK and not ours:
            self._until_learning = LEARN_EVERY
            if (learnt := layout_of(properties, message)) is not None:
                self._known = [learnt, *self._known[: LAYOUTS_MAX - 1]]
        return message, mark


def layout_of(properties: bytes, like: Message) -> Layout | None:
    """The layout of properties that were decoded into this message; None if they cannot have one."""
    if len(properties) > PROPERTIES_MAX_BYTES or not properties[0] & _HEADERS:
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
            + b"".join(re.escape(one.opening) + (one.pattern or re.escape(one.value)) for one in headers)
            + _after_table(properties, end),
            re.DOTALL,
        ),
        json=b"{" + b",".join(one.json for one in headers) + b"}",
        numbers=frozenset(place for place, one in enumerate(places) if one.pattern != _TEXT),
        outside_bytes=table + 4 + len(properties) - end,
        like=like,
    )
    # Not so for a name that comes twice, for headers that mean something to a broker, which the message
    # does not show, and for a text behind which nothing tells that it has ended.
    return layout if layout.read(properties, like.body, like.exchange, like.routing_key) == like else None


class _Header(msgspec.Struct, frozen=True):
    opening: bytes  # its name
    value: bytes  # with its kind
    pattern: bytes  # empty where only this very value fits
    json: bytes


def _headers(properties: bytes, at: int, end: int) -> Iterator[_Header]:
    while at < end:
        start = at + 1 + properties[at]
        kind = properties[start]
        value, stop = decode_value(kind, properties, start + 1)
        pattern, place = b"", _to_json(value).replace(b"%", b"%%")
        if kind == ord("S"):
            pattern, place = _TEXT, b'"%b"'
        elif value and kind in _NUMBERS:  # zero is what most of them are, always
            pattern, place = _NUMBERS[kind], b"%d"
        json = _to_json(properties[at + 1 : start].decode()).replace(b"%", b"%%") + b":" + place
        yield _Header(properties[at:start], properties[start:stop], pattern, json)
        at = stop


def _after_table(properties: bytes, at: int) -> bytes:
    """Of what follows the headers, only two differ, and not in length: the ids of the task and its sender."""
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
