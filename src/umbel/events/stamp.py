"""The clock values that a node adds to events it sends, and that it takes from events it receives.

`EventStamper` turns a fact into an event of the wire: in addition to Celery's fields it carries `inc` (the
incarnation) and `seq` (without gaps). `EventReceiver` advances the clock past the time of each received
event, so everything that happens here afterwards is later (rule L2).
"""

from collections.abc import Callable
from typing import Any

import msgspec

from umbel.errors import WireError
from umbel.protocol.clock import LamportClock

# ---- event stamper ---------------------------------------------------------------------------------
#
# The incarnation is the start time of the process in microseconds, so a restarted node counts as a different
# one. `seq` has no gaps within an incarnation, so a reader can see how many events it missed. The clock
# strictly increases from event to event (rule L1). A blind event has no clock.

SOFTWARE = "umbel"
TASK_GROUP = "task"
EVENT_EXCHANGE = "celeryev"
EVENT_TTL_S = 5.0  # the broker drops an event that was not read by then


class EventStamper:
    """Adds a node's name, clock and numbers to its events."""

    def __init__(self, *, hostname: str, pid: int, incarnation: int, clock: LamportClock) -> None:
        self.hostname = hostname
        self.clock = clock
        self.pid = pid
        self.incarnation = incarnation
        self._sequence = 0

    def skip(self) -> None:
        """Skip the number of an event that cannot be sent, so that readers see a gap."""
        self._sequence += 1

    def advance(self) -> tuple[int, int]:
        """Return the clock and the number of the next event, for code that encodes it without `stamp`."""
        self._sequence += 1
        return self.clock.forward(), self._sequence

    def stamp(
        self, event_type: str, fields: dict[str, Any], *, at: float, blind: bool = False
    ) -> dict[str, Any]:
        """Return the event as a map. `blind` omits the clock, as Celery does; the clock does not advance."""
        self._sequence += 1
        timed = {} if blind else {"clock": self.clock.forward()}
        return {
            "type": event_type,
            "hostname": self.hostname,
            "pid": self.pid,
            **timed,
            "timestamp": at,
            "utcoffset": 0.0,  # timestamps are in UTC everywhere; Celery's monitors subtract this offset
            "inc": self.incarnation,
            "seq": self._sequence,
            **fields,
        }


# ---- event receiver --------------------------------------------------------------------------------
#
# An event of another node advances the clock past that event's time (rule L2). An event of this node came
# back from the broker, so the clock advances by one step only (rule S4). An event without a clock gets the
# time at which it was received. A `task-sent` comes from a client, which takes no part in the cluster's
# clock: it gets the time just before ours, so that it precedes all later worker events of the task (rule L3).
# A `ReorderWindow` also puts it before their earlier events.
#
# These times are local to the receiver and serve to show events in order. Two receivers assign different
# times, so the merge does not use them: events are passed on unchanged.

CLIENT_CLOCK_SKEW = 1
TASK_SENT = "task-sent"


class ReceivedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as it was on the wire, and its time at this receiver."""

    event: dict[str, Any]
    clock: int


class EventReceiver:
    """Decodes events and assigns times. `node` is this node's name, None for a monitor; `decode` reads a
    message body.
    """

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
        """Return a message's events; an empty list if it cannot be decoded, which is counted."""
        try:
            events = self._decode(body)
        except WireError as error:
            self.undecodable += 1
            self.last_error = str(error)
            return []
        return [self.hear(event) for event in events]

    def hear(self, event: dict[str, Any]) -> ReceivedEvent:
        """Return one event with its time at this receiver, and advance the clock past it."""
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
