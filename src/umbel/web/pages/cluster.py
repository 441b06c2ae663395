"""Cluster page: the members as each node sees them, the leaders, and how both changed.

The slider goes back through the last hour, which the dashboard received itself, or through what the lake
recorded. Both are the same list of happenings, and one function replays them: the state at a moment is
computed from the state at the end and the changes before it. Where the lake's tables end before the dashboard
began to receive, there is a gap, and the page says so. The lake is read only if a longer period is requested.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from time import time
from urllib.parse import quote

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from umbel.errors import ConfigurationError, HistoryError
from umbel.history.markup import Markup, duration, instant
from umbel.monitor.cluster import KnownCluster
from umbel.monitor.coordination import STATES
from umbel.monitor.records import Happening, Lease, Node, NodeState
from umbel.web.history import recorded_between
from umbel.web.http import dashboard_of, path_to
from umbel.web.lake import CHANGES_MAX, Recorded
from umbel.web.pages.drawings import DRAWN_MAX, Member, ring, ticks
from umbel.web.pages.frame import render
from umbel.web.pages.labels import long_ago, parse_local

# ---- period ----------------------------------------------------------------------------------------

HOUR_S, DAY_S, WEEK_S = 3600.0, 86_400.0, 604_800.0
PERIODS: Mapping[str, tuple[str, float]] = {
    "hour": ("Last hour", HOUR_S),
    "day": ("Last 24 hours", DAY_S),
    "week": ("Last 7 days", WEEK_S),
}
STEPS = 720  # of the slider
GAP_S = 120.0  # a shorter gap is not shown: heartbeats and builds lag behind
BEFORE: Mapping[str, NodeState | None] = {"joined": None, "returned": None, "alive": "suspect"}
"""The state of a node before its first change, by the kind of the change; alive before other kinds."""


@dataclass(frozen=True, slots=True)
class Period:
    """The period of the slider. `name` is one of PERIODS, or "" for explicit times.

    `asked` has the fields of the query string that select the period.
    """

    name: str
    since: float
    until: float
    asked: Mapping[str, str] = field(default_factory=dict)

    @property
    def ends_now(self) -> bool:
        """Whether the period moves with the time."""
        return bool(self.name)

    @property
    def label(self) -> str:
        """The name that people see."""
        return PERIODS[self.name][0] if self.name else "Chosen time"

    @property
    def length_s(self) -> int:
        """The length in whole seconds, at least 1."""
        return max(1, ceil(self.until - self.since))

    @property
    def step_s(self) -> int:
        """How far one step of the slider goes."""
        return max(1, round(self.length_s / STEPS))


def period_of(given: Mapping[str, str], now: float) -> Period:
    """Return the period that the query selects, by default the last hour; ValueError if it is not valid."""
    if given.get("since"):
        since = _moment(given["since"])
        until = _moment(given["until"]) if given.get("until") else now
        if not since < until:
            raise ValueError("the period ends before it begins; exchange its two times")
        asked = {name: given[name] for name in ("since", "until") if given.get(name)}
        return Period("", since, min(until, max(now, since + 1)), asked)
    name = given.get("period", "")
    name = name if name in PERIODS else "hour"
    return Period(name, now - PERIODS[name][1], now, asked_for(name))


def asked_for(name: str) -> dict[str, str]:
    """Return the query fields that select one of PERIODS; the last hour needs none."""
    return {} if name == "hour" else {"period": name}


def _moment(text: str) -> float:
    return float(text) if text.isdecimal() and len(text) < 12 else parse_local(text)


def moment_of(given: Mapping[str, str], period: Period) -> float | None:
    """Return the moment to show, None for now: the time `at`, or `ago` seconds before the period's end."""
    end = None if period.ends_now else period.until
    at, ago = _number(given.get("at", "")), _number(given.get("ago", ""))
    if at is None and ago:
        at = period.until - ago
    return end if at is None else min(period.until, max(period.since, at))


def _number(text: str) -> float | None:
    whole, _, part = text.partition(".")
    return float(text) if whole.isdecimal() and len(text) < 20 and (not part or part.isdecimal()) else None


# ---- replay ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChangeLog:
    """What `happened`, ordered by time, and the `nodes` and `leases` as they are after all of it."""

    nodes: Sequence[Node]
    leases: Sequence[Lease]
    happened: Sequence[Happening]

    def nodes_at(self, at: float) -> list[Node]:
        """Return the nodes with their states and leases at a moment."""
        leases = self.leases_at(at)
        leads: dict[str, list[str]] = {}
        for lease in leases:
            leads.setdefault(lease.holder, []).append(lease.name)
        return [
            replace(node, leads=leads.get(node.node, []) if node.state == "alive" else [])
            for node in nodes_at(self.nodes, self.happened, at)
        ]

    def leases_at(self, at: float) -> list[Lease]:
        """Return the leases with their holders at a moment, without leases that are first reported later."""
        changed = [change for change in self.happened if change.kind == "lease"]
        before = {change.subject: _lease(change) for change in changed if change.at <= at}
        later = {change.subject for change in changed if change.at > at}
        found = (before.get(lease.name) if lease.name in later else lease for lease in self.leases)
        return [lease for lease in found if lease is not None]


