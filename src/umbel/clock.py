"""The clocks of a process: the cluster's time, as far as it is known here, and the time since boot.

What is due, and what has expired, is judged by `cluster_now`. A client knows no better than its own clock; a
worker corrects it (`worker/steps/cluster_clock.py`), and hands the correction to its children with each job.
Stamps of events and results stay those of the wall clock.
"""

import time as time_module
from collections.abc import Callable
from time import CLOCK_MONOTONIC, clock_gettime, monotonic, time

_BOOT_CLOCK: int = getattr(time_module, "CLOCK_BOOTTIME", CLOCK_MONOTONIC)
_offset_s = 0.0


def cluster_now() -> float:
    """Unix time."""
    return time() + _offset_s


def this_moment() -> Callable[[], float]:
    """When it was asked for, in the cluster's time as it is known later."""
    began = monotonic()
    return lambda: cluster_now() - (monotonic() - began)


def offset_s() -> float:
    return _offset_s


def correct(by_s: float) -> None:
    """From now on this process's wall clock is taken for wrong by so much; 0: for right."""
    global _offset_s
    _offset_s = by_s


def boot_time_s() -> float:
    """A clock that no clock setting moves, the same for all processes of this machine."""
    return clock_gettime(_BOOT_CLOCK)
