"""What the kernel knows and promises about a process: parents and orphans, limits, memory, exits, stacks.

Parents and orphans: Linux kills a child with its parent and lets a process adopt orphans. Elsewhere these
calls return False, and the fork server only watches its control socket.

Limits: a task may lower the limits of its process and cannot raise all of them again. The next task there
would fail without being at fault. Reading all limits takes a tenth of the time of a quick task, so calls of
the `resource` module are noted, and a noted call leads to a check at once. A limit set by other means is
found at the next regular check.

Stacks: a child offers an anonymous file, and at SIGUSR2 its interpreter writes the stacks of all threads
there, inside the signal handler, whatever code runs. A reader finds the file among the child's open
descriptors, so nothing has to be agreed on. Linux only: elsewhere children offer nothing, and are sent
nothing.
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
#
# What only the kernel can promise about processes: who dies with whom, who inherits orphans.
#
# Linux has it; elsewhere the calls say so by returning False, and the fork server's watch on its control
# socket is what remains.

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> bool:
    """Have this process killed when its parent ends. Check the parent afterwards: it may have ended
    before.
    """
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends, so that none escapes."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    import ctypes  # imported here: the main process imports this module and does not need ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)


def thread_count() -> int | None:
    """Threads of this process, including those of C libraries; None where /proc is missing."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return None


def open_sockets() -> set[str]:
    """The sockets of this process, by the kernel's name for each."""
    sockets = set()
    for entry in opened():
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # closed since it was listed
        if target.startswith("socket:"):
            sockets.add(target)
    return sockets


# ---- limits ----------------------------------------------------------------------------------------
#
# What the kernel lets this process use, and whether a task has left it with less.
#
# A task may lower the limits of its process, and cannot raise all of them again. The next task there would
# fail without being at fault. Only what harms it counts: a limit that was raised stays raised.
#
# To read them all takes a tenth of the time of a quick task. So calls of the `resource` module are noted,
# and a noted call leads to a check at once; a limit set by other means is found at the next check. The
# child reads them, and asks here what it means when they are not as they were.

_LIMIT_NAMES = ("NOFILE", "AS", "DATA", "FSIZE", "NPROC", "CPU", "STACK")
LIMITS = {
    getattr(resource, f"RLIMIT_{name}"): name for name in _LIMIT_NAMES if hasattr(resource, f"RLIMIT_{name}")
}


class Limits:
    """The soft and the hard limit of each of KINDS, as they were read last."""

    touched: ClassVar[bool] = False  # Python code may have set one since then

    def __init__(self, read: list[tuple[int, int]]) -> None:
        self.known = read

    def lowered(self, now: list[tuple[int, int]]) -> str:
        """The first limit that is lower than before, as a text; "" if there is none."""
        before, self.known = self.known, now
        for name, was, now_is in zip(LIMITS.values(), before, now, strict=True):
            if any(_order(new) < _order(old) for old, new in zip(was, now_is, strict=True)):
                return f"RLIMIT_{name} from {_limits_shown(was)} to {_limits_shown(now_is)}"
        return ""


def note_calls() -> None:
    """Wrap `resource.setrlimit`. Call it before the app is loaded, which may import the function by name."""
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
#
# What a process holds, and how many processes the kernel has ended for want of it.

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes(pid: int) -> int:
    """Resident memory, including pages shared with the fork server; 0 where it is unknown."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # it has ended, or this is not Linux
        return 0


class OomKills:
    """The kernel's count of out-of-memory kills in our control group, or else of the whole machine."""

    def __init__(self, counters: tuple[Path, ...] | None = None) -> None:
        self._counters = _counters() if counters is None else counters
        self._seen = self._count()

    def happened(self) -> bool:
        """Whether there was a kill since the last call."""
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
# How a process ended, in words and in a word.
#
# There are five kinds: it was asked to exit and did (`asked`), it exited by itself (`exit`), this worker
# killed it (`killed`), the kernel killed it because memory ran out (`out-of-memory`), or another signal
# ended it (`signal`).

ExitKind = Literal["asked", "exit", "killed", "out-of-memory", "signal"]


class Exit(NamedTuple):
    """The kind of an exit, for counters, and its reason, for people."""

    kind: ExitKind
    reason: str


def exit_of(pid: int, status: int, *, dismissed: str, killed: str, out_of_memory: bool) -> Exit:
    """`status` is that of waitpid; `dismissed` and `killed` say why this worker asked it to end, or killed
    it.
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
    """`status` is that of waitpid; returns a text such as "process 4711 was killed by SIGSEGV"."""
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
#
# Where a child is at this moment, although its task blocks and it cannot answer.
#
# A child offers a place in memory and has its interpreter write there, at SIGUSR2, what all its threads are
# at. The interpreter does so inside the signal handler, whatever code runs. A reader finds the place among
# the child's open files, so nothing has to be agreed on. Linux only: on other systems children offer
# nothing, and are sent nothing.

STACKS_FILE = "umbel-stacks"
STACKS_WAIT_S, STACKS_POLL_S = 1.0, 0.01


def offer_stacks() -> None:
    """In a child: from now on SIGUSR2 writes the stacks of all threads, instead of ending the process."""
    if not hasattr(os, "memfd_create"):
        return
    place = os.memfd_create(STACKS_FILE)
    fcntl.fcntl(place, fcntl.F_SETFL, os.O_APPEND)  # the reader empties it
    faulthandler.register(signal.SIGUSR2, file=place, all_threads=True)


async def stacks_of(pid: int) -> str:
    """The stacks of a child's threads, innermost call first; "" when it does not answer."""
    place = _place_of(pid)
    if place is None:
        return ""
    try:
        descriptor = os.open(place, os.O_RDWR)
    except OSError:  # it has ended
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
        if found and found == size:  # it grows no more: all is written
            break
        size = found
    return os.pread(descriptor, size, 0).decode(errors="replace")


def _place_of(pid: int) -> Path | None:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(descriptor).startswith(f"/memfd:{STACKS_FILE}"):
                return descriptor
    except OSError:  # it has ended, or this is not Linux
        return None
    return None
