"""Posts: a message in the form in which Pub/Sub carries it, and the names of topics and subscriptions.

The data is the envelope that Celery's virtual transports share (`wire/envelope_redis.py`). The broker's own
state of a message (how often it was started, that it may have run, when it is due) is in attributes next to
the routing key; Celery reads none of them.

An exchange is a topic of the same name. A queue is a subscription of its exchange's topic: the prefix and the
queue's name, in which a dot is a dash and other punctuation an underscore. The subscription filters by the
routing key, which is an attribute of each message. A queue of a fan-out exchange is a subscription for each
process, with an id behind its name.
"""

import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import urandom
from typing import Annotated

import msgspec

from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.interface import Broadcast, BrokerSettings, DeadLetter, DeclaredQueue
from umbel.brokers.refusals import unbound
from umbel.errors import BrokerRefused, WireError
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.envelope_redis import seal, seal_broadcast, unseal
from umbel.wire.message import LATEST_S, Count, Name, Outgoing, parse_instant
from umbel.wire.values import UNREADABLE

# ---- names -----------------------------------------------------------------------------------------

DEAD = "umbel.dead"
ROUTING_KEY = "routing_key"
_PUNCTUATION = {ord(sign): "_" for sign in string.punctuation if sign not in "_-."} | {ord("."): "-"}
_NAME = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the messages of a queue go: a topic, with a routing key, and the subscription that stores
    them.
    """

    queue: str
    topic: str
    routing_key: str
    subscription: str

    @property
    def filter(self) -> str:
        """The filter that lets only messages with the routing key into the subscription."""
        key = self.routing_key.replace("\\", "\\\\").replace('"', '\\"')
        return f'attributes.{ROUTING_KEY}="{key}"'


class Names:
    """The topics and subscriptions of queues, as a project declares them or with Celery's default names."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._prefix = settings.queue_name_prefix
        self._declared: Mapping[str, DeclaredQueue] = {queue.name: queue for queue in settings.declared}
        self._places: dict[str, Place] = {}

    def place(self, queue: str) -> Place:
        """Return topic and subscription of a queue; raise BrokerRefused for a queue that Pub/Sub
        cannot have.
        """
        found = self._places.get(queue)
        if found is None:
            found = self._places[queue] = self._place(queue)
        return found

    def _place(self, queue: str) -> Place:
        CAPABILITIES.refuse_reserved(queue)
        topic, key = queue, queue
        declared = self._declared.get(queue)
        bindings = declared.bindings if declared is not None else ()
        for binding in bindings[:1]:
            if binding.exchange.kind != "direct":
                raise BrokerRefused(
                    f"the queue {queue!r} is bound to the {binding.exchange.kind} exchange "
                    f"{binding.exchange.name!r}: on Pub/Sub tasks go by direct exchanges only"
                )
            topic, key = binding.exchange.name or queue, binding.routing_key
        if len(bindings) > 1:
            raise BrokerRefused(
                f"the queue {queue!r} has {len(bindings)} bindings: a subscription of Pub/Sub has one topic "
                "and one filter; declare a queue for each binding"
            )
        return Place(queue, checked_name(topic, queue), key, checked_name(self.subscription(queue), queue))

    def subscription(self, queue: str) -> str:
        """Return the queue's name with the prefix, in the characters that Celery's transport uses."""
        name = queue if queue.startswith(self._prefix) else self._prefix + queue
        return name.translate(_PUNCTUATION)


def checked_name(name: str, queue: str) -> str:
    """Return the name, if Pub/Sub allows it; raise BrokerRefused if not."""
    if not _NAME.fullmatch(name):
        raise BrokerRefused(
            f"the queue {queue!r} cannot be on Pub/Sub, where it is called {name!r}: names have 3 to 255 "
            "letters, digits and . _ ~ + % -, begin with a letter and not with goog"
        )
    return name


# ---- posts -----------------------------------------------------------------------------------------

MESSAGE_MAX_BYTES = 10_000_000  # Pub/Sub's own limit, for data and attributes
REQUEST_MAX_BYTES = 7_000_000  # of several messages in one request: in base64 still below ten million
REQUEST_MAX = 1000
DELAY_MAX_S = 86_400.0
STARTS_MAX = 1_000_000
_STARTS, _RAN, _DUE = "umbel-starts", "umbel-ran", "umbel-due"


class MessageState(msgspec.Struct, frozen=True, gc=False):
    """The broker's own state of a message: its starts, that it may have run, and when it is due."""

    starts: int = 0
    ran: bool = False
    due: float = 0.0

    def attributes(self) -> dict[str, str]:
        """Return the attributes of a message that carry this."""
        found = {}
        if self.starts:
            found[_STARTS] = str(self.starts)
        if self.ran:
            found[_RAN] = "1"
        if self.due:
            found[_DUE] = repr(self.due)
        return found


NO_STATE = MessageState()


