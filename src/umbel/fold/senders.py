"""Senders: compute marks, which contain the recorded sequence numbers and the clock skew of each sender.

Umbel nodes number their events without gaps. The numbers of recorded events are stored as runs. The union of
runs does not depend on how the lake is divided into files, nor on repeated events. A gap is the space
between two runs. Its time is the first time in the range of numbers in which it ends.

A sender's clock is ahead of the broker's clock by at least the greatest difference in any event: events take
time to arrive, so the event with the shortest delay shows the greatest difference.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.fold.columns import (
    INSTANT,
    Events,
    Flags,
    Ints,
    groups,
    instants,
    int_array,
    nullable,
    present,
    running_max,
)

RANGE = 32_768
SEQ_MAX = 2**53
SENDER = ("hostname", "pid", "inc")
_SENDER = [("hostname", pa.string()), ("pid", pa.int64()), ("inc", pa.int64())]
SENDERS = pa.schema(
    [
        *_SENDER,
        ("range", pa.int64()),
        ("first_at", INSTANT),
        ("last_at", INSTANT),
        ("ahead_us", pa.int64()),
        ("recorded_at", INSTANT),
    ]
)
"""A row for each sender and range of numbers. Events without a number have no range."""
RUNS = pa.schema([*_SENDER, ("first", pa.int64()), ("last", pa.int64())])
"""A row for each run of recorded numbers."""


EVENTS_KEY = b"umbel.events"
"""The metadata key in a file of marks for the number of described events."""

SOURCES_KEY = b"umbel.sources"
"""The metadata key in a file of marks for the sources of the group, by path in the lake, and recursively
their sources.
"""

MARKS = pa.schema([*SENDERS, *list(RUNS)[len(_SENDER) :]])
"""Senders and runs in one table, as in a file. Rows of runs have a value in `first`."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The recorded sequence numbers and the clock skew of senders."""

    senders: pa.Table
    runs: pa.Table

    def as_table(self) -> pa.Table:
        """Return both tables as one, for a file."""
        return pa.concat_tables([MARKS.empty_table(), self.senders, self.runs], promote_options="default")

    @staticmethod
    def of_table(table: pa.Table) -> "Marks":
        """Return the marks from a table that was read from a file."""
        is_run = pc.is_valid(table.column("first"))
        senders, runs = table.filter(pc.invert(is_run)), table.filter(is_run)
        return Marks(senders.select(SENDERS.names).cast(SENDERS), runs.select(RUNS.names).cast(RUNS))

    def horizon_us(self) -> int | None:
        """Return the time of the last recorded event, by the broker's clock."""
        recorded = pc.max(self.senders.column("recorded_at").cast(pa.int64())).as_py()
        return None if recorded is None else int(recorded)

    def nodes(self) -> pa.Table:
        """Return, for each node, how far its clock is ahead of the broker's. A negative value means that it
        is behind, or slow to send.
        """
        found = self.senders.group_by("hostname").aggregate(
            [("ahead_us", "max"), ("last_at", "max"), ("pid", "max")]
        )
        names = {
            "hostname": "hostname",
            "ahead_us_max": "ahead_us",
            "last_at_max": "last_at",
            "pid_max": "pid",
        }
        return found.select(list(names)).rename_columns(list(names.values()))


