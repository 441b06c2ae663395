"""Charts of the report: plain SVG with a title, a description and tooltips.

A report may be opened years later, from an attachment, on paper, or with a screen reader, so its charts are
drawings in the page that need no script. The interactive charts of the dashboard are drawn by its scripts.
The number of elements is bounded by the queries behind the figures (`figures.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log, log10

from umbel.history.markup import (
    DAY,
    HOUR,
    MINUTE,
    Content,
    Markup,
    circle,
    count,
    drawing,
    duration,
    instant,
    joined,
    line,
    moment,
    rect,
    shortened,
    signed,
    tag,
    text,
    titled,
    unit_of,
)

# ---- scales ----------------------------------------------------------------------------------------

TIME_STEPS_S = (
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE),
    *(HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR),
    *(DAY, 2 * DAY, 7 * DAY, 14 * DAY, 30 * DAY, 90 * DAY, 365 * DAY),
)
DURATIONS_S = (
    *(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0),
    *(MINUTE, 10 * MINUTE, HOUR, 10 * HOUR, 4 * DAY, 40 * DAY, 400 * DAY, 4000 * DAY),
)


def time_step(span_s: float, steps_max: int) -> float:
    """Return the smallest step of a clock that divides the span into at most so many steps."""
    fitting = (step for step in TIME_STEPS_S if span_s / step <= steps_max)
    return next(fitting, ceil(span_s / steps_max / (365 * DAY)) * 365 * DAY)


def _time_marks(start: float, end: float, marks_max: int = 8) -> list[float]:
    """Return round times for an axis from start to end."""
    step = time_step(max(end - start, 0.1), marks_max)
    first = ceil(start / step) * step
    return [first + number * step for number in range(floor((end - first) / step + 1e-9) + 1)]


def _time_labels(marks: Sequence[float]) -> list[str]:
    """Return labels that are as short as the distance of the marks allows."""
    step = marks[1] - marks[0] if len(marks) > 1 else MINUTE
    form = "%d %b %Y" if step >= DAY else "%H:%M" if step >= MINUTE else "%H:%M:%S"
    tenths = [f".{round(tick * 10) % 10}" if step < 1 else "" for tick in marks]
    times = [moment(tick) for tick in marks]
    return ["" if at is None else at.strftime(form) + tenth for at, tenth in zip(times, tenths, strict=True)]


def _value_marks(top: float, marks_max: int = 5) -> list[float]:
    """Return marks from 0 to at least `top` in steps of 1, 2 or 5."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / marks_max
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(ceil(top / step - 1e-9) + 1)]


def _duration_marks(top_s: float) -> list[float]:
    """Return marks in seconds that are round in the unit that suits them."""
    scale, _ = unit_of(top_s)
    return [tick * scale for tick in _value_marks(top_s / scale)]


def _logarithmic_marks(low_s: float, top_s: float) -> list[float]:
    """Return the usual durations around a range: 1 ms, 10 ms, …, 1 min, 10 min, 1 h, …"""
    below = [tick for tick in DURATIONS_S if tick <= low_s] or [DURATIONS_S[0]]
    above = [tick for tick in DURATIONS_S if tick >= top_s] or [DURATIONS_S[-1]]
    return [tick for tick in DURATIONS_S if below[-1] <= tick <= above[0]]


def _whole_marks(top: float) -> list[float]:
    """Return marks that are whole numbers, for counts."""
    return [tick for tick in _value_marks(max(top, 1)) if tick == int(tick)]


# ---- charts ----------------------------------------------------------------------------------------

WIDTH, HEIGHT = 960.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 82.0, 14.0, 12.0, 34.0
LANE_HEIGHT, LANE_LEFT = 24.0, 208.0
LABEL_MAX = 27
LOG_ABOVE = 20.0
"""Above this ratio of the largest to the smallest duration the scale is logarithmic."""

BLUE, VERMILION, ORANGE, GREEN, PURPLE, GREY, LIGHT = (
    *("#0072b2", "#d55e00", "#e69f00", "#009e73", "#a0508a"),
    *("#6b7280", "#9ecae9"),
)
"""Colours that people with any kind of colour vision can distinguish, also in print without colours."""


@dataclass(frozen=True)
class Series:
    """A named, coloured line or part of bars; one value per time step, None where nothing was measured."""

    name: str
    colour: str
    values: Sequence[float | None]
    width: float = 2.0


@dataclass(frozen=True)
class Span:
    """A period on a lane; a moment if start and end are the same."""

    start: float
    end: float
    colour: str
    title: str


