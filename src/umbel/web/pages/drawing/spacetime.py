"""Space-time diagram: what happened to a task, one lane per process, time downwards.

A row is an event: its dot stands on the lane of the process that it happened in, beside it the
Lamport clock, at the right the words. An arrow says that one event had to happen before the other:
a process knows its own past (its lane), and what a message brought it. A repeat is drawn in another
stroke, with its cause. Rows are evenly spaced: the order is what is certain, the time between two
machines' clocks is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from umbel.history.markup import Markup, tag

ROW, TOP, LANE, LEFT, WORDS = 40.0, 66.0, 84.0, 48.0, 380.0
NAME_MAX = 13
WORDS_MAX = 52
ROWS_MAX = 200


@dataclass(frozen=True, slots=True)
class Lane:
    kind: str  # client, broker, worker, child
    name: str
    node: str = ""
    """The worker whose lane it is, or whose child's."""


@dataclass(frozen=True, slots=True)
class Dot:
    """`run` counts the runs of the task from 0; `tone` as in the style sheet, plain if empty."""

    lane: int
    words: str
    clock: int | None = None
    at: str = ""
    run: int = 0
    tone: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Hop:
    """`before` happened before `after`: places of dots."""

    before: int
    after: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class Story:
    lanes: tuple[Lane, ...]
    dots: tuple[Dot, ...]
    hops: tuple[Hop, ...]
    runs: tuple[tuple[int, int, int], ...] = ()
    """(lane, first dot, last dot) of each time the task ran."""


def spacetime(story: Story) -> Markup:
    dots = story.dots[:ROWS_MAX]
    edge = LEFT + LANE * len(story.lanes)
    width, height = edge + WORDS, TOP + ROW * len(dots) + 6
    hops = [hop for hop in story.hops if max(hop.before, hop.after) < len(dots)]
    from_right = {hop.after for hop in hops if dots[hop.before].lane > dots[hop.after].lane}
    said = "; ".join(
        f"{story.lanes[dot.lane].kind} {story.lanes[dot.lane].name}: {dot.words}" for dot in dots[:40]
    )
    return tag(
        "svg",
        tag("title", "Space-time diagram"),
        tag("desc", said),
        [_stripe(place, width) for place in range(1, len(dots), 2)],
        [_lane(place, lane, height) for place, lane in enumerate(story.lanes)],
        [_run(dots, *run) for run in story.runs if run[2] < len(dots)],
        [_hop(dots, hop) for hop in hops],
        [_dot(place, dot, from_right=place in from_right) for place, dot in enumerate(dots)],
        [_words(place, dot, edge) for place, dot in enumerate(dots)],
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        class_="spacetime",
        role="img",
        aria_label="Space-time diagram: the events of this task, one lane per process",
    )


def _x(lane: int) -> float:
    return LEFT + LANE * lane


def _y(place: int) -> float:
    return TOP + ROW * (place + 0.5)


def _stripe(place: int, width: float) -> Markup:
    return tag("rect", x=0.0, y=TOP + ROW * place, width=width, height=ROW, class_="stripe")


def _lane(place: int, lane: Lane, height: float) -> Markup:
    x = _x(place)
    name = lane.name if len(lane.name) <= NAME_MAX else f"{lane.name[: NAME_MAX - 1]}…"
    return tag(
        "g",
        tag("title", f"{lane.kind} {lane.name}"),
        tag("text", lane.kind, x=x, y=24, text_anchor="middle", class_="soft-text"),
        tag("text", name, x=x, y=41, text_anchor="middle"),
        tag("line", x1=x, y1=54.0, x2=x, y2=height, class_="lane-line"),
    )


def _run(dots: Sequence[Dot], lane: int, first: int, last: int) -> Markup:
    again = " again" if dots[first].run else ""
    return tag("line", x1=_x(lane), y1=_y(first), x2=_x(lane), y2=_y(last), class_=f"lane-line run{again}")


def _hop(dots: Sequence[Dot], hop: Hop) -> Markup:
    x1, y1, x2, y2 = _x(dots[hop.before].lane), _y(hop.before), _x(dots[hop.after].lane), _y(hop.after)
    again = " again" if hop.again else ""
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1.0)
    across, down = (x2 - x1) / length, (y2 - y1) / length
    tip, foot = (x2 - across * 8, y2 - down * 8), (x2 - across * 17, y2 - down * 17)
    head = (
        f"M{tip[0]:.1f} {tip[1]:.1f}L{foot[0] - down * 4:.1f} {foot[1] + across * 4:.1f}"
        f"L{foot[0] + down * 4:.1f} {foot[1] - across * 4:.1f}z"
    )
    return tag(
        "g",
        tag("path", d=f"M{x1:.1f} {y1:.1f}L{foot[0]:.1f} {foot[1]:.1f}", class_=f"hop{again}"),
        tag("path", d=head, class_=f"hop-head{again}"),
    )


def _dot(place: int, dot: Dot, *, from_right: bool) -> Markup:
    """The clock stands on the side where no arrow comes in."""
    x, y = _x(dot.lane), _y(place)
    clock = (
        None
        if dot.clock is None
        else tag(
            "text",
            str(dot.clock),
            x=x - 10 if from_right else x + 10,
            y=y - 6,
            text_anchor="end" if from_right else "start",
            class_="mono soft-text halo-text",
        )
    )
    kind = dot.tone or ("again" if dot.run else "")
    return tag(
        "g",
        tag("title", f"{dot.words}" + (f", clock {dot.clock}" if dot.clock is not None else "")),
        tag("circle", cx=x, cy=y, r=6.0, class_=f"dot {kind}"),
        clock,
    )


def _words(place: int, dot: Dot, edge: float) -> Markup:
    y = _y(place)
    words = dot.words if len(dot.words) <= WORDS_MAX else f"{dot.words[: WORDS_MAX - 1]}…"
    under = " · ".join(filter(None, (dot.at,)))
    lines = [
        tag("text", words, x=edge, y=y - 2),
        tag("text", under, x=edge, y=y + 14, class_="soft-text mono"),
    ]
    if dot.cause:
        lines.append(tag("text", dot.cause, x=edge, y=y + 14, class_="cause"))
    return tag("g", tag("title", dot.words), lines)
