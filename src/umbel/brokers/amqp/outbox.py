"""Outbox: what is published where, and which of it the server has confirmed.

Pure, for the asynchronous and the blocking publisher. A message that is not due goes to a level of the delay
ladder. A post names the queue with its declaration, because RabbitMQ drops a message to a missing queue
without an error.

The server numbers what is published on a channel and confirms by number: one message, or all up to it.
Batches that are in flight together are ranges of numbers (`Unconfirmed`), and a confirmation for many costs
one step a batch. A message whose sender stopped waiting for its confirmation is remembered (`Unanswered`), so
that sending it again does not write it twice.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from math import inf
from operator import attrgetter
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.envelope import (
    LETTER_HEADER,
    NO_MARK,
    TRANSIENT,
    Mark,
    Properties,
    encode,
    encode_broadcast,
    encode_properties,
)
from umbel.brokers.amqp.frames import Incoming, encode_publish
from umbel.brokers.amqp.handshake import ChannelClosed, Undecided
from umbel.brokers.amqp.signature_view import FREE, SignatureUse
from umbel.brokers.amqp.streams import LogEntry, Start, encode_record
from umbel.brokers.amqp.topology import Exchange, Queue, TaskQueues
from umbel.brokers.interface import SENT_REMEMBERED_S, Broadcast, Tag
from umbel.errors import BrokerError, BrokerRefused, WireError
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.message import Message, Outgoing, StoredResult

# ---- confirms --------------------------------------------------------------------------------------
#
# Which published messages the server has answered for. Pure; both kinds of link use it.
#
# The server numbers what is published on a channel and answers by number: one message, or all up to it. So
# batches that are in flight together are ranges of numbers, and an answer for many costs one step a batch.
#
# A returned message has no number, and comes before its confirmation. It belongs to the first batch in
# flight that has sent the same message and not yet got it back. Where the server wrote it in other bytes,
# it belongs to the first batch with the same exchange and routing key.

Sent = tuple[str, str, bytes, bytes]
"""Exchange, routing key, properties and body of one message."""

AllSent = Callable[[], Iterable[Sent]]
"""The messages of a batch; called only when a message is returned."""


_first = attrgetter("first")


class Outcome(Enum):
    """What became of one published message."""

    UNDER_WAY = "under way"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    RETURNED = "returned"  # no queue accepted it
    LOST = "lost"  # its channel ended without an answer: the server may have it


class Batch:
    """Messages that were published together: how many wait for an answer, which were refused or returned.

    `sender` tells the batches of one sender from those of others. `waiters` are called when the server has
    answered for all, or never will.
    """

    __slots__ = (
        "_apart",
        "_low",
        "_out",
        "_sent",
        "error",
        "first",
        "missing",
        "refused",
        "returned",
        "sender",
        "waiters",
    )

    def __init__(self, first: int, count: int, sent: AllSent, sender: object) -> None:
        self.first = first  # the number of its first message on the channel
        self.missing = count
        self.error: BrokerError | None = None  # why the server will not answer for the rest
        self.refused: set[int] = set()  # places in the batch
        self.returned: set[int] = set()  # places of mandatory messages that no queue accepted
        self.sender = sender
        self.waiters: list[Callable[[], None]] = []
        self._low = first  # all numbers below it have an answer
        self._apart: set[int] = set()  # and so have these numbers above it
        self._sent = sent
        self._out: dict[Sent, list[int]] | None = None  # places that have not come back

    @property
    def last(self) -> int:
        """The number of its last message on the channel."""
        return self._low + self.missing + len(self._apart) - 1

    @property
    def is_under_way(self) -> bool:
        """Whether answers are still to come."""
        return self.missing > 0 and self.error is None

    def outcome(self, place: int) -> Outcome:
        """The outcome of the message at this place in the batch."""
        number = self.first + place
        if number >= self._low and number not in self._apart:
            return Outcome.UNDER_WAY if self.error is None else Outcome.LOST
        if place in self.returned:
            return Outcome.RETURNED
        return Outcome.REFUSED if place in self.refused else Outcome.ACCEPTED

    def answer_one(self, number: int, *, accepted: bool) -> None:
        """The server has answered for the message with this number; a second answer changes nothing."""
        if number < self._low or number in self._apart:
            return
        self.missing -= 1
        if not accepted:
            self.refused.add(number - self.first)
        if number != self._low:
            self._apart.add(number)
            return
        self._low += 1
        while self._low in self._apart:
            self._apart.discard(self._low)
            self._low += 1

    def answer_up_to(self, number: int, *, accepted: bool) -> None:
        """The server has answered for all messages up to this number."""
        end = min(number, self.last) + 1
        before = {answered for answered in self._apart if answered < end} if self._apart else set()
        if not accepted:
            self.refused.update(at - self.first for at in range(self._low, end) if at not in before)
        self.missing -= max(0, end - self._low) - len(before)
        self._apart -= before
        self._low = max(self._low, end)

    def takes_back(self, incoming: Incoming, *, by_route: bool) -> bool:
        """Whether the returned message is one of this batch that has not come back yet; then it is noted."""
        if self._out is None:
            self._out = {}
            for place, sent in enumerate(self._sent()):
                self._out.setdefault(sent, []).append(place)
        came = _sent_of(incoming)
        found = next((sent for sent in self._out if sent[:2] == came[:2]), None) if by_route else came
        if found is None or found not in self._out:
            return False
        self.returned.add(self._out[found].pop())
        if not self._out[found]:
            del self._out[found]
        return True

    def end(self, error: BrokerError | None = None) -> None:
        """No more answers come: release the messages and wake the waiters."""
        self.error = error
        self._sent, self._out = tuple, None
        for wake in self.waiters:
            wake()


class Unconfirmed:
    """The batches in flight on one channel, in the order of their numbers."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._published = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, count: int, sent: AllSent, sender: object) -> Batch:
        """A new batch of messages that are published next on the channel."""
        batch = Batch(self._published + 1, count, sent, sender)
        self._published += count
        self._batches.append(batch)
        return batch

    def answer(self, number: int, *, multiple: bool, accepted: bool) -> None:
        """The server has answered for one message, or for all up to it."""
        batches = self._batches
        end = bisect_right(batches, number, key=_first)
        start = 0 if multiple else max(0, end - 1)
        touched = batches[start:end]
        for batch in touched:
            if multiple:
                batch.answer_up_to(number, accepted=accepted)
            elif number <= batch.last:
                batch.answer_one(number, accepted=accepted)
        batches[start:end] = [batch for batch in touched if batch.missing]
        for batch in touched:
            if not batch.missing:
                batch.end()

    def take_back(self, incoming: Incoming) -> None:
        """The server returned a message that no queue took; one of no batch in flight is ignored.

        It has no number, and comes before its confirmation. It belongs to the first batch that has sent the
        same message and not yet got it back or, where the server wrote it in other bytes, one with the same
        exchange and routing key.
        """
        for by_route in (False, True):
            if any(batch.takes_back(incoming, by_route=by_route) for batch in self._batches):
                return

    def fail(self, error: BrokerError) -> None:
        """The channel has ended. With batches of several senders in flight it is undecided which one closed
        it.
        """
        ended, self._batches, self._published = self._batches, [], 0
        if isinstance(error, ChannelClosed) and len({id(batch.sender) for batch in ended}) > 1:
            error = Undecided(error)
        for batch in ended:
            batch.end(error)