def marks_of(table: pa.Table) -> Marks:
    """Return the marks of events with the lake's columns."""
    events = Events(table)
    sender = {name: events.column(name) for name in SENDER}
    seq, at, recorded = events.ints("seq"), events.ints("timestamp"), events.ints("recorded_at")
    is_numbered = events.has("inc") & events.has("seq") & (seq >= 0) & (seq <= SEQ_MAX)
    has_time = events.has("timestamp") & (at > 0)
    ranges = nullable(seq // RANGE, is_numbered, pa.int64())
    senders = {
        **sender,
        "range": ranges,
        "first_at": instants(at, has_time),
        "last_at": instants(at, has_time),
        "ahead_us": nullable(at - recorded, has_time & events.has("recorded_at"), pa.int64()),
        "recorded_at": events.column("recorded_at"),
    }
    by, _ = groups(*sender.values())
    numbers = pa.array(seq)
    runs = pa.table([*sender.values(), numbers, numbers], schema=RUNS).filter(pa.array(is_numbered))
    return Marks(_joined_senders(pa.table(senders, schema=SENDERS), by), _joined_runs(runs, by[is_numbered]))


def merged(parts: Iterable[Marks]) -> Marks:
    """Merge the marks of several parts."""
    every = list(parts)
    senders = pa.concat_tables([SENDERS.empty_table(), *(marks.senders for marks in every)])
    runs = pa.concat_tables([RUNS.empty_table(), *(marks.runs for marks in every)])
    return Marks(_joined_senders(senders, _sender_of(senders)), _joined_runs(runs, _sender_of(runs)))


def gaps(marks: Marks) -> pa.Table:
    """Return a row for each gap between two runs: sender, time, start and length."""
    runs, senders = marks.runs.combine_chunks(), marks.senders.combine_chunks()
    sender = _sender_of(runs)
    first, last = (int_array(_column(runs, name)) for name in ("first", "last"))
    after = np.flatnonzero(sender[1:] == sender[:-1]) + 1
    ended = runs.take(pa.array(after))
    where = pa.table(
        [*(ended.column(name) for name in SENDER), pa.array(first[after] // RANGE)], names=[*SENDER, "range"]
    )
    both = pa.concat_tables([senders.select([*SENDER, "range"]), where]).combine_chunks()
    key, found = groups(*(_column(both, name) for name in both.column_names))
    at = _column(senders, "first_at").take(pa.array(found[key[senders.num_rows :]]))
    return pa.table(
        {
            **{name: ended.column(name) for name in SENDER},
            "at": at,
            "start": pa.array(last[after - 1] + 1),
            "n": pa.array(first[after] - last[after - 1] - 1),
        }
    )


def _sender_of(table: pa.Table) -> Ints:
    """Return the number of each row's sender."""
    return groups(*(_column(table, name) for name in SENDER))[0]


def _joined_senders(table: pa.Table, sender: Ints) -> pa.Table:
    """Merge rows of the same sender and range of numbers."""
    group, firsts = groups(pa.array(sender), _column(table, "range"))
    columns = {name: _column(table, name).take(pa.array(firsts)) for name in (*SENDER, "range")}
    for name in ("first_at", "last_at", "ahead_us", "recorded_at"):
        column = _column(table, name)
        values, there = _extreme(column, group, len(firsts), lowest=name == "first_at")
        columns[name] = nullable(values, there, column.type)
    return pa.table(columns, schema=SENDERS)


def _extreme(column: pa.Array, group: Ints, count: int, *, lowest: bool) -> tuple[Ints, Flags]:
    """Return the lowest or highest value of each group, and whether there is one."""
    there = present(column)
    limits = np.iinfo(np.int64)
    values = np.full(count, limits.max if lowest else limits.min)
    (np.minimum if lowest else np.maximum).at(values, group[there], int_array(column)[there])
    known = np.zeros(count, dtype=bool)
    known[group[there]] = True
    return np.where(known, values, 0), known


def _joined_runs(table: pa.Table, sender: Ints) -> pa.Table:
    """Sort runs by sender and number, and join adjacent and overlapping runs."""
    first, last = (int_array(_column(table, name)) for name in ("first", "last"))
    order = np.lexsort((first, sender))
    sender, first, last = sender[order], first[order], last[order]
    reached = running_max(last, sender)
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (sender[1:] != sender[:-1]) | (first[1:] > reached[:-1] + 1)
    begins = np.flatnonzero(is_new)
    ends = np.append(begins[1:], len(order)) - 1 if len(begins) else begins
    rows = pa.array(order[begins])
    columns = {name: _column(table, name).take(rows) for name in SENDER}
    return pa.table(
        {**columns, "first": pa.array(first[begins]), "last": pa.array(reached[ends])}, schema=RUNS
    )


def _column(table: pa.Table, name: str) -> pa.Array:
    return table.column(name).combine_chunks()
