"""The order of received events: gaps in sequence numbers, and a buffer that sorts events by time."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from operator import attrgetter

import msgspec

from umbel.events.stamp import CLIENT_CLOCK_SKEW, TASK_SENT, ReceivedEvent

# ---- sequences -------------------------------------------------------------------------------------
#
# Every node numbers its events without gaps (`stamp.py`), so a missing number is a lost event: it was not
# appended to the log, or was dropped there. Events may arrive twice or late, so a missing number counts as a
# gap only after some time.
#
# Tracking of a sender begins with the first number received from it. If the sender started after the
# recording did, it begins with number 1. Memory is limited: beyond SENDERS_MAX senders the oldest is
# forgotten, and tracked from scratch at its next event. Beyond HOLES_MAX missing ranges of one sender, the
# excess is reported as gaps at once. If a sender's last events are lost together with the sender, no gap is
# noticed.

SENDERS_MAX = 10_000
HOLES_MAX = 5000  # a worker logs 2,000 events at once, by type; a reader may receive half of them first
SETTLED_AFTER_S = 10.0
YOUNGER_BY_US = 60_000_000
"""A sender counts as younger than the recording if it started this much later; the margin allows for clock
differences.
"""

Sender = tuple[str, int, int]
"""Hostname, pid, incarnation."""

Run = tuple[int, int, int]
"""Consecutive numbers that arrived: the first, the last, and the time of the first in microseconds."""


class Gap(msgspec.Struct, frozen=True):
    """Numbers of one sender that did not arrive. `at_us` is the time of the event after them."""

    hostname: str
    pid: int
    inc: int
    first: int
    last: int
    at_us: int

    @property
    def missing(self) -> int:
        """Return how many numbers are missing."""
        return self.last - self.first + 1


class Hole(msgspec.Struct, array_like=True):
    """Numbers that have not arrived yet; `since_s` is when that was noticed."""

    first: int
    last: int
    at_us: int
    since_s: float


class KnownSender(msgspec.Struct, array_like=True):
    """One sender: the highest number received, and the missing ranges below it, in order."""

    hostname: str
    pid: int
    inc: int
    highest: int
    holes: list[Hole] = []


class Sequences:
    """Tracks the numbers of each sender. `began_us` is the start of the recording; 0 if unknown."""

    def __init__(
        self, *, began_us: int = 0, known: Iterable[KnownSender] = (), senders_max: int = SENDERS_MAX
    ) -> None:
        self.holes_open = 0
        self._began_us = began_us
        self._senders_max = senders_max
        self._known: dict[Sender, KnownSender] = {}
        for sender in known:
            self._known[sender.hostname, sender.pid, sender.inc] = sender
            self.holes_open += len(sender.holes)
        self._full: list[Gap] = []

    def saw(self, sender: Sender, runs: Iterable[Run], now: float) -> None:
        """Record that these numbers of the sender arrived."""
        known = self._known.get(sender)
        for first, last, at_us in runs:
            if known is None:
                known = self._meet(*sender, first)
            if first <= known.highest:
                self._fill(known, first, last)
            elif first > known.highest + 1:
                self._open(known, Hole(known.highest + 1, first - 1, at_us, now))
            known.highest = max(known.highest, last)

    def goes_on(self, sender: Sender, first: int) -> bool:
        """Return whether this is the sender's next number."""
        known = self._known.get(sender)
        return known is not None and known.highest + 1 == first

    def settled(self, now: float) -> list[Gap]:
        """Return the ranges that did not arrive in time. Each is reported once."""
        gaps, self._full = self._full, []
        if not self.holes_open:
            return gaps
        for known in self._known.values():
            if not known.holes:
                continue
            open_still = [hole for hole in known.holes if now - hole.since_s < SETTLED_AFTER_S]
            gaps += [_gap(known, hole) for hole in known.holes if now - hole.since_s >= SETTLED_AFTER_S]
            self.holes_open -= len(known.holes) - len(open_still)
            known.holes = open_still
        return gaps

    def known(self) -> list[KnownSender]:
        """Return the state to restore after a restart."""
        return list(self._known.values())

    def _meet(self, hostname: str, pid: int, inc: int, seq: int) -> KnownSender:
        if len(self._known) >= self._senders_max:
            oldest = self._known.pop(next(iter(self._known)))
            self._full += [_gap(oldest, hole) for hole in oldest.holes]
            self.holes_open -= len(oldest.holes)
        is_young = bool(self._began_us) and inc > self._began_us + YOUNGER_BY_US
        known = self._known[hostname, pid, inc] = KnownSender(hostname, pid, inc, 0 if is_young else seq - 1)
        return known

    def _open(self, known: KnownSender, hole: Hole) -> None:
        known.holes.append(hole)
        self.holes_open += 1
        if len(known.holes) > HOLES_MAX:
            self._full.append(_gap(known, known.holes.pop(0)))
            self.holes_open -= 1

    def _fill(self, known: KnownSender, first: int, last: int) -> None:
        begin = bisect_left(known.holes, first, key=attrgetter("last"))
        end = bisect_right(known.holes, last, key=attrgetter("first"))
        left = [
            part
            for hole in known.holes[begin:end]
            for part in (
                Hole(hole.first, first - 1, hole.at_us, hole.since_s),
                Hole(last + 1, hole.last, hole.at_us, hole.since_s),
            )
            if part.first <= part.last
        ]
        known.holes[begin:end] = left
        self.holes_open += len(left) - (end - begin)


