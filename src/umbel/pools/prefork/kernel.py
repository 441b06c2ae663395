"""What only the kernel can promise about processes: who dies with whom, who inherits orphans.

Linux has it; elsewhere the calls say so by returning False, and the fork server's watch on its
control socket is what remains.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> bool:
    """Have this process killed when its parent ends; ask for the parent afterwards, it may be too late."""
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends, so that none can get away."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    import ctypes  # the main process, which shares this module, asks for none of this

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)


def thread_count() -> int | None:
    """Threads of this process, those of C libraries included; None when nobody can tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return None


def open_descriptors() -> set[int]:
    """Those this process holds; nothing where there is no /proc to ask."""
    listed = {int(name) for name in _names_in("/proc/self/fd")}
    return {one for one in listed if os.path.exists(f"/proc/self/fd/{one}")}  # not that of the listing


def open_sockets() -> set[str]:
    """The sockets this process holds, by the kernel's name for each."""
    sockets = set()
    for entry in _names_in("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith("socket:"):
            sockets.add(target)
    return sockets


def _names_in(directory: str) -> list[str]:
    """Nothing where there is no /proc to ask."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries]
    except FileNotFoundError:
        return []
