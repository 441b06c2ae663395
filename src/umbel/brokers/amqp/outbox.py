"""Outbox: what is published where. Pure; the broker and the producer both send what it says.

A message that is not due goes to a step of the delay ladder. Who publishes names the queue with
its declaration, because a message to a queue that is not there would be dropped in silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.confirms import Sent
from umbel.brokers.amqp.declared import TaskQueues
from umbel.brokers.amqp.envelope import (
    LETTER_HEADER,
    NO_MARK,
    TRANSIENT,
    Mark,
    encode,
    encode_broadcast,
)
from umbel.brokers.amqp.frames import encode_publish
from umbel.brokers.amqp.properties import Properties, encode_properties
from umbel.brokers.amqp.records import LogEntry, encode_record
from umbel.brokers.amqp.topology import Exchange, Queue
from umbel.brokers.interface import Broadcast
from umbel.errors import BrokerRefused, WireError
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.message import Message, Outgoing, StoredResult

REASON, QUEUE, STARTS, BURIED_AT = "umbel-reason", LETTER_HEADER, "umbel-starts", "umbel-buried"
HEADERS = "umbel-headers"  # the beginning of those of a dead letter that cannot be written as a table
HEADERS_SHOWN_BYTES = 4096
ALONE_BYTES = 8 * 1024 * 1024  # the smallest limit that a RabbitMQ has by default is 16 MiB
DELETED_AGAIN = "its queue was deleted twice while publishing"
Refusals = dict[int, str]
"""Why messages were refused, by their place in what was sent together."""

_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
_STREAM_PROPERTIES = encode_properties(Properties(delivery_mode=2))


@dataclass(frozen=True, slots=True)
class Post:
    """One message on its way. Without a `queue` or `via`, it may be lost when nobody listens."""

    key: str
    properties: bytes
    body: bytes
    queue: Queue | None = None
    exchange: str = ""
    via: Exchange | None = None  # it is refused if that exchange is not there, or hands it to no queue

    @property
    def target(self) -> str:
        """For people."""
        return self.key if self.via is None else f"{self.exchange}/{self.key}"

    @property
    def route(self) -> tuple[str, str]:
        return self.exchange, self.key

    @property
    def needs(self) -> str:
        """What must be there for it, by a name that queues and exchanges do not share."""
        return self.via.name if self.via is not None else f"queue {self.queue.name if self.queue else ''}"

    @property
    def sent(self) -> Sent:
        return self.exchange, self.key, self.properties, self.body

    @property
    def is_plain(self) -> bool:
        """Straight to a queue, and not large: nothing about it makes the server close its channel."""
        return not self.exchange and len(self.body) <= ALONE_BYTES

    def frames(self, channel: int) -> bytes:
        mandatory = self.queue is not None or self.via is not None
        return encode_publish(
            channel, self.exchange, self.key, self.properties, self.body, mandatory=mandatory
        )


def broadcast(one: Broadcast, ttl_s: float, *, ask_who_hears: bool = False) -> Post:
    """`ask_who_hears`: the server then says of a control request that nobody listens for any."""
    via = topology.exchange(one.exchange) if ask_who_hears and one.exchange == REQUEST_EXCHANGE else None
    properties = encode_broadcast(one, ttl_s)
    return Post(one.routing_key, properties, one.body, exchange=one.exchange, via=via)


def task(outgoing: Outgoing, queues: TaskQueues, now: float, *, ran: bool = False) -> Post:
    delay_s, message = outgoing.not_before - now, outgoing.message
    if outgoing.exchange:
        return _by_exchange(outgoing, queues, Mark(outgoing.not_before if delay_s > 0 else 0.0, ran))
    if delay_s <= 0:
        mark = Mark(ran=True) if ran else NO_MARK
        return Post(outgoing.queue, encode(message, mark), message.body, queues.queue(outgoing.queue))
    properties = encode(message, Mark(outgoing.not_before, ran))
    step_ms = topology.delay_step_ms(delay_s)
    if step_ms is None:  # the claiming worker waits these few milliseconds
        return Post(outgoing.queue, properties, message.body, queues.queue(outgoing.queue))
    waiting = topology.delay_queue(outgoing.queue, step_ms)
    return Post(waiting.name, properties, message.body, waiting)


def _by_exchange(outgoing: Outgoing, queues: TaskQueues, mark: Mark) -> Post:
    """At once, also when it is not due, as Celery does: who consumes its queue parks it there."""
    message = outgoing.message
    if message.exchange:
        message = replace(message, exchange="", routing_key="")
    properties, via = encode(message, mark), queues.exchange(outgoing.exchange)
    return Post(outgoing.routing_key, properties, message.body, exchange=outgoing.exchange, via=via)


def tasks(batch: Sequence[Outgoing], queues: TaskQueues, now: float) -> list[Post]:
    return [task(outgoing, queues, now, ran=outgoing.redelivered) for outgoing in batch]


def kept_failure(queue: str, message: Message, reason: str, now: float, into: Queue) -> Post:
    """It is kept as long as its queue says, not as long as it was to wait for its run."""
    return dead_letter(queue, replace(message, expiration_ms=None), reason, 0, now, into)


def dead_letter(
    queue: str, message: Message, reason: str, starts: int, now: float, into: Queue | None = None
) -> Post:
    """Whatever the message is like, it can be a dead letter: what cannot be written goes as text."""
    extra: dict[str, Any] = {QUEUE: queue, REASON: reason, STARTS: starts, BURIED_AT: now}
    letter_id = str(uuid4())
    try:
        properties = encode(message, NO_MARK, extra, message_id=letter_id)
    except (WireError, ValueError):
        extra[HEADERS] = message.headers[:HEADERS_SHOWN_BYTES].decode(errors="backslashreplace")
        bare = Message(b"{}", message.body, expiration_ms=message.expiration_ms)
        properties = encode(bare, NO_MARK, extra, message_id=letter_id)
    place = into or topology.dead_letter_queue()
    return Post(place.name, properties, message.body, place)


def result(stored: StoredResult, reply_to: str) -> Post:
    """A result for the client that asked for it, as Celery sends it (wire 6.3)."""
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
    """One more entry of a stream."""
    return Post(stream, _STREAM_PROPERTIES, body)


def log_entries(entries: Sequence[tuple[str, bytes]], counts: Sequence[int], now: float) -> list[Post]:
    """Events on their way into the event log, each by itself."""
    events = [
        (key, bytes(one))
        for (key, body), count in zip(entries, counts or [1] * len(entries), strict=True)
        for one in (_parts(body) if count > 1 else (body,))
    ]
    return [
        entry(topology.EVENTS, encode_record(LogEntry(now, key, body.decode("utf-8", "surrogateescape"))))
        for key, body in events
    ]


def refusal(refused: Refusals, posts: Sequence[Post]) -> BrokerRefused:
    """One error for all that was refused; it names the first queue."""
    first = min(refused)
    more = f" (and {len(refused) - 1} more of {len(posts)} messages)" if len(refused) > 1 else ""
    return BrokerRefused(
        f"RabbitMQ refused the message for {posts[first].target!r}{more}: {refused[first]}",
        places=sorted(refused),
    )
