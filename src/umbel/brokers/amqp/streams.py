"""Streams: the entries of Umbel's streams, the views that readers make of them, and how they are read.

Every reader of a stream sees the same entries in the same order, so all views agree in the end. Entries are
small JSON texts. An entry that cannot be read, or has a value that Umbel never writes, is counted, logged and
skipped: a stream cannot be repaired, and the next reader must not stop at it.

All tails of a connection share one channel. `catch_up` relies on that: the server sends new entries to a
channel in the order in which it answers its requests.

This file owns the types of entries and the views, except those of signatures (`signature_view.py`).
"""

import logging
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.envelope import decode_properties
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack
from umbel.brokers.interface.queues import Pause
from umbel.errors import RevokesFull
from umbel.protocol.leadership.coordination import RETENTION_S, ElectionRecord
from umbel.wire.message import COUNT_MAX, NAME_MAX_BYTES, Message, is_name
from umbel.wire.records import Revoke
from umbel.wire.values import UNREADABLE

if TYPE_CHECKING:
    from umbel.brokers.amqp.link import Channel, Link


# ---- records ---------------------------------------------------------------------------------------

log = logging.getLogger("umbel.brokers.amqp")
RecordT = TypeVar("RecordT")
T = TypeVar("T")

NUMBER_MAX = 2**53  # of terms, versions, offsets and clocks, so that sums fit 64 bits
TIME_MAX_S = 1e11
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, Meta(ge=0, le=TIME_MAX_S)]
Label = Annotated[str, Meta(max_length=NAME_MAX_BYTES)]

STARTS_MAX = 100_000
REWRITE_AFTER = 5_000  # entries of the stream of facts, which retains many times as many


class View(Protocol):
    """What one reader knows from a stream. `apply` is called with every entry once, in order."""

    def apply(self, offset: int, body: bytes) -> None:
        """Apply the entry at this offset."""

    def restart(self) -> None:
        """Prepare for a new stream of the same name, because the server lost the old one; retain what is
        still true.
        """


class EntryReader(Generic[RecordT]):
    """Decodes the entries of one stream, and counts those that cannot be used."""

    def __init__(self, stream: str, kind: object) -> None:
        self.stream = stream
        self.unreadable = 0
        self._decoder: msgspec.json.Decoder[RecordT] = msgspec.json.Decoder(kind)

    def read(
        self, offset: int, body: bytes, problem: Callable[[RecordT], str] | None = None
    ) -> RecordT | None:
        """Return the entry's value; None if it cannot be used. `problem` returns why a value is invalid, or
        "".
        """
        try:
            record = self._decoder.decode(body)
            why = problem(record) if problem is not None else ""
        except UNREADABLE as error:  # written by another version, or by a foreign program
            record, why = None, str(error)
        if not why:
            return record
        self.skip(offset, body, why)
        return None

    def skip(self, offset: int, body: bytes, why: str) -> None:
        """Count and log an entry that cannot be used."""
        self.unreadable += 1
        extra = {
            "stream": self.stream,
            "offset": offset,
            "why": why,
            "begins": body[:80].decode(errors="replace"),
            "count": self.unreadable,
        }
        log.warning(
            "unreadable entry in a cluster record of RabbitMQ ignored; does another Umbel version run?",
            extra=extra,
        )


