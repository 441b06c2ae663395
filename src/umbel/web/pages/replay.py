"""Replay: who was there and who led at a moment of a period; from how it ended, and what happened before.

What the dashboard heard itself shows the last hour, or less of it when it was started since. What is older is
read from the lake; where its tables end before the dashboard began to listen there is a gap, and it is said.
Both are the same list of happenings, and replayed by the same code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from msgspec.structs import replace

from umbel.monitor.happenings import STATES
from umbel.monitor.shapes import Happening, Lease, Node, NodeState
from umbel.web.pages.times import parse_local

HOUR_S, DAY_S, WEEK_S = 3600.0, 86_400.0, 604_800.0
PERIODS: Mapping[str, tuple[str, float]] = {
    "hour": ("Last hour", HOUR_S),
    "day": ("Last 24 hours", DAY_S),
    "week": ("Last 7 days", WEEK_S),
}
STEPS = 720  # of the slider
GAP_S = 120.0  # heartbeats and builds may be so far behind
BEFORE: Mapping[str, NodeState | None] = {"joined": None, "returned": None, "alive": "suspect"}
"""What a node was before its first change of a kind; alive before all others."""


@dataclass(frozen=True, slots=True)
class Period:
    """`name`: one of PERIODS; "" for one that has an end of its own."""

    name: str
    since: float
    until: float
    asked: Mapping[str, str] = field(default_factory=dict)
    """Its part of the query string."""

    @property
    def ends_now(self) -> bool:
        return bool(self.name)

    @property
    def label(self) -> str:
        return PERIODS[self.name][0] if self.name else "Chosen time"

    @property
    def length_s(self) -> int:
        return max(1, ceil(self.until - self.since))

    @property
    def step_s(self) -> int:
        return max(1, round(self.length_s / STEPS))


def period_of(given: Mapping[str, str], now: float) -> Period:
    """The last hour unless another is asked for; ValueError for one that is none."""
    if given.get("since"):
        since = _moment(given["since"])
        until = _moment(given["until"]) if given.get("until") else now
        if not since < until:
            raise ValueError("the period ends before it begins; exchange its two times")
        asked = {name: given[name] for name in ("since", "until") if given.get(name)}
        return Period("", since, min(until, max(now, since + 1)), asked)
    name = given.get("period") if given.get("period") in PERIODS else "hour"
    assert name is not None
    return Period(name, now - PERIODS[name][1], now, asked_for(name))


def asked_for(name: str) -> dict[str, str]:
    """How a URL asks for one of PERIODS; the last hour needs no asking."""
    return {} if name == "hour" else {"period": name}


def _moment(text: str) -> float:
    return float(text) if text.isdecimal() and len(text) < 12 else parse_local(text)


def moment_of(given: Mapping[str, str], period: Period) -> float | None:
    """Which moment is shown; None: as it is now. `at` names it; `ago` counts back from the period's end."""
    end = None if period.ends_now else period.until
    at, ago = _number(given.get("at", "")), _number(given.get("ago", ""))
    if at is None and ago:
        at = period.until - ago
    return end if at is None else min(period.until, max(period.since, at))


def _number(text: str) -> float | None:
    whole, _, part = text.partition(".")
    return float(text) if whole.isdecimal() and len(text) < 20 and (not part or part.isdecimal()) else None


@dataclass(frozen=True, slots=True)
class Reel:
    """`nodes` and `leases` as they are after all that `happened`, which is in the order of time."""

    nodes: Sequence[Node]
    leases: Sequence[Lease]
    happened: Sequence[Happening]

    def nodes_at(self, at: float) -> list[Node]:
        leases = self.leases_at(at)
        leads: dict[str, list[str]] = {}
        for one in leases:
            leads.setdefault(one.holder, []).append(one.name)
        return [
            replace(node, leads=leads.get(node.node, []) if node.state == "alive" else [])
            for node in nodes_at(self.nodes, self.happened, at)
        ]

    def leases_at(self, at: float) -> list[Lease]:
        """Who held which; one that is first told of later is left out."""
        changed = [one for one in self.happened if one.kind == "lease"]
        before = {one.subject: _lease(one) for one in changed if one.at <= at}
        later = {one.subject for one in changed if one.at > at}
        found = (before.get(one.name) if one.name in later else one for one in self.leases)
        return [one for one in found if one is not None]


