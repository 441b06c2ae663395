"""Evidence: what a broker knows of a node that others do not hear."""

from enum import Enum


class Evidence(Enum):
    """What the broker knows of a node that others do not hear."""

    ALIVE = "alive"  # its mark or its connection stands
    GONE = "gone"  # that run of it has ended, for certain
    UNKNOWN = "unknown"  # no mark of it: it is silent, or it never makes any, as Celery's nodes


def judge_mark(found: int, incarnation: int) -> Evidence:
    """What a mark says of a run of its node. Incarnations grow, so a newer one ends the older."""
    if not found or found < incarnation:
        return Evidence.UNKNOWN
    return Evidence.ALIVE if incarnation in (0, found) else Evidence.GONE