def _sent_of(returned: Incoming) -> Sent:
    _, _, exchange, routing_key = returned.fields
    return exchange, routing_key, returned.properties, returned.body


# ---- outbox ----------------------------------------------------------------------------------------
#
# What is published where. Pure; the broker and the producer both send it.
#
# A message that is not due goes to a level of the delay ladder. A post names the queue with its
# declaration, because RabbitMQ drops a message to a missing queue without an error.

REASON, QUEUE, STARTS, BURIED_AT = "umbel-reason", LETTER_HEADER, "umbel-starts", "umbel-buried"
HEADERS = "umbel-headers"  # the first bytes of a dead letter's headers that cannot be encoded as a table
HEADERS_SHOWN_BYTES = 4096
ALONE_BYTES = 8 * 1024 * 1024  # the smallest default limit of a RabbitMQ version is 16 MiB
DELETED_AGAIN = "its queue was deleted twice while publishing"
Refusals = dict[int, str]
"""Why messages were refused, by their place in the batch."""

_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
_STREAM_PROPERTIES = encode_properties(Properties(delivery_mode=2))


class Post(msgspec.Struct, frozen=True, gc=False):
    """One message to publish. Without a `queue` or `via`, it may be lost when nothing listens.

    `source`: the message as it was given to the broker. Without one, publishing the post twice does no harm.
    `claim`: the kind of post and the claim that it ends; a claim sends one post of a kind.
    """

    key: str
    properties: bytes
    body: bytes
    queue: Queue | None = None
    exchange: str = ""
    via: Exchange | None = None  # refused if that exchange is missing, or routes it to no queue
    source: Outgoing | None = None
    claim: tuple[str, Tag] | None = None

    @property
    def target(self) -> str:
        """The queue, or exchange and routing key, for error texts."""
        return self.key if self.via is None else f"{self.exchange}/{self.key}"

    @property
    def route(self) -> tuple[str, str]:
        """Exchange and routing key."""
        return self.exchange, self.key

    @property
    def needs(self) -> str:
        """What must exist for it, by a name that queues, exchanges and reserved names do not share."""
        if self.via is not None:
            return self.via.name
        if self.queue is None:
            return "queue "
        return f"reserved {self.queue.name}" if self.queue.reserved else f"queue {self.queue.name}"

    @property
    def sent(self) -> Sent:
        """The parts by which a returned message is recognised."""
        return self.exchange, self.key, self.properties, self.body

    @property
    def is_plain(self) -> bool:
        """Whether it goes straight to a queue and is not large: it cannot make the server
        close its channel.
        """
        return not self.exchange and len(self.body) <= ALONE_BYTES

    def identity(self) -> int | None:
        """A number that is the same for the same message; None for a post of which a copy does no harm."""
        if self.claim is not None:
            return hash(self.claim)
        if (source := self.source) is None:
            return None
        message = source.message
        place = (source.queue, source.exchange, source.routing_key)
        return hash((place, message.correlation_id, message.headers, message.body))

    def as_redelivered(self) -> "Post":
        """The same message, flagged as one that may have run; a dead letter stays unchanged."""
        source = self.source
        if source is None or self.key in (topology.DEAD, topology.FAILED):
            return self
        return replace(self, properties=encode(source.message, Mark(source.not_before, ran=True)))

    def frames(self, channel: int) -> bytes:
        """The bytes to publish it on this channel."""
        mandatory = self.queue is not None or self.via is not None
        return encode_publish(
            channel, self.exchange, self.key, self.properties, self.body, mandatory=mandatory
        )


