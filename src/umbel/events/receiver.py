"""EventReceiver: what a node's clock makes of the events it hears.

Hearing another node's event moves the clock past that event's time, so whatever happens here next
is later than it (L2). An event of the own node came back from the broker and moves the clock one
step only (S4). An event without a clock gets the time at which it was heard. A `task-sent` comes
from a client, which takes no part in the cluster's clock: it is given the time just before ours, so
that it comes before what the workers tell of the task from now on (L3); a `ReorderWindow` puts it
before what they have told already.

These times are the receiver's view, good for showing events in order. Two receivers give different
ones, so the merge never sees them: the events themselves are handed on as they were on the wire.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from umbel.errors import WireError
from umbel.protocol.clock import LamportClock

CLIENT_CLOCK_SKEW = 1
TASK_SENT = "task-sent"


class Heard(msgspec.Struct, frozen=True, gc=False):
    """An event as it was on the wire, and the time it has for this receiver."""

    event: dict[str, Any]
    clock: int


class EventReceiver:
    """`node`: the own name; a monitor has none. `decode`: how the body of a message is read."""

    def __init__(
        self, clock: LamportClock, decode: Callable[[bytes], list[dict[str, Any]]], *, node: str = ""
    ) -> None:
        self.clock = clock
        self.heard = 0
        self.undecodable = 0
        self.last_error = ""
        self._decode = decode
        self._node = node

    def receive(self, body: bytes) -> list[Heard]:
        """The events of one message, single or a list; none if it cannot be decoded, which is counted."""
        try:
            events = self._decode(body)
        except WireError as error:
            self.undecodable += 1
            self.last_error = str(error)
            return []
        return [self.hear(event) for event in events]

    def hear(self, event: dict[str, Any]) -> Heard:
        self.heard += 1
        clock = self.clock
        told = event.get("clock")
        if event["type"] == TASK_SENT:
            told = (clock.value or CLIENT_CLOCK_SKEW) - CLIENT_CLOCK_SKEW
            clock.adjust(told)
        elif self._node and event.get("hostname") == self._node:
            now = clock.forward()
            told = now if told is None else told
        elif told is None:
            told = clock.forward()
        else:
            was_rejected = clock.rejected
            now = clock.adjust(told)
            told = now if clock.rejected > was_rejected else told
        return Heard(event, told if type(told) is int else clock.value)