class Post(msgspec.Struct, frozen=True, gc=False):
    """A message to publish; `target` names the queue or exchange in error texts."""

    topic: str
    data: bytes
    attributes: Mapping[str, str]
    target: str

    @property
    def size_bytes(self) -> int:
        """Its size by Pub/Sub's rules: data, attribute names and values."""
        return len(self.data) + sum(len(name) + len(value) for name, value in self.attributes.items())


def read_state(attributes: Mapping[str, str]) -> MessageState:
    """Return the state in the attributes; values that are not well formed count as absent."""
    if not attributes or not any(name in attributes for name in (_STARTS, _RAN, _DUE)):
        return NO_STATE
    starts = attributes.get(_STARTS, "0")
    try:
        due = float(attributes.get(_DUE, "0"))
    except ValueError:
        due = 0.0
    known = int(starts) if starts.isascii() and starts.isdecimal() and len(starts) < 8 else 0
    usable = due if math.isfinite(due) and 0 <= due <= LATEST_S else 0.0
    return MessageState(min(known, STARTS_MAX), attributes.get(_RAN) == "1", usable)


def task(outgoing: Outgoing, names: Names, now: float) -> Post:
    """Return the post of a task's message; raise BrokerRefused if Pub/Sub cannot carry it."""
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
    attributes = {ROUTING_KEY: key} | MessageState(0, outgoing.redelivered, due).attributes()
    return checked_post(Post(topic, data, attributes, outgoing.target))


def copy_of(data: bytes, queue: str, names: Names, state: MessageState) -> Post:
    """Return the post of a copy of the message, with other starts and due time."""
    place = names.place(queue)
    return Post(place.topic, data, {ROUTING_KEY: place.routing_key} | state.attributes(), queue)


def broadcast(sent: Broadcast) -> Post:
    """Return the post of a broadcast; raise BrokerRefused if it is too large."""
    data = seal_broadcast(sent.exchange, sent.routing_key, sent.body, sent.headers, urandom(16).hex())
    # Celery's messages to all nodes have no routing key.
    attributes = {} if sent.exchange == REQUEST_EXCHANGE else {ROUTING_KEY: sent.routing_key}
    return checked_post(Post(sent.exchange, data, attributes, sent.exchange))


def checked_post(post: Post) -> Post:
    """Return the post, if it is within Pub/Sub's size limit; raise BrokerRefused if not."""
    if post.size_bytes > MESSAGE_MAX_BYTES:
        raise BrokerRefused(
            f"a message of {post.size_bytes:,} bytes for {post.target!r} exceeds the limit of Pub/Sub "
            f"({MESSAGE_MAX_BYTES:,}): store large data elsewhere and send its address"
        )
    return post


def unbound_post(post: Post) -> str:
    """Return the refusal of a post whose topic does not exist, so that it reaches no queue."""
    return unbound(post.topic, post.attributes.get(ROUTING_KEY, ""))


def requests(posts: Sequence[Post]) -> Iterator[list[int]]:
    """Yield the places of the posts of each request: posts of one topic, in their order, within the
    limits.
    """
    open_requests: dict[str, tuple[list[int], int]] = {}
    for place, post in enumerate(posts):
        places, size = open_requests.get(post.topic, ([], 0))
        if places and (len(places) == REQUEST_MAX or size + post.size_bytes > REQUEST_MAX_BYTES):
            yield places
            places, size = [], 0
        places.append(place)
        open_requests[post.topic] = (places, size + post.size_bytes)
    for places, _ in open_requests.values():
        if places:
            yield places


# -- dead letters --------------------------------------------------------------------------------------


class _Letter(msgspec.Struct, frozen=True):
    """A dead letter in its stored form."""

    umbel_letter: Name
    queue: Name
    reason: str
    starts: Count
    buried_at: Annotated[float, msgspec.Meta(ge=0, le=LATEST_S)]
    data: bytes


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(_Letter).decode


def letter(queue: str, data: bytes, reason: str, starts: int, now: float) -> Post:
    """Return the post of a dead letter, with the message's data unchanged."""
    body = _encode(_Letter(urandom(8).hex(), queue, reason, starts, now, data))
    return Post(DEAD, body, {ROUTING_KEY: DEAD}, DEAD)


def read_letter(data: bytes, message_id: str, published: str) -> tuple[DeadLetter, bytes]:
    """Return the dead letter, and the data of the message in it.

    Pub/Sub itself moves undelivered messages to the dead letters, and any other program may publish there:
    data that is not a letter of Umbel counts as the message itself.
    """
    try:
        found = _decode(data)
    except UNREADABLE:
        message = unseal(data).message
        why = "delivered too often without an acknowledgement: it may have ended its workers"
        letter_id, at = f"gcpubsub-{message_id}", moment(published)
        queue = message.routing_key or "celery"
        return DeadLetter(letter_id, queue, message, why, 0, at), data
    opened = unseal(found.data).message
    return (
        DeadLetter(found.umbel_letter, found.queue, opened, found.reason, found.starts, found.buried_at),
        found.data,
    )


def moment(published: str) -> float:
    """Return when a message was published; 0 if the text cannot be read."""
    try:
        return parse_instant(published)
    except WireError:
        return 0.0
