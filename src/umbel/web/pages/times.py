"""Times as pages write them: in UTC, as every event has them, and how long ago."""

from datetime import UTC, datetime

from umbel.history.scales import duration


def instant(at: float | None) -> str:
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def clock_time(at: float | None) -> str:
    """To the millisecond, for what happens within one."""
    if at is None:
        return "–"
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.") + f"{round(at * 1000) % 1000:03}"


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def ago(at: float | None, now: float) -> str:
    if at is None:
        return "–"
    past = now - at
    return "now" if past < 1 else f"{duration(float(round(past)))} ago"


def parse_local(text: str) -> float:
    """A date and time as a form sends it, in UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no date and time; write it like 2026-05-01T13:00") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def local(at: float | None) -> str:
    """The same the other way round."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M")
