"""Events on the wire: facts about tasks and workers, as they are broadcast and logged (wire 4.1).

A node encodes each of its events once. The same bytes go to listeners and into the event log. Listeners get
lists in the order in which the events happened, as Celery's monitors expect. The log gets one list for each
type, because its reader decodes events of one type together, and orders them by their clocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from umbel.errors import BadMessage, TooLarge
from umbel.events.stamp import EventStamper
from umbel.events.types import TASK_TYPES, Event, TaskEvent, fields_of, tag_of
from umbel.wire.message import DEFAULT_LIMITS, Limits
from umbel.wire.show import brief
from umbel.wire.values import decode_json, encode_json

# ---- events ----------------------------------------------------------------------------------------

LOGGED = "logged"
"""Header of a broadcast whose events are also in the broker's event log, where a recorder reads them."""

EVENTS_MAX = 10_000
"""Limit for a single message. Celery sends at most 24 events; a longer list is a mistake or an attack."""


def routing_key(event_type: str) -> str:
    """Return the routing key: `task.sent` for `task-sent`, so that receivers can bind to `task.#`."""
    return event_type.replace("-", ".")


def routing_key_of_list(group: str) -> str:
    """Return the routing key of a message with several events of one group."""
    return f"{group}.multi"


def group_of(event_type: str) -> str:
    """Return `task` or `worker`; a sender can be configured to omit one of these groups."""
    return event_type.partition("-")[0]


def encode_event(event: Mapping[str, Any]) -> bytes:
    """Encode one event. Raises WireError."""
    return encode_json(event if type(event) is dict else dict(event), root="event")


def encode_events(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Encode a list of events as one body. Raises WireError."""
    return encode_json([event if type(event) is dict else dict(event) for event in events], root="events")


def decode_events(body: bytes, *, limits: Limits = DEFAULT_LIMITS) -> list[dict[str, Any]]:
    """Read a message of events: one map, or a list of them, each with a type. Raises WireError."""
    found = decode_json(body, limits=limits)
    events = found if isinstance(found, list) else [found]
    if len(events) > EVENTS_MAX:
        raise TooLarge(f"the message contains {len(events)} events; the limit is {EVENTS_MAX}")
    for event in events:
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise BadMessage(f"an event must be a map with a 'type', not {brief(event)}")
    return events


# ---- encoded events --------------------------------------------------------------------------------
# type together, and orders them by their clocks.
# Nearly all events are about tasks. Their encoded forms are derived from the vocabulary (`events/types.py`),
# so that an event is encoded from its values without building a map.

LIST_MAX, LIST_MAX_BYTES = 200, 256 * 1024
"""The largest number of events and of bytes in one list; a larger event is sent alone."""

EncodedEvent = tuple[str, bytes]
"""Routing key and body, of an event or of a list of events."""

_encode = msgspec.json.Encoder().encode


_STAMPED = list(fields_of(Event))


def encoded_fields(of: type[TaskEvent]) -> list[str]:
    """Return the fields of an event type without its stamp, in encoding order."""
    return list(
        dict.fromkeys(name for name in (*fields_of(TaskEvent), *fields_of(of)) if name not in _STAMPED)
    )


class _Form:
    """The encoding of events of one type."""

    __slots__ = ("key", "make", "tag")

    def __init__(self, of: type[TaskEvent]) -> None:
        self.tag = tag_of(of)
        self.key = routing_key(self.tag)
        self.make: Any = msgspec.defstruct(
            f"{of.__name__}Told", ["type", *_STAMPED, *encoded_fields(of)], gc=False
        )


_FORMS = {of: _Form(of) for of in TASK_TYPES}


class EventEncoder:
    """Stamps and encodes a node's events. After a WireError the event's number is skipped."""

    def __init__(self, stamper: EventStamper) -> None:
        self.stamper = stamper

    def tell(
        self, event_type: str, fields: dict[str, Any], *, at: float, blind: bool = False
    ) -> EncodedEvent:
        """Return an event of any type with its routing key. Raises WireError."""
        stamped = self.stamper.stamp(event_type, fields, at=at, blind=blind)
        return routing_key(event_type), encode_event(stamped)

    def tell_task(self, of: type[TaskEvent], at: float, *values: Any) -> EncodedEvent:
        """Return a task's event with its routing key. `values` are the values of all `encoded_fields`."""
        form, stamper = _FORMS[of], self.stamper
        clock, number = stamper.advance()
        event = form.make(
            form.tag, stamper.hostname, stamper.pid, clock, at, 0.0, stamper.incarnation, number, *values
        )
        try:
            return form.key, _encode(event)
        except ValueError:  # text that is not valid Unicode; encoding it this way, the error names the field
            return form.key, encode_event(msgspec.structs.asdict(event))


def in_lists(events: Sequence[EncodedEvent]) -> Iterator[tuple[bytes, int]]:
    """Yield bodies of lists, in this order, and how many events each contains."""
    for bodies in _cut([body for _, body in events]):
        yield b"[%b]" % b",".join(bodies), len(bodies)


def by_type(events: Sequence[EncodedEvent]) -> tuple[list[EncodedEvent], list[int]]:
    """Return entries for the log, each of one type, and how many events each contains."""
    bodies: dict[str, list[bytes]] = {}
    for key, body in events:
        if key in bodies:
            bodies[key].append(body)
        else:
            bodies[key] = [body]
    entries: list[EncodedEvent] = []
    counts: list[int] = []
    for key, alike in bodies.items():
        for some in _cut(alike):
            entries.append((key, some[0] if len(some) == 1 else b"[%b]" % b",".join(some)))
            counts.append(len(some))
    return entries, counts


def _cut(bodies: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for place in range(0, len(bodies), LIST_MAX):
        some = bodies[place : place + LIST_MAX]
        if sum(map(len, some)) <= LIST_MAX_BYTES:
            yield some
            continue
        first = size = 0
        for number, body in enumerate(some):
            if number > first and size + len(body) > LIST_MAX_BYTES:
                yield some[first:number]
                first, size = number, 0
            size += len(body)
        yield some[first:]
