"""The clocks of a process: the cluster's time, as this process knows it, and the time since boot.

`cluster_now` decides which ETAs are due and which tasks have expired. A client uses its system clock
unchanged. A worker corrects it (`worker/steps/cluster_clock.py`) and passes the correction to its children
with each job. Timestamps of events and results come from the uncorrected wall clock.

A test may stop the cluster's time and move it (`umbel/testing/bench.py`). Code that waits for a time
subscribes to changes of the clock, and checks again after each.
"""

import time as time_module
from collections.abc import Callable
from time import CLOCK_MONOTONIC, clock_gettime, monotonic, time

_BOOT_CLOCK: int = getattr(time_module, "CLOCK_BOOTTIME", CLOCK_MONOTONIC)
_offset_s = 0.0
_stands_at: float | None = None
_listeners: set[Callable[[], None]] = set()


def cluster_now() -> float:
    """Return the cluster's time, as Unix time."""
    return time() + _offset_s if _stands_at is None else _stands_at


def this_moment() -> Callable[[], float]:
    """Remember this moment; the returned function gives it in the cluster's time, with later corrections."""
    began = monotonic()
    return lambda: cluster_now() - (monotonic() - began)


def offset_s() -> float:
    """Return the correction of this process's wall clock, in seconds."""
    return _offset_s


def correct(by_s: float) -> None:
    """Set the correction of this process's wall clock to `by_s` seconds."""
    global _offset_s
    if by_s != _offset_s:
        _offset_s = by_s
        _tell()


def stand_still(at_s: float | None) -> None:
    """Stop the cluster's time of this process at a moment, for tests; None lets it run again."""
    global _stands_at
    _stands_at = at_s
    _tell()


def on_change(listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener`, in any thread, when the cluster's time is changed; return a function that unsubscribes
    it.
    """
    _listeners.add(listener)
    return lambda: _listeners.discard(listener)


def _tell() -> None:
    for listener in tuple(_listeners):
        listener()


def boot_time_s() -> float:
    """Return the seconds since boot: unaffected by clock settings, and equal in all processes of this
    machine.
    """
    return clock_gettime(_BOOT_CLOCK)
