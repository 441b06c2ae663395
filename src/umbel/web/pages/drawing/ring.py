"""Ring: the members of a cluster around their broker, as the florets of an umbel.

Each node is a circle with the sign of its state; the rays of those who lead something are drawn
stronger and end in a crown. More nodes than `LABELLED_MAX` get no name of their own, more than
`DRAWN_MAX` are grouped by state: a thousand circles say less than four numbers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sin

from umbel.history.markup import Markup, tag
from umbel.web.pages.drawing.icons import LOOKS, PATHS

WIDTH, HEIGHT = 560.0, 380.0
CENTRE = (WIDTH / 2, HEIGHT / 2)
LABELLED_MAX = 24
DRAWN_MAX = 120
NAME_MAX = 18
ORDER = ("alive", "suspect", "silent", "lost", "left")


@dataclass(frozen=True, slots=True)
class Member:
    node: str
    state: str
    leads: tuple[str, ...] = ()
    said: str = ""
    """What a pointer or a screen reader is told beside name and state."""
    link: str = ""


def ring(members: Sequence[Member], name: str = "") -> Markup:
    """Two or more views of the same cluster are two rings: the caller draws one for each."""
    states = Counter(one.state for one in members)
    counted = ", ".join(f"{states[one]} {one}" for one in ORDER if states[one]) or "no nodes"
    shown = list(members[:DRAWN_MAX])
    title = f"Members{f' as {name} sees them' if name else ''}: {counted}"
    return tag(
        "svg",
        tag("title", title),
        tag(
            "ellipse",
            cx=CENTRE[0],
            cy=CENTRE[1],
            rx=_reach(shown)[0],
            ry=_reach(shown)[1],
            class_="ring-line",
        ),
        [_ray(shown, place) for place in range(len(shown))],
        _hub(states, len(members)),
        [_floret(shown, place) for place in range(len(shown))],
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        class_="drawing ring",
        role="group",
        aria_label=title,
    )


def _reach(members: Sequence[Member]) -> tuple[float, float]:
    return (176.0, 130.0) if len(members) <= LABELLED_MAX else (250.0, 165.0)


def _place(members: Sequence[Member], place: int) -> tuple[float, float]:
    angle = 2 * pi * place / max(len(members), 1) - pi / 2
    across, down = _reach(members)
    return CENTRE[0] + across * cos(angle), CENTRE[1] + down * sin(angle)


def _size(members: Sequence[Member]) -> float:
    return 17.0 if len(members) <= 12 else 13.0 if len(members) <= LABELLED_MAX else 8.0


def _ray(members: Sequence[Member], place: int) -> Markup:
    x, y = _place(members, place)
    bend = (x + CENTRE[0]) / 2, (y + CENTRE[1]) / 2 + 14
    line = f"M{CENTRE[0]:.1f} {CENTRE[1]:.1f}Q{bend[0]:.1f} {bend[1]:.1f} {x:.1f} {y:.1f}"
    return tag("path", d=line, class_="ray leads" if members[place].leads else "ray")


def _hub(states: Counter[str], total: int) -> Markup:
    x, y = CENTRE
    return tag(
        "g",
        tag("circle", cx=x, cy=y, r=46, class_="box"),
        tag("text", f"{states['alive']} of {total}", x=x, y=y + 1, text_anchor="middle", class_="big"),
        tag("text", "alive", x=x, y=y + 20, text_anchor="middle", class_="soft-text"),
    )


def _floret(members: Sequence[Member], place: int) -> Markup:
    one, size = members[place], _size(members)
    x, y = _place(members, place)
    told = f"{one.node}: {one.state}" + (f", leads {', '.join(one.leads)}" if one.leads else "")
    told += f"; {one.said}" if one.said else ""
    look = LOOKS.get(one.state, LOOKS["silent"])
    kind = {"silent": "suspect", "alive": ""}.get(one.state, one.state)
    scale = size / 15
    sign = tag(
        "path",
        d=PATHS[look.icon],
        class_=f"sign {kind}",
        transform=f"translate({x - 8 * scale:.1f} {y - 8 * scale:.1f}) scale({scale:.2f})",
    )
    parts = [
        tag("title", told),
        tag("circle", cx=x, cy=y, r=size + 4, class_="halo"),
        tag("circle", cx=x, cy=y, r=size, class_=f"floret {kind}"),
        sign,
        _crown(x, y - size - 3) if one.leads else None,
        _label(members, place, x, y) if len(members) <= LABELLED_MAX else None,
    ]
    if one.link:
        return tag("a", parts, href=one.link, aria_label=told)
    return tag("g", parts)


def _crown(x: float, y: float) -> Markup:
    return tag("path", d=f"M{x - 8:.1f} {y:.1f}l-1.5-8 5 3.5 4.5-7 4.5 7 5-3.5-1.5 8z", class_="crown")


def _label(members: Sequence[Member], place: int, x: float, y: float) -> Markup:
    size, one = _size(members), members[place]
    side = x - CENTRE[0]
    name = one.node if len(one.node) <= NAME_MAX else f"{one.node[: NAME_MAX - 1]}…"
    if abs(side) < 60:
        below = y > CENTRE[1]
        at, down, anchor = x, y + (size + 17 if below else -size - (20 if one.leads else 8)), "middle"
    else:
        at, down, anchor = x + (size + 7) * (1 if side > 0 else -1), y + 4, "start" if side > 0 else "end"
    return tag("text", name, x=at, y=down, text_anchor=anchor)
