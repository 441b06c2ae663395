"""Publishing: the posts that a broker publishes, from messages, results and stream entries.

Pure; the asynchronous and the blocking publisher send them. A delayed message goes to a level of the delay
ladder. A post names its queue with the queue's declaration, because RabbitMQ drops a message to a missing
queue without an error.
"""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.confirms import Sent
from umbel.brokers.amqp.envelope import (
    LETTER_HEADER,
    NO_STATE,
    TRANSIENT,
    MessageState,
    Properties,
    encode,
    encode_broadcast,
    encode_properties,
)
from umbel.brokers.amqp.frames import encode_publish
from umbel.brokers.amqp.signature_view import FREE, SignatureUse
from umbel.brokers.amqp.streams import LogEntry, Start, encode_record
from umbel.brokers.amqp.topology import Exchange, Queue, TaskQueues
from umbel.brokers.interface import Broadcast, Tag
from umbel.errors import BrokerRefused, WireError
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.message import Message, Outgoing, StoredResult

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

    `source`: the message that the caller gave to the broker. Without one, publishing the post twice does no
    harm. `claim`: the kind of post and the claim that it ends; a claim sends one post of a kind.
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
        """The name of the queue or exchange that must exist for it; queues, exchanges and reserved names
        share none.
        """
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
        """Whether it goes straight to a queue and is not large: such a post cannot make the server close its
        channel.
        """
        return not self.exchange and len(self.body) <= ALONE_BYTES

    def identity(self) -> int | None:
        """Return a number that is the same for the same message; None for a post of which a copy does no
        harm.
        """
        if self.claim is not None:
            return hash(self.claim)
        if (source := self.source) is None:
            return None
        message = source.message
        place = (source.queue, source.exchange, source.routing_key)
        return hash((place, message.correlation_id, message.headers, message.body))

    def as_redelivered(self) -> "Post":
        """Return the same message, flagged as one that may have run; a dead letter stays unchanged."""
        source = self.source
        if source is None or self.key in (topology.DEAD, topology.FAILED):
            return self
        return replace(self, properties=encode(source.message, MessageState(source.not_before, ran=True)))

    def frames(self, channel: int) -> bytes:
        """Return the bytes that publish it on this channel."""
        mandatory = self.queue is not None or self.via is not None
        return encode_publish(
            channel, self.exchange, self.key, self.properties, self.body, mandatory=mandatory
        )


def broadcast(sent: Broadcast, ttl_s: float, *, asks_for_listeners: bool = False) -> Post:
    """Return the post of a broadcast.

    With `asks_for_listeners` the server reports a control request that nothing listens for.
    """
    asks = asks_for_listeners and sent.exchange == REQUEST_EXCHANGE
    via = topology.exchange(sent.exchange) if asks else None
    properties = encode_broadcast(sent, ttl_s)
    return Post(sent.routing_key, properties, sent.body, exchange=sent.exchange, via=via)


def task(outgoing: Outgoing, queues: TaskQueues, now: float, since: float = 0.0) -> Post:
    """Return the post of a task's message.

    `since`: when this process learned that the message may have run, if that was before it is sent.
    """
    delay_s, message, ran = outgoing.not_before - now, outgoing.message, outgoing.redelivered
    if outgoing.exchange:
        due = outgoing.not_before if delay_s > 0 else 0.0
        return _by_exchange(outgoing, queues, MessageState(due, ran, since))
    queue = queues.queue(outgoing.queue)
    if delay_s <= 0:
        state = MessageState(0.0, ran, since) if ran else NO_STATE
        return Post(outgoing.queue, encode(message, state), message.body, queue, source=outgoing)
    properties = encode(message, MessageState(outgoing.not_before, ran, since))
    step_ms = topology.delay_step_ms(delay_s)
    if step_ms is None or queue.reserved:  # the claiming worker waits for these few milliseconds
        return Post(outgoing.queue, properties, message.body, queue, source=outgoing)
    waiting = topology.delay_queue(outgoing.queue, step_ms)
    return Post(waiting.name, properties, message.body, waiting, source=outgoing)


