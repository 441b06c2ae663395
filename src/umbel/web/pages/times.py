"""Times as pages write them: in UTC, as every event has them, and how long ago."""

from datetime import UTC, datetime

from umbel.history.scales import duration

UNKNOWN = "–"
_UNITS = ((86_400, 10**6, "d"), (3600, 24, "h"), (60, 60, "min"), (1, 60, "s"))


def instant(at: float | None) -> str:
    found = _moment(at)
    return UNKNOWN if found is None else found.strftime("%Y-%m-%d %H:%M:%S")


def clock_time(at: float | None) -> str:
    """To the millisecond, for what happens within one."""
    found = _moment(at)
    if at is None or found is None:
        return UNKNOWN
    return found.strftime("%H:%M:%S.") + f"{round(at * 1000) % 1000:03}"


def iso(at: float) -> str:
    found = _moment(at)
    return "" if found is None else found.isoformat(timespec="milliseconds")


def ago(at: float | None, now: float) -> str:
    if at is None:
        return UNKNOWN
    past = now - at
    return "now" if past < 1 else f"{duration(float(round(past)))} ago"


def long_ago(seconds: int) -> str:
    """In two units: `1 d 3 h ago`; the slider's script says it alike."""
    parts = [(seconds // size % wrap, unit) for size, wrap, unit in _UNITS]
    first = next((place for place, (number, _) in enumerate(parts) if number), len(parts) - 1)
    said = [f"{number} {unit}" for number, unit in parts[first : first + 2] if number]
    return f"{' '.join(said) or '0 s'} ago"


def parse_local(text: str) -> float:
    """A date and time as a form sends it, in UTC."""
    try:
        found = datetime.fromisoformat(text)
        at = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        at = -1.0
    if at < 0:
        raise ValueError(f"{text[:50]!r} is not a date and time since 1970; write it like 2026-05-01T13:00")
    return at


def local(at: float | None) -> str:
    """The same the other way round."""
    found = _moment(at)
    return "" if found is None else found.strftime("%Y-%m-%dT%H:%M")


def _moment(at: float | None) -> datetime | None:
    """None also for what no calendar has: times come from nodes whose clocks may be anything."""
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        return None
