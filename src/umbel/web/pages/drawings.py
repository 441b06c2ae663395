"""Drawings as SVG, made of plain data by pure functions; every text is escaped.

The ring shows the members of a cluster around their broker. The workflow graph shows the tasks that one call
led to, with its critical path. The heat map has one row per item and one cell per step of time. The ticks
above the time slider show where something changed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import cos, log1p, pi, sin

from umbel.history.markup import Markup, circle, drawing, instant, rect, shortened, tag, text
from umbel.monitor.records import Happening
from umbel.web.pages.labels import LOOKS, PATHS, look

# ---- ring ------------------------------------------------------------------------------------------

RING_WIDTH, RING_HEIGHT = 560.0, 380.0
CENTRE_X, CENTRE_Y = RING_WIDTH / 2, RING_HEIGHT / 2
LARGE_MAX = 12  # with more nodes their circles are smaller
LABELLED_MAX = 24  # with more nodes there are no names
DRAWN_MAX = 120
RING_NAME_MAX = 18
ORDER = ("alive", "suspect", "silent", "lost", "left")


@dataclass(frozen=True, slots=True)
class Member:
    """A node in the ring. `note` is added to its name and state in the tooltip and for screen readers."""

    node: str
    state: str
    leads: tuple[str, ...] = ()
    note: str = ""
    link: str = ""


def ring(members: Sequence[Member], name: str = "") -> Markup:
    """Return the ring of one view of the cluster; the caller draws a ring for each view that differs.

    Each node is a circle with the icon of its state. The rays of nodes that hold a lease are thicker and end
    in a crown. Only the first DRAWN_MAX nodes are drawn.
    """
    states = Counter(member.state for member in members)
    counts = ", ".join(f"{states[state]} {state}" for state in ORDER if states[state]) or "no nodes"
    drawn = members[:DRAWN_MAX]
    places = _places(len(drawn))
    reach_x, reach_y = _reach(len(drawn))
    return drawing(
        RING_WIDTH,
        RING_HEIGHT,
        f"Members{f' as {name} sees them' if name else ''}: {counts}",
        tag("ellipse", cx=CENTRE_X, cy=CENTRE_Y, rx=reach_x, ry=reach_y, class_="ring-line"),
        [_ray(member, *place) for member, place in zip(drawn, places, strict=True)],
        _hub(states, len(members)),
        [_floret(member, *place, len(drawn)) for member, place in zip(drawn, places, strict=True)],
        class_="drawing ring",
        role="group",
    )


def _reach(count: int) -> tuple[float, float]:
    return (176.0, 130.0) if count <= LABELLED_MAX else (250.0, 165.0)


def _places(count: int) -> list[tuple[float, float]]:
    reach_x, reach_y = _reach(count)
    angles = [2 * pi * place / count - pi / 2 for place in range(count)]
    return [(CENTRE_X + reach_x * cos(angle), CENTRE_Y + reach_y * sin(angle)) for angle in angles]


def _ray(member: Member, x: float, y: float) -> Markup:
    bend = f"{(x + CENTRE_X) / 2:.1f} {(y + CENTRE_Y) / 2 + 14:.1f}"
    path = f"M{CENTRE_X:.1f} {CENTRE_Y:.1f}Q{bend} {x:.1f} {y:.1f}"
    return tag("path", d=path, class_="ray leads" if member.leads else "ray")


def _hub(states: Counter[str], total: int) -> Markup:
    return tag(
        "g",
        circle(CENTRE_X, CENTRE_Y, 46, class_="box"),
        text(f"{states['alive']} of {total}", CENTRE_X, CENTRE_Y + 1, "middle", class_="big"),
        text("alive", CENTRE_X, CENTRE_Y + 20, "middle", class_="soft-text"),
    )


def _floret(member: Member, x: float, y: float, count: int) -> Markup:
    size = 17.0 if count <= LARGE_MAX else 13.0 if count <= LABELLED_MAX else 8.0
    title = f"{member.node}: {member.state}" + (f", leads {', '.join(member.leads)}" if member.leads else "")
    title += f"; {member.note}" if member.note else ""
    kind = {"silent": "suspect", "alive": ""}.get(member.state, member.state)
    icon, scale = LOOKS.get(member.state, LOOKS["silent"]).icon, size / 15
    parts = [
        tag("title", title),
        circle(x, y, size + 4, class_="halo"),
        circle(x, y, size, class_=f"floret {kind}"),
        _sign(icon, kind, x - 8 * scale, y - 8 * scale, scale),
        _crown(x, y - size - 3) if member.leads else None,
        _label(member, x, y, size) if count <= LABELLED_MAX else None,
    ]
    return tag("a", parts, href=member.link, aria_label=title) if member.link else tag("g", parts)


def _sign(icon: str, kind: str, x: float, y: float, scale: float) -> Markup:
    move = f"translate({x:.1f} {y:.1f}) scale({scale:.2f})"
    return tag("path", d=PATHS[icon], class_=f"sign {kind}", transform=move)


def _crown(x: float, y: float) -> Markup:
    return tag("path", d=f"M{x - 8:.1f} {y:.1f}l-1.5-8 5 3.5 4.5-7 4.5 7 5-3.5-1.5 8z", class_="crown")


def _label(member: Member, x: float, y: float, size: float) -> Markup:
    """Return the name of a node: outside of the ring, or above and below it near the middle."""
    name, side = shortened(member.node, RING_NAME_MAX), x - CENTRE_X
    if abs(side) < 60:
        below = y > CENTRE_Y
        return text(name, x, y + (size + 17 if below else -size - (20 if member.leads else 8)), "middle")
    return text(name, x + (size + 7) * (1 if side > 0 else -1), y + 4, "start" if side > 0 else "end")


# ---- workflow graph --------------------------------------------------------------------------------

BOX, TALL, ACROSS, DOWN, MARGIN = 186.0, 46.0, 58.0, 16.0, 8.0
TASKS_MAX = 200
GRAPH_NAME_MAX = 22
_SIGNS = {"good": "alive", "warn": "suspect", "bad": "lost"}


@dataclass(frozen=True, slots=True)
class Step:
    """A task of the graph. `after`: the ids of the tasks that had to end before this task could start."""

    task_id: str
    name: str
    state: str
    after: tuple[str, ...] = ()
    note: str = ""
    link: str = ""


@dataclass(slots=True)
class Layout:
    """The column and row of each task in the grid."""

    columns: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def corner(self, task_id: str) -> tuple[float, float]:
        """Return the top left corner of a task's box."""
        column, row = self.columns[task_id], self.rows[task_id]
        return MARGIN + column * (BOX + ACROSS), MARGIN + row * (TALL + DOWN)


