"""Cluster: who is there as each node sees it, who leads what, and how it came to be so.

The slider goes back through the last hour: the membership of then is the one of now with what happened
since taken back, read from the same list of happenings that is shown below it.
"""

from collections.abc import Mapping, Sequence
from time import time
from urllib.parse import quote

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from umbel.history.markup import Markup
from umbel.history.scales import duration
from umbel.monitor.shapes import Happening, Node
from umbel.web.pages.drawing.ring import Member, ring
from umbel.web.pages.frame import render
from umbel.web.pages.numbers import number_of
from umbel.web.site import path_to, site_of

REPLAY_S = 3600
SHOWN_MAX = 200
STATES = {
    "joined": "alive",
    "returned": "alive",
    "alive": "alive",
    "suspect": "suspect",
    "lost": "lost",
    "left": "left",
}
PLURAL_OF_VIEWS = 4


async def cluster(request: Request) -> Response:
    site, now = site_of(request), time()
    ago_s = _ago(request.query_params.get("ago", ""))
    nodes, happened = site.nodes(), site.happenings(since=now - REPLAY_S)
    at = now - ago_s if ago_s else None
    shown = nodes if at is None else nodes_at(nodes, happened, at)
    listed = [one for one in happened if at is None or one.at <= at]
    return render(
        request,
        "cluster.html",
        nodes=nodes,
        rings=_rings(request, shown),
        ago_s=ago_s,
        at=at,
        now=now,
        replay_s=REPLAY_S,
        happened=listed[::-1][:SHOWN_MAX],
        leases=site.leases(),
        gossip=sum(node.messages_per_s for node in nodes),
    )


def nodes_at(nodes: Sequence[Node], happened: Sequence[Happening], at: float) -> list[Node]:
    """The nodes in the states that they had then; who was not there yet is left out."""
    then: dict[str, str | None] = {
        one.subject: None for one in happened if one.kind in STATES and one.at > at
    }  # what each change after `at` replaced is the state before it
    for one in happened:
        if one.kind in STATES and one.at <= at and one.subject in then:
            then[one.subject] = STATES[one.kind]
    changed = {one.subject: one for one in reversed(happened) if one.kind in STATES and one.at > at}
    states: dict[str, str] = {}
    for node in nodes:
        if node.node not in then:
            states[node.node] = node.state
        elif (known := then[node.node]) is not None:
            states[node.node] = known
        elif changed[node.node].kind != "joined":
            states[node.node] = "alive"  # it changed later for the first time, so it was there before
    return [_with(node, states[node.node]) for node in nodes if node.node in states]


def views(nodes: Sequence[Node]) -> list[tuple[list[str], Mapping[str, str]]]:
    """Groups of nodes that see the cluster alike: (who, state by node), the largest first.

    Where all of them agree it is one group, shown as the dashboard itself knows it: it hears of a change
    before it has asked the nodes again.
    """
    alive = [node.node for node in nodes if node.state == "alive"]
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for viewer in alive:
        seen = {node.node: node.differs.get(viewer, node.state) for node in nodes}
        groups.setdefault(tuple(seen.items()), []).append(viewer)
    if len(groups) < 2:
        return [(alive, {node.node: node.state for node in nodes})]
    return [(who, dict(seen)) for seen, who in sorted(groups.items(), key=lambda one: -len(one[1]))]


def _rings(request: Request, nodes: Sequence[Node]) -> list[tuple[str, Markup]]:
    found = views(nodes)[:PLURAL_OF_VIEWS]
    return [
        (
            ", ".join(who) if len(found) > 1 else "",
            ring(
                [_member(request, node, seen[node.node]) for node in nodes],
                ", ".join(who) if len(found) > 1 else "",
            ),
        )
        for who, seen in found
    ]


def _member(request: Request, node: Node, state: str) -> Member:
    said = f"heard {duration(float(round(node.silent_s)))} ago" if node.silent_s >= 1 else "heard now"
    return Member(
        node.node, state, tuple(node.leads), said, path_to(request, f"/workers/{quote(node.node, safe='')}")
    )


def _with(node: Node, state: str) -> Node:
    return replace(node, state=state, differs={}, leads=node.leads if state == "alive" else [])


def _ago(text: str) -> int:
    return min(REPLAY_S, number_of(text))
