"""Comparing: each task's figures in two periods, and how they changed."""

from dataclasses import dataclass
from datetime import UTC, datetime

from umbel.history.period import Row
from umbel.history.query import Tables

TASKS_MAX = 1000
FIRST, LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Span:
    """From `since` up to `until`, which is not part of it."""

    since: datetime = FIRST
    until: datetime = LAST


def compare(tables: Tables, before: Span, after: Span) -> list[Row]:
    """One row per task, those with most attempts first."""
    return tables.rows(
        "select * from compared($before_since, $before_until, $after_since, $after_until)"
        f" order by n_before + n_after desc, name nulls last limit {TASKS_MAX}",
        {
            "before_since": before.since,
            "before_until": before.until,
            "after_since": after.since,
            "after_until": after.until,
        },
    )
