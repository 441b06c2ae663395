"""Observed mode: in a large cluster three observers receive all heartbeats and report changes to the rest.

In a small cluster every node listens to every node. The cost grows with the square of the number of nodes, so
above a limit the mode changes (`GossipMode`). A node that missed a `worker-lost` or `worker-online` event
learns of it from the `Views` that observers broadcast every half minute.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from hashlib import sha256
from math import inf

from umbel.protocol.membership.heartbeat import OBSERVERS
from umbel.protocol.membership.members import LATE_MAX_S, BroadcastView, Introduced, Members, Record, Viewed

# ---- gossip mode -----------------------------------------------------------------------------------
#
# Whether every node receives every heartbeat, or three observers do it for all.
#
# In a small cluster every node listens to every node: that is the simplest, and depends on no node. The
# cost grows with the square of the number of nodes, so above 40 nodes only the holders of the leases
# `observer-0` to `observer-2` receive heartbeats, and notify the others when a node is lost. Between 33 and
# 40 the mode does not change, so that one node more or less does not switch it back and forth.

FULL_MAX = 32
OBSERVED_MIN = 41
ANSWERERS = 3
CANDIDATES = 8
OBSERVER_LEASES = tuple(f"observer-{number}" for number in range(OBSERVERS))


class GossipMode(StrEnum):
    """Which nodes receive heartbeats: all of them (full), or three observers."""

    AUTO = "auto"
    FULL = "full"
    OBSERVED = "observed"


def mode_for(setting: GossipMode, current: GossipMode, nodes: int) -> GossipMode:
    """Return the mode for this cluster size; between the limits the current mode stays."""
    if setting is not GossipMode.AUTO:
        return setting
    if nodes <= FULL_MAX:
        return GossipMode.FULL
    return GossipMode.OBSERVED if nodes >= OBSERVED_MIN else current


def patterns_for(mode: GossipMode, *, observer: bool) -> tuple[str, ...]:
    """The routing keys to subscribe to. All nodes receive rare events; only observers receive heartbeats."""
    if mode is GossipMode.FULL:
        return ("worker.#",)
    rare = (
        "worker.online",
        "worker.offline",
        "worker.suspect",
        "worker.lost",
        "worker.elected",
        "worker.leader",
        "worker.elect",
        "worker.elect.ack",
        "worker.view",
    )
    return (*rare, "worker.heartbeat") if observer else rare


def is_among_lowest(text: str, node: str, nodes: Sequence[str], count: int) -> bool:
    """Whether the node is among the `count` nodes that every node would choose for the text.

    Nodes that see the same members choose the same; where views differ, a few more or fewer do.
    """
    mine = _score(text, node)
    return sum(1 for other in nodes if other != node and _score(text, other) < mine) < count


def _score(text: str, node: str) -> bytes:
    return sha256(f"{text}\0{node}".encode(errors="replace")).digest()[:8]


# ---- views -----------------------------------------------------------------------------------------
#
# How nodes that receive no heartbeats find out that they missed something.
#
# In observed mode a node that missed a `worker-lost` or a `worker-online` would be wrong about that node
# until the next such event. So each observer broadcasts every half minute which nodes are present, a part
# of the names at a time: there are no requests and no replies, and a large cluster is covered in minutes.
#
# A node that is named joins. A node that no view names for more than a minute is lost: the next observer
# names the nodes that a single observer, cut off or newly elected, did not see, and a node whose clock was
# set back is recognized after a minute. A recent change is not touched, because the view may be older.
#
# It rests on broadcasts arriving again: a node that receives no views stays wrong, and is cut off.

VIEW_S = 30.0  # also how long an observer listens before its first view
VIEW_SPREAD = 0.1
VIEW_MAX = 100  # names in one part
SETTLED_S = 20.0  # views are ignored for this long after a change of state
UNNAMED_MAX_S = LATE_MAX_S + 10.0
STOOD_STILL_S = 5.0


class Views:
    """The views that one node sends, and those it receives. `me` is this node, which is not in the table."""

    def __init__(self, members: Members, me: Introduced, uniform: Callable[[float, float], float]) -> None:
        self.deadline = inf
        self._members = members
        self._me = me
        self._uniform = uniform
        self._told_until = ""  # the name at which the last part ended; empty after the last of all

    def tell(self, on: bool, now_s: float) -> None:
        """Start or stop sending views; an observer that other nodes rely on sends them."""
        if on != (self.deadline < inf):
            self.deadline, self._told_until = self._next_s(now_s) if on else inf, ""

    def tick(self, now_s: float, *, doubtful: bool) -> list[BroadcastView]:
        """Return the next part of the view when it is due. `doubtful`: this node may be cut off, so send
        none.
        """
        if now_s < self.deadline:
            return []
        stood_still = now_s > self.deadline + STOOD_STILL_S
        self.deadline = self._next_s(now_s)
        return [] if doubtful or stood_still else [self._next_part()]

    def unnamed(self, view: Viewed, now_s: float) -> list[Record]:
        """Return the runs to declare lost, because views have not named them for long."""
        named = {(run.node, run.inc, run.pid) for run in view.runs}
        found: list[Record] = []
        for record in self._members:
            member = record.member
            covered = view.after < member.node and (not view.until or member.node <= view.until)
            if not covered or now_s - record.changed_s < SETTLED_S:
                continue
            if (member.node, member.inc, member.pid) in named:
                record.unnamed_s = inf
                continue
            record.unnamed_s = min(record.unnamed_s, now_s)
            if now_s - record.unnamed_s >= UNNAMED_MAX_S:
                found.append(record)
        return found

    def _next_part(self) -> BroadcastView:
        there = {record.node: record for record in self._members if not record.is_gone}
        names = sorted(name for name in (*there, self._me.node) if name > self._told_until)
        part = names[:VIEW_MAX]
        after, until = self._told_until, part[-1] if len(names) > VIEW_MAX else ""
        self._told_until = until
        return BroadcastView(
            after, until, tuple(_run(there[name]) if name in there else self._me for name in part)
        )

    def _next_s(self, now_s: float) -> float:
        return now_s + VIEW_S * self._uniform(1 - VIEW_SPREAD, 1 + VIEW_SPREAD)


def _run(record: Record) -> Introduced:
    member = record.member
    return Introduced(member.node, member.inc, member.pid, member.clock, member.freq_s, member.software)
