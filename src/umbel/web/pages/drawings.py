"""Drawings as SVG, made of plain data by pure functions; every text is escaped.

The ring shows the members of a cluster around their broker. The workflow graph shows the tasks that one call
led to, and its critical path. The heat map has one row for each thing and one cell for each step of time. The
ticks above the time slider say where something changed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import cos, log1p, pi, sin

from umbel.history.charts import Markup, tag
from umbel.monitor.records import Happening
from umbel.web.pages.labels import LOOKS, PATHS, instant, look

# ---- ring ------------------------------------------------------------------------------------------
#
# The members of a cluster around their broker, as the florets of an umbel.
#
# Each node is a circle with the sign of its state; the rays of nodes that hold a lease are thicker and end
# in a crown. With more than `LABELLED_MAX` nodes there are no name labels; only the first `DRAWN_MAX` nodes
# are drawn.

RING_WIDTH, RING_HEIGHT = 560.0, 380.0
CENTRE = (RING_WIDTH / 2, RING_HEIGHT / 2)
LABELLED_MAX = 24
DRAWN_MAX = 120
RING_NAME_MAX = 18
ORDER = ("alive", "suspect", "silent", "lost", "left")


@dataclass(frozen=True, slots=True)
class Member:
    """A node in the ring."""

    node: str
    state: str
    leads: tuple[str, ...] = ()
    said: str = ""
    """What the tooltip and a screen reader say after name and state."""
    link: str = ""


def ring(members: Sequence[Member], name: str = "") -> Markup:
    """Return the ring of one view of the cluster; the caller draws one for each view that differs.

    With more than LABELLED_MAX nodes there are no name labels; only the first DRAWN_MAX nodes are drawn.
    """
    states = Counter(member.state for member in members)
    counted = ", ".join(f"{states[state]} {state}" for state in ORDER if states[state]) or "no nodes"
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
        viewBox=f"0 0 {RING_WIDTH:g} {RING_HEIGHT:g}",
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
    member, size = members[place], _size(members)
    x, y = _place(members, place)
    title = f"{member.node}: {member.state}" + (f", leads {', '.join(member.leads)}" if member.leads else "")
    title += f"; {member.said}" if member.said else ""
    look = LOOKS.get(member.state, LOOKS["silent"])
    kind = {"silent": "suspect", "alive": ""}.get(member.state, member.state)
    scale = size / 15
    sign = tag(
        "path",
        d=PATHS[look.icon],
        class_=f"sign {kind}",
        transform=f"translate({x - 8 * scale:.1f} {y - 8 * scale:.1f}) scale({scale:.2f})",
    )
    parts = [
        tag("title", title),
        tag("circle", cx=x, cy=y, r=size + 4, class_="halo"),
        tag("circle", cx=x, cy=y, r=size, class_=f"floret {kind}"),
        sign,
        _crown(x, y - size - 3) if member.leads else None,
        _label(members, place, x, y) if len(members) <= LABELLED_MAX else None,
    ]
    if member.link:
        return tag("a", parts, href=member.link, aria_label=title)
    return tag("g", parts)


def _crown(x: float, y: float) -> Markup:
    return tag("path", d=f"M{x - 8:.1f} {y:.1f}l-1.5-8 5 3.5 4.5-7 4.5 7 5-3.5-1.5 8z", class_="crown")


def _label(members: Sequence[Member], place: int, x: float, y: float) -> Markup:
    size, member = _size(members), members[place]
    side = x - CENTRE[0]
    name = member.node if len(member.node) <= RING_NAME_MAX else f"{member.node[: RING_NAME_MAX - 1]}…"
    if abs(side) < 60:
        below = y > CENTRE[1]
        at, down, anchor = x, y + (size + 17 if below else -size - (20 if member.leads else 8)), "middle"
    else:
        at, down, anchor = x + (size + 7) * (1 if side > 0 else -1), y + 4, "start" if side > 0 else "end"
    return tag("text", name, x=at, y=down, text_anchor=anchor)


# ---- workflow graph --------------------------------------------------------------------------------
#
# The tasks that one call led to, from left to right, and the critical path.

BOX, TALL, ACROSS, DOWN, MARGIN = 186.0, 46.0, 58.0, 16.0, 8.0
TASKS_MAX = 200
GRAPH_NAME_MAX = 22


@dataclass(frozen=True, slots=True)
class Step:
    """One task of the graph. `after`: the ids of the tasks that had to end before this one could start."""

    task_id: str
    name: str
    state: str
    after: tuple[str, ...] = ()
    said: str = ""
    link: str = ""


@dataclass(slots=True)
class Layout:
    """Column and row of each task in the grid."""

    columns: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


def workflow(steps: Sequence[Step], path: Sequence[str] = (), here: str = "") -> Markup:
    """Return the graph. `path`: the ids on the critical path, in order; `here`: the task whose page it is."""
    shown = list(steps[:TASKS_MAX])
    layout = _laid_out(shown)
    width = MARGIN * 2 + (max(layout.columns.values(), default=0) + 1) * (BOX + ACROSS) - ACROSS
    height = MARGIN * 2 + (max(layout.rows.values(), default=0) + 1) * (TALL + DOWN) - DOWN
    on_path = set(pairwise(path))
    edges = [
        _edge(layout, before, step.task_id, critical=(before, step.task_id) in on_path)
        for step in shown
        for before in step.after
        if before in layout.columns
    ]
    names = " then ".join(step.name for uuid in path for step in shown if step.task_id == uuid)
    title = f"Workflow of {len(shown)} tasks; critical path: {names or 'not known yet'}"
    return tag(
        "svg",
        tag("title", title),
        edges,
        [_box(layout, step, critical=step.task_id in path, here=step.task_id == here) for step in shown],
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        class_="workflow",
        role="group",
        aria_label=title,
    )


def _laid_out(steps: Sequence[Step]) -> Layout:
    """Place each task to the right of those that it waits for, and below earlier ones in its column."""
    known = {step.task_id: step for step in steps}
    layout = Layout()
    for step in steps:
        _column(step.task_id, known, layout.columns, frozenset())
    taken: dict[int, int] = {}
    for step in sorted(steps, key=lambda step: layout.columns[step.task_id]):
        column = layout.columns[step.task_id]
        rows_before = [layout.rows[earlier] for earlier in step.after if earlier in layout.rows]
        row = max(taken.get(column, 0), min(rows_before, default=0))
        layout.rows[step.task_id] = row
        taken[column] = row + 1
    return layout


def _column(task_id: str, known: Mapping[str, Step], columns: dict[str, int], above: frozenset[str]) -> int:
    if task_id not in columns and task_id not in above:
        before = [earlier for earlier in known[task_id].after if earlier in known]
        deeper = above | {task_id}
        columns[task_id] = max(
            (_column(earlier, known, columns, deeper) + 1 for earlier in before), default=0
        )
    return columns.get(task_id, 0)


def _corner(layout: Layout, task_id: str) -> tuple[float, float]:
    return (
        MARGIN + layout.columns[task_id] * (BOX + ACROSS),
        MARGIN + layout.rows[task_id] * (TALL + DOWN),
    )


def _edge(layout: Layout, before: str, after: str, *, critical: bool) -> Markup:
    x1, y1 = _corner(layout, before)
    x2, y2 = _corner(layout, after)
    x1, y1, y2 = x1 + BOX, y1 + TALL / 2, y2 + TALL / 2
    bend = (x2 - x1) / 2
    kind = " critical" if critical else ""
    line = f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2 - 8:.1f} {y2:.1f}"
    head = f"M{x2:.1f} {y2:.1f}l-9-4.5v9z"
    return tag("g", tag("path", d=line, class_=f"edge{kind}"), tag("path", d=head, class_=f"edge-head{kind}"))


def _box(layout: Layout, step: Step, *, critical: bool, here: bool) -> Markup:
    x, y = _corner(layout, step.task_id)
    looks = look(step.state)
    name = step.name if len(step.name) <= GRAPH_NAME_MAX else f"…{step.name[-GRAPH_NAME_MAX + 1 :]}"
    kinds = f"box {looks.tone}" + (" critical" if critical else "") + (" here" if here else "")
    title = f"{step.name}: {looks.word}" + (f", {step.said}" if step.said else "")
    title += ", on the critical path" if critical else ""
    parts = [
        tag("title", f"{title}; {step.task_id}"),
        tag("rect", x=x, y=y, width=BOX, height=TALL, rx=9, class_=kinds),
        tag(
            "path",
            d=PATHS[looks.icon],
            class_=f"sign {_SIGNS.get(looks.tone, 'left')}",
            transform=f"translate({x + 10:.1f} {y + 8:.1f}) scale(.9)",
        ),
        tag("text", name, x=x + 31, y=y + 20),
        tag(
            "text",
            f"{looks.word}{f' · {step.said}' if step.said else ''}",
            x=x + 31,
            y=y + 36,
            class_="soft-text",
        ),
    ]
    return tag("a", parts, href=step.link, aria_label=title) if step.link else tag("g", parts)


_SIGNS = {"good": "alive", "warn": "suspect", "bad": "lost"}


# ---- heat map --------------------------------------------------------------------------------------
#
# One row for each item, one cell for each step of time; darker is more.
#
# The scale has five logarithmic steps, so that one bad hour does not make all others pale. Each cell has
# its figure as a tooltip; the table next to the map shows it to everyone.

LEFT, TOP, ROW, HEAT_WIDTH = 150.0, 6.0, 22.0, 960.0
STEPS = 5
HEAT_NAME_MAX = 20


def heat_map(
    title: str,
    rows: Sequence[tuple[str, Sequence[float | None]]],
    columns: Sequence[str],
    form: Callable[[float], str],
    labels_max: int = 8,
) -> Markup:
    """Return the map. `columns` label the steps; below it are as many labels as there is room for.

    Each cell has its figure as a tooltip; the table next to the map shows it to everyone.
    """
    top = max((value for _, values in rows for value in values if value), default=0.0)
    height = TOP + ROW * len(rows) + 22
    wide = (HEAT_WIDTH - LEFT) / max(len(columns), 1)
    every = max(1, -(-len(columns) // labels_max))
    below = [
        tag(
            "text",
            column,
            x=LEFT + wide * (place + 0.5),
            y=height - 5,
            text_anchor="middle",
            class_="soft-text",
        )
        for place, column in enumerate(columns)
        if place % every == 0
    ]
    return tag(
        "svg",
        tag("title", title),
        [_row(place, name, values, columns, wide, top, form) for place, (name, values) in enumerate(rows)],
        below,
        viewBox=f"0 0 {HEAT_WIDTH:g} {height:g}",
        class_="drawing heat-map",
        role="img",
        aria_label=f"{title}; the most is {form(top)}",
    )


def shade(value: float | None, top: float) -> int:
    """Return the step of the scale, 0 for nothing, else 1 to 5.

    The scale is logarithmic, so that one bad hour does not make the rest pale.
    """
    if not value or top <= 0:
        return 0
    return max(1, min(STEPS, round(log1p(value / top * 20) / log1p(20) * STEPS)))


def _row(
    place: int,
    name: str,
    values: Sequence[float | None],
    columns: Sequence[str],
    wide: float,
    top: float,
    form: Callable[[float], str],
) -> Markup:
    y = TOP + ROW * place
    shown = name if len(name) <= HEAT_NAME_MAX else f"{name[: HEAT_NAME_MAX - 1]}…"
    cells = [
        tag(
            "rect",
            tag("title", f"{name}, {column}: {'–' if value is None else form(value)}"),
            x=LEFT + wide * number,
            y=y,
            width=wide,
            height=ROW,
            rx=3,
            class_=f"heat h{shade(value, top)}",
        )
        for number, (column, value) in enumerate(zip(columns, values, strict=True))
    ]
    label = tag("text", tag("title", name), shown, x=LEFT - 10, y=y + ROW / 2 + 4, text_anchor="end")
    return tag("g", label, cells)


# ---- ticks -----------------------------------------------------------------------------------------
#
# Where in a period something changed, as a strip above the time slider.
#
# A worse change has a higher tick, so that colour alone says nothing; where several fall on one place, the
# worst is drawn. The list next to the strip names all of them.

PLACES = 180
TICKS_HEIGHT = 20.0
TICKS_WIDTH = 4.0  # of a place
TONES = {"lost": ("bad", 1.0), "suspect": ("warn", 0.8), "left": ("idle", 0.6)}
USUAL = ("good", 0.45)
LEADS = ("leads", 0.45)


def ticks(
    happened: Sequence[Happening], since: float, until: float, gap: tuple[float, float] | None = None
) -> Markup:
    """Return the strip. `gap`: the part of the period for which there are no data.

    A worse change has a higher tick, so that colour alone says nothing; where several fall on one place, the
    worst is drawn. The list next to the strip names all of them.
    """
    length = max(until - since, 1.0)
    places: dict[int, list[Happening]] = {}
    for change in happened:
        place = int((change.at - since) / length * PLACES)
        places.setdefault(min(PLACES - 1, max(0, place)), []).append(change)
    return tag(
        "svg",
        None if gap is None else _gap(*((moment - since) / length for moment in gap)),
        [_tick(place, there) for place, there in sorted(places.items())],
        viewBox=f"0 0 {PLACES * TICKS_WIDTH:g} {TICKS_HEIGHT:g}",
        preserveAspectRatio="none",
        class_="ticks",
        aria_hidden="true",
    )


def _gap(first: float, last: float) -> Markup:
    whole = PLACES * TICKS_WIDTH
    return tag(
        "rect",
        tag("title", "no data"),
        x=f"{first * whole:.1f}",
        y=0,
        width=f"{(last - first) * whole:.1f}",
        height=TICKS_HEIGHT,
        class_="tick gap",
    )


def _tick(place: int, there: Sequence[Happening]) -> Markup:
    tone, share = max((_tone(change) for change in there), key=lambda tone_share: tone_share[1])
    high = TICKS_HEIGHT * share
    more = f" and {len(there) - 1} more" if len(there) > 1 else ""
    return tag(
        "rect",
        tag("title", f"{instant(there[0].at)}: {there[0].subject[:80]} {there[0].kind}{more}"),
        x=place * TICKS_WIDTH + 0.75,
        y=TICKS_HEIGHT - high,
        width=TICKS_WIDTH - 1.5,
        height=high,
        class_=f"tick {tone}",
    )


def _tone(change: Happening) -> tuple[str, float]:
    return TONES.get(change.kind) or (LEADS if change.kind in ("lease", "elected") else USUAL)
