"""API: the calls of Pub/Sub's REST interface that are made here, as values, and their answers as values."""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

import msgspec

from umbel.brokers.gcpubsub.names import Place
from umbel.brokers.gcpubsub.posts import Post

ACK_DEADLINE_MIN_S, ACK_DEADLINE_MAX_S = 10, 600
ACK_IDS_MAX = 1000  # of one request, which may have 512 KiB
DELIVERIES_MAX = 100  # Pub/Sub then moves a message to the dead letters; the most that it allows
FAN_OUT_RETENTION_S = 600


class Call(msgspec.Struct, frozen=True, gc=False):
    """`what`: the same in words, for errors."""

    verb: str
    path: str
    body: bytes
    what: str


class Received(msgspec.Struct, frozen=True, gc=False):
    ack_id: str
    data: bytes
    attributes: Mapping[str, str]
    message_id: str
    published: str  # when, as ISO 8601
    deliveries: int  # 0: not counted


def publish(project: str, posts: Sequence[Post]) -> Call:
    """To one topic."""
    body = _encode({"messages": [{"data": one.data, "attributes": one.attributes} for one in posts]})
    topic = posts[0].topic
    return Call("POST", f"{_path(project, 'topics', topic)}:publish", body, f"publishing to {topic!r}")


def make_topic(project: str, topic: str, retention_s: float) -> Call:
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
    """Change a subscription that somebody else made."""
    name = f"projects/{project}/subscriptions/{place.subscription}"
    changed = {"name": name, "topic": _topic(project, place.topic)} | _dead_letter_policy(project, into)
    body = _encode({"subscription": changed, "updateMask": "deadLetterPolicy"})
    path = _path(project, "subscriptions", place.subscription)
    return Call("PATCH", path, body, f"the subscription {place.subscription!r}")


def look_at(project: str, subscription: str) -> Call:
    path = _path(project, "subscriptions", subscription)
    return Call("GET", path, b"", f"the subscription {subscription!r}")


def remove(project: str, subscription: str) -> Call:
    path = _path(project, "subscriptions", subscription)
    return Call("DELETE", path, b"", f"the subscription {subscription!r}")


def pull(project: str, subscription: str, count: int, *, waits: bool) -> Call:
    asked: dict[str, object] = {"maxMessages": max(1, min(count, ACK_IDS_MAX))}
    if not waits:
        asked["returnImmediately"] = True
    return _of_subscription(project, subscription, "pull", asked)


def acknowledge(project: str, subscription: str, ack_ids: Sequence[str]) -> Call:
    return _of_subscription(project, subscription, "acknowledge", {"ackIds": ack_ids})


def set_deadline(project: str, subscription: str, ack_ids: Sequence[str], deadline_s: int) -> Call:
    """From now on; 0 gives the messages back."""
    asked = {"ackIds": ack_ids, "ackDeadlineSeconds": deadline_s}
    return _of_subscription(project, subscription, "modifyAckDeadline", asked)


def read_pulled(body: bytes) -> list[Received]:
    return [
        Received(
            one.ack_id,
            one.message.data,
            one.message.attributes,
            one.message.message_id,
            one.message.publish_time,
            one.delivery_attempt,
        )
        for one in _decode_pulled(body).received_messages
    ]


class Subscribed(msgspec.Struct, frozen=True, rename="camel"):
    """A subscription as the server has it."""

    ack_deadline_seconds: int = ACK_DEADLINE_MIN_S
    dead_letter_policy: Mapping[str, object] = {}


read_subscription = msgspec.json.Decoder(Subscribed).decode


class _Message(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    data: bytes = b""
    attributes: dict[str, str] = {}
    message_id: str = ""
    publish_time: str = ""


class _Received(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    ack_id: str
    message: _Message = _Message()
    delivery_attempt: int = 0


class _Pulled(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    received_messages: list[_Received] = []


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
