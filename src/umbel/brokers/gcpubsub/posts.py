"""Posts: a message in the form in which Pub/Sub carries it, and back.

The data is the envelope that Celery's virtual transports share (`wire/envelope_redis.py`). What this
broker must remember of a message (how often it was started, that it may have run, when it is due) is in
attributes beside the routing key; Celery reads none of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from os import urandom

import msgspec

from umbel.brokers.gcpubsub.names import DEAD, ROUTING_KEY, Names
from umbel.brokers.interface import Broadcast, DeadLetter
from umbel.errors import BrokerRefused, WireError
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.envelope_redis import seal, seal_broadcast, unseal
from umbel.wire.instant import LATEST_S, parse_instant
from umbel.wire.message import Message, Outgoing

MESSAGE_MAX_BYTES = 10_000_000  # Pub/Sub's own limit, for data and attributes
REQUEST_MAX_BYTES = 7_000_000  # of several messages in one request, as base64 less than ten million
REQUEST_MAX = 1000
DELAY_MAX_S = 86_400.0
STARTS_MAX = 1_000_000
_STARTS, _RAN, _DUE = "umbel-starts", "umbel-ran", "umbel-due"


class Mark(msgspec.Struct, frozen=True, gc=False):
    """What is remembered with a message."""

    starts: int = 0
    ran: bool = False
    due: float = 0.0

    def attributes(self) -> dict[str, str]:
        found = {}
        if self.starts:
            found[_STARTS] = str(self.starts)
        if self.ran:
            found[_RAN] = "1"
        if self.due:
            found[_DUE] = repr(self.due)
        return found


NO_MARK = Mark()


class Post(msgspec.Struct, frozen=True, gc=False):
    """What is published: `target` is for people."""

    topic: str
    data: bytes
    attributes: Mapping[str, str]
    target: str

    @property
    def size_bytes(self) -> int:
        return len(self.data) + sum(len(name) + len(value) for name, value in self.attributes.items())


def read_mark(attributes: Mapping[str, str]) -> Mark:
    """A mark that is not well formed marks nothing."""
    if not attributes or not any(name in attributes for name in (_STARTS, _RAN, _DUE)):
        return NO_MARK
    starts = attributes.get(_STARTS, "0")
    try:
        due = float(attributes.get(_DUE, "0"))
    except ValueError:
        due = 0.0
    known = int(starts) if starts.isascii() and starts.isdecimal() and len(starts) < 8 else 0
    usable = due if math.isfinite(due) and 0 <= due <= LATEST_S else 0.0
    return Mark(min(known, STARTS_MAX), attributes.get(_RAN) == "1", usable)


def task(outgoing: Outgoing, names: Names, now: float) -> Post:
    """Raises BrokerRefused where Pub/Sub cannot carry it."""
    if outgoing.not_before > now + DELAY_MAX_S:
        raise BrokerRefused(
            f"the message for {outgoing.target!r} is due in {(outgoing.not_before - now) / 3600:.0f} hours: "
            f"Pub/Sub holds a message for {DELAY_MAX_S / 3600:.0f} hours at most; set 'coordination_store', "
            "where delayed tasks wait"
        )
    if outgoing.exchange:
        topic, key = outgoing.exchange, outgoing.routing_key
    else:
        place = names.place(outgoing.queue)
        topic, key = place.topic, place.routing_key
    data = seal(
        outgoing.message,
        outgoing.queue,
        urandom(16).hex(),
        exchange=outgoing.exchange,
        routing_key=outgoing.routing_key,
    )
    due = outgoing.not_before if outgoing.not_before > now else 0.0
    attributes = {ROUTING_KEY: key} | Mark(0, outgoing.redelivered, due).attributes()
    return checked(Post(topic, data, attributes, outgoing.target))


def again(data: bytes, queue: str, names: Names, mark: Mark) -> Post:
    """The same message once more, with another mark."""
    place = names.place(queue)
    return Post(place.topic, data, {ROUTING_KEY: place.routing_key} | mark.attributes(), queue)


def broadcast(one: Broadcast) -> Post:
    data = seal_broadcast(one.exchange, one.routing_key, one.body, one.headers, urandom(16).hex())
    # Celery gives none to what goes to everybody.
    attributes = {} if one.exchange == REQUEST_EXCHANGE else {ROUTING_KEY: one.routing_key}
    return checked(Post(one.exchange, data, attributes, one.exchange))


def checked(post: Post) -> Post:
    if post.size_bytes > MESSAGE_MAX_BYTES:
        raise BrokerRefused(
            f"a message of {post.size_bytes:,} bytes for {post.target!r} exceeds the limit of Pub/Sub "
            f"({MESSAGE_MAX_BYTES:,}): store large data elsewhere and send its address"
        )
    return post


def requests(posts: Sequence[Post]) -> Iterator[list[int]]:
    """The places of those that go in one request each: of one topic, in their order, within the limits."""
    open_ones: dict[str, tuple[list[int], int]] = {}
    for place, post in enumerate(posts):
        places, size = open_ones.get(post.topic, ([], 0))
        if places and (len(places) == REQUEST_MAX or size + post.size_bytes > REQUEST_MAX_BYTES):
            yield places
            places, size = [], 0
        places.append(place)
        open_ones[post.topic] = (places, size + post.size_bytes)
    for places, _ in open_ones.values():
        if places:
            yield places


# -- dead letters --------------------------------------------------------------------------------------


class _Letter(msgspec.Struct, frozen=True):
    umbel_letter: str
    queue: str
    reason: str
    starts: int
    buried_at: float
    data: bytes


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(_Letter).decode


def letter(queue: str, data: bytes, reason: str, starts: int, now: float) -> Post:
    body = _encode(_Letter(urandom(8).hex(), queue, reason, starts, now, data))
    return Post(DEAD, body, {ROUTING_KEY: DEAD}, DEAD)


def read_letter(data: bytes, message_id: str, published: str) -> tuple[DeadLetter, bytes]:
    """The letter, and the message in it as it was. Pub/Sub itself sends messages here without our words."""
    try:
        found = _decode(data)
    except msgspec.DecodeError:
        message = unseal(data).message
        why = "delivered too often without an acknowledgement: it may have ended its workers"
        letter_id, at = f"gcpubsub-{message_id}", moment(published)
        return DeadLetter(letter_id, _queue_of(message), message, why, 0, at), data
    opened = unseal(found.data).message
    return (
        DeadLetter(found.umbel_letter, found.queue, opened, found.reason, found.starts, found.buried_at),
        found.data,
    )


def _queue_of(message: Message) -> str:
    return message.routing_key or "celery"


def moment(published: str) -> float:
    """When a message was published; 0 where that cannot be read."""
    try:
        return parse_instant(published)
    except WireError:
        return 0.0
