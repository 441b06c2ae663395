"""LamportClock: the logical order of events that the cluster agrees on.

Every event moves the clock forward; every received message moves it past the time in that message. So an
event that can have caused another has the lower time. The value orders events for people; elections and
leases never depend on it.

A clock value from the wire may be wrong or hostile: a value that is not a whole number, is negative, or lies
further ahead than any honest clock could, is ignored and counted, because believing it once would push the
whole cluster to the end of the range.

ClockReservation: a node that starts must begin above everything that was stamped before, whichever nodes are
alive to reply to it. So the store's clock mark stays ahead of the stamps: no stamp leaves a node before the
store's mark is at least as high, and the mark is raised by a block, so that this costs one call for BLOCK
steps. A node that reads the mark and begins there is above every stamp that ever left a node.

It stops being right where stamps leave although the mark could not be raised, where the store loses its data,
and for nodes that do not reserve (Umbel up to 0.3, Celery).
"""

CLOCK_MAX = 2**53 - 1  # what JSON readers everywhere can hold exactly
JUMP_MAX = 2**32
BLOCK = 2**14


class LamportClock:
    """A logical clock that steps with every event and past every received time, between 0 and CLOCK_MAX."""

    __slots__ = ("rejected", "value")

    def __init__(self, value: int = 0) -> None:
        assert 0 <= value <= CLOCK_MAX
        self.value = value
        self.rejected = 0

    def forward(self) -> int:
        """Step for an event of this node, and return its time."""
        self.value = min(self.value + 1, CLOCK_MAX)
        return self.value

    def adjust(self, received: object) -> int:
        """Step past a received time and return the new value; an impossible time is counted and ignored."""
        if type(received) is int and 0 <= received <= min(self.value + JUMP_MAX, CLOCK_MAX - 1):
            self.value = max(self.value, received)
        else:
            self.rejected += 1
        return self.forward()

    def begin_above(self, value: int) -> None:
        """Move forward to a value from a trusted source, however far ahead; never back."""
        self.value = max(self.value, min(value, CLOCK_MAX))


class ClockReservation:
    """The range in which this node may stamp events: up to `mark`, the store's clock mark as last read."""

    __slots__ = ("_clock", "mark")

    def __init__(self, clock: LamportClock) -> None:
        self._clock = clock
        self.mark = 0

    def begin(self, mark: int) -> None:
        """Take over the store's clock mark at the start: every later stamp of this node is above it."""
        self.mark = mark
        self._clock.begin_above(mark)

    @property
    def wanted(self) -> int | None:
        """The value to which the store's mark must be raised before the clock's value may leave; None if it
        may.
        """
        value = self._clock.value
        return None if value <= self.mark else min(value + BLOCK, CLOCK_MAX)

    def raised(self, mark: int) -> None:
        """Note that the store's clock mark is at least this high now."""
        self.mark = max(self.mark, mark)

    def catch_up(self, mark: int) -> None:
        """Note the store's clock mark some time later, and move a clock that received few events forward.

        When a node raised the mark, its clock was at `mark - BLOCK` at least, so this moves no clock past the
        highest.
        """
        self.raised(mark)
        self._clock.begin_above(mark - BLOCK)

    def lost(self) -> None:
        """Note that the store has lost its data, and with it the clock mark."""
        self.mark = 0
