"""Autoscale: how many children a pool should have, between two sizes, by what they have to do.

It grows when every child was busy at two looks in a row and messages wait: by as many as wait, but at
most to twice the size, so that a heap of quick tasks does not fill the machine with children that
find it empty. It shrinks when, for a whole cool-down, some children had nothing to do at every look: by
the least number that was idle, so those who were needed even once stay. Only idle children go.

Growing resets the cool-down, so the size cannot swing faster than that. It stops being right where
a look hits by chance: children that are busy for moments between looks count as idle.
"""

from typing import assert_never

from umbel.protocol.value import Value

COOL_DOWN_S = 30.0


class Load(Value):
    """What there is at this look. `waiting`: messages that no child has yet."""

    size: int
    busy: int
    waiting: int


class Limit(Value):
    """From now on between these sizes."""

    most: int
    least: int


class Resize(Value):
    """So many more children, or fewer: then only idle ones."""

    by: int


Event = Load | Limit
Effect = Resize


class Autoscale:
    def __init__(self, *, most: int, least: int, cool_down_s: float = COOL_DOWN_S) -> None:
        assert 1 <= least <= most, "the settings were checked"
        self.most, self.least = most, least
        self._cool_down_s = cool_down_s
        self._was_full = False  # at the last look
        self._idle_since: float | None = None
        self._idle_least = 0  # since then

    def step(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Load():
                by = self._by(event, now)
                return [Resize(by)] if by else []
            case Limit(most, least):
                self.most, self.least = most, least
                self._idle_since = None
                return []
            case _:
                assert_never(event)

    def wants_depth(self, load: Load) -> bool:
        """Whether it matters how many messages wait: asking the broker costs something."""
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
        """How many have been of no use for a whole cool-down."""
        if self._idle_since is None:
            self._idle_since, self._idle_least = now, idle
        self._idle_least = min(self._idle_least, idle)
        if now - self._idle_since < self._cool_down_s:
            return 0
        self._idle_since = None
        return max(0, min(self._idle_least, size - self.least))
