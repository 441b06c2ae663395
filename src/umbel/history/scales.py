"""Scales: where the marks of an axis stand, and how times, durations and counts are written."""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import ceil, floor, log10

from umbel.text import numbered

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
        _instant(mark).strftime(form) + (f".{round(mark * 10) % 10}" if step < 1 else "") for mark in marks
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
    return [mark * scale for mark in value_marks(top_s / scale)], unit


def logarithmic_marks(low_s: float, top_s: float) -> list[float]:
    """Durations people count in, around what is shown: 1 ms, 10 ms, …, 1 min, 10 min, 1 h, …"""
    below = [mark for mark in DURATIONS_S if mark <= low_s] or [DURATIONS_S[0]]
    above = [mark for mark in DURATIONS_S if mark >= top_s] or [DURATIONS_S[-1]]
    return [mark for mark in DURATIONS_S if below[-1] <= mark <= above[0]]


def unit_of(seconds: float) -> tuple[float, str]:
    fitting = [(scale, unit) for scale, unit in UNITS if abs(seconds) >= scale * 0.999]
    return fitting[-1] if fitting else UNITS[0]


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if abs(seconds) < 5e-7:
        return "0 s"
    scale, unit = unit_of(seconds)
    return f"{_three_digits(seconds / scale)} {unit}"


def signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + duration(abs(seconds))


def count(number: float | None) -> str:
    if number is None:
        return "–"
    return f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"


def some(number: int | None, noun: str) -> str:
    return f"– {noun}s" if number is None else numbered(number, noun)


def rate(per_s: float | None) -> str:
    if per_s is None:
        return "–"
    return f"{_three_digits(per_s)}/s" if per_s >= 1 or per_s == 0 else f"{_three_digits(per_s * 60)}/min"


def percent(share: float | None) -> str:
    if share is None:
        return "–"
    if share in {0, 1}:
        return f"{share * 100:.0f} %"
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share * 100:.1f} %"


def instant(seconds: float | None) -> str:
    return "–" if seconds is None else _instant(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
