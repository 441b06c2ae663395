"""The clocks of a process: the cluster's time, as far as it is known here, and the time since boot.

What is due, and what has expired, is judged by `cluster_now`. A client knows no better than its own clock; a
worker corrects it (`worker/steps/cluster_clock.py`), and hands the correction to its children with each job.
Stamps of events and results stay those of the wall clock.

A test may have the cluster's time stand still and move it (`umbel/testing/clock.py`). Who waits for a moment
listens for changes of the clock, and looks again.
"""

import time as time_module
from collections.abc import Callable
from time import CLOCK_MONOTONIC, clock_gettime, monotonic, time

_BOOT_CLOCK: int = getattr(time_module, "CLOCK_BOOTTIME", CLOCK_MONOTONIC)
_offset_s = 0.0
_stands_at: float | None = None
_listeners: set[Callable[[], None]] = set()


def cluster_now() -> float:
    """Unix time."""
    return time() + _offset_s if _stands_at is None else _stands_at


def this_moment() -> Callable[[], float]:
    """When it was asked for, in the cluster's time as it is known later."""
    began = monotonic()
    return lambda: cluster_now() - (monotonic() - began)


def offset_s() -> float:
    return _offset_s


def correct(by_s: float) -> None:
    """From now on this process's wall clock is taken for wrong by so much; 0: for right."""
    global _offset_s
    if by_s != _offset_s:
        _offset_s = by_s
        _tell()


def stand_still(at_s: float | None) -> None:
    """From now on it is this moment in this process, until another is set; None: time passes again."""
    global _stands_at
    _stands_at = at_s
    _tell()


def on_change(listener: Callable[[], None]) -> Callable[[], None]:
    """Have it called, in any thread, when the cluster's time was changed; what ends that."""
    _listeners.add(listener)
    return lambda: _listeners.discard(listener)


def _tell() -> None:
    for listener in tuple(_listeners):
        listener()


def boot_time_s() -> float:
    """A clock that no clock setting moves, the same for all processes of this machine."""
    return clock_gettime(_BOOT_CLOCK)