class RevokeView:
    """The revokes that have not expired, by the offset of their newest entries."""

    def __init__(self) -> None:
        self.entries: EntryReader[Revoke] = EntryReader(topology.REVOKES, Revoke)
        self.cursor = 0
        self._before = 0  # the cursor at which the current stream began
        self._entries: dict[tuple[str, str], tuple[int, Revoke]] = {}
        self._order: list[tuple[int, Revoke]] = []

    def apply(self, offset: int, body: bytes) -> None:
        """Apply a revoke; a newer one of the same task replaces it."""
        self.cursor = self._before + offset + 1
        revoke = self.entries.read(offset, body)
        if revoke is None:
            return
        self._entries[revoke.task_id, revoke.header] = (self.cursor, revoke)
        self._order.append((self.cursor, revoke))

    def restart(self) -> None:
        """Retain the revokes; the cursor continues to rise."""
        self._before = self.cursor

    def after(self, cursor: int, now: float) -> list[Revoke]:
        """Return the revokes recorded after this cursor that a worker must know: those in force, and those
        that take an earlier one back.
        """
        if cursor >= self.cursor:
            return []
        first = bisect_right(self._order, cursor, key=lambda entry: entry[0])
        return [
            revoke
            for place, revoke in self._order[first:]
            if revoke.is_news(now) and self._entries[revoke.task_id, revoke.header][0] == place
        ]

    def check_room(self, new: Sequence[Revoke], limit: int, now: float) -> None:
        """Raise RevokesFull if the record would exceed `limit` entries with these."""
        # The expired ones are still in the dict, so its size is an upper bound; count only near the limit.
        if len(self._entries) + len(new) > limit and self.count_with(new, now) > limit:
            raise RevokesFull(
                f"the revoke record is at its limit of {limit:,} entries: {len(new)} more were not "
                "recorded; raise `revokes_max`, shorten `revoke_retention_s`, or purge the queue instead"
            )

    def count_with(self, new: Sequence[Revoke], now: float) -> int:
        """Return how many entries would be in force with these."""
        standing = {key for key, (_, revoke) in self._entries.items() if revoke.expires_at > now}
        return len(standing | {(revoke.task_id, revoke.header) for revoke in new if revoke.expires_at > now})

    def sweep(self, now: float) -> None:
        """Forget expired revokes."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry[1].expires_at > now}
        self._order = sorted(self._entries.values(), key=lambda entry: entry[0])


class Start(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How often a message was started; 0 when its count ended.

    `unstarted`: it was returned to its queue without having started, though RabbitMQ flags it as redelivered.
    `attempt`: the attempt of its task, if the message was redelivered; it runs, or has ended.
    """

    queue: str
    message: str
    starts: Count
    unstarted: bool = False
    attempt: Count | None = None


class _Attempt(msgspec.Struct):
    """The number of retries, from the headers of a task."""

    retries: Count = 0


class StartsView:
    """The counted starts of messages, the messages that were returned unstarted, and the redelivered
    attempts.

    Starts are counted for messages that may have killed a worker. A redelivered message that runs or has
    ended is known with its attempt, because it may have a copy that looks like a first delivery: one that was
    written on a lost connection, or parked by a worker that was killed. The copy may arrive last.

    Beyond STARTS_MAX of each, the oldest are forgotten. Then a suspect message gets a new chance, an
    unstarted message counts as redelivered, and a copy counts as a first delivery.
    """

    def __init__(self) -> None:
        self.entries: EntryReader[Start] = EntryReader(topology.STARTS, Start)
        self._starts: dict[tuple[str, str], int] = {}
        self._unstarted: dict[tuple[str, str], None] = {}
        self._attempts: dict[tuple[str, str], int] = {}

    def apply(self, offset: int, body: bytes) -> None:
        """Apply a count; the newest of a message replaces the earlier ones."""
        start = self.entries.read(offset, body)
        if start is None:
            return
        key = (start.queue, start.message)
        self._starts.pop(key, None)
        self._unstarted.pop(key, None)
        if start.starts:
            _remember(self._starts, key, start.starts)
        elif start.unstarted:
            _remember(self._unstarted, key, None)
        if start.attempt is not None:
            _remember(self._attempts, key, start.attempt)

    def restart(self) -> None:
        """Retain the counts that the server lost."""

    def count(self, queue: str, message: str) -> int:
        """Return how often the message was started, as far as starts are counted; 0 if unknown."""
        return self._starts.get((queue, message), 0)

    @property
    def knows_copies(self) -> bool:
        """Whether `is_copy` is true of any message."""
        return bool(self._attempts)

    def is_copy(self, queue: str, message: Message) -> bool:
        """Whether the same attempt of the same task was redelivered before, and runs or has ended."""
        known = self._attempts.get((queue, message.correlation_id))
        return known is not None and known == attempt_of(message)

    def is_unstarted(self, queue: str, message: str) -> bool:
        """Whether its last owner returned it unstarted, and no other owner has claimed it since."""
        return (queue, message) in self._unstarted