def _gap(known: KnownSender, hole: Hole) -> Gap:
    return Gap(known.hostname, known.pid, known.inc, hole.first, hole.last, hole.at_us)


# ---- reorder window --------------------------------------------------------------------------------
#
# The window sorts received events into the cluster's order, for display.
#
# Brokers deliver the events of one node in order, but those of two nodes in any order. So each event is
# buffered for a moment, then released together with all events that come before it by (clock, time, node). An
# event that arrives too late for its place is released at once, and counted. When too many events are
# buffered, the first in order is released at once.
#
# A `task-sent` does not carry the cluster's clock: its client sends it when the task is stored, and a worker
# may start the task before. So a buffered `task-sent` is released just before the first worker event of that
# attempt (rule L3), whatever their clocks are.

HELD_MAX = 10_000
HELD_BYTES_MAX = 32 * 2**20

Place = tuple[int, float, str, int]


class _Held:
    __slots__ = ("arrived", "heard", "is_out", "place", "size_bytes")

    def __init__(self, received: ReceivedEvent, place: Place, arrived: float, size_bytes: int) -> None:
        self.heard, self.place, self.arrived, self.is_out = received, place, arrived, False
        self.size_bytes = size_bytes

    def __lt__(self, other: "_Held") -> bool:
        return self.place < other.place