def parked(outgoing: Outgoing, queues: TaskQueues, now: float, since: float, claim: Tag) -> Post:
    """Return the post of a claimed message that goes to the next level of the delay ladder."""
    return replace(task(outgoing, queues, now, since), claim=parking(claim).claim)


def parking(claim: Tag) -> Post:
    """Return a post with the identity of the post that parks this claim's message; its content does not
    matter.
    """
    return Post("", b"", b"", claim=("park", claim))


def _by_exchange(outgoing: Outgoing, queues: TaskQueues, state: MessageState) -> Post:
    """Return the post of a message for an exchange. A delayed one is sent at once, like Celery's: the
    consumer of its queue parks it.
    """
    message = outgoing.message
    if message.exchange:
        message = replace(message, exchange="", routing_key="")
        outgoing = replace(outgoing, message=message)
    properties, via = encode(message, state), queues.exchange(outgoing.exchange)
    exchange, key = outgoing.exchange, outgoing.routing_key
    return Post(key, properties, message.body, exchange=exchange, via=via, source=outgoing)


def tasks(batch: Sequence[Outgoing], queues: TaskQueues, now: float) -> list[Post]:
    """Return the posts of several tasks' messages, in order."""
    return [task(outgoing, queues, now) for outgoing in batch]


def sendable_tasks(batch: Sequence[Outgoing], queues: TaskQueues, now: float) -> list[Post]:
    """Return the posts for a sender that sends all or none; BrokerRefused if one is for a reserved queue."""
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
    """Return the post of a failed task's message.

    The queue of failures decides how long it stays, not the message's expiration.
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
    """Return the post of a dead letter. Every message can become one: headers that cannot be encoded are
    stored as text.

    `claim`: the claim of the message that it ends.
    """
    extra: dict[str, Any] = {QUEUE: queue, REASON: reason, STARTS: starts, BURIED_AT: now}
    letter_id = str(uuid4())
    try:
        properties = encode(message, NO_STATE, extra, message_id=letter_id)
    except (WireError, ValueError):
        extra[HEADERS] = message.headers[:HEADERS_SHOWN_BYTES].decode(errors="backslashreplace")
        bare = Message(b"{}", message.body, expiration_ms=message.expiration_ms)
        properties = encode(bare, NO_STATE, extra, message_id=letter_id)
    place = into or topology.dead_letter_queue()
    source = Outgoing(place.name, message)
    ends = None if claim is None else (place.name, claim)
    return Post(place.name, properties, message.body, place, source=source, claim=ends)


def result(stored: StoredResult, reply_to: str) -> Post:
    """Return the post of a result for the client that waits for it, in Celery's form (wire 6.3)."""
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
    """Return the post of one more entry of a stream."""
    return Post(stream, _STREAM_PROPERTIES, body)


def start_entry(
    queue: str, message: str, starts: int, *, unstarted: bool = False, attempt: int | None = None
) -> Post:
    """Return the entry that records how often a message was started, or that it was returned unstarted."""
    return entry(topology.STARTS, encode_record(Start(queue, message, starts, unstarted, attempt)))


def freeing(use: SignatureUse) -> Post:
    """Return the entry that makes a used signature free again."""
    return entry(
        topology.SIGNATURES, encode_record(SignatureUse(use.mark, FREE, born=use.born, over=use.user))
    )


def log_entries(entries: Sequence[tuple[str, bytes]], counts: Sequence[int], now: float) -> list[Post]:
    """Return the posts of events for the event log, one post for each event."""
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
    """Return one error for all refused messages; it names the first queue."""
    first = min(refused)
    more = f" (and {len(refused) - 1} more of {len(posts)} messages)" if len(refused) > 1 else ""
    return BrokerRefused(
        f"RabbitMQ refused the message for {posts[first].target!r}{more}: {refused[first]}",
        places=sorted(refused),
    )
