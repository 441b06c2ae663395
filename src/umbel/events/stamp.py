"""Stamps: what a node's clock adds to the events it sends, and what it takes from those it receives.

`EventStamper` turns a fact into an event of the wire: besides Celery's fields it carries `inc` (the
incarnation) and `seq` (without gaps). `EventReceiver` moves the clock past the time of each received event,
so whatever happens here afterwards is later (L2).
"""

from collections.abc import Callable
from typing import Any

import msgspec

from umbel.errors import WireError
from umbel.protocol.clock import LamportClock

# ---- event stamper ---------------------------------------------------------------------------------
#
# Turns a fact into an event of the wire, for one node.
#
# In addition to Celery's fields every event carries `inc` (the incarnation: microseconds at the start of
# the process, so a restarted node is a different one) and `seq` (without gaps per incarnation, so a reader
# knows what it missed). The clock strictly increases from event to event (L1); a blind event has none.

SOFTWARE = "umbel"
TASK_GROUP = "task"
EVENT_EXCHANGE = "celeryev"
EVENT_TTL_S = 5.0  # an event that was not read by then is dropped


class EventStamper:
    """Adds a node's name, clock and numbers to its events."""

    def __init__(self, *, hostname: str, pid: int, incarnation: int, clock: LamportClock) -> None:
        self.hostname = hostname
        self.clock = clock
        self.pid = pid
        self.incarnation = incarnation
        self._sequence = 0

    def skip(self) -> None:
        """Skip the number of an event that cannot be sent, so that readers know of it."""
        self._sequence += 1

    def advance(self) -> tuple[int, int]:
        """Return the clock and the number of the next event, for code that encodes it without `stamp`."""
        self._sequence += 1
        return self.clock.forward(), self._sequence

    def stamp(
        self, event_type: str, fields: dict[str, Any], *, at: float, blind: bool = False
    ) -> dict[str, Any]:
        """Return the event as a map. `blind`: without a clock, as in Celery, and the clock does not move."""
        self._sequence += 1
        timed = {} if blind else {"clock": self.clock.forward()}
        return {
            "type": event_type,
            "hostname": self.hostname,
            "pid": self.pid,
            **timed,
            "timestamp": at,
            "utcoffset": 0.0,  # timestamps are UTC everywhere; Celery's monitors shift by this
            "inc": self.incarnation,
            "seq": self._sequence,
            **fields,
        }


# ---- event receiver --------------------------------------------------------------------------------
#
# How a node's clock follows the events it receives.
#
# Another node's event moves the clock past that event's time, so whatever happens here next is later than
# it (L2). An event of this node came back from the broker and moves the clock one step only (S4). An event
# without a clock gets the time at which it was received. A `task-sent` comes from a client, which takes no
# part in the cluster's clock: it gets the time just before ours, so that it precedes all later events of
# workers about the task (L3); a `ReorderWindow` puts it before their earlier ones.
#
# These times are the receiver's view, good for showing events in order. Two receivers assign different
# times, so the merge never sees them: the events are passed on as they were on the wire.

CLIENT_CLOCK_SKEW = 1
TASK_SENT = "task-sent"


class ReceivedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as it was on the wire, and its time for this receiver."""

    event: dict[str, Any]
    clock: int


class EventReceiver:
    """Receives events. `node`: this node's name; a monitor has none. `decode`: reads a message's body."""

    def __init__(
        self, clock: LamportClock, decode: Callable[[bytes], list[dict[str, Any]]], *, node: str = ""
    ) -> None:
        self.clock = clock
        self.heard = 0
        self.undecodable = 0
        self.last_error = ""
        self._decode = decode
        self._node = node

    def receive(self, body: bytes) -> list[ReceivedEvent]:
        """Return a message's events; none if it cannot be decoded, which is counted."""
        try:
            events = self._decode(body)
        except WireError as error:
            self.undecodable += 1
            self.last_error = str(error)
            return []
        return [self.hear(event) for event in events]

    def hear(self, event: dict[str, Any]) -> ReceivedEvent:
        """Return one event with its time for this receiver, and move the clock past it."""
        self.heard += 1
        clock = self.clock
        time = event.get("clock")
        if event["type"] == TASK_SENT:
            time = (clock.value or CLIENT_CLOCK_SKEW) - CLIENT_CLOCK_SKEW
            clock.adjust(time)
        elif self._node and event.get("hostname") == self._node:
            now = clock.forward()
            time = now if time is None else time
        elif time is None:
            time = clock.forward()
        else:
            was_rejected = clock.rejected
            now = clock.adjust(time)
            time = now if clock.rejected > was_rejected else time
        return ReceivedEvent(event, time if type(time) is int else clock.value)
