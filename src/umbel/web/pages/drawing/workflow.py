"""Workflow graph: the tasks that one call led to, from left to right, and the path that took the time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from umbel.history.markup import Markup, tag
from umbel.web.pages.drawing.icons import PATHS, look

BOX, TALL, ACROSS, DOWN, MARGIN = 186.0, 46.0, 58.0, 16.0, 8.0
TASKS_MAX = 200
NAME_MAX = 22


@dataclass(frozen=True, slots=True)
class Step:
    """`after`: the ids of the tasks that had to end before this one could start."""

    task_id: str
    name: str
    state: str
    after: tuple[str, ...] = ()
    said: str = ""
    link: str = ""


@dataclass(slots=True)
class Layout:
    columns: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


def workflow(steps: Sequence[Step], path: Sequence[str] = (), here: str = "") -> Markup:
    """`path`: the ids on the critical path, first to last; `here`: the one whose page it is."""
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
    names = " then ".join(step.name for one in path for step in shown if step.task_id == one)
    said = f"Workflow of {len(shown)} tasks; critical path: {names or 'not known yet'}"
    return tag(
        "svg",
        tag("title", said),
        edges,
        [_box(layout, step, critical=step.task_id in path, here=step.task_id == here) for step in shown],
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        class_="workflow",
        role="group",
        aria_label=said,
    )


def _laid_out(steps: Sequence[Step]) -> Layout:
    """A task stands right of all that it waits for, and below those that came before it there."""
    known = {step.task_id: step for step in steps}
    layout = Layout()
    for step in steps:
        _column(step.task_id, known, layout.columns, frozenset())
    taken: dict[int, int] = {}
    for step in sorted(steps, key=lambda one: layout.columns[one.task_id]):
        column = layout.columns[step.task_id]
        beside = [layout.rows[one] for one in step.after if one in layout.rows]
        row = max(taken.get(column, 0), min(beside, default=0))
        layout.rows[step.task_id] = row
        taken[column] = row + 1
    return layout


def _column(task_id: str, known: Mapping[str, Step], columns: dict[str, int], above: frozenset[str]) -> int:
    if task_id not in columns and task_id not in above:
        before = [one for one in known[task_id].after if one in known]
        deeper = above | {task_id}
        columns[task_id] = max((_column(one, known, columns, deeper) + 1 for one in before), default=0)
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
    name = step.name if len(step.name) <= NAME_MAX else f"…{step.name[-NAME_MAX + 1 :]}"
    kinds = f"box {looks.tone}" + (" critical" if critical else "") + (" here" if here else "")
    told = f"{step.name}: {looks.word}" + (f", {step.said}" if step.said else "")
    told += ", on the critical path" if critical else ""
    parts = [
        tag("title", f"{told}; {step.task_id}"),
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
    return tag("a", parts, href=step.link, aria_label=told) if step.link else tag("g", parts)


_SIGNS = {"good": "alive", "warn": "suspect", "bad": "lost"}