class ReorderWindow:
    """Buffers events for `window_s`, at most `held_max` of them and `bytes_max` bytes."""

    def __init__(self, window_s: float, *, held_max: int = HELD_MAX, bytes_max: int = HELD_BYTES_MAX) -> None:
        assert window_s >= 0
        assert held_max > 0
        self.late = 0
        self._window_s = window_s
        self._held_max, self._bytes_max = held_max, bytes_max
        self._number = 0
        self._held = self._held_bytes = 0
        self._heap: list[_Held] = []
        self._arrivals: deque[_Held] = deque()
        self._sent: dict[str, list[_Held]] = {}  # the buffered `task-sent` events of each task
        self._highest = 0
        self._last: Place | None = None

    @property
    def deadline(self) -> float | None:
        """Return when the next event is due; None if no event is buffered."""
        self._forget_given()
        return self._arrivals[0].arrived + self._window_s if self._arrivals else None

    def put(self, received: ReceivedEvent, now: float, *, size_bytes: int = 0) -> list[ReceivedEvent]:
        """Buffer an event of this size; return the events that are released to make room for it."""
        self._number += 1
        received = self._timed(received)
        held = _Held(received, _place(received, self._number), now, size_bytes)
        if _is_sent(received):
            if self._last is not None and held.place < self._last:
                held.place = (*self._last[:3], self._number)
            self._sent.setdefault(_task(received), []).append(held)
        heappush(self._heap, held)
        self._arrivals.append(held)
        self._held += 1
        self._held_bytes += size_bytes
        given: list[ReceivedEvent] = []
        while self._held > self._held_max or self._held_bytes > self._bytes_max:
            given += self._give()
        return given

    def due(self, now: float) -> list[ReceivedEvent]:
        """Return the events that were buffered long enough, with the events before them, in order."""
        given: list[ReceivedEvent] = []
        while (deadline := self.deadline) is not None and deadline <= now:
            given += self._give()
        return given

    def rest(self) -> list[ReceivedEvent]:
        """Return all buffered events, in order."""
        given: list[ReceivedEvent] = []
        while self._held:
            given += self._give()
        return given

    def _give(self) -> list[ReceivedEvent]:
        """Return the first buffered event, after the `task-sent` events that belong before it."""
        held = heappop(self._heap)
        while held.is_out:  # a `task-sent` that was released with an event of its task
            held = heappop(self._heap)
        sent = self._sent_before(held.heard)
        for entry in (*sent, held):
            self._take_out(entry)
        earlier = held.heard.clock - CLIENT_CLOCK_SKEW
        if self._last is not None and held.place < self._last:
            self.late += 1
        else:
            earlier = max(earlier, self._last[0] if self._last else earlier)
            self._last = held.place
        self._forget_given()
        return [
            *(ReceivedEvent(entry.heard.event, min(entry.heard.clock, earlier)) for entry in sent),
            held.heard,
        ]

    def _sent_before(self, received: ReceivedEvent) -> list[_Held]:
        if _is_sent(received):
            return []
        attempt = _attempt(received)
        return [entry for entry in self._sent.get(_task(received), ()) if _attempt(entry.heard) <= attempt]

    def _timed(self, received: ReceivedEvent) -> ReceivedEvent:
        """Give a `task-sent` a time between the last released event and the highest cluster time.

        The receiver's clock advances with every event it receives. Its time would soon be later than the next
        events of the nodes, and after a quiet period it would be earlier than the last released events.
        """
        if not _is_sent(received):
            self._highest = max(self._highest, received.clock)
            return received
        lowest = self._last[0] if self._last else 0
        return ReceivedEvent(received.event, max(lowest, min(received.clock, self._highest)))

    def _take_out(self, held: _Held) -> None:
        held.is_out = True
        self._held -= 1
        self._held_bytes -= held.size_bytes
        if _is_sent(held.heard):
            left = [entry for entry in self._sent.pop(_task(held.heard)) if entry is not held]
            if left:
                self._sent[_task(held.heard)] = left

    def _forget_given(self) -> None:
        while self._arrivals and self._arrivals[0].is_out:
            self._arrivals.popleft()


def _place(received: ReceivedEvent, number: int) -> Place:
    """Return the sort key; events that are equal otherwise stay in the order in which they were received."""
    timestamp, hostname = received.event.get("timestamp"), received.event.get("hostname")
    at = float(timestamp) if isinstance(timestamp, int | float) else 0.0
    return (received.clock, at, hostname if isinstance(hostname, str) else "", number)


def _is_sent(received: ReceivedEvent) -> bool:
    return bool(received.event["type"] == TASK_SENT)


def _task(received: ReceivedEvent) -> str:
    return str(received.event.get("uuid", ""))


def _attempt(received: ReceivedEvent) -> int:
    """Return the attempt; Celery's workers state it on receipt only, so their later events sort after the
    receipt.
    """
    attempt = received.event.get("retries")
    return attempt if isinstance(attempt, int) else 0