def workflow(steps: Sequence[Step], path: Sequence[str] = (), here: str = "") -> Markup:
    """Return the graph. `path`: the ids on the critical path, in order; `here`: the task whose page it is."""
    drawn = list(steps[:TASKS_MAX])
    layout = _laid_out(drawn)
    width = MARGIN * 2 + (max(layout.columns.values(), default=0) + 1) * (BOX + ACROSS) - ACROSS
    height = MARGIN * 2 + (max(layout.rows.values(), default=0) + 1) * (TALL + DOWN) - DOWN
    on_path = set(pairwise(path))
    edges = [
        _edge(layout, before, step.task_id, critical=(before, step.task_id) in on_path)
        for step in drawn
        for before in step.after
        if before in layout.columns
    ]
    names = " then ".join(step.name for task_id in path for step in drawn if step.task_id == task_id)
    return drawing(
        width,
        height,
        f"Workflow of {len(drawn)} tasks; critical path: {names or 'not known yet'}",
        edges,
        [_box(layout, step, critical=step.task_id in path, here=step.task_id == here) for step in drawn],
        width=width,
        height=height,
        class_="workflow",
        role="group",
    )


def _laid_out(steps: Sequence[Step]) -> Layout:
    """Place each task to the right of the tasks that it waits for, and below earlier tasks in its column."""
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
    """Set the column of a task and of those before it; `above` ends a loop, which forged events may have."""
    if task_id not in columns and task_id not in above:
        before = [earlier for earlier in known[task_id].after if earlier in known]
        deeper = above | {task_id}
        columns[task_id] = max(
            (_column(earlier, known, columns, deeper) + 1 for earlier in before), default=0
        )
    return columns.get(task_id, 0)


def _edge(layout: Layout, before: str, after: str, *, critical: bool) -> Markup:
    (x1, y1), (x2, y2) = layout.corner(before), layout.corner(after)
    x1, y1, y2 = x1 + BOX, y1 + TALL / 2, y2 + TALL / 2
    bend = (x2 - x1) / 2
    kind = " critical" if critical else ""
    curve = f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2 - 8:.1f} {y2:.1f}"
    head = f"M{x2:.1f} {y2:.1f}l-9-4.5v9z"
    return tag(
        "g", tag("path", d=curve, class_=f"edge{kind}"), tag("path", d=head, class_=f"edge-head{kind}")
    )


def _box(layout: Layout, step: Step, *, critical: bool, here: bool) -> Markup:
    x, y = layout.corner(step.task_id)
    looks = look(step.state)
    name = step.name if len(step.name) <= GRAPH_NAME_MAX else f"…{step.name[-GRAPH_NAME_MAX + 1 :]}"
    kinds = f"box {looks.tone}" + (" critical" if critical else "") + (" here" if here else "")
    title = f"{step.name}: {looks.word}" + (f", {step.note}" if step.note else "")
    title += ", on the critical path" if critical else ""
    parts = [
        tag("title", f"{title}; {step.task_id}"),
        rect(x, y, BOX, TALL, rx=9, class_=kinds),
        _sign(looks.icon, _SIGNS.get(looks.tone, "left"), x + 10, y + 8, 0.9),
        text(name, x + 31, y + 20),
        text(f"{looks.word}{f' · {step.note}' if step.note else ''}", x + 31, y + 36, class_="soft-text"),
    ]
    return tag("a", parts, href=step.link, aria_label=title) if step.link else tag("g", parts)


