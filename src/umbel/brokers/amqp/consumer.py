"""Consumer: the messages of one queue that RabbitMQ has delivered to one owner.

A consumer has a separate channel, so that its prefetch can follow the demand: RabbitMQ delivers as many
messages as the owner asked for and has not settled, and no more. The limit is the channel's, which can be
changed at any time. Quorum queues refuse that by ending the connection; there (`per_consumer`) the limit is
the consumer's, which is restarted when the demand has grown.

What arrived waits in `buffered` until it is claimed. A message that is not due yet is either held for the
last few milliseconds or put on `early`, to be parked.

An owner that can start nothing for a while stops fetching, and what it has not claimed goes back. With a
prefetch floor it goes on as the consumer with the lowest priority: RabbitMQ delivers to it only what no other
consumer has room for.

A layout reads a message at a glance when its properties look like those of an earlier one: the messages of
one kind of client differ in a few texts (ids, arguments) only. Matching takes a tenth of the time of decoding
the headers. It reads the same as `envelope.decode`; what fits no layout is decoded, and may become the next
layout.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.envelope import NO_MARK, Mark, decode
from umbel.brokers.amqp.frames import Incoming, Method, Table, decode_value, encode_ack, encode_method
from umbel.brokers.amqp.handshake import ChannelClosed
from umbel.brokers.amqp.link import Channel, Link
from umbel.clock import cluster_now
from umbel.errors import BrokerError
from umbel.wire.message import Message

# ---- layouts ---------------------------------------------------------------------------------------
#
# Read a message at a glance when its properties look like those of an earlier one.
#
# The messages of one kind of client differ in a few texts (ids, arguments) and otherwise have the same
# headers, of the same types, in the same order. The id of the sending process or thread is one of those
# texts, so a layout serves any number of clients. A layout is a regular expression (the bytes that stay the
# same, and a group for each text) and JSON with a place for each text. To match it takes a tenth of the
# time of decoding the table.
#
# A layout reads the same as `envelope.decode`: it fits complete properties only, and a text only if it is
# as long as its length field says. Anything else is decoded, and may become the next layout. That happens
# at most once in LEARN_EVERY messages, because it costs as much as decoding thirty. Texts that JSON would
# have to escape, long ones, and headers with a meaning for brokers never fit.

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
    """A regular expression for properties (the bytes that stay the same, and groups for what differs) and
    their JSON.

    The groups: the table's length, a length and a value for each place, then two of the properties. It fits
    complete properties only, and a text only if it is as long as its length field says.
    """

    expression: re.Pattern[bytes]
    json: bytes
    numbers: frozenset[int]  # the places of values that are numbers
    outside_bytes: int  # of the properties, outside of what the table's length counts
    like: Message

    def read(self, properties: bytes, body: bytes, exchange: str = "", key: str = "") -> Message | None:
        """The message with these properties; None if they do not fit this layout."""
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
    long ones, and headers with a meaning for brokers never fit.
    """

    def __init__(self) -> None:
        self._known: list[Layout] = []
        self._until_learning = 0

    def __len__(self) -> int:
        return len(self._known)

    def read(self, incoming: Incoming, exchange: str = "", key: str = "") -> tuple[Message, Mark]:
        """The same message and mark as `envelope.decode` returns."""
        properties = incoming.properties
        for place, layout in enumerate(self._known):
            if (message := layout.read(properties, incoming.body, exchange, key)) is not None:
                if place:
                    self._known.insert(0, self._known.pop(place))
                return message, NO_MARK
        message, state, ours = decode(incoming, exchange, key)
        if self._until_learning:
            self._until_learning -= 1
        elif message.headers and state is NO_MARK and not ours:
            self._until_learning = LEARN_EVERY
            if (learnt := layout_of(properties, message)) is not None:
                self._known = [learnt, *self._known[: LAYOUTS_MAX - 1]]
        return message, state


def layout_of(properties: bytes, like: Message) -> Layout | None:
    """The layout of properties that were decoded into this message; None if they cannot have a layout."""
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
    """One header as a layout has it."""

    opening: bytes  # its name
    value: bytes  # with its kind
    pattern: bytes  # empty if only this very value fits
    json: bytes


