"""Autoscaling and stall detection: two decisions about a pool's load.

`Autoscale` chooses the number of children of a pool, between two limits. `StallWatch` detects a worker that
has free slots and waiting messages, but starts nothing.
"""

from typing import assert_never

from umbel.protocol.machine import Value

# ---- autoscale -------------------------------------------------------------------------------------
#
# The pool grows when every child was busy at two consecutive checks and messages wait: by the number of
# waiting messages, but at most to twice the size, so that a batch of short tasks does not start many children
# that have nothing to do. It shrinks when some children were idle at every check of a whole cool-down: by the
# smallest number of idle children, so a child that was needed even once stays. Only idle children end.
#
# Growing restarts the cool-down, so the size cannot oscillate faster than that. Limit: children that are busy
# only between checks count as idle.

COOL_DOWN_S = 30.0


class Load(Value):
    """The pool's load at one check. `waiting`: messages that no child has yet."""

    size: int
    busy: int
    waiting: int


class SizeLimits(Value):
    """Limits the size from now on."""

    most: int
    least: int


class ResizeBy(Value):
    """Start this many children, or end this many idle ones if negative."""

    by: int


Event = Load | SizeLimits
Effect = ResizeBy


class Autoscale:
    """Chooses the size of one pool between `least` and `most`."""

    def __init__(self, *, most: int, least: int, cool_down_s: float = COOL_DOWN_S) -> None:
        assert 1 <= least <= most, "the settings have been checked"
        self.most, self.least = most, least
        self._cool_down_s = cool_down_s
        self._was_full = False  # at the last check
        self._idle_since: float | None = None
        self._idle_least = 0  # the smallest number of idle children since then

    def step(self, event: Event, now: float) -> list[Effect]:
        """Process one event; return a change of size, if any."""
        match event:
            case Load():
                by = self._by(event, now)
                return [ResizeBy(by)] if by else []
            case SizeLimits(most, least):
                self.most, self.least = most, least
                self._idle_since = None
                return []
            case _:
                assert_never(event)

    def wants_depth(self, load: Load) -> bool:
        """Return whether the number of waiting messages matters, because asking the broker is expensive."""
        return load.busy >= load.size < self.most

    def _by(self, load: Load, now: float) -> int:
        idle = max(0, load.size - load.busy)
        was_full, self._was_full = self._was_full, idle == 0
        if load.size < self.least:
            return self._grown(self.least - load.size)
        if load.size > self.most:
            return -min(idle, load.size - self.most)
        if idle == 0:
            self._idle_since = None
            return self._grown(min(load.waiting, load.size, self.most - load.size)) if was_full else 0
        return -self._spare(idle, load.size, now)

    def _grown(self, by: int) -> int:
        self._idle_since, self._was_full = None, False
        return by

    def _spare(self, idle: int, size: int, now: float) -> int:
        """Return how many children were not needed during a whole cool-down."""
        if self._idle_since is None:
            self._idle_since, self._idle_least = now, idle
        self._idle_least = min(self._idle_least, idle)
        if now - self._idle_since < self._cool_down_s:
            return 0
        self._idle_since = None
        return max(0, min(self._idle_least, size - self.least))


# ---- stall watch -----------------------------------------------------------------------------------
#
# A stalled worker is worse than a dead one, because nothing replaces it. It is stalled if, for `patience_s`,
# it had free slots and its queues held messages that were due, and it received none of them. If the broker
# does not reply, it is unknown whether there is work, so the worker does not count as stalled.


class StallWatch:
    """Detects that a worker has been stalled for `patience_s`."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._received = -1
        self._since: float | None = None

    def is_idle(self, *, received: int, free: int) -> bool:
        """Return whether to ask the broker: nothing arrived since the last check, and children are free."""
        idle = received == self._received and free > 0
        self._received = received
        if not idle:
            self._since = None
        return idle

    def is_stalled(self, *, ready: int | None, now: float) -> bool:
        """Return whether an idle worker is stalled; `ready` messages wait, None if the broker could not be
        asked.
        """
        if not ready:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._patience_s