def change_log_of(nodes: Sequence[Node], leases: Sequence[Lease], happened: Sequence[Happening]) -> ChangeLog:
    """Return the log, with nodes and leases that only the changes name."""
    states = {change.subject: STATES[change.kind] for change in happened if change.kind in STATES}
    held = {change.subject: _lease(change) for change in happened if change.kind == "lease"}
    listed, named = {node.node for node in nodes}, {lease.name for lease in leases}
    gone = [Node(node=name, state=state) for name, state in states.items() if name not in listed]
    freed = [lease for name, lease in held.items() if name not in named]
    return ChangeLog(
        sorted([*nodes, *gone], key=lambda node: node.node),
        sorted([*leases, *freed], key=lambda lease: lease.name),
        happened,
    )


def nodes_at(nodes: Sequence[Node], happened: Sequence[Happening], at: float) -> list[Node]:
    """Return the nodes in their states at a moment, without nodes that joined later."""
    then: dict[str, NodeState] = {}
    later: dict[str, str] = {}  # the first change after it
    for change in happened:
        if change.kind not in STATES:
            continue
        if change.at <= at:
            then[change.subject] = STATES[change.kind]
        else:
            later.setdefault(change.subject, change.kind)
    found: list[Node] = []
    for node in nodes:
        name, state = node.node, node.state
        if name in later:
            known = then.get(name, BEFORE.get(later[name], "alive"))
            if known is None:
                continue  # it joins later
            state = known
        found.append(replace(node, state=state, differs={}))
    return found


def complete_since(nodes: Sequence[Node], happened: Sequence[Happening], now: float) -> float:
    """Return since when the dashboard itself has received all changes.

    Each node that it finds at its start counts as joined. So if a node's join is not among the changes of the
    last hour, the dashboard was running before that hour.
    """
    joined = {change.subject for change in happened if change.kind in ("joined", "returned")}
    if any(node.node not in joined for node in nodes):
        return now - HOUR_S
    return happened[0].at if happened else now


@dataclass(frozen=True, slots=True)
class Replay:
    """The changes of a period: those that this dashboard `received` since `received_since`, and before
    that those that were `recorded` in the lake, whose tables end at `recorded_until`.
    """

    period: Period
    received: ChangeLog
    received_since: float
    recorded: ChangeLog | None = None
    recorded_until: float | None = None

    @property
    def happened(self) -> list[Happening]:
        """All changes of the period, oldest first."""
        begins, happened = self.received_since, self.received.happened
        old = [change for change in self.recorded.happened if change.at < begins] if self.recorded else []
        new = [change for change in happened if not old or change.at >= begins]
        return [change for change in (*old, *new) if self.period.since <= change.at <= self.period.until]

    def log_at(self, at: float) -> ChangeLog:
        """Return the log that covers the moment."""
        return self.received if self.recorded is None or at >= self.received_since else self.recorded

    @property
    def gap(self) -> tuple[float, float] | None:
        """The part of the period for which there are no data."""
        if self.recorded_until is None:
            return None
        since = max(self.recorded_until, self.period.since)
        until = min(self.received_since, self.period.until)
        return (since, until) if until - since > GAP_S else None

    def is_known(self, at: float) -> bool:
        """Return whether there are data for the moment."""
        return self.gap is None or not self.gap[0] < at < self.gap[1]


def around(happened: Sequence[Happening], period: Period, at: float | None) -> tuple[int | None, int | None]:
    """Return the whole seconds of the last change before a moment and of the first change after it."""
    moments = [min(ceil(change.at), int(period.until)) for change in happened]
    now = period.until if at is None else at
    earlier = [moment for moment in moments if moment < now]
    later = [moment for moment in moments if moment > now]
    return max(earlier, default=None), min(later, default=None)


def _lease(changed: Happening) -> Lease:
    return Lease(name=changed.subject, holder=changed.node, term=changed.term, left_s=0.0, since=changed.at)


# ---- page ------------------------------------------------------------------------------------------

SHOWN_MAX = 200
VIEWS_MAX = 4


async def cluster(request: Request) -> Response:
    """Answer with the members, leases and changes, now or at the moment that the query selects."""
    known, now = dashboard_of(request).cluster, time()
    period, found, problem = period_of({}, now), None, ""
    try:
        period = period_of(request.query_params, now)
        if period.name != "hour":
            found = await recorded_between(request, period.since, period.until)
            problem = _nothing(found, period)
    except (ValueError, HistoryError, ConfigurationError) as error:
        problem = str(error)
    if problem:
        return _page(request, _received(known, period_of({}, now), now), problem=problem)
    replay = _received(known, period, now)
    return _page(request, replay if found is None else _with_recorded(replay, found), found=found)


def _received(known: KnownCluster, period: Period, now: float) -> Replay:
    nodes, happened = known.nodes(), known.happenings()
    log = change_log_of(nodes, known.leases(), happened)
    return Replay(period, log, complete_since(nodes, happened, now))


