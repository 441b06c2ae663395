"""Observed mode: in a large cluster three observers receive all heartbeats and report changes to the other
nodes.

In a small cluster every node listens to every node. The cost of that grows with the square of the number of
nodes, so the mode changes above a limit (`GossipMode`). A node that missed a `worker-lost` or `worker-online`
event learns of it from the `Views` that observers broadcast every half minute.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from hashlib import sha256
from math import inf

from umbel.protocol.membership.heartbeat import OBSERVERS
from umbel.protocol.membership.members import LATE_MAX_S, BroadcastView, Introduced, Members, Record, Viewed

# ---- gossip mode -----------------------------------------------------------------------------------
#
# Full mode is the simplest, and depends on no other node. Above 40 nodes only the holders of the leases
# `observer-0` to `observer-2` receive heartbeats, and notify the others when a node is lost. Between 33 and
# 40 nodes the mode does not change, so that a single node that comes and goes does not switch it back and
# forth.

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
    """Return the routing keys to subscribe to: rare events for all nodes, heartbeats for observers only."""
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
    """Return whether the node is among the `count` nodes that every node would choose for the text.

    Nodes that see the same members choose the same nodes; if views differ, a few more or fewer are chosen.
    """
    mine = _score(text, node)
    return sum(1 for other in nodes if other != node and _score(text, other) < mine) < count


def _score(text: str, node: str) -> bytes:
    return sha256(f"{text}\0{node}".encode(errors="replace")).digest()[:8]


# ---- views -----------------------------------------------------------------------------------------
#
# In observed mode a node that missed a `worker-lost` or a `worker-online` would be wrong about that node
# until the next such event. So each observer broadcasts every half minute which nodes are present, a part of
# the names at a time. This needs no requests or replies, and covers a large cluster within minutes.
#
# A node named in a view joins. A node that no view names for more than a minute is lost. The time is needed
# because a single observer may have missed nodes (it was partitioned, or newly elected), which the next
# observer names; and a node whose clock was set back is recognized after a minute. A recent change is not
# touched, because the view may be older.
#
# Limit: a node that receives no views stays wrong; it is partitioned.

VIEW_S = 30.0  # also how long an observer listens before its first view
VIEW_SPREAD = 0.1
VIEW_MAX = 100  # names in one part of a view
SETTLED_S = 20.0  # views are ignored for this long after a change of state
UNNAMED_MAX_S = LATE_MAX_S + 10.0
STOOD_STILL_S = 5.0


class Views:
    """The views that one node sends and receives. `me` is this node, which is not in the table."""

    def __init__(self, members: Members, me: Introduced, uniform: Callable[[float, float], float]) -> None:
        self.deadline = inf
        self._members = members
        self._me = me
        self._uniform = uniform
        self._told_until = ""  # the name at which the last part ended; empty when a new view begins

    def tell(self, on: bool, now_s: float) -> None:
        """Start or stop sending views; observers that other nodes rely on send them."""
        if on != (self.deadline < inf):
            self.deadline, self._told_until = self._next_s(now_s) if on else inf, ""

    def tick(self, now_s: float, *, doubtful: bool) -> list[BroadcastView]:
        """Return the next part of the view when it is due; nothing if `doubtful`, because this node may be
        partitioned.
        """
        if now_s < self.deadline:
            return []
        stood_still = now_s > self.deadline + STOOD_STILL_S
        self.deadline = self._next_s(now_s)
        return [] if doubtful or stood_still else [self._next_part()]

    def unnamed(self, view: Viewed, now_s: float) -> list[Record]:
        """Return the runs to declare lost, because views have not named them for too long."""
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
