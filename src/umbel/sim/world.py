"""World: one seed, one virtual clock, one heap of scheduled actions, and the network between the nodes.

Everything that happens in a simulation is an entry of the heap, and every choice comes from the world's
generator. So a seed decides everything that happens: a replay gives the same trace and the same hash. The
network delays each message separately, so messages overtake one another. In bad conditions ("weather") a
message is lost, duplicated or very late.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol

from umbel.protocol.leadership.coordination import Instant

# ---- world -----------------------------------------------------------------------------------------

EPOCH_S = 1_800_000_000.0  # the Unix time at which every world begins
TRACE_KEPT = 400  # lines that a failing run can show


class Trace:
    """A log of the simulation: a hash of all lines, and the last lines to read."""

    def __init__(self) -> None:
        self.lines = 0
        self._kept: deque[str] = deque(maxlen=TRACE_KEPT)
        self._waiting: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, line: str) -> None:
        """Add a line."""
        self._waiting.append(line)
        if len(self._waiting) >= TRACE_KEPT:
            self._settle()

    def last(self, count: int) -> list[str]:
        """Return the last lines, at most TRACE_KEPT."""
        self._settle()
        return list(self._kept)[-count:]

    def digest(self) -> str:
        """Return the hash of all lines so far."""
        self._settle()
        return self._hash.hexdigest()

    def _settle(self) -> None:
        self.lines += len(self._waiting)
        self._hash.update("\n".join([*self._waiting, ""]).encode() if self._waiting else b"")
        self._kept.extend(self._waiting)
        self._waiting.clear()


class World:
    """The virtual time, the random generator and the scheduled actions of one simulation."""

    def __init__(self, seed: str) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.trace = Trace()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._stopped = False

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call at this time."""
        self._count += 1
        heappush(self._heap, (when, self._count, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call after this delay."""
        self._count += 1
        heappush(self._heap, (self.now + delay_s, self._count, call, arguments))

    def stop(self) -> None:
        """End the run after the current action."""
        self._stopped = True

    def run(self, until: float) -> None:
        """Run actions up to `until`, or until the world is stopped."""
        heap = self._heap
        while heap and heap[0][0] <= until and not self._stopped:
            self.now, _, call, arguments = heappop(heap)
            call(*arguments)
        if not self._stopped:
            self.now = max(self.now, until)


class NodeClock:
    """A node's clocks: they run a little fast or slow, and the wall clock may be wrong by days."""

    __slots__ = ("_boot_at", "_rate", "_wall_at")

    def __init__(self, *, rate: float = 1.0, boot_s: float = 0.0, skew_s: float = 0.0) -> None:
        self._rate = rate
        self._boot_at = boot_s
        self._wall_at = EPOCH_S + skew_s

    def read(self, now: float) -> Instant:
        """Return the node's time at this time of the world."""
        passed = now * self._rate
        return Instant(self._boot_at + passed, self._wall_at + passed)

    def when(self, boot_s: float) -> float:
        """Return the world's time at which this clock shows `boot_s`."""
        return (boot_s - self._boot_at) / self._rate

    def set_skew(self, skew_s: float) -> None:
        """Set the wall clock this far off."""
        self._wall_at = EPOCH_S + skew_s


# ---- network ---------------------------------------------------------------------------------------
#
# A partitioned node sends and receives nothing, as with a broken connection to the broker, and misses the
# broadcasts of that time. Not simulated: a broker that holds broadcasts for a node that is away, as RabbitMQ
# does for some seconds. Such a broker only loses less.

NEAR_S = (0.0005, 0.005)  # the delay of a message under normal conditions
FAR_S = (4.0, 4.0, 4.0, 15.0)  # possible delays of a late message


@dataclass(slots=True)
class Weather:
    """The shares of messages that are lost, duplicated and delayed, and the partitioned nodes."""

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    cut_off: set[int] = field(default_factory=set)

    @property
    def fair(self) -> bool:
        """Return whether no message is lost, duplicated or delayed."""
        return not (self.lost or self.doubled or self.delayed)


class Listener(Protocol):
    """A receiver of broadcasts."""

    index: int

    def hear(self, message: Any) -> None:
        """Receive a broadcast."""


class Network:
    """The messages in transit. `broadcasts` and `calls` have separate conditions."""

    def __init__(self, world: World) -> None:
        self.broadcasts = Weather()
        self.calls = Weather()
        self.sent = 0
        self.delivered = 0
        self._world = world

    def clear_up(self) -> None:
        """Restore normal conditions and end all partitions."""
        self.broadcasts = Weather()
        self.calls = Weather()

    def broadcast(self, sender: int, message: Any, listeners: Iterable[Listener]) -> None:
        """Send to all, including the sender. `sender` is -1 for a client, which is never partitioned."""
        self.sent += 1
        weather = self.broadcasts
        if sender in weather.cut_off:
            return
        world = self._world
        random = world.random.random
        low, high = NEAR_S
        span = high - low
        if weather.fair and not weather.cut_off:
            for listener in listeners:
                self.delivered += 1
                world.after(low + span * random(), listener.hear, message)
            return
        for listener in listeners:
            if listener.index not in weather.cut_off:
                self._send(weather, listener.hear, message)

    def call(self, node: int, arrive: Callable[..., None], *arguments: Any) -> None:
        """Send one direction of a call to the store, or of its reply."""
        weather = self.calls
        if node in weather.cut_off:
            return
        if weather.fair:
            low, high = NEAR_S
            self._world.after(low + (high - low) * self._world.random.random(), arrive, *arguments)
        else:
            self._send(weather, arrive, *arguments)

    def _send(self, weather: Weather, arrive: Callable[..., None], *arguments: Any) -> None:
        chance = self._world.random
        if chance.random() < weather.lost:
            return
        copies = 2 if chance.random() < weather.doubled else 1
        for _ in range(copies):
            self.delivered += 1
            late = chance.random() < weather.delayed
            delay_s = chance.uniform(0.0, chance.choice(FAR_S)) if late else chance.uniform(*NEAR_S)
            self._world.after(delay_s, arrive, *arguments)
