"""API: the calls to Pub/Sub's REST interface as values, and which topics and subscriptions must exist.

A topic without a subscription drops the messages that are sent to it. So a sender creates the topic and the
subscription of a queue before it sends there first, and again when they were deleted. The calls are values:
the blocking and the asynchronous client make them in the same order.
"""

from collections.abc import Generator, Mapping, Sequence
from math import ceil
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from umbel.brokers.gcpubsub.http import Address, AlreadyExists, Call
from umbel.brokers.gcpubsub.posts import DEAD, Names, Place, Post
from umbel.brokers.interface import BrokerSettings
from umbel.errors import BrokerRefused

# ---- api -------------------------------------------------------------------------------------------

ACK_DEADLINE_MIN_S, ACK_DEADLINE_MAX_S = 10, 600
ACK_IDS_MAX = 1000  # in one request, which may have 512 KiB
DELIVERIES_MAX = 100  # then Pub/Sub moves a message to the dead letters; the maximum that it allows
FAN_OUT_RETENTION_S = 600


class PubsubMessage(msgspec.Struct, frozen=True, gc=False):
    """A message as Pub/Sub stores it; `published` is an instant in ISO 8601."""

    data: bytes = b""
    attributes: dict[str, str] = {}
    message_id: str = msgspec.field(name="messageId", default="")
    published: str = msgspec.field(name="publishTime", default="")


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message that a pull returned. `deliveries` 0: Pub/Sub does not count them."""

    ack_id: str = msgspec.field(name="ackId")
    message: PubsubMessage = PubsubMessage()
    deliveries: int = msgspec.field(name="deliveryAttempt", default=0)


def publish(project: str, posts: Sequence[Post]) -> Call:
    """Publish posts, all to one topic."""
    body = _encode({"messages": [{"data": post.data, "attributes": post.attributes} for post in posts]})
    topic = posts[0].topic
    return Call("POST", f"{_path(project, 'topics', topic)}:publish", body, f"publishing to {topic!r}")


def make_topic(project: str, topic: str, retention_s: float) -> Call:
    """Create a topic that retains messages for `retention_s`."""
    body = _encode({"messageRetentionDuration": _duration(retention_s)})
    return Call("PUT", _path(project, "topics", topic), body, f"the topic {topic!r}")


def make_subscription(
    project: str,
    place: Place,
    *,
    ack_deadline_s: int,
    retention_s: float,
    expires_s: float,
    exactly_once: bool = False,
    counts_deliveries_into: str = "",
    is_filtered: bool = True,
) -> Call:
    """Create a subscription. With `counts_deliveries_into`, a message delivered too often moves to that
    topic.
    """
    wanted: dict[str, object] = {
        "topic": _topic(project, place.topic),
        "ackDeadlineSeconds": ack_deadline_s,
        "messageRetentionDuration": _duration(retention_s),
        "expirationPolicy": {"ttl": _duration(expires_s)},
    }
    if exactly_once:
        wanted["enableExactlyOnceDelivery"] = True
    if is_filtered:
        wanted["filter"] = place.filter
    if counts_deliveries_into:
        wanted |= _dead_letter_policy(project, counts_deliveries_into)
    path = _path(project, "subscriptions", place.subscription)
    return Call("PUT", path, _encode(wanted), f"the subscription {place.subscription!r}")


def count_deliveries(project: str, place: Place, into: str) -> Call:
    """Give an existing subscription, for example one of Celery's, a topic for its dead letters."""
    name = f"projects/{project}/subscriptions/{place.subscription}"
    changed = {"name": name, "topic": _topic(project, place.topic)} | _dead_letter_policy(project, into)
    body = _encode({"subscription": changed, "updateMask": "deadLetterPolicy"})
    path = _path(project, "subscriptions", place.subscription)
    return Call("PATCH", path, body, f"the subscription {place.subscription!r}")


def look_at(project: str, subscription: str) -> Call:
    """Read the settings of a subscription."""
    path = _path(project, "subscriptions", subscription)
    return Call("GET", path, b"", f"the subscription {subscription!r}")


def remove(project: str, subscription: str) -> Call:
    """Delete a subscription."""
    path = _path(project, "subscriptions", subscription)
    return Call("DELETE", path, b"", f"the subscription {subscription!r}")


def pull(project: str, subscription: str, count: int, *, waits: bool, within_s: int | None = None) -> Call:
    """Take up to `count` messages; with `waits`, wait at the server for the first."""
    asked: dict[str, object] = {"maxMessages": max(1, min(count, ACK_IDS_MAX))}
    if not waits:
        asked["returnImmediately"] = True
    return replace(_of_subscription(project, subscription, "pull", asked), within_s=within_s)


def acknowledge(project: str, subscription: str, ack_ids: Sequence[str]) -> Call:
    """Acknowledge messages by the ids of their deliveries."""
    return _of_subscription(project, subscription, "acknowledge", {"ackIds": ack_ids})


def set_deadline(project: str, subscription: str, ack_ids: Sequence[str], deadline_s: int) -> Call:
    """Set the ack deadline from now on; 0 returns the messages."""
    asked = {"ackIds": ack_ids, "ackDeadlineSeconds": deadline_s}
    return _of_subscription(project, subscription, "modifyAckDeadline", asked)


def read_pulled(body: bytes) -> list[Received]:
    """Return the messages in the answer to `pull`."""
    return _decode_pulled(body).received_messages


class Subscribed(msgspec.Struct, frozen=True, rename="camel"):
    """The settings of a subscription at the server."""

    ack_deadline_seconds: int = ACK_DEADLINE_MIN_S
    dead_letter_policy: Mapping[str, object] = {}


