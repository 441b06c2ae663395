"""Labels: states with an icon, a word and a tone, and times in UTC and as an age.

Colour never says a state alone.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from umbel.history.markup import UNKNOWN, Markup, moment, tag

# ---- icons and states ------------------------------------------------------------------------------

PATHS = {
    "check": "M3 8.5l3.2 3.2L13 5",
    "cross": "M4 4l8 8M12 4l-8 8",
    "alert": "M8 2.5l6 11H2zM8 6.5v3.2M8 11.6v.2",
    "question": "M5.8 6a2.2 2.2 0 1 1 3.2 2c-.8.4-1 .9-1 1.7M8 12v.2",
    "leave": "M9.5 3H4v10h5.5M7.5 8H14M11.5 5.5L14 8l-2.5 2.5",
    "play": "M5 3.5v9l7-4.5z",
    "inbox": "M2.5 9h3l1 2h3l1-2h3M2.5 9L4 3.5h8L13.5 9v3.5h-11z",
    "clock": "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11M8 5v3.2l2 1.3",
    "again": "M12.8 6.2A5 5 0 1 0 13 9M13 3v3.4H9.6",
    "stop": "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11M4.2 4.2l7.6 7.6",
    "return": "M6 4L3 7l3 3M3 7h6.5a3 3 0 0 1 0 6H7",
    "circle": "M8 3.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9",
    "pulse": "M1.5 8.5h3l2-5 3 9 2-4h3",
    "ring": "M8 2.2v2M8 11.8v2M2.2 8h2M11.8 8h2M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6",
    "list": "M5.5 4h8M5.5 8h8M5.5 12h8M2.5 4h.2M2.5 8h.2M2.5 12h.2",
    "layers": "M8 2.5l6 3-6 3-6-3zM2 8.5l6 3 6-3M2 11.2l6 3 6-3",
    "calendar": "M2.5 4h11v9.5h-11zM2.5 7h11M5.5 2.5V5M10.5 2.5V5",
    "crown": "M2.5 12.5h11M2.5 5l3 3L8 3.5 10.5 8l3-3-1 7.5h-9z",
    "history": "M2.5 13.5h11M4 11V8M7 11V4M10 11V6M13 11V3",
    "book": "M3 2.5h8.5a1.5 1.5 0 0 1 1.5 1.5v9.5H4.5A1.5 1.5 0 0 1 3 12zM6 6h4M6 9h4",
    "cpu": "M5 5h6v6H5zM8 2v3M8 11v3M2 8h3M11 8h3",
    "download": "M8 2.5v7.5M5 7.5L8 10.5l3-3M3 13.5h10",
    "pause": "M6 4v8M10 4v8",
    "earlier": "M10 3.5L5.5 8l4.5 4.5",
    "later": "M6 3.5L10.5 8 6 12.5",
    "bookmark": "M4.5 2.5h7v11L8 10.8l-3.5 2.7z",
    "search": "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9M10.5 10.5l3 3",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How a state is shown: its icon, its word and its tone."""

    icon: str
    word: str
    tone: str  # good, warn, bad, busy or idle: the classes of the style sheet


LOOKS = {
    "alive": Look("check", "alive", "good"),
    "suspect": Look("question", "suspect", "warn"),
    "silent": Look("question", "silent", "warn"),
    "lost": Look("cross", "lost", "bad"),
    "left": Look("leave", "left", "idle"),
    "PENDING": Look("clock", "waiting", "idle"),
    "RECEIVED": Look("inbox", "received", "busy"),
    "STARTED": Look("play", "running", "busy"),
    "SUCCESS": Look("check", "succeeded", "good"),
    "FAILURE": Look("cross", "failed", "bad"),
    "RETRY": Look("again", "will retry", "warn"),
    "REVOKED": Look("stop", "revoked", "idle"),
    "REJECTED": Look("return", "rejected", "warn"),
    "INTERRUPTED": Look("cross", "interrupted", "warn"),
    "ok": Look("check", "ok", "good"),
    "error": Look("cross", "error", "bad"),
    "paused": Look("pause", "paused", "warn"),
}


def look(state: str) -> Look:
    """Return the look of a state; a custom state such as PROGRESS counts as running."""
    return LOOKS.get(state) or Look("play", state.lower(), "busy")


def icon(name: str, size: int = 16) -> Markup:
    """Return the icon of this name as SVG."""
    stroke = {"stroke": "currentColor", "stroke_width": "1.6", "stroke_linecap": "round"}
    path = tag("path", d=PATHS[name], fill="none", stroke_linejoin="round", **stroke)
    return tag("svg", path, viewBox="0 0 16 16", width=size, height=size, aria_hidden="true")


def state(name: str, word: str = "") -> Markup:
    """Return a small label with the icon of a state and its word."""
    looks = look(name)
    return tag("span", icon(looks.icon, 14), word or looks.word, class_=f"state {looks.tone}")


# ---- times -----------------------------------------------------------------------------------------

_UNITS = ((86_400, 10**6, "d"), (3600, 24, "h"), (60, 60, "min"), (1, 60, "s"))


def clock_time(at: float | None) -> str:
    """Return the time of day to the millisecond."""
    found = moment(at)
    if at is None or found is None:
        return UNKNOWN
    return found.strftime("%H:%M:%S.") + f"{round(at * 1000) % 1000:03}"


def iso(at: float) -> str:
    """Return the time as ISO 8601; "" if it is outside the calendar."""
    found = moment(at)
    return "" if found is None else found.isoformat(timespec="milliseconds")


def long_ago(seconds: int) -> str:
    """Return how long ago it was in two units, `1 d 3 h ago`; the slider's script uses the same format."""
    parts = [(seconds // size % wrap, unit) for size, wrap, unit in _UNITS]
    first = next((place for place, (number, _) in enumerate(parts) if number), len(parts) - 1)
    named = [f"{number} {unit}" for number, unit in parts[first : first + 2] if number]
    return f"{' '.join(named) or '0 s'} ago"


def parse_local(text: str) -> float:
    """Return the Unix time of a form's date and time, in UTC; ValueError if it is not valid."""
    try:
        found = datetime.fromisoformat(text)
        at = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        at = -1.0
    if at < 0:
        raise ValueError(f"{text[:50]!r} is not a date and time since 1970; write it like 2026-05-01T13:00")
    return at


def local(at: float | None) -> str:
    """Return a time as a form's date and time field expects it."""
    found = moment(at)
    return "" if found is None else found.strftime("%Y-%m-%dT%H:%M")
