"""Views: how nodes that hear no heartbeats find out that they missed something.

In observed mode a node that missed a `worker-lost` or a `worker-online` would be wrong about that
node until the next one. So each observer tells, every half minute, whom it knows to be there, a part
of the names at a time: nobody asks, nobody answers, and a large cluster is gone through in minutes.

A node that is named joins. One that is not is lost when no view names it for more than a minute: the
next observer names whom a single one, cut off or newly elected, did not hear, and a node whose clock
was set back is heard after a minute. What changed a moment ago is left alone, because the view may be
older than that.

It rests on broadcasts arriving again: a node that hears no views stays wrong, and is cut off.
"""

from collections.abc import Callable
from math import inf

from umbel.protocol.membership.events import Introduced, TellView, Viewed
from umbel.protocol.membership.members import LATE_MAX_S, Members, Record

VIEW_S = 30.0  # also how long an observer listens before it tells
VIEW_SPREAD = 0.1
VIEW_MAX = 100  # names in one part
SETTLED_S = 20.0  # after a change of state no view counts for so long
UNNAMED_MAX_S = LATE_MAX_S + 10.0
STOOD_STILL_S = 5.0


class Views:
    """`me` is this node, which is there and not in the table."""

    def __init__(self, members: Members, me: Introduced, uniform: Callable[[float, float], float]) -> None:
        self.deadline = inf
        self._members = members
        self._me = me
        self._uniform = uniform
        self._told_until = ""  # the name at which the last part ended; empty after the last of all

    def tell(self, on: bool, now_s: float) -> None:
        """Whether this node is to tell views, as an observer does who is listened to."""
        if on != (self.deadline < inf):
            self.deadline, self._told_until = self._next_s(now_s) if on else inf, ""

    def tick(self, now_s: float, *, doubtful: bool) -> list[TellView]:
        if now_s < self.deadline:
            return []
        stood_still = now_s > self.deadline + STOOD_STILL_S
        self.deadline = self._next_s(now_s)
        return [] if doubtful or stood_still else [self._next_part()]

    def unnamed(self, view: Viewed, now_s: float) -> list[Record]:
        """The runs that are not to be believed in any more, because views have not named them for long."""
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

    def _next_part(self) -> TellView:
        there = {record.node: record for record in self._members if not record.is_gone}
        names = sorted(name for name in (*there, self._me.node) if name > self._told_until)
        part = names[:VIEW_MAX]
        after, until = self._told_until, part[-1] if len(names) > VIEW_MAX else ""
        self._told_until = until
        return TellView(
            after, until, tuple(_run(there[name]) if name in there else self._me for name in part)
        )

    def _next_s(self, now_s: float) -> float:
        return now_s + VIEW_S * self._uniform(1 - VIEW_SPREAD, 1 + VIEW_SPREAD)


def _run(record: Record) -> Introduced:
    member = record.member
    return Introduced(member.node, member.inc, member.pid, member.clock, member.freq_s, member.software)
