"""The store's clocks: one for leases that never jumps, the cluster's time for everything dated.

All processes on the file share one kernel, so they share CLOCK_BOOTTIME, which counts suspended
time too. It starts anew at every boot; the store keeps the kernel's boot id beside its leases,
and leases of another boot have ended, as all their holders have.
"""

import time
from pathlib import Path

from umbel import clock
from umbel.protocol.leadership.coordination import Instant

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WALL = "wall clock"


class Clock:
    """Where the kernel tells no boot id, leases run on the wall clock."""

    def __init__(self) -> None:
        self.boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else _WALL

    def wall_s(self) -> float:
        return clock.cluster_now()

    def now(self) -> Instant:
        wall_s = self.wall_s()
        return Instant(wall_s if self.boot_id == _WALL else time.clock_gettime(time.CLOCK_BOOTTIME), wall_s)

    def ticket(self) -> int:
        """A number that no later call gives again, to name a claim.

        Claims are made one at a time under the database's write lock, and each takes longer
        than the clock's nanosecond.
        """
        return time.time_ns() if self.boot_id == _WALL else time.clock_gettime_ns(time.CLOCK_BOOTTIME)