read_subscription = msgspec.json.Decoder(Subscribed).decode


class _Pulled(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    received_messages: list[Received] = []


_encode = msgspec.json.encode
_decode_pulled = msgspec.json.Decoder(_Pulled).decode


def _of_subscription(project: str, subscription: str, verb: str, asked: Mapping[str, object]) -> Call:
    path = f"{_path(project, 'subscriptions', subscription)}:{verb}"
    return Call("POST", path, _encode(asked), f"{verb} on the subscription {subscription!r}")


def _path(project: str, kind: str, name: str) -> str:
    return f"/v1/projects/{project}/{kind}/{quote(name, safe='')}"


def _topic(project: str, topic: str) -> str:
    return f"projects/{project}/topics/{topic}"


def _dead_letter_policy(project: str, into: str) -> dict[str, object]:
    policy = {"deadLetterTopic": _topic(project, into), "maxDeliveryAttempts": DELIVERIES_MAX}
    return {"deadLetterPolicy": policy}


def _duration(seconds: float) -> str:
    return f"{seconds:.0f}s"


# ---- topology --------------------------------------------------------------------------------------

LETTERS_RETENTION_S = 7 * 86_400.0  # the default retention of a subscription
LETTERS_EXPIRE_S = 31 * 86_400.0
DEAD_PLACE = Place(DEAD, DEAD, DEAD, DEAD)

Calls = Generator[Call, bytes | BrokerRefused, None]
"""Calls to be made in order. Each is answered with the body or the refusal; one without a meaning here is
raised.
"""


def next_of(calls: Calls, answer: bytes | BrokerRefused | None) -> Call | None:
    """Return the call that follows this answer (None: the first call); None when there is no more."""
    try:
        return next(calls) if answer is None else calls.send(answer)
    except StopIteration:
        return None


class Topology:
    """The topics and subscriptions that this process has created, and the calls that create the rest.

    A topic or subscription that exists already counts as created. Another program may have chosen its
    settings, so they stay unchanged, and the ack deadline is read from Pub/Sub; only a subscription without
    dead letters gets them. If a topic is deleted later, a call fails, and `make_again` creates it.
    """

    def __init__(self, settings: BrokerSettings, address: Address) -> None:
        self.expires_s = settings.subscription_expires_s  # of unused subscriptions; topics retain as long
        self._project = address.project
        self._exactly_once = settings.exactly_once or address.exactly_once
        self.names = Names(settings)
        self.ack_deadline_s = ack_deadline(settings.lease_s)
        self.made: dict[str, int] = {}  # by queue, the ack deadline of its subscription
        self.topics: set[str] = set()

    def make_topic(self, topic: str) -> Calls:
        """Yield the calls that create the topic, unless that was done."""
        if topic in self.topics:
            return
        retention_s = LETTERS_RETENTION_S if topic == DEAD else self.expires_s
        _unless_there((yield make_topic(self._project, topic, retention_s)))
        self.topics.add(topic)

    def make_again(self, topic: str) -> Calls:
        """Yield the calls that create a deleted topic and the subscriptions of its queues again."""
        queues = [queue for queue in self.made if self.names.place(queue).topic == topic]
        self.topics.discard(topic)
        for queue in queues:
            del self.made[queue]
        if topic == DEAD:
            yield from self.make_dead()
        yield from self.make_topic(topic)
        for queue in queues:
            yield from self.make_queue(queue)

    def make_dead(self) -> Calls:
        """Yield the calls that create topic and subscription of the dead letters, unless that was done."""
        if DEAD in self.topics:
            return
        yield from self.make_topic(DEAD)
        self.topics.discard(DEAD)
        subscribing = make_subscription(
            self._project,
            DEAD_PLACE,
            ack_deadline_s=60,
            retention_s=LETTERS_RETENTION_S,
            expires_s=LETTERS_EXPIRE_S,
            is_filtered=False,
        )
        _unless_there((yield subscribing))
        self.topics.add(DEAD)

    def make_queue(self, queue: str) -> Calls:
        """Yield the calls that create topic and subscription of the queue, unless that was done.

        The dead letters are created first: Pub/Sub refuses a subscription whose dead letter topic is missing.
        """
        if queue in self.made:
            return
        place = self.names.place(queue)
        yield from self.make_dead()
        yield from self.make_topic(place.topic)
        subscribing = make_subscription(
            self._project,
            place,
            ack_deadline_s=self.ack_deadline_s,
            retention_s=self.expires_s,
            expires_s=self.expires_s,
            exactly_once=self._exactly_once,
            counts_deliveries_into=DEAD,
        )
        answer = yield subscribing
        if isinstance(answer, BrokerRefused):
            _unless_there(answer)
            answer = yield look_at(self._project, place.subscription)
            if isinstance(answer, BrokerRefused):
                raise answer
            found = read_subscription(answer)
            if not found.dead_letter_policy:  # made by Celery; if we may not change it, it is used unchanged
                yield count_deliveries(self._project, place, DEAD)
            self.made[queue] = found.ack_deadline_seconds
        else:
            self.made[queue] = self.ack_deadline_s


def ack_deadline(lease_s: float) -> int:
    """Return the ack deadline for a lease, within Pub/Sub's limits."""
    return max(ACK_DEADLINE_MIN_S, min(ceil(lease_s), ACK_DEADLINE_MAX_S))


def _unless_there(answer: bytes | BrokerRefused) -> None:
    if isinstance(answer, BrokerRefused) and not isinstance(answer, AlreadyExists):
        raise answer
