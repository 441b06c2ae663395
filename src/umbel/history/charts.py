"""Charts of the report, and what they are drawn with: HTML and SVG as values, scales, and how times,
durations and counts are written.

Text from outside can never become markup.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from math import ceil, floor, log, log10
from typing import TypeAlias

from umbel.text import numbered, one_line

# ---- markup ----------------------------------------------------------------------------------------
#
# HTML and SVG as values, so that text from outside can never become markup.
#
# Names of tasks, arguments and errors can contain anything, `</script>` included. Text is escaped unless it
# is `Markup`, which only `tag` makes, so escaping cannot be forgotten. The page needs no more than this, so
# it uses no template library.

VOID = frozenset({"meta", "br", "hr", "line", "rect", "circle", "path", "polyline"})


class Markup(str):
    """Text that is already escaped; templates know it by `__html__`."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


Content: TypeAlias = "Markup | str | int | float | Sequence[Content] | None"


def tag(name: str, /, *content: Content, **attributes: str | float | None) -> Markup:
    """One element. An attribute that is None is left out; `class_` and `stroke_width` as in HTML."""
    spelled = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(one_line(_number(value)), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not content:
        return Markup(f"<{name}{spelled}/>")
    return Markup(f"<{name}{spelled}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    """Several pieces of content as one markup; text is escaped."""
    return Markup("".join(map(_rendered, content)))


def _rendered(content: Content) -> str:
    match content:
        case None:
            return ""
        case Markup():
            return content
        case str() | int() | float():
            return escape(one_line(str(content)), quote=True)
        case _:
            return "".join(map(_rendered, content))


def _number(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


# ---- layout ----------------------------------------------------------------------------------------
#
# The parts that the report's page is put together from: sections, figures, tables.


def section(title: str, *content: Content) -> Markup:
    """A section of a page below its heading."""
    name = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title), content, id=name)


def figure(caption: str, drawn: Markup, listed: Markup) -> Markup:
    """A drawing with its caption, and the table of its values."""
    return joined(tag("figure", tag("figcaption", caption), drawn, tabindex=0), listed)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Content]],
    *,
    numbers: Collection[int] = (),
    whole: Collection[int] = (),
    id_: str | None = None,
) -> Markup:
    """A table. `numbers`: positions of columns with numbers; `whole`: of columns that are not broken into
    lines.
    """

    def kind(place: int) -> str | None:
        return "number" if place in numbers else "whole" if place in whole else None

    head = tag(
        "tr", [tag("th", name, scope="col", class_=kind(place)) for place, name in enumerate(headings)]
    )
    body = [
        tag("tr", [tag("td", value, class_=kind(place)) for place, value in enumerate(row)]) for row in rows
    ]
    listed = tag("table", tag("thead", head), tag("tbody", body), id=id_)
    # On a narrow screen the table scrolls sideways, also by keyboard.
    return tag("div", listed, class_="wide", tabindex=0, role="group", aria_label="Table; scroll sideways")


def nothing(reason: str) -> Markup:
    """A line that says why there is nothing to show."""
    return tag("p", reason, class_="nothing")


# ---- scales ----------------------------------------------------------------------------------------
#
# Where the marks of an axis stand, and how times, durations and counts are written.

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
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
UNITS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (MINUTE, "min"), (HOUR, "h"), (DAY, "d"))


def time_step(span_s: float, steps_max: int) -> float:
    """The smallest step of a clock that cuts the span into no more than so many."""
    fitting = (step for step in TIME_STEPS_S if span_s / step <= steps_max)
    return next(fitting, ceil(span_s / steps_max / (365 * DAY)) * 365 * DAY)


def time_marks(start: float, end: float, marks_max: int = 8) -> list[float]:
    """Round times for an axis from start to end."""
    step = time_step(max(end - start, 0.1), marks_max)
    first = ceil(start / step) * step
    return [first + number * step for number in range(floor((end - first) / step + 1e-9) + 1)]


def time_labels(marks: Sequence[float]) -> list[str]:
    """As short as still distinguishes them; the date where it is new."""
    if not marks:
        return []
    step = marks[1] - marks[0] if len(marks) > 1 else MINUTE
    form = "%d %b %Y" if step >= DAY else "%H:%M" if step >= MINUTE else "%H:%M:%S"
    return [
        _instant(tick).strftime(form) + (f".{round(tick * 10) % 10}" if step < 1 else "") for tick in marks
    ]


def value_marks(top: float, marks_max: int = 5) -> list[float]:
    """From 0 to at least `top` in steps of 1, 2 or 5."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / marks_max
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(ceil(top / step - 1e-9) + 1)]


def duration_marks(top_s: float) -> tuple[list[float], str]:
    """Marks in seconds that are round in the unit that suits them, and that unit."""
    scale, unit = unit_of(top_s)
    return [tick * scale for tick in value_marks(top_s / scale)], unit


def logarithmic_marks(low_s: float, top_s: float) -> list[float]:
    """Durations people count in, around what is shown: 1 ms, 10 ms, …, 1 min, 10 min, 1 h, …"""
    below = [tick for tick in DURATIONS_S if tick <= low_s] or [DURATIONS_S[0]]
    above = [tick for tick in DURATIONS_S if tick >= top_s] or [DURATIONS_S[-1]]
    return [tick for tick in DURATIONS_S if below[-1] <= tick <= above[0]]


def unit_of(seconds: float) -> tuple[float, str]:
    """The unit that suits a duration: its length in seconds and its name."""
    fitting = [(scale, unit) for scale, unit in UNITS if abs(seconds) >= scale * 0.999]
    return fitting[-1] if fitting else UNITS[0]


def duration(seconds: float | None) -> str:
    """A duration as text in the unit that suits it; a dash for None."""
    if seconds is None:
        return "–"
    if abs(seconds) < 5e-7:
        return "0 s"
    scale, unit = unit_of(seconds)
    return f"{_three_digits(seconds / scale)} {unit}"


def signed(seconds: float) -> str:
    """A duration as text with its sign."""
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + duration(abs(seconds))


def count(number: float | None) -> str:
    """A number with separators of thousands; a dash for None."""
    if number is None:
        return "–"
    return f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"


def some(number: int | None, noun: str) -> str:
    """A number with its noun, in the singular or plural; a dash for None."""
    return f"– {noun}s" if number is None else numbered(number, noun)


def rate(per_s: float | None) -> str:
    """A rate per second or per minute; a dash for None."""
    if per_s is None:
        return "–"
    return f"{_three_digits(per_s)}/s" if per_s >= 1 or per_s == 0 else f"{_three_digits(per_s * 60)}/min"


def percent(share: float | None) -> str:
    """A share in percent; a dash for None."""
    if share is None:
        return "–"
    if share in {0, 1}:
        return f"{share * 100:.0f} %"
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share * 100:.1f} %"


