"""Opinions: what to believe of a node when several nodes say different things of it.

Whoever heard a node within the last heartbeats knows that it was there, whatever others think: that
is evidence. Where nobody did, "alive" says only that its teller has not judged: it may have been cut off
itself a moment ago, and knows least. So the gravest judgement counts then. What is said of a newer
run of the node counts before what is said of an older one.

It stops being right where a whole part of the cluster is cut off from who asks: then only the other
part is heard, and what that one thinks.
"""

from umbel.protocol.value import Value

HEARTBEAT_S = 2.0
FRESH_BEATS = 1.5
_GRAVITY = {"alive": 0, "suspect": 1, "lost": 2, "left": 3}


class Opinion(Value):
    state: str
    silent_s: float
    incarnation: int = 0
    freq_s: float = HEARTBEAT_S


def is_better(one: Opinion, other: Opinion) -> bool:
    """Whether to believe the first of two opinions of one node rather than the second."""
    return _weight(one) > _weight(other)


def _weight(opinion: Opinion) -> tuple[int, bool, int, float]:
    is_fresh = opinion.silent_s <= FRESH_BEATS * max(opinion.freq_s, HEARTBEAT_S)
    gravity = 0 if is_fresh else _GRAVITY.get(opinion.state, 0)
    return opinion.incarnation, is_fresh, gravity, -opinion.silent_s