def broadcast(sent: Broadcast, ttl_s: float, *, ask_who_hears: bool = False) -> Post:
    """The post of a broadcast. With `ask_who_hears` the server reports a control request that nothing listens
    for.
    """
    via = topology.exchange(sent.exchange) if ask_who_hears and sent.exchange == REQUEST_EXCHANGE else None
    properties = encode_broadcast(sent, ttl_s)
    return Post(sent.routing_key, properties, sent.body, exchange=sent.exchange, via=via)


def task(outgoing: Outgoing, queues: TaskQueues, now: float, since: float = 0.0) -> Post:
    """The post of a task's message. `since`: when it was learned that it may have run, if that was before it
    is sent.
    """
    delay_s, message, ran = outgoing.not_before - now, outgoing.message, outgoing.redelivered
    if outgoing.exchange:
        return _by_exchange(outgoing, queues, Mark(outgoing.not_before if delay_s > 0 else 0.0, ran, since))
    queue = queues.queue(outgoing.queue)
    if delay_s <= 0:
        state = Mark(0.0, ran, since) if ran else NO_MARK
        return Post(outgoing.queue, encode(message, state), message.body, queue, source=outgoing)
    properties = encode(message, Mark(outgoing.not_before, ran, since))
    step_ms = topology.delay_step_ms(delay_s)
    if step_ms is None or queue.reserved:  # the claiming worker waits for these few milliseconds
        return Post(outgoing.queue, properties, message.body, queue, source=outgoing)
    waiting = topology.delay_queue(outgoing.queue, step_ms)
    return Post(waiting.name, properties, message.body, waiting, source=outgoing)


