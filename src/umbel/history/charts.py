"""Charts: plain SVG, drawn here.

A report is opened years later, from an attachment, on paper, by a screen reader: so a chart is a
drawing in the page, with its title and description, and needs no script. Interactive plots belong to
the dashboard. Each mark carries a tooltip; the number of marks is bounded by the caller of the
figures (`figures.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from umbel.history.markup import Markup, joined, tag
from umbel.history.scales import (
    count,
    duration,
    duration_marks,
    instant,
    logarithmic_marks,
    signed,
    time_labels,
    time_marks,
    value_marks,
)

WIDTH, HEIGHT = 960.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 82.0, 14.0, 12.0, 34.0
LANE_HEIGHT, LANE_LEFT = 24.0, 208.0
LABEL_MAX = 27
LOG_ABOVE = 20.0
"""From this ratio of the largest to the smallest duration on, an even scale would hide the small ones."""

BLUE, VERMILION, ORANGE, GREEN, PURPLE, GREY, LIGHT = (
    *("#0072b2", "#d55e00", "#e69f00", "#009e73", "#a0508a"),
    *("#6b7280", "#9ecae9"),
)
"""Colours that people with any kind of colour vision can distinguish; also different in grey."""


@dataclass(frozen=True)
class Series:
    name: str
    colour: str
    values: Sequence[float | None]
    width: float = 2.0


@dataclass(frozen=True)
class Span:
    """Something that lasted, on a lane; a moment where start and end are the same."""

    start: float
    end: float
    colour: str
    title: str


@dataclass(frozen=True)
class Frame:
    """Where values stand on the paper."""

    start: float
    end: float
    height: float = HEIGHT
    left: float = LEFT

    def x(self, at: float) -> float:
        share = (at - self.start) / max(self.end - self.start, 1e-9)
        return self.left + min(max(share, 0.0), 1.0) * (WIDTH - self.left - RIGHT)

    @property
    def floor(self) -> float:
        return self.height - BOTTOM


def stacked_bars(
    title: str, times: Sequence[float], step_s: float, series: Sequence[Series], unit: str
) -> Markup:
    """Counts per time step, one upon the other."""
    frame = Frame(times[0], times[-1] + step_s)
    totals = [sum(one.values[place] or 0 for one in series) for place in range(len(times))]
    marks = _whole_marks(max(totals))

    def y(value: float) -> float:
        return frame.floor - value / marks[-1] * (frame.floor - TOP)

    bars = []
    for place, at in enumerate(times):
        left, right = frame.x(at), frame.x(at + step_s)
        below, parts = 0.0, []
        for one in series:
            value = one.values[place] or 0
            if value:
                top, bottom = y(below + value), y(below)
                wide = max(right - left - 0.6, 0.8)
                parts.append(tag("rect", x=left, y=top, width=wide, height=bottom - top, fill=one.colour))
                below += value
        said = ", ".join(f"{count(one.values[place] or 0)} {one.name}" for one in series if one.values[place])
        bars.append(tag("g", tag("title", f"{instant(at)}: {said}"), parts) if parts else "")
    axes = joined(_value_axis(frame, marks, y, count, unit), _time_axis(frame))
    return _drawing(title, f"Stacked bars over time, {unit}.", frame.height, joined(axes, bars), series)


def _whole_marks(top: float) -> list[float]:
    """Of what is counted there is no half."""
    return [mark for mark in value_marks(max(top, 1)) if mark == int(mark)]


def lines(
    title: str,
    times: Sequence[float],
    step_s: float,
    series: Sequence[Series],
    form: Callable[[float | None], str] = duration,
) -> Markup:
    """Durations over time, or numbers (`form`); where nothing was measured the line is broken."""
    frame = Frame(times[0], times[-1] + step_s)
    known = [value for one in series for value in one.values if value is not None]
    positive = [value for value in known if value > 0] or [1e-3]
    low, top = min(positive), max(positive)
    y: Callable[[float], float]
    if form is duration and top / low > LOG_ABOVE:
        marks, unit = logarithmic_marks(low, top), "logarithmic"
        depth = log(marks[-1] / marks[0])

        def y(value: float) -> float:
            return frame.floor - log(max(value, marks[0]) / marks[0]) / depth * (frame.floor - TOP)
    else:
        marks, unit = duration_marks(top)[0] if form is duration else _whole_marks(top), ""

        def y(value: float) -> float:
            return frame.floor - value / marks[-1] * (frame.floor - TOP)

    drawn = [_line(frame, times, step_s, one, y) for one in reversed(series)]
    axes = joined(_value_axis(frame, marks, y, form, unit), _time_axis(frame))
    hover = _hover(frame, times, step_s, series, form)
    said = "Lines over time" + (", logarithmic scale." if unit else ".")
    return _drawing(title, said, frame.height, joined(axes, drawn, hover), series)


def lanes(
    title: str, rows: Sequence[tuple[str, Sequence[Span]]], start: float, end: float, legend: Sequence[Series]
) -> Markup:
    """One lane a row: who was there when."""
    frame = Frame(start, end, TOP + LANE_HEIGHT * len(rows) + BOTTOM, LANE_LEFT)
    drawn: list[Markup] = []
    for place, (label, spans) in enumerate(rows):
        top = TOP + place * LANE_HEIGHT
        middle = top + LANE_HEIGHT / 2
        drawn.append(tag("line", x1=frame.left, y1=middle, x2=WIDTH - RIGHT, y2=middle, class_="grid"))
        drawn.append(_lane_label(frame, middle, label))
        drawn += [_span(frame, middle, span) for span in spans]
    return _drawing(
        title, "One lane each, over time.", frame.height, joined(_time_axis(frame), drawn), legend
    )


def ranges(title: str, rows: Sequence[tuple[str, float, float, float]]) -> Markup:
    """For each row a low, a middle and a high value in seconds, around zero."""
    reach = max(max(abs(low), abs(high)) for _, low, _, high in rows) or 1e-3
    marks, _unit = duration_marks(reach)
    both = sorted({-mark for mark in marks} | set(marks))
    both = both[:: 2 if len(both) > 9 else 1] if 0.0 in both[:: 2 if len(both) > 9 else 1] else both
    frame = Frame(-marks[-1], marks[-1], TOP + LANE_HEIGHT * len(rows) + BOTTOM, LANE_LEFT)
    drawn: list[Markup] = []
    for mark in both:
        x, at_zero = frame.x(mark), abs(mark) < 1e-12
        drawn.append(tag("line", x1=x, y1=TOP, x2=x, y2=frame.floor, class_="axis" if at_zero else "grid"))
        said = "0" if at_zero else signed(mark)
        anchor = "end" if x > WIDTH - 40 else "middle"
        drawn.append(tag("text", said, x=x, y=frame.floor + 18, text_anchor=anchor))
    for place, (label, low, middle, high) in enumerate(rows):
        y = TOP + (place + 0.5) * LANE_HEIGHT
        told = tag("title", f"{label}: middle {signed(middle)}, 90 % within {signed(low)} to {signed(high)}")
        bar = tag(
            "line",
            x1=frame.x(low),
            y1=y,
            x2=frame.x(high),
            y2=y,
            stroke=BLUE,
            stroke_width=4,
            stroke_opacity="0.45",
        )
        drawn.append(_lane_label(frame, y, label))
        drawn.append(tag("g", told, bar, tag("circle", cx=frame.x(middle), cy=y, r=4.5, fill=BLUE)))
    return _drawing(
        title, "One row each: a dot for the middle, a bar for nine tenths.", frame.height, joined(drawn), ()
    )


def _drawing(
    title: str, description: str, height: float, content: Markup, legend: Sequence[Series]
) -> Markup:
    keys = [
        tag("li", tag("span", "", class_="key", style=f"background:{one.colour}"), one.name) for one in legend
    ]
    drawing = tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        content,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=f"{title}. {description}",
    )
    return joined(tag("ul", keys, class_="legend") if keys else "", drawing)


def _value_axis(
    frame: Frame, marks: Sequence[float], y: Callable[[float], float], form: Callable[[float], str], unit: str
) -> Markup:
    drawn = [
        joined(
            tag("line", x1=frame.left, y1=y(mark), x2=WIDTH - RIGHT, y2=y(mark), class_="grid"),
            tag("text", form(mark) if mark else "0", x=frame.left - 8, y=y(mark) + 4, text_anchor="end"),
        )
        for mark in marks
    ]
    middle = (TOP + frame.floor) / 2
    said = tag(
        "text",
        unit,
        x=12,
        y=middle,
        text_anchor="middle",
        transform=f"rotate(-90 12 {middle:g})",
        class_="unit",
    )
    return joined(drawn, said if unit else "")


def _time_axis(frame: Frame) -> Markup:
    marks = time_marks(frame.start, frame.end)
    drawn: list[Markup] = [
        tag("line", x1=frame.left, y1=frame.floor, x2=WIDTH - RIGHT, y2=frame.floor, class_="axis")
    ]
    for mark, label in zip(marks, time_labels(marks), strict=True):
        x = frame.x(mark)
        drawn.append(tag("line", x1=x, y1=frame.floor, x2=x, y2=frame.floor + 5, class_="axis"))
        anchor = "end" if x > WIDTH - 40 else "middle"
        drawn.append(tag("text", label, x=min(x, WIDTH - 2), y=frame.floor + 20, text_anchor=anchor))
    return joined(drawn)


def _line(
    frame: Frame, times: Sequence[float], step_s: float, one: Series, y: Callable[[float], float]
) -> Markup:
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(times, one.values, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((frame.x(at + step_s / 2), y(value)))
    drawn = []
    for piece in filter(None, pieces):
        if len(piece) == 1:
            drawn.append(tag("circle", cx=piece[0][0], cy=piece[0][1], r=2.5, fill=one.colour))
        else:
            points = " ".join(f"{x:.1f},{height:.1f}" for x, height in piece)
            drawn.append(
                tag(
                    "polyline",
                    points=points,
                    fill="none",
                    stroke=one.colour,
                    stroke_width=one.width,
                    stroke_linejoin="round",
                )
            )
    return joined(drawn)


def _hover(
    frame: Frame,
    times: Sequence[float],
    step_s: float,
    series: Sequence[Series],
    form: Callable[[float | None], str],
) -> Markup:
    """Invisible areas that say the figures of one time step."""
    drawn = []
    for place, at in enumerate(times):
        said = ", ".join(
            f"{one.name} {form(one.values[place])}" for one in series if one.values[place] is not None
        )
        if said:
            left, right = frame.x(at), frame.x(at + step_s)
            area = tag(
                "rect",
                x=left,
                y=TOP,
                width=right - left,
                height=frame.floor - TOP,
                fill="none",
                pointer_events="all",
            )
            drawn.append(tag("g", tag("title", f"{instant(at)}: {said}"), area))
    return joined(drawn)


def _lane_label(frame: Frame, middle: float, label: str) -> Markup:
    shown = label if len(label) <= LABEL_MAX else label[: LABEL_MAX - 1] + "…"
    return tag("text", tag("title", label), shown, x=frame.left - 10, y=middle + 4, text_anchor="end")


def _span(frame: Frame, middle: float, span: Span) -> Markup:
    left, right = frame.x(span.start), frame.x(span.end)
    if span.start == span.end:
        mark = tag("circle", cx=left, cy=middle, r=5, fill=span.colour, class_="moment")
    else:
        mark = tag(
            "rect", x=left, y=middle - 7, width=max(right - left, 1.5), height=14, rx=2, fill=span.colour
        )
    return tag("g", tag("title", span.title), mark)
