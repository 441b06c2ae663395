"""Heat map: one row for each thing, one cell for each step of time; darker is more.

The steps of the scale are five, by equal parts of the logarithm, so that one bad hour does not
pale all others. Each cell says its figure to a pointer; the table beside it says it to everybody.
"""

from collections.abc import Callable, Sequence
from math import log1p

from umbel.history.markup import Markup, tag

LEFT, TOP, ROW, WIDTH = 150.0, 6.0, 22.0, 960.0
STEPS = 5
NAME_MAX = 20


def heat_map(
    title: str,
    rows: Sequence[tuple[str, Sequence[float | None]]],
    columns: Sequence[str],
    form: Callable[[float], str],
    labels_max: int = 8,
) -> Markup:
    """`columns` name the steps; as many of them are written below as there is room for."""
    top = max((value for _, values in rows for value in values if value), default=0.0)
    height = TOP + ROW * len(rows) + 22
    wide = (WIDTH - LEFT) / max(len(columns), 1)
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
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        class_="drawing heat-map",
        role="img",
        aria_label=f"{title}; the most is {form(top)}",
    )


def shade(value: float | None, top: float) -> int:
    """0 for nothing, else 1 to 5."""
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
    shown = name if len(name) <= NAME_MAX else f"{name[: NAME_MAX - 1]}…"
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
