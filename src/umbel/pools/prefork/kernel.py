"""Kernel features for processes: parents and orphans, limits, memory, exit status, stack traces.

Parents and orphans: Linux can kill a child together with its parent, and lets a process adopt orphans. On
other systems these calls return False, and the fork server only watches its control socket.

Limits: a task may lower the limits of its process and cannot raise all of them again. Then the next task
would fail without its fault. Reading all limits takes a tenth of the time of a short task. So calls of the
`resource` module are recorded, and a recorded call leads to an immediate check. A limit set by other means is
found at the next regular check.

Stack traces: a child opens an anonymous file, and at SIGUSR2 its interpreter writes the stacks of all threads
to it, inside the signal handler, whatever code runs. A reader finds the file among the child's open
descriptors, so no path has to be agreed on. This works on Linux only: on other systems there is no file, and
no signal is sent.
"""

import faulthandler
import fcntl
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from umbel.files import opened

# ---- kernel ----------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> bool:
    """Make the kernel kill this process when its parent ends. The caller then checks that the parent still
    runs.
    """
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Make this process the new parent of descendants whose own parent ends, so that none escapes."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    import ctypes  # imported here: the main process imports this module and does not need ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)


def thread_count() -> int | None:
    """Return the number of threads of this process, with those of C libraries; None if there is no /proc."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return None


def open_sockets() -> set[str]:
    """Return the sockets of this process, by their names in /proc."""
    sockets = set()
    for entry in opened():
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # closed since the listing
        if target.startswith("socket:"):
            sockets.add(target)
    return sockets


# ---- limits ----------------------------------------------------------------------------------------
#
# Only lowered limits count. A limit that was raised stays raised.

_LIMIT_NAMES = ("NOFILE", "AS", "DATA", "FSIZE", "NPROC", "CPU", "STACK")
LIMITS = {
    getattr(resource, f"RLIMIT_{name}"): name for name in _LIMIT_NAMES if hasattr(resource, f"RLIMIT_{name}")
}


class Limits:
    """The soft and the hard limit of each of KINDS, as last read."""

    touched: ClassVar[bool] = False  # whether Python code may have set a limit since then

    def __init__(self, read: list[tuple[int, int]]) -> None:
        self.known = read

    def lowered(self, now: list[tuple[int, int]]) -> str:
        """Describe the first limit that is lower than before; return "" if there is none."""
        before, self.known = self.known, now
        for name, was, now_is in zip(LIMITS.values(), before, now, strict=True):
            if any(_order(new) < _order(old) for old, new in zip(was, now_is, strict=True)):
                return f"RLIMIT_{name} from {_limits_shown(was)} to {_limits_shown(now_is)}"
        return ""


def note_calls() -> None:
    """Wrap `resource.setrlimit`. Must be called before the app is loaded, which may import the function by
    name.
    """
    if hasattr(resource.setrlimit, "__wrapped__"):
        return
    resource.setrlimit = _noted(resource.setrlimit)
    if hasattr(resource, "prlimit"):
        resource.prlimit = _noted(resource.prlimit)


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any) -> Any:
        Limits.touched = True
        return function(*args)

    return call


def _order(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _limits_shown(limits: tuple[int, int]) -> str:
    return "/".join("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in limits)


# ---- memory ----------------------------------------------------------------------------------------

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes(pid: int) -> int:
    """Return the resident memory, including pages shared with the fork server; 0 if it is unknown."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # the process has ended, or this is not Linux
        return 0


class OomKills:
    """The kernel's count of out-of-memory kills in this control group, or otherwise of the whole machine."""

    def __init__(self, counters: tuple[Path, ...] | None = None) -> None:
        self._counters = _counters() if counters is None else counters
        self._seen = self._count()

    def happened(self) -> bool:
        """Return whether there was an out-of-memory kill since the last call."""
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


# ---- exits -----------------------------------------------------------------------------------------
#
# There are five kinds: the process exited as requested (`asked`), it exited by itself (`exit`), this worker
# killed it (`killed`), the kernel killed it because memory ran out (`out-of-memory`), or another signal ended
# it (`signal`).

ExitKind = Literal["asked", "exit", "killed", "out-of-memory", "signal"]


class Exit(NamedTuple):
    """The kind of an exit, for counters, and its reason, for people."""

    kind: ExitKind
    reason: str


def exit_of(pid: int, status: int, *, dismissed: str, killed: str, out_of_memory: bool) -> Exit:
    """Classify the end of a process. `status` is that of waitpid.

    `dismissed` and `killed` say why this worker asked the process to end, or killed it.
    """
    if killed:
        return Exit("killed", f"process {pid} was killed by this worker: {killed}")
    if dismissed and status == 0:
        return Exit("asked", f"process {pid} exited ({dismissed})")
    code = os.waitstatus_to_exitcode(status)
    if -code == signal.SIGKILL and out_of_memory:
        return Exit("out-of-memory", f"process {pid} was killed by SIGKILL: the system ran out of memory")
    return Exit("exit" if code >= 0 else "signal", exit_reason(pid, status))


def exit_reason(pid: int, status: int) -> str:
    """Describe a waitpid status, for example as "process 4711 was killed by SIGSEGV"."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"process {pid} exited with status {code}"
    if -code == signal.SIGKILL:
        return f"process {pid} was killed by SIGKILL, not by this worker"
    return f"process {pid} was killed by {_signal_name(-code)}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"  # real-time signals have no names


# ---- stacks ----------------------------------------------------------------------------------------

STACKS_FILE = "umbel-stacks"
STACKS_WAIT_S, STACKS_POLL_S = 1.0, 0.01


def offer_stacks() -> None:
    """Make SIGUSR2 write the stacks of all threads of this child, instead of ending the process."""
    if not hasattr(os, "memfd_create"):
        return
    place = os.memfd_create(STACKS_FILE)
    fcntl.fcntl(place, fcntl.F_SETFL, os.O_APPEND)  # the reader truncates it
    faulthandler.register(signal.SIGUSR2, file=place, all_threads=True)


async def stacks_of(pid: int) -> str:
    """Return the stacks of a child's threads, innermost call first; "" if it does not respond."""
    place = _place_of(pid)
    if place is None:
        return ""
    try:
        descriptor = os.open(place, os.O_RDWR)
    except OSError:  # the process has ended
        return ""
    try:
        os.ftruncate(descriptor, 0)
        os.kill(pid, signal.SIGUSR2)
        return await _written(descriptor)
    except ProcessLookupError:
        return ""
    finally:
        os.close(descriptor)


async def _written(descriptor: int) -> str:
    import asyncio  # imported here: children import this module and never load asyncio

    size, waited_s = 0, 0.0
    while waited_s < STACKS_WAIT_S:
        await asyncio.sleep(STACKS_POLL_S)
        waited_s += STACKS_POLL_S
        found = os.fstat(descriptor).st_size
        if found and found == size:  # no longer growing: everything is written
            break
        size = found
    return os.pread(descriptor, size, 0).decode(errors="replace")


def _place_of(pid: int) -> Path | None:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(descriptor).startswith(f"/memfd:{STACKS_FILE}"):
                return descriptor
    except OSError:  # the process has ended, or this is not Linux
        return None
    return None