def reel_of(nodes: Sequence[Node], leases: Sequence[Lease], happened: Sequence[Happening]) -> Reel:
    """With those that only what happened still names."""
    states = {one.subject: STATES[one.kind] for one in happened if one.kind in STATES}
    held = {one.subject: _lease(one) for one in happened if one.kind == "lease"}
    listed, named = {one.node for one in nodes}, {one.name for one in leases}
    gone = [Node(node=name, state=state) for name, state in states.items() if name not in listed]
    freed = [lease for name, lease in held.items() if name not in named]
    return Reel(
        sorted([*nodes, *gone], key=lambda one: one.node),
        sorted([*leases, *freed], key=lambda one: one.name),
        happened,
    )


def nodes_at(nodes: Sequence[Node], happened: Sequence[Happening], at: float) -> list[Node]:
    """The nodes in the states that they had then; who was not there yet is left out."""
    then: dict[str, NodeState] = {}
    later: dict[str, str] = {}  # the first change after it
    for one in happened:
        if one.kind not in STATES:
            continue
        if one.at <= at:
            then[one.subject] = STATES[one.kind]
        else:
            later.setdefault(one.subject, one.kind)
    states = {
        node.node: node.state
        if node.node not in later
        else then.get(node.node, BEFORE.get(later[node.node], "alive"))
        for node in nodes
    }
    return [
        replace(node, state=state, differs={}) for node in nodes if (state := states[node.node]) is not None
    ]


def heard_since(nodes: Sequence[Node], happened: Sequence[Happening], now: float) -> float:
    """Since when the dashboard itself knows what happened.

    It is told of each node that comes, also of those that it finds when it starts. So one whose coming
    is not among what happened in the last hour was there before, and the dashboard too.
    """
    came = {one.subject for one in happened if one.kind in ("joined", "returned")}
    if any(node.node not in came for node in nodes):
        return now - HOUR_S
    return happened[0].at if happened else now


@dataclass(frozen=True, slots=True)
class Replay:
    """What is known of a period: heard since `heard_since`, read from the lake before that."""

    period: Period
    heard: Reel
    heard_since: float
    read: Reel | None = None
    read_until: float | None = None
    """Up to where the lake's tables know it."""

    @property
    def happened(self) -> list[Happening]:
        """All of the period, oldest first."""
        old = [one for one in self.read.happened if one.at < self.heard_since] if self.read else []
        new = [one for one in self.heard.happened if not old or one.at >= self.heard_since]
        return [one for one in (*old, *new) if self.period.since <= one.at <= self.period.until]

    def reel_at(self, at: float) -> Reel:
        return self.heard if self.read is None or at >= self.heard_since else self.read

    @property
    def gap(self) -> tuple[float, float] | None:
        """The time of the period of which nothing is known."""
        if self.read is None or self.read_until is None:
            return None
        since = max(self.read_until, self.period.since)
        until = min(self.heard_since, self.period.until)
        return (since, until) if until - since > GAP_S else None

    def is_known(self, at: float) -> bool:
        return self.gap is None or not self.gap[0] < at < self.gap[1]


def around(happened: Sequence[Happening], period: Period, at: float | None) -> tuple[int | None, int | None]:
    """The whole seconds in which something changed before and after a moment."""
    moments = [min(ceil(one.at), int(period.until)) for one in happened]
    now = period.until if at is None else at
    earlier = [one for one in moments if one < now]
    later = [one for one in moments if one > now]
    return max(earlier, default=None), min(later, default=None)


def _lease(changed: Happening) -> Lease:
    return Lease(name=changed.subject, holder=changed.node, term=changed.term, left_s=0.0, since=changed.at)
