"""The cluster's time, as far as this process knows it: its wall clock, corrected by what others show.

What is due, and what has expired, is judged by `cluster_now`. A client knows no better than its own clock; a
worker corrects it (`worker/steps/cluster_clock.py`), and hands the correction to its children with each job.
Stamps of events and results stay those of the wall clock.
"""

from collections.abc import Callable
from time import monotonic, time

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
