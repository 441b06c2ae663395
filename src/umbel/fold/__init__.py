"""Fold: compute tables from events, with Arrow and numpy. No files, no Spark.

`umbel.events.tables` defines the tables, `umbel.events` the rules. All events of a task must be folded
together, so the caller first divides events by task id (`buckets.py`).
"""

import re
from dataclasses import dataclass

# ---- names of files --------------------------------------------------------------------------------
#
# The names of files with events that are divided into buckets.
#
#     co-1794700800000000-000000-b003of016.parquet   events of the tasks of one bucket
#     co-1794700800000000-000000-others.parquet      events without a task
#     co-1794700800000000-000000-marks.parquet       the marks of all these events, and their number
#
# The common part is the name of the group. An empty bucket has no file.

SUFFIX = ".parquet"
TABLES = "tables"
"""The folder of the tables that are built from the events."""

_PLACED = re.compile(r"(.*co-\d+-\d+)-(?:b(\d+)of(\d+)|others)\.parquet", re.ASCII | re.DOTALL)

_COUNTS = frozenset(2**power for power in range(13))


@dataclass(frozen=True, slots=True)
class Place:
    """The group and bucket of a file. `bucket` is None for events without a task."""

    group: str
    bucket: int | None
    count: int


def place_of(name: str) -> Place | None:
    """Parse the name of a file. Return None for a file that is not divided into buckets."""
    parsed = _PLACED.fullmatch(name)
    if parsed is None:
        return None
    group, bucket, count = parsed.groups()
    if bucket is None:
        return Place(group, None, 0)
    is_place = int(count) in _COUNTS and int(bucket) < int(count)
    return Place(group, int(bucket), int(count)) if is_place else None


def bucket_file(group: str, bucket: int, count: int) -> str:
    """Return the name of a bucket's file."""
    return f"{group}-b{bucket:03}of{count:03}{SUFFIX}"


def others_file(group: str) -> str:
    """Return the name of a group's file of events without a task."""
    return f"{group}-others{SUFFIX}"


def marks_file(group: str) -> str:
    """Return the name of a group's file of marks."""
    return f"{group}-marks{SUFFIX}"
