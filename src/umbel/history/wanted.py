"""Wanted: which part of the history is looked at: a time, tasks, a queue.

Each table is narrowed where it is opened (`query.py`), so that all that is asked of it is about that part.
What a table does not know does not narrow it: node sessions, elections and clocks are those of all tasks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from umbel.history.spelling import text_literal


@dataclass(frozen=True)
class Wanted:
    """`task` and `queue` are patterns, as in `shop.*`; `until` is not part of the time."""

    since: datetime | None = None
    until: datetime | None = None
    task: str = ""
    queue: str = ""

    def __bool__(self) -> bool:
        return self != Wanted()

    def of(self, table: str) -> str:
        """A condition of SQL on the rows of a table."""
        return _all([self.of_any_time(table), *self._when(table)])

    def of_any_time(self, table: str) -> str:
        named = ((self.task, _NAMES.get(table)), (self.queue, _QUEUES.get(table)))
        return _all(
            [f"{column} glob {text_literal(wanted)}" for wanted, column in named if wanted and column]
        )

    def _when(self, table: str) -> list[str]:
        first, last = _TIMES[table]
        found = [f"{last} >= {_instant(self.since)}"] if self.since else []
        return [*found, f"{first} < {_instant(self.until)}"] if self.until else found

    def said(self) -> str:
        """For people; nothing where all is wanted."""
        parts = [
            f"tasks {self.task}" if self.task else "",
            f"queue {self.queue}" if self.queue else "",
            f"since {_shown(self.since)}" if self.since else "",
            f"until {_shown(self.until)}" if self.until else "",
        ]
        return ", ".join(filter(None, parts))


_NAMES = dict.fromkeys(("tasks", "attempts", "metrics", "anomalies"), "name")
_QUEUES = dict.fromkeys(("tasks", "attempts", "metrics"), "queue")
_ENDED = "coalesce(ended_at, state_at)"
_TIMES: Mapping[str, tuple[str, str]] = {
    "tasks": ("state_at", "state_at"),
    "attempts": (_ENDED, _ENDED),
    "timeline": ("recorded_at", "recorded_at"),
    "workers": ("online_at", "coalesce(ended_at, last_at)"),
    "elections": ("first_at", "coalesce(last_at, first_at)"),
    "metrics": ("minute", "minute"),
    "anomalies": ('"at"', '"at"'),
}
"""From when to when a row of a table was: it is wanted if that overlaps the time."""


def _all(conditions: list[str]) -> str:
    return " and ".join(filter(None, conditions))


def _instant(at: datetime) -> str:
    return f"timestamptz {text_literal(at.astimezone(UTC).isoformat())}"


def _shown(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