def _headers(properties: bytes, at: int, end: int) -> Iterator[_Header]:
    """The headers of a table, in order."""
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
    """The expression for the bytes behind the headers: only the ids of task and sender differ, never in
    length.
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


# ---- consumer --------------------------------------------------------------------------------------
#
# The messages of one queue that RabbitMQ has delivered to one owner.
#
# It has a separate channel, so that its prefetch can follow the demand: RabbitMQ delivers as many messages
# as the owner asked for and has not settled, and no more. The limit is the channel's, which can be changed
# at any time. Quorum queues refuse that, by ending the connection; there (`per_consumer`) the limit is the
# consumer's, which is restarted when the demand has grown.
#
# What arrived waits in `buffered` until it is claimed. A message that is not due yet is either held for the
# last few milliseconds or put on `early`, to be parked.
#
# An owner that can start nothing for a while stops fetching, and what it has not claimed goes back. With a
# prefetch floor it goes on as the consumer with the lowest priority: RabbitMQ delivers to it only what no
# other consumer of the queue has room for.

log = logging.getLogger("umbel.brokers.amqp")

_LATE_ACK = (
    "RabbitMQ requeued messages that were unacknowledged for longer than its consumer_timeout (30 minutes "
    "by default): they run again if another worker takes them; raise consumer_timeout in rabbitmq.conf, give "
    "such tasks acks_late=False, or make them shorter"
)
HOLD_S = topology.DELAY_STEPS_MS[0] / 1000
BARRIERS_MAX = 4
LAST: Table = {"x-priority": -1}  # such a consumer is served after all others
TIMER_S = 0.002  # uvloop's timers count whole milliseconds, and may fire one too early


class Arrived(msgspec.Struct, gc=False):
    """A message that was delivered to this process and is not claimed."""

    message: Message
    delivery_tag: int
    redelivered: bool
    mark: Mark
    claim: int = 0  # the tag of the claim under which it is being parked


class Consumer:
    """The consumer of one queue for one owner. `on_deleted` is called when the queue was deleted while it was
    consumed.
    """

    def __init__(
        self,
        link: Link,
        queue: str,
        on_arrival: Callable[[], None],
        on_deleted: Callable[["Consumer"], None],
        *,
        per_consumer: bool,
        prefetch_floor: int = 0,
        expires_all: bool = False,
    ) -> None:
        self.queue = queue
        self.claimed = 0
        self.prefetch = 0
        self.early: list[Arrived] = []
        self.stirred = False  # something was returned, and may be delivered again piecemeal
        self._link = link
        self._channel: Channel | None = None
        self._on_arrival = on_arrival
        self._on_deleted = on_deleted
        self._has_begun = False
        self._is_last = False  # consumes with the lowest priority
        self._held: dict[int, Arrived] = {}  # by delivery tag, until they are due in a moment
        self._buffers: dict[int, deque[Arrived]] = {}
        self._outstanding: dict[int, None] = {}
        self._layouts = Layouts()
        self._per_consumer = per_consumer
        self._prefetch_floor = prefetch_floor
        self._expires_all = expires_all  # the queue drops messages that have waited too long
        self._generation = 0

    @property
    def is_open(self) -> bool:
        """Whether its channel lives; if not, RabbitMQ has its messages again."""
        return self._channel is not None and self._channel.error is None

    @property
    def error(self) -> BrokerError | None:
        """The error that ended its channel, if it has ended."""
        return None if self._channel is None else self._channel.error

    @property
    def held(self) -> int:
        """How many messages wait here for the last milliseconds until they are due."""
        return len(self._held)

    @property
    def buffered(self) -> int:
        """How many messages wait here to be claimed."""
        return sum(map(len, self._buffers.values()))

    @property
    def priorities(self) -> list[int]:
        """The priorities of the messages that wait here to be claimed."""
        return [priority for priority, waiting in self._buffers.items() if waiting]

    def streams(self, limit: int) -> bool:
        """Whether the server may deliver so many more messages, and will do so in the order of the queue."""
        room = self.prefetch >= self.claimed + limit and not self._is_last
        return room and not self.stirred and not self.early

    async def open(self) -> None:
        """Open its channel; nothing is consumed until `want`."""
        self._channel = await self._link.channel()
        self._channel.on_delivery = self._receive
        self._channel.on_end = self._end

    async def want(self, count: int) -> None:
        """Let `count` messages come in addition to those that are claimed; at most so many then wait here.

        Or more, up to the floor: RabbitMQ drops a message that expires in its queue without a trace, while
        one that waits here ends as a task that has expired.
        """
        wanted = max(self.claimed + self.held + len(self.early) + count, self._prefetch_floor)
        if self._is_last or self.prefetch < wanted or self.prefetch > 4 * wanted:
            await self._set_prefetch(wanted)

    async def settled(self) -> int:
        """Wait until everything that the server delivered before this call has arrived.

        It makes two requests: the answer to the first may overtake a message that is on its way inside the
        server, the answer to the second cannot. Returns how many messages still wait there.
        """
        assert self._channel is not None
        self.stirred = False
        method, fields = topology.passive(self.queue)
        await self._channel.call(method, *fields)
        ready: int = (await self._channel.call(method, *fields)).fields[1]
        return ready

    def take(self, priority: int, limit: int) -> list[Arrived]:
        """Up to `limit` messages of this priority, which count as claimed."""
        waiting = self._buffers.get(priority)
        if not waiting:
            return []
        taken = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        self.claimed += len(taken)
        return taken

    def untake(self, arrived: Arrived) -> None:
        """Undo `take` for one message, which is the next to be taken again."""
        self.claimed -= 1
        self._buffers[arrived.message.priority].appendleft(arrived)

    def waiting(self) -> Iterable[Arrived]:
        """What is here and not claimed, in the order of claims."""
        for priority in sorted(self._buffers, reverse=True):
            yield from self._buffers[priority]

    def drop_waiting(self) -> int:
        """Acknowledge what is here and not claimed, because the queue is being purged; how many messages."""
        dropped = [arrived.delivery_tag for arrived in self.waiting()]
        self._buffers.clear()
        self._ack(dropped)
        return len(dropped)

    def finish(self, tags: list[int]) -> None:
        """Acknowledge these claimed messages."""
        self.claimed -= len(tags)
        self._ack(tags)

    def finish_early(self, parked: Iterable[Arrived]) -> None:
        """Acknowledge messages that were parked on the delay ladder."""
        self._ack([arrived.delivery_tag for arrived in parked])

    def give_back(self, tag: int) -> None:
        """Return a claimed message to its queue, at its old place if possible."""
        assert self._channel is not None
        self.claimed -= 1
        self.stirred = True
        self._outstanding.pop(tag, None)
        self._channel.send(encode_method(self._channel.number, Method.BASIC_NACK, tag, False, True))

    def reject(self, tag: int) -> None:
        """Let the queue's dead letter exchange have a claimed message."""
        assert self._channel is not None
        self.claimed -= 1
        self._outstanding.pop(tag, None)
        self._channel.send(encode_method(self._channel.number, Method.BASIC_NACK, tag, False, False))

    async def stop_fetching(self, *, is_busy: bool) -> list[Arrived]:
        """What is here and not claimed, which counts as claimed for `give_back`; no more comes until `want`.

        A busy owner with a floor goes on as the last consumer to be served, and holds what expires: RabbitMQ
        drops an expired message without a trace, and one that is held ends as a task that has expired.
        """
        assert self._channel is not None
        stays = is_busy and self._prefetch_floor > 0
        is_full = self.prefetch <= self.claimed and not self._per_consumer  # then nothing more arrives anyway
        if self.prefetch and not (stays and self._is_last) and not (is_busy and is_full):
            await self._channel.call(Method.BASIC_CANCEL, str(self._generation), False)
            self.prefetch, self._is_last = 0, False
        fetched = [*self.early, *self._held.values(), *self.waiting()]
        if stays:
            fetched = [arrived for arrived in fetched if not self._expires(arrived)]
        gone = {arrived.delivery_tag for arrived in fetched}
        self.early = [arrived for arrived in self.early if arrived.delivery_tag not in gone]
        self._held = {tag: arrived for tag, arrived in self._held.items() if tag not in gone}
        for priority, waiting in self._buffers.items():
            self._buffers[priority] = deque(here for here in waiting if here.delivery_tag not in gone)
        self.claimed += len(fetched)
        return fetched

    async def fetch_last(self) -> None:
        """With a floor, hold what no other consumer has room for, after `stop_fetching`."""
        if self._prefetch_floor and not self._is_last and not self.prefetch:
            await self._set_prefetch(max(self.claimed, self._prefetch_floor), is_last=True)

    def _expires(self, arrived: Arrived) -> bool:
        return self._expires_all or arrived.message.expiration_ms is not None

    def release(self) -> asyncio.Future[Incoming] | None:
        """Return everything to the queue and close the channel; the future ends when that is done."""
        channel = self._channel
        if channel is None or channel.error is not None:
            return None
        # Returned before the channel ends, so that the queue has them in order before it is asked for more;
        # and after the consumer ended, or the queue would deliver them, and others, to it again.
        if self._generation:
            cancelled = str(self._generation)
            channel.send(encode_method(channel.number, Method.BASIC_CANCEL, cancelled, True))
        channel.send(encode_method(channel.number, Method.BASIC_NACK, 0, True, True))
        return channel.ask(Method.CHANNEL_CLOSE, 200, "", 0, 0)

    def _end(self, error: BrokerError) -> None:
        """The claims of this consumer are requeued, or gone with the queue; wake the waiting callers."""
        if isinstance(error, ChannelClosed):
            what = _LATE_ACK if "acknowledgement" in error.text else "RabbitMQ ended a consumer"
            if error.code == ChannelClosed.NOT_FOUND and self._has_begun:
                self._on_deleted(self)
            else:
                log.warning(what, extra={"queue": self.queue, "returned": self.claimed, "why": error.text})
        self._on_arrival()

    def _ack(self, tags: list[int]) -> None:
        """One ack for the oldest messages if they end together, and one for each of the others."""
        if not tags:
            return
        assert self._channel is not None
        number, outstanding, ended = self._channel.number, self._outstanding, set(tags)
        last = 0
        for tag in outstanding:
            if tag not in ended:
                break
            last = tag
        frames = [encode_ack(number, last, multiple=True)] if last else []
        frames += [encode_ack(number, tag) for tag in tags if tag > last]
        for tag in tags:
            outstanding.pop(tag, None)
        self._channel.send(b"".join(frames))

    def _receive(self, incoming: Incoming) -> None:
        _, tag, redelivered, key, exchange = incoming.fields
        self._outstanding[tag] = None
        message, state = self._layouts.read(incoming, exchange, key)
        arrived = Arrived(message, tag, redelivered, state)
        if state.due and (wait_s := state.due - cluster_now()) > 0:
            if wait_s > HOLD_S:
                self.early.append(arrived)
                self._on_arrival()
            else:
                self._held[tag] = arrived
                asyncio.get_running_loop().call_later(wait_s + TIMER_S, self._release_held, arrived)
            return
        self._admit(arrived)

    def _release_held(self, arrived: Arrived) -> None:
        if self._held.pop(arrived.delivery_tag, None) is not None and self.is_open:
            self._admit(arrived)

    def _admit(self, arrived: Arrived) -> None:
        buffer = self._buffers.get(arrived.message.priority)
        if buffer is None:
            buffer = self._buffers[arrived.message.priority] = deque()
        buffer.append(arrived)
        self._on_arrival()

    async def _set_prefetch(self, wanted: int, *, is_last: bool = False) -> None:
        assert self._channel is not None
        consumes, changes = self.prefetch > 0, is_last != self._is_last
        self.prefetch = wanted = min(wanted, 65_535)
        self._is_last = is_last
        if self._per_consumer:
            limit = (0, max(1, wanted - self.claimed), False)
        else:
            limit = (0, wanted, True)
        if consumes and not changes and not self._per_consumer:
            await self._channel.call(Method.BASIC_QOS, *limit)
            return
        if consumes:
            self._channel.ask(Method.BASIC_CANCEL, str(self._generation), False)
        self._channel.ask(Method.BASIC_QOS, *limit)
        await self._consume(LAST if is_last else {})

    async def _consume(self, arguments: Table) -> None:
        assert self._channel is not None
        self._generation += 1
        await self._channel.call(
            Method.BASIC_CONSUME, 0, self.queue, str(self._generation), False, False, False, False, arguments
        )
        self._has_begun = True