def parked(outgoing: Outgoing, queues: TaskQueues, now: float, since: float, claim: Tag) -> Post:
    """The post of a claimed message that goes to the next level of the delay ladder."""
    return replace(task(outgoing, queues, now, since), claim=parking(claim).claim)


def parking(claim: Tag) -> Post:
    """A post with the identity of the post that parks this claim's message; its content does not matter."""
    return Post("", b"", b"", claim=("park", claim))


def _by_exchange(outgoing: Outgoing, queues: TaskQueues, state: Mark) -> Post:
    """Sent at once, even if it is not due, as Celery does: the consumer of its queue parks it there."""
    message = outgoing.message
    if message.exchange:
        message = replace(message, exchange="", routing_key="")
        outgoing = replace(outgoing, message=message)
    properties, via = encode(message, state), queues.exchange(outgoing.exchange)
    exchange, key = outgoing.exchange, outgoing.routing_key
    return Post(key, properties, message.body, exchange=exchange, via=via, source=outgoing)


def tasks(batch: Sequence[Outgoing], queues: TaskQueues, now: float) -> list[Post]:
    """The posts of several tasks' messages, in order."""
    return [task(outgoing, queues, now) for outgoing in batch]


def sendable_tasks(batch: Sequence[Outgoing], queues: TaskQueues, now: float) -> list[Post]:
    """The posts for a sender that sends all or none: BrokerRefused if one is for a queue whose name is
    reserved.
    """
    posts = tasks(batch, queues, now)
    for post in posts if queues.some_are_reserved else ():
        if post.queue is not None and post.queue.reserved:
            raise BrokerRefused(f"cannot send a message: {post.queue.reserved}")
    return posts


def kept_failure(
    queue: str,
    message: Message,
    reason: str,
    starts: int,
    now: float,
    into: Queue,
    *,
    claim: Tag | None = None,
) -> Post:
    """The post of a failed task's message. The queue of failures decides how long it stays, not the message's
    expiration.
    """
    return dead_letter(queue, replace(message, expiration_ms=None), reason, starts, now, into, claim=claim)


def dead_letter(
    queue: str,
    message: Message,
    reason: str,
    starts: int,
    now: float,
    into: Queue | None = None,
    *,
    claim: Tag | None = None,
) -> Post:
    """The post of a dead letter. Every message can become one: headers that cannot be encoded are stored as
    text.

    `claim`: the claim of the message that it ends.
    """
    extra: dict[str, Any] = {QUEUE: queue, REASON: reason, STARTS: starts, BURIED_AT: now}
    letter_id = str(uuid4())
    try:
        properties = encode(message, NO_MARK, extra, message_id=letter_id)
    except (WireError, ValueError):
        extra[HEADERS] = message.headers[:HEADERS_SHOWN_BYTES].decode(errors="backslashreplace")
        bare = Message(b"{}", message.body, expiration_ms=message.expiration_ms)
        properties = encode(bare, NO_MARK, extra, message_id=letter_id)
    place = into or topology.dead_letter_queue()
    source = Outgoing(place.name, message)
    ends = None if claim is None else (place.name, claim)
    return Post(place.name, properties, message.body, place, source=source, claim=ends)


