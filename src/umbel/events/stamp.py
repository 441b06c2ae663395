"""EventStamper: turns "this happened" into an event of the wire, for one node.

Besides Celery's fields every event carries `inc` (the incarnation: microseconds at the start of
the process, so a restarted node is another one) and `seq` (without gaps per incarnation, so a
reader knows what it missed). The clock strictly increases from event to event (L1); a blind event
has none.
"""

from typing import Any

from umbel.protocol.clock import LamportClock

SOFTWARE = "umbel"
TASK_GROUP = "task"
EVENT_EXCHANGE = "celeryev"
EVENT_TTL_S = 5.0  # an event nobody has read by then is old news


class EventStamper:
    def __init__(self, *, hostname: str, pid: int, incarnation: int, clock: LamportClock) -> None:
        self.hostname = hostname
        self.clock = clock
        self.pid = pid
        self.incarnation = incarnation
        self._sequence = 0

    def skip(self) -> None:
        """An event that cannot be told: its number is missing, so that readers know of it."""
        self._sequence += 1

    def advance(self) -> tuple[int, int]:
        """The clock and the number of the next event, for who writes it without `stamp`."""
        self._sequence += 1
        return self.clock.forward(), self._sequence

    def stamp(
        self, event_type: str, fields: dict[str, Any], *, at: float, blind: bool = False
    ) -> dict[str, Any]:
        """`blind`: as Celery has it, without a clock value, and the clock is not moved by it."""
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