class ClockView:
    """The highest value of the logical clock ever written, and the highest that the stream has now."""

    def __init__(self) -> None:
        self.entries: EntryReader[int] = EntryReader(topology.CLOCK, Number)
        self.mark = self.stored = 0

    def apply(self, offset: int, body: bytes) -> None:
        """Apply a clock value."""
        value = self.entries.read(offset, body)
        if value is not None:
            self.stored = max(self.stored, value)
            self.mark = max(self.mark, self.stored)

    def restart(self) -> None:
        """Retain the value, because time does not go back; it is written again when the clock is
        raised next.
        """
        self.stored = 0


class QueueFact(msgspec.Struct, frozen=True, tag="queue"):
    """A task queue was declared."""

    name: str


class PauseFact(msgspec.Struct, frozen=True, tag="pause"):
    """A queue is paused; without a pause: it is resumed."""

    name: str
    pause: Pause | None


class RecorderFact(msgspec.Struct, frozen=True, tag="recorder"):
    """A recorder has acknowledged the event log up to here; None: it is no longer registered."""

    name: Label
    acknowledged: Number | None
    lost: Number = 0


class LeaseFact(msgspec.Struct, frozen=True, tag="lease"):
    """The holder of a lease, its data, and its time to live. The lease's hold queue shows whether it is still
    held.

    `sending`: messages are being published under the lease, and its data changes when they are confirmed.
    """

    name: Label
    holder: Label
    term: Number
    ttl_s: Seconds
    data: bytes
    version: Number
    sending: bool = False


class ElectionFact(msgspec.Struct, frozen=True, tag="election"):
    """One election as last written by its holder, or by the node that opened it."""

    key: Label
    record: ElectionRecord
    version: Number


class BarrierFact(msgspec.Struct, frozen=True, tag="mark"):
    """A barrier in the stream: a writer that reads its own barrier has read all entries before it."""

    nonce: str


class LogEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event of the event log."""

    recorded_at: Seconds
    routing_key: str  # "": the entry of a recorder's registration
    body: str


Fact = QueueFact | PauseFact | RecorderFact | LeaseFact | ElectionFact | BarrierFact
Changed = LeaseFact | ElectionFact


class FactsView:
    """The last valid entry about each queue, pause, recorder, lease and election.

    A lease or an election is changed by a writer that knows its last version: the entry names the next
    version, and of two entries with the same version the first in the stream counts. All readers see one
    order, so all agree which was first, and the writer learns it by reading on. This is a compare-and-set,
    which RabbitMQ itself does not have.
    """

    def __init__(self) -> None:
        self.entries: EntryReader[Fact] = EntryReader(topology.FACTS, Fact)
        self.queues: set[str] = set()
        self.paused: dict[str, Pause] = {}
        self.pauses_read = 0  # pauses and resumes that were read
        self.on_pause: Callable[[], None] = lambda: None
        self.recorders: dict[str, int] = {}
        self.lost = 0
        self.leases: dict[str, LeaseFact] = {}
        self.elections: dict[str, ElectionRecord] = {}
        self.last_term = 0
        self.awaited: dict[str, Callable[[], None]] = {}  # by a barrier's nonce: what to do when it is read
        self._last_entries: dict[tuple[str, str], int] = {}
        self._offset = 0
        self._versions: dict[tuple[str, str], int] = {}
        self._attempts: dict[Changed, bool] = {}

    def apply(self, offset: int, body: bytes) -> None:
        """Apply a fact; one whose version is not the next is ignored."""
        self._offset = offset
        fact = self.entries.read(offset, body, _problem)
        if fact is None:
            return
        match fact:
            case QueueFact(name):
                self._last_entries["queue", name] = offset
                self.queues.add(name)
            case PauseFact(name, pause):
                self.paused.pop(name, None)
                self._last_entries.pop(("pause", name), None)
                if pause is not None:
                    self.paused[name], self._last_entries["pause", name] = pause, offset
                self.pauses_read += 1
                self.on_pause()
            case RecorderFact(name, acknowledged, lost):
                self.lost += lost
                self._last_entries["recorder", name] = offset
                if acknowledged is None:
                    self.recorders.pop(name, None)
                    del self._last_entries["recorder", name]
                else:
                    self.recorders[name] = max(acknowledged, self.recorders.get(name, 0))
            case LeaseFact(name, _, term):
                self.last_term = max(self.last_term, term)
                if self._is_next(fact):
                    self._last_entries["lease", name] = offset
                    self.leases[name] = fact
            case BarrierFact(nonce):
                self.awaited.pop(nonce, lambda: None)()
            case ElectionFact(key, record):
                self.last_term = max(self.last_term, record.term)
                if self._is_next(fact):
                    self.elections[key] = record

    def restart(self) -> None:
        """Forget all facts; only terms continue to rise."""
        for forgotten in (
            self.queues,
            self.paused,
            self.recorders,
            self.leases,
            self.elections,
            self._last_entries,
            self._versions,
        ):
            forgotten.clear()

    def next_version(self, kind: str, name: str) -> int:
        """Return the version that the next change of this lease or election must have."""
        return self._versions.get((kind, name), 0) + 1

    @contextmanager
    def attempt(self, fact: "Changed") -> Iterator[Callable[[], bool]]:
        """Watch a fact while it is written and read again; the returned function tells whether it counted."""
        self._attempts[fact] = False
        try:
            yield lambda: self._attempts[fact]
        finally:
            del self._attempts[fact]

    def to_rewrite(self) -> list[Fact]:
        """Return the facts so far back in the stream that they must be written again. Elections may
        expire.
        """
        old = [key for key, offset in self._last_entries.items() if offset < self._offset - REWRITE_AFTER]
        facts: list[Fact] = []
        for kind, name in old:
            if kind == "queue":
                facts.append(QueueFact(name))
            elif kind == "pause":
                facts.append(PauseFact(name, self.paused[name]))
            elif kind == "recorder":
                facts.append(RecorderFact(name, self.recorders[name]))
            else:
                lease = self.leases[name]
                facts.append(msgspec.structs.replace(lease, version=lease.version + 1))
        return facts

    def sweep(self, now: float) -> None:
        """Forget elections that ended longer ago than they are retained."""
        ended = [key for key, record in self.elections.items() if record.changed_at <= now - RETENTION_S]
        for key in ended:
            del self.elections[key]
            del self._versions["election", key]

    def _is_next(self, fact: "Changed") -> bool:
        """Whether the fact counts. For a lease or election that fell off the stream's end, or was swept, any
        version is the next.
        """
        place = ("lease", fact.name) if isinstance(fact, LeaseFact) else ("election", fact.key)
        known = self._versions.get(place)
        if known is not None and fact.version != known + 1 and not self._is_restarted(fact):
            return False
        self._versions[place] = fact.version
        if fact in self._attempts:
            self._attempts[fact] = True
        return True

    def _is_restarted(self, fact: "Changed") -> bool:
        """Whether the writer had forgotten, after the retention time, an election that is still known
        here.
        """
        if isinstance(fact, LeaseFact):
            return False
        known = self.elections[fact.key]
        return fact.record.changed_at >= known.changed_at + RETENTION_S


def attempt_of(message: Message) -> int:
    """Return the number of the attempt, from 0; 0 for headers that cannot be read."""
    try:
        return _attempt_decoder.decode(message.headers).retries
    except UNREADABLE:
        return 0


def _remember(known: dict[tuple[str, str], T], key: tuple[str, str], value: T) -> None:
    """Add as the newest, and forget the oldest beyond STARTS_MAX."""
    known.pop(key, None)
    known[key] = value
    if len(known) > STARTS_MAX:
        del known[next(iter(known))]


def _problem(fact: Fact) -> str:
    """Return why the values of a fact are invalid; "" if they are valid."""
    if isinstance(fact, QueueFact | PauseFact) and not is_name(fact.name):
        return "no queue can have this name"
    if isinstance(fact, ElectionFact):
        record = fact.record
        numbers = (record.term, record.attempt, record.changed_at, record.expires_at, record.ttl_s)
        if not all(0 <= number <= NUMBER_MAX for number in numbers):
            return "a number of the election is out of range"
    return ""


_attempt_decoder = msgspec.json.Decoder(_Attempt)
encode_record = msgspec.json.Encoder().encode


# ---- streams ---------------------------------------------------------------------------------------

PREFETCH = 1000
ACK_EVERY = 250
OFFSET = "x-stream-offset"
# The properties of an entry that Umbel wrote, as RabbitMQ delivers them: a table with only the offset,
# which follows these bytes, and the delivery mode in one byte.
_OWN_OPENING = b"\x30\x00" + (25).to_bytes(4) + bytes((len(OFFSET),)) + OFFSET.encode() + b"l"
_OWN_BYTES = len(_OWN_OPENING) + 9


@dataclass(slots=True)
class StreamPosition:
    """A view and its position in its stream; both outlive the connection."""

    view: View
    next_offset: int = 0
    last_entry: int = 0  # its hash

    def read(self, offset: int, body: bytes) -> None:
        """Pass an entry to the view, unless it was read before."""
        if offset >= self.next_offset:
            self.view.apply(offset, body)
            self.next_offset, self.last_entry = offset + 1, hash(body)

    def restart(self) -> None:
        """Read a new stream from its first entry."""
        self.view.restart()
        self.next_offset = 0


class Tails:
    """Reads every followed stream, on one connection."""

    def __init__(self, channel: "Channel", followed: Mapping[str, StreamPosition]) -> None:
        self._channel = channel
        self._followed = followed
        self._received = 0
        self._last_read = {
            stream: (position.next_offset - 1, position.last_entry)
            for stream, position in followed.items()
            if position.next_offset
        }
        channel.on_delivery = self._receive

    @property
    def ended(self) -> bool:
        """Whether their channel was closed, for example because a stream was deleted."""
        return self._channel.error is not None

    @property
    def unrecognised(self) -> list[str]:
        """Streams that have not delivered again the entry that was read last: they may be new ones."""
        return list(self._last_read)

    async def begin(self) -> None:
        """Start to consume each stream at the last entry read before, and catch up."""
        asked = [self._channel.ask(Method.BASIC_QOS, 0, PREFETCH, False)]
        for stream, followed in self._followed.items():
            start = {OFFSET: max(0, followed.next_offset - 1) or "first"}
            flags = (False, False, False, False)
            asked.append(self._channel.ask(Method.BASIC_CONSUME, 0, stream, stream, *flags, start))
        for answer in asked:
            await self._channel.answer(answer)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Read all entries that were confirmed before this call.

        It makes two requests, because the notice of an entry and the entry itself are two steps inside the
        server; it repeats them for as long as more entries arrive.
        """
        received = -1
        while received != self._received:
            received = self._received
            await self._question()
            await self._question()

    async def close(self) -> None:
        """Stop reading."""
        await self._channel.close()

    async def _question(self) -> None:
        await self._channel.call(Method.BASIC_QOS, 0, PREFETCH, False)

    def _receive(self, incoming: Incoming) -> None:
        stream, tag, *_ = incoming.fields
        self._received += 1
        offset = offset_of(incoming)
        if stream in self._last_read and self._last_read[stream] == (offset, hash(incoming.body)):
            del self._last_read[stream]
        self._followed[stream].read(offset, incoming.body)
        self._channel.send(encode_ack(self._channel.number, tag))