def result(stored: StoredResult, reply_to: str) -> Post:
    """A result for the client that waits for it, as Celery sends it (wire 6.3)."""
    properties = Properties(
        content_type="application/json",
        content_encoding="utf-8",
        headers={},
        delivery_mode=TRANSIENT,
        priority=0,
        correlation_id=stored.task_id,
    )
    return Post(reply_to, encode_properties(properties), stored.payload)


def entry(stream: str, body: bytes) -> Post:
    """The post of one more entry of a stream."""
    return Post(stream, _STREAM_PROPERTIES, body)


def start_entry(
    queue: str, message: str, starts: int, *, unstarted: bool = False, attempt: int | None = None
) -> Post:
    """The stream entry that says how often a message was started, or that it was returned unstarted."""
    return entry(topology.STARTS, encode_record(Start(queue, message, starts, unstarted, attempt)))


def freeing(use: SignatureUse) -> Post:
    """The stream entry that makes a used signature free again."""
    return entry(
        topology.SIGNATURES, encode_record(SignatureUse(use.mark, FREE, born=use.born, over=use.user))
    )


def log_entries(entries: Sequence[tuple[str, bytes]], counts: Sequence[int], now: float) -> list[Post]:
    """The posts of events for the event log, one post for each event."""
    events = [
        (key, bytes(event))
        for (key, body), count in zip(entries, counts or [1] * len(entries), strict=True)
        for event in (_parts(body) if count > 1 else (body,))
    ]
    return [
        entry(topology.EVENTS, encode_record(LogEntry(now, key, body.decode("utf-8", "surrogateescape"))))
        for key, body in events
    ]


def refusal(refused: Refusals, posts: Sequence[Post]) -> BrokerRefused:
    """One error for all refused messages; it names the first queue."""
    first = min(refused)
    more = f" (and {len(refused) - 1} more of {len(posts)} messages)" if len(refused) > 1 else ""
    return BrokerRefused(
        f"RabbitMQ refused the message for {posts[first].target!r}{more}: {refused[first]}",
        places=sorted(refused),
    )


# ---- unanswered ------------------------------------------------------------------------------------
#
# Messages that were published, and whose sender no longer waits for the server's answer.
#
# A sender stops waiting when the answer is overdue, when it is cancelled, or when the connection ends. The
# server may have the message all the same, or read it later: a server with a resource alarm reads what was
# written when the alarm is over. So a message that is sent again is looked up here first:
#
# | its first publish | what happens to the second |
# |---|---|
# | in flight: its connection lives | nothing is written; its sender waits for the answer to the first |
# | accepted or refused meanwhile | nothing is written; that is the answer |
# | returned: no queue took it | it is sent |
# | lost: its channel or connection ended without an answer | it is sent as redelivered: it may have run |
#
# A message is the same if it goes to the same queue with the same id, headers and body. What a broker sends
# for a claimed message (its dead letter, its next level of the delay ladder) is the same if it belongs to
# the same claim.
#
# Where it stops being right: another process knows nothing of this. Beyond REMEMBERED_MAX messages the
# oldest are forgotten, and so is a message that was not sent again within SENT_REMEMBERED_S after its
# answer. Entries of streams and results are not looked up: two copies mean the same as one.

REMEMBERED_MAX = 100_000
WayT = TypeVar("WayT")


class SendPlan(NamedTuple):
    """What must still be sent of messages that may have been published before, by their places."""

    to_send: dict[int, Post]
    refused: list[int]


class _GivenUp(Generic[WayT]):
    """A batch that its sender does not wait for any more."""

    __slots__ = ("_clock", "batch", "ended_at", "way")

    def __init__(self, batch: Batch, way: WayT | None, clock: Callable[[], float]) -> None:
        self.batch = batch
        self.way = way
        self.ended_at = inf
        self._clock = clock
        batch.waiters.append(self._note_end)
        if not batch.is_under_way:
            self._note_end()

    def _note_end(self) -> None:
        self.ended_at, self.way = self._clock(), None