# ---- heat map --------------------------------------------------------------------------------------

LEFT, TOP, ROW, HEAT_WIDTH = 150.0, 6.0, 22.0, 960.0
SHADES = 5
HEAT_NAME_MAX = 20


def heat_map(
    title: str,
    rows: Sequence[tuple[str, Sequence[float | None]]],
    columns: Sequence[str],
    form: Callable[[float], str],
    labels_max: int = 8,
) -> Markup:
    """Return the map. `columns` label the steps; as many labels are below it as there is room for.

    Each cell has its figure as a tooltip; the table next to the map shows the figures to everyone.
    """
    top = max((value for _, values in rows for value in values if value), default=0.0)
    height = TOP + ROW * len(rows) + 22
    wide = (HEAT_WIDTH - LEFT) / max(len(columns), 1)
    every = max(1, -(-len(columns) // labels_max))
    drawn = []
    for place, (name, values) in enumerate(rows):
        y = TOP + ROW * place
        label = (tag("title", name), shortened(name, HEAT_NAME_MAX))
        cells = [
            rect(
                LEFT + wide * number,
                y,
                wide,
                ROW,
                tag("title", f"{name}, {column}: {'–' if value is None else form(value)}"),
                rx=3,
                class_=f"heat h{shade(value, top)}",
            )
            for number, (column, value) in enumerate(zip(columns, values, strict=True))
        ]
        drawn.append(tag("g", text(label, LEFT - 10, y + ROW / 2 + 4, "end"), cells))
    below = [
        text(column, LEFT + wide * (place + 0.5), height - 5, "middle", class_="soft-text")
        for place, column in enumerate(columns)
        if place % every == 0
    ]
    most = f"{title}; the most is {form(top)}"
    return drawing(HEAT_WIDTH, height, title, drawn, below, label=most, class_="drawing heat-map")


def shade(value: float | None, top: float) -> int:
    """Return the shade of a value, 0 for nothing, else 1 to 5.

    The scale is logarithmic, so that one bad hour does not make the other hours pale.
    """
    if not value or top <= 0:
        return 0
    return max(1, min(SHADES, round(log1p(value / top * 20) / log1p(20) * SHADES)))


# ---- ticks -----------------------------------------------------------------------------------------

PLACES = 180
TICKS_HEIGHT = 20.0
TICK_WIDTH = 4.0
TONES = {
    "lost": ("bad", 1.0),
    "suspect": ("warn", 0.8),
    "left": ("idle", 0.6),
    "lease": ("leads", 0.45),
    "elected": ("leads", 0.45),
}
"""The tone and the height of each kind of change, so that colour alone says nothing."""
USUAL = ("good", 0.45)


def ticks(
    happened: Sequence[Happening], since: float, until: float, gap: tuple[float, float] | None = None
) -> Markup:
    """Return the strip. `gap`: the part of the period for which there are no data.

    Where several changes are at one place, the worst is drawn; the list next to the strip names all changes.
    """
    length, width = max(until - since, 1.0), PLACES * TICK_WIDTH
    places: dict[int, list[Happening]] = {}
    for change in happened:
        place = int((change.at - since) / length * PLACES)
        places.setdefault(min(PLACES - 1, max(0, place)), []).append(change)
    drawn = [_tick(place, there) for place, there in sorted(places.items())]
    if gap is not None:
        first, last = ((moment - since) / length * width for moment in gap)
        unknown = rect(first, 0, last - first, TICKS_HEIGHT, tag("title", "no data"), class_="tick gap")
        drawn.insert(0, unknown)
    return tag(
        "svg",
        drawn,
        viewBox=f"0 0 {width:g} {TICKS_HEIGHT:g}",
        preserveAspectRatio="none",
        class_="ticks",
        aria_hidden="true",
    )


def _tick(place: int, there: Sequence[Happening]) -> Markup:
    tone, share = max((TONES.get(change.kind, USUAL) for change in there), key=lambda found: found[1])
    high = TICKS_HEIGHT * share
    more = f" and {len(there) - 1} more" if len(there) > 1 else ""
    title = f"{instant(there[0].at)}: {there[0].subject[:80]} {there[0].kind}{more}"
    x, wide = place * TICK_WIDTH + 0.75, TICK_WIDTH - 1.5
    return rect(x, TICKS_HEIGHT - high, wide, high, tag("title", title), class_=f"tick {tone}")