async def read_stream(
    link: "Link", stream: str, offset: int | str, limit: int, collect: Callable[[int, Incoming], None]
) -> None:
    """Pass up to `limit` entries from an offset to `collect`, and return at the end of the stream."""
    async with link.temporary_channel() as channel:
        received = shown = 0

        def receive(incoming: Incoming) -> None:
            nonlocal received, shown
            received += 1
            place = offset_of(incoming)
            # A stream starts with the chunk that contains the offset, which may begin earlier.
            if isinstance(offset, str) or place >= offset:
                shown += 1
                collect(place, incoming)
            # An acknowledgement asks for more entries: many at once, and no more than are wanted.
            if received % ACK_EVERY == 0 and shown < limit and channel.error is None:
                channel.send(encode_ack(channel.number, incoming.fields[1], multiple=True))

        channel.on_delivery = receive
        await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
        await channel.call(Method.BASIC_CONSUME, 0, stream, "r", False, False, False, False, {OFFSET: offset})
        seen = -1
        while seen != received and shown < limit:
            seen = received
            await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
            await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)


def offset_of(incoming: Incoming) -> int:
    """Return the offset of the entry; -1 for an entry of a foreign writer that hides it."""
    properties = incoming.properties
    if len(properties) == _OWN_BYTES and properties.startswith(_OWN_OPENING):
        return int.from_bytes(properties[-9:-1], signed=True)
    try:
        offset = (decode_properties(incoming.properties).headers or {}).get(OFFSET)
    except (ValueError, IndexError, struct.error):
        return -1
    return offset if isinstance(offset, int) else -1
