"""Formats: how times, durations, counts and shares are written, on the dashboard, in reports and in
terminals.

All times are in UTC. A dash stands for an unknown value.
"""

from datetime import UTC, datetime

from umbel.text import numbered

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