@dataclass(frozen=True)
class Frame:
    """The drawing area of a chart, which maps times to horizontal positions."""

    start: float
    end: float
    height: float = HEIGHT
    left: float = LEFT

    def x(self, at: float) -> float:
        """Return the horizontal position of a time; a time outside the frame is at its border."""
        share = (at - self.start) / max(self.end - self.start, 1e-9)
        return self.left + min(max(share, 0.0), 1.0) * (WIDTH - self.left - RIGHT)

    @property
    def floor(self) -> float:
        """The vertical position of the time axis."""
        return self.height - BOTTOM

    def linear(self, top: float) -> Callable[[float], float]:
        """Return the function from a value to its vertical position, on a scale from 0 to `top`."""
        return lambda value: self.floor - value / top * (self.floor - TOP)

    def logarithmic(self, low: float, top: float) -> Callable[[float], float]:
        """Return the function from a value to its vertical position, on a logarithmic scale."""
        depth = log(top / low)
        return lambda value: self.floor - log(max(value, low) / low) / depth * (self.floor - TOP)


def stacked_bars(
    title: str, times: Sequence[float], step_s: float, series: Sequence[Series], unit: str
) -> Markup:
    """Return a chart of counts per time step, stacked."""
    frame = Frame(times[0], times[-1] + step_s)
    totals = [sum(part.values[place] or 0 for part in series) for place in range(len(times))]
    marks = _whole_marks(max(totals))
    y = frame.linear(marks[-1])
    bars = []
    for place, at in enumerate(times):
        left = frame.x(at)
        wide = max(frame.x(at + step_s) - left - 0.6, 0.8)
        below, parts, named = 0.0, [], []
        for part in series:
            if value := part.values[place] or 0:
                top = y(below + value)
                parts.append(rect(left, top, wide, y(below) - top, fill=part.colour))
                named.append(f"{count(value)} {part.name}")
                below += value
        bars.append(titled(f"{instant(at)}: {', '.join(named)}", parts) if parts else "")
    axes = joined(_value_axis(frame, marks, y, count, unit), _time_axis(frame))
    return _chart(title, f"Stacked bars over time, {unit}.", frame.height, joined(axes, bars), series)


def lines(
    title: str,
    times: Sequence[float],
    step_s: float,
    series: Sequence[Series],
    form: Callable[[float | None], str] = duration,
) -> Markup:
    """Return a chart of durations over time, or of numbers (`form`); a line has gaps where nothing was
    measured.
    """
    frame = Frame(times[0], times[-1] + step_s)
    known = [value for part in series for value in part.values if value is not None]
    positive = [value for value in known if value > 0] or [1e-3]
    low, top = min(positive), max(positive)
    if form is duration and top / low > LOG_ABOVE:
        marks, unit = _logarithmic_marks(low, top), "logarithmic"
        y = frame.logarithmic(marks[0], marks[-1])
    else:
        marks, unit = _duration_marks(top) if form is duration else _whole_marks(top), ""
        y = frame.linear(marks[-1])
    drawn = [_line(frame, times, step_s, part, y) for part in reversed(series)]
    axes = joined(_value_axis(frame, marks, y, form, unit), _time_axis(frame))
    hover = _hover(frame, times, step_s, series, form)
    description = "Lines over time" + (", logarithmic scale." if unit else ".")
    return _chart(title, description, frame.height, joined(axes, drawn, hover), series)


def lanes(
    title: str, rows: Sequence[tuple[str, Sequence[Span]]], start: float, end: float, legend: Sequence[Series]
) -> Markup:
    """Return a chart with one lane per row, which has the periods of that row."""
    frame = Frame(start, end, TOP + LANE_HEIGHT * len(rows) + BOTTOM, LANE_LEFT)
    drawn: list[Markup] = []
    for place, (label, spans) in enumerate(rows):
        middle = TOP + (place + 0.5) * LANE_HEIGHT
        drawn.append(line(frame.left, middle, WIDTH - RIGHT, middle, class_="grid"))
        drawn.append(_lane_label(frame, middle, label))
        drawn += [_span(frame, middle, span) for span in spans]
    content = joined(_time_axis(frame), drawn)
    return _chart(title, "One lane each, over time.", frame.height, content, legend)


