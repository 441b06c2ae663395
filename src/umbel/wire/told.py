"""Told: events as a node sends them, each encoded once, with its routing key.

The same bytes go to those who listen and into the event log. Listeners get lists in the order in which
things happened, as Celery's monitors want them. The log gets a list for each type: its reader decodes
events of one type together, and orders them by their clocks.

Events of tasks are nearly all there are. Their forms are made from the vocabulary (`events/types.py`), so
that an event is written from its values without a map in between.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from umbel.events.stamp import EventStamper
from umbel.events.types import TASK_TYPES, Event, TaskEvent, fields_of, tag_of
from umbel.wire.event import encode_event, routing_key

LIST_MAX, LIST_MAX_BYTES = 200, 256 * 1024
"""Events of one list, and their bytes; a larger event goes alone."""

Told = tuple[str, bytes]
"""Routing key and body, of an event or of a list of them."""

_encode = msgspec.json.Encoder().encode


_STAMPED = list(fields_of(Event))


def told_fields(of: type[TaskEvent]) -> list[str]:
    """The fields of a type beside its stamp, in the order in which they are told."""
    return list(
        dict.fromkeys(name for name in (*fields_of(TaskEvent), *fields_of(of)) if name not in _STAMPED)
    )


class _Form:
    """How an event of one type is written from its values."""

    __slots__ = ("key", "make", "tag")

    def __init__(self, of: type[TaskEvent]) -> None:
        self.tag = tag_of(of)
        self.key = routing_key(self.tag)
        self.make: Any = msgspec.defstruct(
            f"{of.__name__}Told", ["type", *_STAMPED, *told_fields(of)], gc=False
        )


_FORMS = {of: _Form(of) for of in TASK_TYPES}


class EventTeller:
    """Stamps and encodes what one node tells. WireError: nobody could read it; its number is missing then."""

    def __init__(self, stamper: EventStamper) -> None:
        self.stamper = stamper

    def tell(self, event_type: str, fields: dict[str, Any], *, at: float, blind: bool = False) -> Told:
        stamped = self.stamper.stamp(event_type, fields, at=at, blind=blind)
        return routing_key(event_type), encode_event(stamped)

    def tell_task(self, of: type[TaskEvent], at: float, *values: Any) -> Told:
        """`values`: those of `told_fields`, all of them."""
        form, stamper = _FORMS[of], self.stamper
        clock, number = stamper.advance()
        event = form.make(
            form.tag, stamper.hostname, stamper.pid, clock, at, 0.0, stamper.incarnation, number, *values
        )
        try:
            return form.key, _encode(event)
        except ValueError:  # text that is no Unicode: this way it is refused by name
            return form.key, encode_event(msgspec.structs.asdict(event))


def in_lists(told: Sequence[Told]) -> Iterator[tuple[bytes, int]]:
    """Bodies of lists, in this order, and how many events each holds."""
    for some in _cut([body for _, body in told]):
        yield b"[%b]" % b",".join(some), len(some)


def by_type(told: Sequence[Told]) -> tuple[list[Told], list[int]]:
    """Entries for the log, each of one type, and how many events each holds."""
    bodies: dict[str, list[bytes]] = {}
    for key, body in told:
        if key in bodies:
            bodies[key].append(body)
        else:
            bodies[key] = [body]
    entries: list[Told] = []
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
