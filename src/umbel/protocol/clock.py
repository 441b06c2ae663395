"""LamportClock: the order the cluster agrees on.

Every event moves the clock forward; every message heard moves it past what it says. So an event
that can have caused another has the lower time. The value orders events for people; elections
and leases never depend on it.

A clock that came over the wire may be wrong or hostile: one that is not a whole number, is
negative, or lies further ahead than any honest clock could, is ignored and counted, because
believing it once would push the whole cluster to the end of the range.
"""

CLOCK_MAX = 2**53 - 1  # what JSON readers everywhere can hold exactly
JUMP_MAX = 2**32


class LamportClock:
    __slots__ = ("rejected", "value")

    def __init__(self, value: int = 0) -> None:
        assert 0 <= value <= CLOCK_MAX
        self.value = value
        self.rejected = 0

    def forward(self) -> int:
        """Step for an event of our own, and return its time."""
        self.value = min(self.value + 1, CLOCK_MAX)
        return self.value

    def adjust(self, heard: object) -> int:
        """Step past a time that was heard; an impossible one is counted and only steps."""
        if type(heard) is int and 0 <= heard <= min(self.value + JUMP_MAX, CLOCK_MAX - 1):
            self.value = max(self.value, heard)
        else:
            self.rejected += 1
        return self.forward()