class Unanswered(Generic[WayT]):
    """Messages whose senders gave up waiting, so that sending them again does not write them twice.
    Thread-safe.

    A message that is sent again is looked up here first. If its first publish is in flight, its sender waits
    for that answer. If it was accepted or refused meanwhile, that is the answer. If it was returned, it is
    sent. If its channel ended without an answer, it is sent as redelivered, because it may have run. A
    message is the same if it goes to the same queue with the same id, headers and body, or if it ends the
    same claim in the same way.

    Another process knows nothing of this. Beyond REMEMBERED_MAX messages the oldest are forgotten, and so is
    a message that was not sent again within SENT_REMEMBERED_S after its answer. Entries of streams and
    results are not looked up: two copies mean the same as one. `WayT`: the channel or connection on which a
    batch is answered.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may send while its thread does
        # By message, the oldest first. It is nearly always empty, which senders check first.
        self.given_up: dict[int, tuple[_GivenUp[WayT], int]] = {}

    def add(self, posts: Sequence[Post], batch: Batch, way: WayT | None) -> None:
        """The sender of these, which were published as this batch, stops waiting for the answer."""
        given_up = _GivenUp(batch, way, self._clock)
        with self._lock:
            self._drop_old()
            for place, post in enumerate(posts):
                if (key := post.identity()) is not None:
                    self.given_up.pop(key, None)
                    self.given_up[key] = given_up, place
            while len(self.given_up) > REMEMBERED_MAX:
                del self.given_up[next(iter(self.given_up))]

    def add_accepted(self, posts: Sequence[Post]) -> None:
        """The server has these, but their sender will send them again: it failed in a later step."""
        batch = Batch(1, len(posts), tuple, None)
        batch.answer_up_to(len(posts), accepted=True)
        self.add(posts, batch, None)

    def under_way(self, posts: Sequence[Post]) -> list[tuple[Batch, WayT]]:
        """The batches whose answers the sender of these must wait for."""
        found = {id(given_up): given_up for _, given_up, _ in self._known(posts)}
        return [
            (given_up.batch, given_up.way)
            for given_up in found.values()
            if given_up.batch.is_under_way and given_up.way is not None
        ]

    def left(self, posts: Sequence[Post]) -> SendPlan:
        """What must still be sent of these; none of them may be in flight."""
        left = SendPlan(dict(enumerate(posts)), [])
        for number, given_up, place in self._known(posts):
            outcome = given_up.batch.outcome(place)
            if outcome is Outcome.LOST:
                left.to_send[number] = posts[number].as_redelivered()
            elif outcome in (Outcome.ACCEPTED, Outcome.REFUSED):
                del left.to_send[number]
            if outcome is Outcome.REFUSED:
                left.refused.append(number)
        return left

    def may_have_arrived(self, posts: Sequence[Post]) -> bool:
        """Whether the server may have any of these."""
        not_there = (Outcome.REFUSED, Outcome.RETURNED)
        return any(known.batch.outcome(place) not in not_there for _, known, place in self._known(posts))

    def forget(self, posts: Sequence[Post]) -> None:
        """Their sender has learned the outcome."""
        with self._lock:
            for post in posts if self.given_up else ():
                if (key := post.identity()) is not None:
                    self.given_up.pop(key, None)

    def _known(self, posts: Sequence[Post]) -> Iterator[tuple[int, _GivenUp[WayT], int]]:
        oldest = self._clock() - SENT_REMEMBERED_S
        for number, post in enumerate(posts if self.given_up else ()):
            key = post.identity()
            found = None if key is None else self.given_up.get(key)
            if found is not None and found[0].ended_at > oldest:
                yield number, *found

    def _drop_old(self) -> None:
        """Forget from the oldest on, up to the first that may still be needed."""
        oldest = self._clock() - SENT_REMEMBERED_S
        while self.given_up:
            key, (given_up, _) = next(iter(self.given_up.items()))
            if given_up.ended_at > oldest:
                return
            del self.given_up[key]
