"""Events: facts about tasks and workers, as they are broadcast (wire 4.1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from umbel.errors import BadMessage, TooLarge
from umbel.wire.limits import DEFAULT_LIMITS, Limits
from umbel.wire.show import brief
from umbel.wire.values import decode_json, encode_json

LOGGED = "logged"
"""Header of a broadcast whose events are in the broker's event log too: who records reads them there."""

EVENTS_MAX = 10_000
"""In one message. Celery sends at most 24; a longer list than this is a mistake or an attack."""


def routing_key(event_type: str) -> str:
    """`task-sent` goes out as `task.sent`, so that receivers can bind to `task.#`."""
    return event_type.replace("-", ".")


def routing_key_of_list(group: str) -> str:
    """Several events of one group, sent as one message."""
    return f"{group}.multi"


def group_of(event_type: str) -> str:
    """`task` or `worker`: what a sender can be configured to leave out."""
    return event_type.partition("-")[0]


def encode_event(event: Mapping[str, Any]) -> bytes:
    return encode_json(event if type(event) is dict else dict(event), root="event")


def encode_events(events: Sequence[Mapping[str, Any]]) -> bytes:
    return encode_json([event if type(event) is dict else dict(event) for event in events], root="events")


def decode_events(body: bytes, *, limits: Limits = DEFAULT_LIMITS) -> list[dict[str, Any]]:
    """Read a message of events: one map, or a list of them. Each has a type."""
    found = decode_json(body, limits=limits)
    events = found if isinstance(found, list) else [found]
    if len(events) > EVENTS_MAX:
        raise TooLarge(f"the message contains {len(events)} events; the limit is {EVENTS_MAX}")
    for event in events:
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise BadMessage(f"an event must be a map with a 'type', not {brief(event)}")
    return events
