"""Memory: what a process holds, and how many processes the kernel has ended for want of it."""

import os
import re
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes(pid: int) -> int:
    """Resident memory, pages shared with the fork server included; 0 where nobody can tell."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # it has ended, or this is not Linux
        return 0


class OomKills:
    """The kernel's count of kills in our control group; where there is none, of the whole machine."""

    def __init__(self, counters: tuple[Path, ...] | None = None) -> None:
        self._counters = _counters() if counters is None else counters
        self._seen = self._count()

    def happened(self) -> bool:
        """Whether there was one since this was asked last."""
        before, self._seen = self._seen, self._count()
        return before is not None and self._seen is not None and self._seen > before

    def _count(self) -> int | None:
        for counter in self._counters:
            try:
                found = re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)
            except OSError:
                continue
            if found is not None:
                return int(found[1])
        return None


def _counters() -> tuple[Path, ...]:
    try:
        groups = dict(line.split(":")[1:3] for line in Path("/proc/self/cgroup").read_text().splitlines())
    except OSError:
        return ()
    ours, theirs = groups.get("", "/").lstrip("/"), groups.get("memory", "/").lstrip("/")
    return (
        _CGROUPS / ours / "memory.events",
        _CGROUPS / "memory.events",  # in a container the path may be that of the host
        _CGROUPS / "memory" / theirs / "memory.oom_control",
        _CGROUPS / "memory" / "memory.oom_control",
        Path("/proc/vmstat"),
    )
