"""Markup: HTML and SVG as values, for the report and for the drawings of the dashboard.

Names of tasks, arguments and errors can contain anything, `</script>` included. So text is escaped unless it
is `Markup`, which only `tag` and `joined` make, and escaping cannot be forgotten.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import TypeAlias

from umbel.text import numbered, one_line

VOID = frozenset({"meta", "br", "hr", "line", "rect", "circle", "path", "polyline"})


class Markup(str):
    """Text that is already escaped; templates recognize it by `__html__`."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


Content: TypeAlias = "Markup | str | int | float | Sequence[Content] | None"
Attribute: TypeAlias = str | float | None


def tag(name: str, /, *content: Content, **attributes: Attribute) -> Markup:
    """Return an element. An attribute that is None is left out; `class_` and `stroke_width` become `class`
    and `stroke-width`.
    """
    spelled = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(one_line(_number(value)), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not content:
        return Markup(f"<{name}{spelled}/>")
    return Markup(f"<{name}{spelled}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    """Return several pieces of content as one markup; text is escaped."""
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


# ---- drawings --------------------------------------------------------------------------------------


def drawing(
    width: float, height: float, title: str, /, *content: Content, label: str = "", **more: Attribute
) -> Markup:
    """Return an SVG image with its title; `label` is what a screen reader says, by default the title."""
    attributes: dict[str, Attribute] = {"role": "img", "aria_label": label or title, **more}
    return tag("svg", tag("title", title), content, viewBox=f"0 0 {width:g} {height:g}", **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **more: Attribute) -> Markup:
    """Return a straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, **more)


def rect(x: float, y: float, width: float, height: float, *content: Content, **more: Attribute) -> Markup:
    """Return a rectangle; its content may be a tooltip (`title`)."""
    return tag("rect", *content, x=x, y=y, width=width, height=height, **more)


def circle(x: float, y: float, radius: float, **more: Attribute) -> Markup:
    """Return a circle around a point."""
    return tag("circle", cx=x, cy=y, r=radius, **more)


def text(words: Content, x: float, y: float, anchor: str | None = None, **more: Attribute) -> Markup:
    """Return text at a point. `anchor` says which part of the text is there: its start, `middle` or `end`."""
    return tag("text", words, x=x, y=y, text_anchor=anchor, **more)


def titled(title: str, *content: Content) -> Markup:
    """Return a group of shapes with a tooltip."""
    return tag("g", tag("title", title), content)


def shortened(words: str, most: int) -> str:
    """Return the beginning of a text that is too long for its place."""
    return words if len(words) <= most else f"{words[: most - 1]}…"


# ---- formats ---------------------------------------------------------------------------------------
#
# How times, durations, counts and shares are written, on the dashboard, in reports and in
# terminals.
#
# All times are in UTC. A dash stands for an unknown value.

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
UNITS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (MINUTE, "min"), (HOUR, "h"), (DAY, "d"))
UNKNOWN = "–"


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the unit that suits a duration: its length in seconds and its name."""
    fitting = [(scale, unit) for scale, unit in UNITS if abs(seconds) >= scale * 0.999]
    return fitting[-1] if fitting else UNITS[0]


def duration(seconds: float | None) -> str:
    """Return a duration as text in the unit that suits it."""
    if seconds is None:
        return UNKNOWN
    if abs(seconds) < 5e-7:
        return "0 s"
    scale, unit = unit_of(seconds)
    return f"{_three_digits(seconds / scale)} {unit}"


def signed(seconds: float) -> str:
    """Return a duration as text with its sign."""
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + duration(abs(seconds))


def count(number: float | None) -> str:
    """Return a number with separators of thousands."""
    if number is None:
        return UNKNOWN
    return f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"


def some(number: int | None, noun: str) -> str:
    """Return a number with its noun, in the singular or plural."""
    return f"{UNKNOWN} {noun}s" if number is None else numbered(number, noun)


def rate(per_s: float | None) -> str:
    """Return a rate per second or per minute."""
    if per_s is None:
        return UNKNOWN
    return f"{_three_digits(per_s)}/s" if per_s >= 1 or per_s == 0 else f"{_three_digits(per_s * 60)}/min"


def percent(share: float | None) -> str:
    """Return a share in percent."""
    if share is None:
        return UNKNOWN
    if share in {0, 1}:
        return f"{share * 100:.0f} %"
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share * 100:.1f} %"


def moment(at: float | None) -> datetime | None:
    """Return a time in UTC; None for a time outside the calendar, because the clocks of nodes may be
    wrong.
    """
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def instant(at: float | None) -> str:
    """Return a time to the second."""
    found = moment(at)
    return UNKNOWN if found is None else found.strftime("%Y-%m-%d %H:%M:%S")


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