def _with_recorded(replay: Replay, found: Recorded) -> Replay:
    """Add the recorded changes; if only the newest were read, the period begins later."""
    asked = replay.period
    since = max(asked.since, found.since) if found.more else asked.since
    return Replay(
        Period(asked.name, since, asked.until, asked.asked),
        replay.received,
        replay.received_since,
        change_log_of([], [], found.happenings),
        found.known_until,
    )


def _nothing(found: Recorded, period: Period) -> str:
    """Return why nothing of the period can be shown; "" if something can."""
    is_recorded = found.known_until is not None and found.known_until > period.since
    if is_recorded and any(change.at <= period.until for change in found.happenings):
        return ""
    if found.known_from is None:
        return f"Build {found.build} of the lake's tables has no nodes and no elections."
    return (
        f"Nothing was recorded then: the lake's tables (build {found.build}) go from"
        f" {instant(found.known_from)} to {instant(found.known_until)} UTC."
    )


def _page(request: Request, replay: Replay, problem: str = "", found: Recorded | None = None) -> Response:
    """Render the page; what only some parts show is computed when they do.

    With a `problem` it shows the last hour and why the requested period cannot be shown.
    """
    known, period, given = dashboard_of(request).cluster, replay.period, dict(request.query_params)
    nodes, happened = known.nodes(), replay.happened
    at = None if problem else moment_of(given, period)
    log = None if at is None else replay.log_at(at)
    shown = nodes if at is None or log is None else log.nodes_at(at)
    listed = [change for change in happened if at is None or change.at <= at]
    ago_s = 0 if at is None else round(period.until - at)
    chosen = period.name if not problem else "" if given.get("since") else given.get("period")
    return render(
        request,
        "cluster.html",
        nodes=nodes,
        rings=lambda: _rings(request, shown, None if at is None else {node.node for node in nodes}),
        drawn_max=DRAWN_MAX,
        shown=shown,
        period=period,
        periods=[(label, asked_for(name), chosen == name) for name, (label, _) in PERIODS.items()],
        given=given,
        at=at,
        is_known=at is None or replay.is_known(at),
        ago_s=ago_s,
        ago=_moment_label(period, at, ago_s),
        around=lambda: around(happened, period, at),
        asked=dict(period.asked),
        ticks=lambda: ticks(happened, period.since, period.until, replay.gap),
        problem=problem,
        note=_note(replay, found),
        happened=listed[::-1][:SHOWN_MAX],
        leases=known.leases() if at is None or log is None else log.leases_at(at),
        gossip=sum(node.messages_per_s for node in nodes),
    )


def _moment_label(period: Period, at: float | None, ago_s: int) -> str:
    if at is None:
        return "now"
    return long_ago(ago_s) if period.ends_now else f"{instant(at)} UTC"


def _note(replay: Replay, found: Recorded | None) -> str:
    """Return which parts of the shown period are incomplete."""
    notes = []
    if found is not None and found.more:
        notes.append(f"Only the newest {CHANGES_MAX:,} changes were read: from {instant(found.since)} on.")
    if replay.gap is not None:
        since, until = map(instant, replay.gap)
        notes.append(
            f"There are no data for {since} to {until} UTC: the tables end there."
            " `umbel history build` brings them up to date."
        )
    return " ".join(notes)


def views(nodes: Sequence[Node]) -> list[tuple[list[str], Mapping[str, str]]]:
    """Return groups of nodes with the same view of the cluster: (nodes, state by node), the largest first.

    If all nodes agree there is one group, with the states that the dashboard knows, because it receives a
    change before it asks the nodes again.
    """
    alive = [node.node for node in nodes if node.state == "alive"]
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for viewer in alive if any(node.differs for node in nodes) else ():
        seen = {node.node: node.differs.get(viewer, node.state) for node in nodes}
        groups.setdefault(tuple(seen.items()), []).append(viewer)
    if len(groups) < 2:
        return [(alive, {node.node: node.state for node in nodes})]
    return [
        (viewers, dict(seen)) for seen, viewers in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]


def _rings(request: Request, nodes: Sequence[Node], known: set[str] | None) -> list[tuple[str, Markup]]:
    """Return a ring for each view. `known`: the nodes that have a page, for a past moment; None for now."""
    found = views(nodes)[:VIEWS_MAX]
    names = [", ".join(viewers) if len(found) > 1 else "" for viewers, _ in found]
    return [
        (name, ring([_member(request, node, seen[node.node], known) for node in nodes], name))
        for name, (_, seen) in zip(names, found, strict=True)
    ]


def _member(request: Request, node: Node, state: str, known: set[str] | None) -> Member:
    link = path_to(request, f"/workers/{quote(node.node, safe='')}")
    if known is not None:
        return Member(node.node, state, tuple(node.leads), "", link if node.node in known else "")
    silent_s = float(round(node.silent_s))
    age = f"last heartbeat {duration(silent_s)} ago" if node.silent_s >= 1 else "heartbeat now"
    return Member(node.node, state, tuple(node.leads), age, link)