def instant(seconds: float | None) -> str:
    """A time in UTC, to the second; a dash for None."""
    return "–" if seconds is None else _instant(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


# ---- charts ----------------------------------------------------------------------------------------
#
# Plain SVG, drawn here.
#
# A report is opened years later, from an attachment, on paper, by a screen reader: so a chart is a drawing
# in the page, with its title and description, and needs no script. Interactive plots belong to the
# dashboard. Each drawn element has a tooltip; their number is bounded by the queries behind the figures
# (`figures.py`).

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
"""Colours that people with any kind of colour vision can distinguish; also different in grey."""


@dataclass(frozen=True)
class Series:
    """A named, coloured line or part of bars; one value per time step, None where nothing was measured."""

    name: str
    colour: str
    values: Sequence[float | None]
    width: float = 2.0


@dataclass(frozen=True)
class Span:
    """A period on a lane; a moment where start and end are the same."""

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
        """The horizontal position of a time; a time outside the frame is at its border."""
        share = (at - self.start) / max(self.end - self.start, 1e-9)
        return self.left + min(max(share, 0.0), 1.0) * (WIDTH - self.left - RIGHT)

    @property
    def floor(self) -> float:
        """The vertical position of the time axis."""
        return self.height - BOTTOM


def stacked_bars(
    title: str, times: Sequence[float], step_s: float, series: Sequence[Series], unit: str
) -> Markup:
    """Counts per time step, one upon the other."""
    frame = Frame(times[0], times[-1] + step_s)
    totals = [sum(each.values[place] or 0 for each in series) for place in range(len(times))]
    marks = _whole_marks(max(totals))

    def y(value: float) -> float:
        return frame.floor - value / marks[-1] * (frame.floor - TOP)

    bars = []
    for place, at in enumerate(times):
        left, right = frame.x(at), frame.x(at + step_s)
        below, parts = 0.0, []
        for each in series:
            value = each.values[place] or 0
            if value:
                top, bottom = y(below + value), y(below)
                wide = max(right - left - 0.6, 0.8)
                parts.append(tag("rect", x=left, y=top, width=wide, height=bottom - top, fill=each.colour))
                below += value
        shown = ", ".join(
            f"{count(each.values[place] or 0)} {each.name}" for each in series if each.values[place]
        )
        bars.append(tag("g", tag("title", f"{instant(at)}: {shown}"), parts) if parts else "")
    axes = joined(_value_axis(frame, marks, y, count, unit), _time_axis(frame))
    return _drawing(title, f"Stacked bars over time, {unit}.", frame.height, joined(axes, bars), series)


def _whole_marks(top: float) -> list[float]:
    """Axis values that are whole numbers, for counts."""
    return [tick for tick in value_marks(max(top, 1)) if tick == int(tick)]


def lines(
    title: str,
    times: Sequence[float],
    step_s: float,
    series: Sequence[Series],
    form: Callable[[float | None], str] = duration,
) -> Markup:
    """Durations over time, or numbers (`form`); where nothing was measured the line is broken."""
    frame = Frame(times[0], times[-1] + step_s)
    known = [value for each in series for value in each.values if value is not None]
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

    drawn = [_line(frame, times, step_s, each, y) for each in reversed(series)]
    axes = joined(_value_axis(frame, marks, y, form, unit), _time_axis(frame))
    hover = _hover(frame, times, step_s, series, form)
    description = "Lines over time" + (", logarithmic scale." if unit else ".")
    return _drawing(title, description, frame.height, joined(axes, drawn, hover), series)


def lanes(
    title: str, rows: Sequence[tuple[str, Sequence[Span]]], start: float, end: float, legend: Sequence[Series]
) -> Markup:
    """One lane per row, with the periods of that row."""
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
    both = sorted({-tick for tick in marks} | set(marks))
    both = both[:: 2 if len(both) > 9 else 1] if 0.0 in both[:: 2 if len(both) > 9 else 1] else both
    frame = Frame(-marks[-1], marks[-1], TOP + LANE_HEIGHT * len(rows) + BOTTOM, LANE_LEFT)
    drawn: list[Markup] = []
    for tick in both:
        x, at_zero = frame.x(tick), abs(tick) < 1e-12
        drawn.append(tag("line", x1=x, y1=TOP, x2=x, y2=frame.floor, class_="axis" if at_zero else "grid"))
        label = "0" if at_zero else signed(tick)
        anchor = "end" if x > WIDTH - 40 else "middle"
        drawn.append(tag("text", label, x=x, y=frame.floor + 18, text_anchor=anchor))
    for place, (label, low, middle, high) in enumerate(rows):
        y = TOP + (place + 0.5) * LANE_HEIGHT
        tooltip = tag(
            "title", f"{label}: middle {signed(middle)}, 90 % within {signed(low)} to {signed(high)}"
        )
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
        drawn.append(tag("g", tooltip, bar, tag("circle", cx=frame.x(middle), cy=y, r=4.5, fill=BLUE)))
    return _drawing(
        title, "One row each: a dot for the middle, a bar for nine tenths.", frame.height, joined(drawn), ()
    )


def _drawing(
    title: str, description: str, height: float, content: Markup, legend: Sequence[Series]
) -> Markup:
    keys = [
        tag("li", tag("span", "", class_="key", style=f"background:{each.colour}"), each.name)
        for each in legend
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
            tag("line", x1=frame.left, y1=y(tick), x2=WIDTH - RIGHT, y2=y(tick), class_="grid"),
            tag("text", form(tick) if tick else "0", x=frame.left - 8, y=y(tick) + 4, text_anchor="end"),
        )
        for tick in marks
    ]
    middle = (TOP + frame.floor) / 2
    label = tag(
        "text",
        unit,
        x=12,
        y=middle,
        text_anchor="middle",
        transform=f"rotate(-90 12 {middle:g})",
        class_="unit",
    )
    return joined(drawn, label if unit else "")


