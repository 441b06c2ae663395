"""What the kernel says about a process."""

import os
import signal
from contextlib import suppress
from pathlib import Path


def is_gone(pid: int) -> bool:
    """It has ended. A zombie counts: who reaps it is not the pool's business in every test."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


def signals(pid: int, kind: str) -> set[signal.Signals]:
    """The signals it ignores ("SigIgn") or catches ("SigCgt")."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == kind:
            mask = int(value, 16)
            return {signum for signum in signal.Signals if mask >> (signum - 1) & 1}
    raise AssertionError(f"no {kind} of process {pid}")


def held_by(pid: int) -> set[str]:
    """What it has open, by the kernel's names, without what it closes meanwhile."""
    names: set[str] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.add(os.readlink(link))
    return names


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[1])
