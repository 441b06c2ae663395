"""Cluster: who is there as each node sees it, who leads what, and how it came to be so.

The slider goes back through the last hour, or through what the lake has recorded; `replay.py` says how the
members and leaders of then are known. The lake is read only where a longer period is asked for.
"""

from collections.abc import Mapping, Sequence
from time import time
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from umbel.errors import ConfigurationError, HistoryError
from umbel.history.markup import Markup
from umbel.history.scales import duration
from umbel.monitor.shapes import Node
from umbel.web.looking_back import recorded_between
from umbel.web.pages.drawing.ring import Member, ring
from umbel.web.pages.drawing.ticks import ticks
from umbel.web.pages.frame import render
from umbel.web.pages.replay import (
    PERIODS,
    Period,
    Replay,
    around,
    asked_for,
    heard_since,
    moment_of,
    period_of,
    reel_of,
)
from umbel.web.pages.times import instant, long_ago
from umbel.web.recorded import CHANGES_MAX, Recorded
from umbel.web.site import Site, path_to, site_of

SHOWN_MAX = 200
PLURAL_OF_VIEWS = 4


async def cluster(request: Request) -> Response:
    site, now, given = site_of(request), time(), dict(request.query_params)
    nodes = site.nodes()
    try:
        period = period_of(given, now)
    except ValueError as error:
        return _instead(request, str(error), "")
    if period.name == "hour":
        return _page(request, nodes, _heard(site, period, now), moment_of(given, period))
    try:
        found = await recorded_between(site, period.since, period.until)
    except (HistoryError, ConfigurationError) as error:
        return _instead(request, str(error), period.name)
    if nothing := _nothing(found, period):
        return _instead(request, nothing, period.name)
    replay = _with_the_lake(_heard(site, period, now), found)
    return _page(request, nodes, replay, moment_of(given, replay.period), found=found)


def _instead(request: Request, problem: str, chosen: str) -> Response:
    """Now and the last hour, where what was asked for cannot be shown; and why."""
    site, now = site_of(request), time()
    return _page(request, site.nodes(), _heard(site, period_of({}, now), now), None, problem, chosen)


def _heard(site: Site, period: Period, now: float) -> Replay:
    nodes, happened = site.nodes(), site.happenings()
    return Replay(period, reel_of(nodes, site.leases(), happened), heard_since(nodes, happened, now))


def _with_the_lake(heard: Replay, found: Recorded) -> Replay:
    """From where on nothing is missing: where there was too much, the period begins later."""
    asked = heard.period
    since = max(asked.since, found.since) if found.more else asked.since
    period = Period(asked.name, since, asked.until, asked.asked)
    return Replay(
        period, heard.heard, heard.heard_since, reel_of([], [], found.happenings), found.known_until
    )


def _nothing(found: Recorded, period: Period) -> str:
    is_recorded = found.known_until is not None and found.known_until > period.since
    if is_recorded and any(one.at <= period.until for one in found.happenings):
        return ""
    if found.known_from is None:
        return f"Build {found.build} of the lake's tables has no nodes and no elections."
    return (
        f"Nothing was recorded then: the lake's tables (build {found.build}) go from"
        f" {instant(found.known_from)} to {instant(found.known_until)} UTC."
    )


def _page(
    request: Request,
    nodes: Sequence[Node],
    replay: Replay,
    at: float | None,
    problem: str = "",
    chosen: str | None = None,
    found: Recorded | None = None,
) -> Response:
    """What only some parts show is made when they do."""
    site, period = site_of(request), replay.period
    shown = nodes if at is None else replay.reel_at(at).nodes_at(at)
    happened, now_chosen = replay.happened, period.name if chosen is None else chosen
    listed = [one for one in happened if at is None or one.at <= at]
    ago_s = 0 if at is None else round(period.until - at)
    return render(
        request,
        "cluster.html",
        nodes=nodes,
        rings=lambda: _rings(request, shown, None if at is None else {one.node for one in nodes}),
        shown=shown,
        period=period,
        periods=[(label, asked_for(name), now_chosen == name) for name, (label, _) in PERIODS.items()],
        given=dict(request.query_params),
        at=at,
        is_known=at is None or replay.is_known(at),
        ago_s=ago_s,
        ago=_said(period, at, ago_s),
        around=lambda: around(happened, period, at),
        asked=dict(period.asked),
        ticks=lambda: ticks(happened, period.since, period.until, replay.gap),
        problem=problem,
        note=_note(replay, found),
        happened=listed[::-1][:SHOWN_MAX],
        leases=site.leases() if at is None else replay.reel_at(at).leases_at(at),
        gossip=sum(node.messages_per_s for node in nodes),
    )


def _said(period: Period, at: float | None, ago_s: int) -> str:
    if at is None:
        return "now"
    return long_ago(ago_s) if period.ends_now else f"{instant(at)} UTC"


def _note(replay: Replay, found: Recorded | None) -> str:
    """What is missing in what is shown."""
    said = []
    if found is not None and found.more:
        said.append(f"Only the newest {CHANGES_MAX:,} changes were read: from {instant(found.since)} on.")
    if replay.gap is not None:
        since, until = map(instant, replay.gap)
        said.append(
            f"Nothing is known of {since} to {until} UTC: the tables end there."
            " `umbel history build` brings them up to date."
        )
    return " ".join(said)


def views(nodes: Sequence[Node]) -> list[tuple[list[str], Mapping[str, str]]]:
    """Groups of nodes that see the cluster alike: (who, state by node), the largest first.

    Where all of them agree it is one group, shown as the dashboard itself knows it: it hears of a change
    before it has asked the nodes again.
    """
    alive = [node.node for node in nodes if node.state == "alive"]
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for viewer in alive if any(node.differs for node in nodes) else ():
        seen = {node.node: node.differs.get(viewer, node.state) for node in nodes}
        groups.setdefault(tuple(seen.items()), []).append(viewer)
    if len(groups) < 2:
        return [(alive, {node.node: node.state for node in nodes})]
    return [(who, dict(seen)) for seen, who in sorted(groups.items(), key=lambda one: -len(one[1]))]


def _rings(request: Request, nodes: Sequence[Node], known: set[str] | None) -> list[tuple[str, Markup]]:
    """`known`: the nodes that have a page, for a moment that is over; None for now."""
    found = views(nodes)[:PLURAL_OF_VIEWS]
    return [
        (
            ", ".join(who) if len(found) > 1 else "",
            ring(
                [_member(request, node, seen[node.node], known) for node in nodes],
                ", ".join(who) if len(found) > 1 else "",
            ),
        )
        for who, seen in found
    ]


def _member(request: Request, node: Node, state: str, known: set[str] | None) -> Member:
    link = path_to(request, f"/workers/{quote(node.node, safe='')}")
    if known is not None:
        return Member(node.node, state, tuple(node.leads), "", link if node.node in known else "")
    said = f"heard {duration(float(round(node.silent_s)))} ago" if node.silent_s >= 1 else "heard now"
    return Member(node.node, state, tuple(node.leads), said, link)
