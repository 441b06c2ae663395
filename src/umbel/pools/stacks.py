"""Stacks: where a child is at this moment, although its task blocks and it cannot answer.

A child offers a place in memory and has its interpreter write there, at SIGUSR2, what all its
threads are at. The interpreter does so inside the signal handler, whatever code runs. A reader
finds the place among the child's open files, so nothing has to be agreed on. Linux only: on
other systems children offer nothing, and are sent nothing.
"""

import faulthandler
import fcntl
import os
import signal
from pathlib import Path

NAME = "umbel-stacks"
WAIT_S, LOOK_EVERY_S = 1.0, 0.01


def offer_stacks() -> None:
    """In a child: from now on SIGUSR2 writes the stacks, instead of ending the process."""
    if not hasattr(os, "memfd_create"):
        return
    place = os.memfd_create(NAME)
    fcntl.fcntl(place, fcntl.F_SETFL, os.O_APPEND)  # the reader empties it
    faulthandler.register(signal.SIGUSR2, file=place, all_threads=True)


async def stacks_of(pid: int) -> str:
    """The stacks of a child's threads, innermost call first; "" when it does not tell."""
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
    import asyncio  # who asks has a loop; the children, who import this too, have none

    size, waited_s = 0, 0.0
    while waited_s < WAIT_S:
        await asyncio.sleep(LOOK_EVERY_S)
        waited_s += LOOK_EVERY_S
        found = os.fstat(descriptor).st_size
        if found and found == size:  # it has come to its end
            break
        size = found
    return os.pread(descriptor, size, 0).decode(errors="replace")


def _place_of(pid: int) -> Path | None:
    try:
        for one in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(one).startswith(f"/memfd:{NAME}"):
                return one
    except OSError:  # it has ended, or this is not Linux
        return None
    return None
