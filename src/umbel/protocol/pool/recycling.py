"""Recycling: when a child is replaced (F5), by the number of jobs it ran and the memory it uses.

A child is given no more jobs than it may still run, so the last of them is known when it is sent
and nothing has to be taken back. Memory is looked at when a job ends, at most every
`_PAUSE_S`, and every `_EVERY_S` while one runs: a child that idles is not looked at. Over the first
limit the child runs its job to the end and goes; over the hard one it is killed, because the
kernel would choose its victim with less care.

It stops being right for a job that takes all there is in less than half a second.
"""

from umbel.protocol.pool.child import Child
from umbel.protocol.pool.events import SlotSettings, WorkT

_EVERY_S, _PAUSE_S = 0.5, 0.05
_MIB = 1024 * 1024


class Recycling:
    def __init__(self, settings: SlotSettings) -> None:
        self._jobs_max = settings.jobs_max
        self._max_bytes = settings.memory_max_bytes
        self._hard_bytes = settings.memory_hard_bytes
        self._weighs = self._max_bytes is not None or self._hard_bytes is not None

    def allowance(self, child: Child[WorkT], wanted: int) -> int:
        """How many of so many more jobs the child may be given."""
        if self._jobs_max is None:
            return wanted
        return max(0, min(wanted, self._jobs_max - child.ended - child.outstanding()))

    def job_limit_reached(self, child: Child[WorkT]) -> str:
        """Why it goes now, or nothing."""
        if self._jobs_max is not None and child.ended >= self._jobs_max:
            return f"max_tasks_per_child reached after {child.ended} tasks"
        return ""

    def job_sent(self, child: Child[WorkT], now: float) -> None:
        if self._weighs and child.weigh_at is None:
            child.weigh_at = now + _EVERY_S

    def is_to_be_weighed(self, child: Child[WorkT], now: float) -> bool:
        """A job has ended: look now, or soon if somebody looked a moment ago."""
        if not self._weighs:
            return False
        child.weigh_at = child.weighed_at + _PAUSE_S
        if child.weigh_at > now:
            return False
        child.weigh_at = None
        return True

    def weighed(self, child: Child[WorkT], now: float) -> None:
        child.weighed_at = now
        child.weigh_at = now + _EVERY_S if child.batches else None

    def over_memory_limit(self, size_bytes: int) -> str:
        """Why it is replaced when its job has ended, or nothing."""
        if self._max_bytes is None or size_bytes <= self._max_bytes:
            return self.over_hard_limit(size_bytes)  # idle: the next job must not pay for the last one
        return f"memory use of {_shown(size_bytes)} exceeds max_memory_per_child of {_shown(self._max_bytes)}"

    def over_hard_limit(self, size_bytes: int) -> str:
        """Why it is killed, or nothing."""
        if self._hard_bytes is None or size_bytes <= self._hard_bytes:
            return ""
        return f"memory use of {_shown(size_bytes)} exceeds max_memory_hard of {_shown(self._hard_bytes)}"


def _shown(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.0f} MiB"