def ranges(title: str, rows: Sequence[tuple[str, float, float, float]]) -> Markup:
    """Return a chart with a low, a middle and a high value in seconds for each row, around zero."""
    reach = max(max(abs(low), abs(high)) for _, low, _, high in rows) or 1e-3
    marks = _duration_marks(reach)
    both = sorted({-tick for tick in marks} | set(marks))
    fewer = both[:: 2 if len(both) > 9 else 1]
    frame = Frame(-marks[-1], marks[-1], TOP + LANE_HEIGHT * len(rows) + BOTTOM, LANE_LEFT)
    drawn: list[Markup] = []
    for tick in fewer if 0.0 in fewer else both:
        x, is_zero = frame.x(tick), abs(tick) < 1e-12
        drawn.append(line(x, TOP, x, frame.floor, class_="axis" if is_zero else "grid"))
        label, anchor = "0" if is_zero else signed(tick), "end" if x > WIDTH - 40 else "middle"
        drawn.append(text(label, x, frame.floor + 18, anchor))
    for place, (label, low, middle, high) in enumerate(rows):
        y = TOP + (place + 0.5) * LANE_HEIGHT
        tooltip = f"{label}: middle {signed(middle)}, 90 % within {signed(low)} to {signed(high)}"
        bar = line(frame.x(low), y, frame.x(high), y, stroke=BLUE, stroke_width=4, stroke_opacity="0.45")
        drawn.append(_lane_label(frame, y, label))
        drawn.append(titled(tooltip, bar, circle(frame.x(middle), y, 4.5, fill=BLUE)))
    description = "One row each: a dot for the middle, a bar for nine tenths."
    return _chart(title, description, frame.height, joined(drawn), ())


def _chart(title: str, description: str, height: float, content: Content, legend: Sequence[Series]) -> Markup:
    drawn = drawing(WIDTH, height, title, tag("desc", description), content, label=f"{title}. {description}")
    return joined(legend_of([(part.name, part.colour) for part in legend]), drawn)


def legend_of(names: Sequence[tuple[str, str]]) -> Markup | None:
    """Return the legend of names with their colours; None without names."""
    keys = [
        tag("li", tag("span", "", class_="key", style=f"background:{colour}"), name) for name, colour in names
    ]
    return tag("ul", keys, class_="legend") if keys else None


def _value_axis(
    frame: Frame, marks: Sequence[float], y: Callable[[float], float], form: Callable[[float], str], unit: str
) -> Markup:
    drawn = [
        joined(
            line(frame.left, y(tick), WIDTH - RIGHT, y(tick), class_="grid"),
            text(form(tick) if tick else "0", frame.left - 8, y(tick) + 4, "end"),
        )
        for tick in marks
    ]
    middle = (TOP + frame.floor) / 2
    turned = f"rotate(-90 12 {middle:g})"
    label = text(unit, 12, middle, "middle", transform=turned, class_="unit") if unit else None
    return joined(drawn, label)


def _time_axis(frame: Frame) -> Markup:
    marks = _time_marks(frame.start, frame.end)
    drawn = [line(frame.left, frame.floor, WIDTH - RIGHT, frame.floor, class_="axis")]
    for tick, label in zip(marks, _time_labels(marks), strict=True):
        x = frame.x(tick)
        drawn.append(line(x, frame.floor, x, frame.floor + 5, class_="axis"))
        anchor = "end" if x > WIDTH - 40 else "middle"
        drawn.append(text(label, min(x, WIDTH - 2), frame.floor + 20, anchor))
    return joined(drawn)


def _line(
    frame: Frame, times: Sequence[float], step_s: float, series: Series, y: Callable[[float], float]
) -> Markup:
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(times, series.values, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((frame.x(at + step_s / 2), y(value)))
    drawn = []
    for piece in filter(None, pieces):
        points = " ".join(f"{x:.1f},{height:.1f}" for x, height in piece)
        stroke: dict[str, str | float] = {"stroke": series.colour, "stroke_width": series.width}
        drawn.append(
            circle(*piece[0], 2.5, fill=series.colour)
            if len(piece) == 1
            else tag("polyline", points=points, fill="none", stroke_linejoin="round", **stroke)
        )
    return joined(drawn)


def _hover(
    frame: Frame,
    times: Sequence[float],
    step_s: float,
    series: Sequence[Series],
    form: Callable[[float | None], str],
) -> Markup:
    """Return invisible areas whose tooltips have the figures of one time step."""
    drawn = []
    for place, at in enumerate(times):
        values = [(part.name, part.values[place]) for part in series]
        figures = ", ".join(f"{name} {form(value)}" for name, value in values if value is not None)
        if figures:
            left, wide = frame.x(at), frame.x(at + step_s) - frame.x(at)
            area = rect(left, TOP, wide, frame.floor - TOP, fill="none", pointer_events="all")
            drawn.append(titled(f"{instant(at)}: {figures}", area))
    return joined(drawn)


def _lane_label(frame: Frame, middle: float, label: str) -> Markup:
    words = joined(tag("title", label), shortened(label, LABEL_MAX))
    return text(words, frame.left - 10, middle + 4, "end")


def _span(frame: Frame, middle: float, span: Span) -> Markup:
    left, wide = frame.x(span.start), max(frame.x(span.end) - frame.x(span.start), 1.5)
    if span.start == span.end:
        return titled(span.title, circle(left, middle, 5, fill=span.colour, class_="moment"))
    return titled(span.title, rect(left, middle - 7, wide, 14, rx=2, fill=span.colour))