def _time_axis(frame: Frame) -> Markup:
    marks = time_marks(frame.start, frame.end)
    drawn: list[Markup] = [
        tag("line", x1=frame.left, y1=frame.floor, x2=WIDTH - RIGHT, y2=frame.floor, class_="axis")
    ]
    for tick, label in zip(marks, time_labels(marks), strict=True):
        x = frame.x(tick)
        drawn.append(tag("line", x1=x, y1=frame.floor, x2=x, y2=frame.floor + 5, class_="axis"))
        anchor = "end" if x > WIDTH - 40 else "middle"
        drawn.append(tag("text", label, x=min(x, WIDTH - 2), y=frame.floor + 20, text_anchor=anchor))
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
        if len(piece) == 1:
            drawn.append(tag("circle", cx=piece[0][0], cy=piece[0][1], r=2.5, fill=series.colour))
        else:
            points = " ".join(f"{x:.1f},{height:.1f}" for x, height in piece)
            drawn.append(
                tag(
                    "polyline",
                    points=points,
                    fill="none",
                    stroke=series.colour,
                    stroke_width=series.width,
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
    """Invisible areas whose tooltips show the figures of one time step."""
    drawn = []
    for place, at in enumerate(times):
        shown = ", ".join(
            f"{each.name} {form(each.values[place])}" for each in series if each.values[place] is not None
        )
        if shown:
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
            drawn.append(tag("g", tag("title", f"{instant(at)}: {shown}"), area))
    return joined(drawn)


def _lane_label(frame: Frame, middle: float, label: str) -> Markup:
    shown = label if len(label) <= LABEL_MAX else label[: LABEL_MAX - 1] + "…"
    return tag("text", tag("title", label), shown, x=frame.left - 10, y=middle + 4, text_anchor="end")


def _span(frame: Frame, middle: float, span: Span) -> Markup:
    left, right = frame.x(span.start), frame.x(span.end)
    if span.start == span.end:
        shape = tag("circle", cx=left, cy=middle, r=5, fill=span.colour, class_="moment")
    else:
        shape = tag(
            "rect", x=left, y=middle - 7, width=max(right - left, 1.5), height=14, rx=2, fill=span.colour
        )
    return tag("g", tag("title", span.title), shape)
