"""LamportClock: the logical order of events in the cluster.

Every event advances the clock, and every received message advances it past the time in that message. So an
event that may have caused another has the lower time. The order is for people who read events; elections and
leases never depend on it.

A clock value from the wire may be wrong or hostile. A value that is not an integer, is negative, or is
further ahead than any honest clock could be, is ignored and counted. Accepting it once would push the whole
cluster to the end of the range.

ClockReservation: a node that starts must begin above every time that was stamped before, even if no other
node is alive to reply. So the store holds a clock mark, an upper bound of all stamps: a node sends no stamp
above the mark. It raises the mark by BLOCK at a time, so this costs one call for BLOCK steps. A node that
begins at the mark is above every stamp that was ever sent.

Limits: the guarantee does not hold if stamps are sent although the mark could not be raised, if the store
loses its data, and for nodes without reservation (Umbel up to 0.3, Celery).
"""

CLOCK_MAX = 2**53 - 1  # the largest integer that all JSON readers represent exactly
JUMP_MAX = 2**32
BLOCK = 2**14


class LamportClock:
    """A logical clock, from 0 to CLOCK_MAX, that advances with every event and past every received time."""

    __slots__ = ("rejected", "value")

    def __init__(self, value: int = 0) -> None:
        assert 0 <= value <= CLOCK_MAX
        self.value = value
        self.rejected = 0

    def forward(self) -> int:
        """Advance for an event of this node, and return its time."""
        self.value = min(self.value + 1, CLOCK_MAX)
        return self.value

    def adjust(self, received: object) -> int:
        """Advance past a received time and return the new value; count and ignore an impossible time."""
        if type(received) is int and 0 <= received <= min(self.value + JUMP_MAX, CLOCK_MAX - 1):
            self.value = max(self.value, received)
        else:
            self.rejected += 1
        return self.forward()

    def begin_above(self, value: int) -> None:
        """Advance to a value from a trusted source, however far ahead; never go back."""
        self.value = max(self.value, min(value, CLOCK_MAX))


class ClockReservation:
    """The range in which this node may stamp events: up to `mark`, the store's clock mark as last read."""

    __slots__ = ("_clock", "mark")

    def __init__(self, clock: LamportClock) -> None:
        self._clock = clock
        self.mark = 0

    def begin(self, mark: int) -> None:
        """Start above the store's clock mark, so that every later stamp of this node is higher."""
        self.mark = mark
        self._clock.begin_above(mark)

    @property
    def wanted(self) -> int | None:
        """Return the value to which the store's mark must be raised before this clock's value may be sent.

        Returns None if it may be sent now.
        """
        value = self._clock.value
        return None if value <= self.mark else min(value + BLOCK, CLOCK_MAX)

    def raised(self, mark: int) -> None:
        """Record that the store's clock mark is now at least this high."""
        self.mark = max(self.mark, mark)

    def catch_up(self, mark: int) -> None:
        """Record the store's clock mark later, and advance a clock that received few events.

        The node that raised the mark had a clock of at least `mark - BLOCK`, so this moves no clock past the
        highest one.
        """
        self.raised(mark)
        self._clock.begin_above(mark - BLOCK)

    def lost(self) -> None:
        """Record that the store has lost its data, and with it the clock mark."""
        self.mark = 0
