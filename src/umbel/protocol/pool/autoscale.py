"""Autoscale and stall detection: two decisions that look at a pool's load.

`Autoscale` says how many children a pool should have, between two sizes. `StallWatch` notices a worker that
has free slots and waiting messages, and starts nothing.
"""

from typing import assert_never

from umbel.protocol.machine import Value

# ---- autoscale -------------------------------------------------------------------------------------
#
# How many children a pool should have, between two sizes, by its load.
#
# It grows when every child was busy at two checks in a row and messages wait: by as many as wait, but at
# most to twice the size, so that a batch of quick tasks does not fill the machine with children that find
# it empty. It shrinks when, for a whole cool-down, some children were idle at every check: by the least
# number that was idle, so children that were needed even once stay. Only idle children end.
#
# Growing resets the cool-down, so the size cannot swing faster than that. It stops being right where checks
# hit by chance: children that are busy only between checks count as idle.

COOL_DOWN_S = 30.0


class Load(Value):
    """The pool's load at one check. `waiting`: messages that no child has yet."""

    size: int
    busy: int
    waiting: int


class SizeLimits(Value):
    """From now on the size is between these two."""

    most: int
    least: int


class ResizeBy(Value):
    """Start this many children, or end this many idle ones if negative."""

    by: int


Event = Load | SizeLimits
Effect = ResizeBy


class Autoscale:
    """The size of one pool between `least` and `most`."""

    def __init__(self, *, most: int, least: int, cool_down_s: float = COOL_DOWN_S) -> None:
        assert 1 <= least <= most, "the settings were checked"
        self.most, self.least = most, least
        self._cool_down_s = cool_down_s
        self._was_full = False  # at the last look
        self._idle_since: float | None = None
        self._idle_least = 0  # since then

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return a change of size, if any."""
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
        """Whether the number of waiting messages matters: asking the broker costs something."""
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
        """How many children were not needed during a whole cool-down."""
        if self._idle_since is None:
            self._idle_since, self._idle_least = now, idle
        self._idle_least = min(self._idle_least, idle)
        if now - self._idle_since < self._cool_down_s:
            return 0
        self._idle_since = None
        return max(0, min(self._idle_least, size - self.least))


# ---- stall watch -----------------------------------------------------------------------------------
#
# Notices a worker that could work, has work, and does not.
#
# Such a worker is worse than a dead one, because nothing replaces it. It is stalled when for `patience_s`
# it had free slots, its queues held messages that were due, and it received none of them. A broker that
# does not reply is another matter: then it is unknown whether there is work.


class StallWatch:
    """Whether one worker has been stalled for `patience_s`."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._received = -1
        self._since: float | None = None

    def is_idle(self, *, received: int, free: int) -> bool:
        """Whether to ask the broker: nothing arrived since the last check, and children are free."""
        idle = received == self._received and free > 0
        self._received = received
        if not idle:
            self._since = None
        return idle

    def is_stalled(self, *, ready: int | None, now: float) -> bool:
        """Whether an idle worker is stalled; `ready` messages wait, None if the broker could not be asked."""
        if not ready:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._patience_s
