"""Marks: which of a sender's events are in the lake, and how far its time is from the broker's.

Umbel's senders number their events without gaps. The numbers that are there are kept as runs; the union
of runs does not depend on how the lake is cut into parts, nor on events that are there twice. A gap is
what lies between two runs. It is dated by the first time in the range of numbers that it ends in.

How far a sender's time is ahead of the broker's is at least the highest difference that any event shows:
one takes time to arrive, so the least delayed says most.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.fold.columns import Events, Flags, Ints, instants, int_array, nullable, present
from umbel.fold.groups import groups, running_max
from umbel.fold.schemas import INSTANT

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
"""One row for each sender and range of numbers; those without a number have no range."""
RUNS = pa.schema([*_SENDER, ("first", pa.int64()), ("last", pa.int64())])
"""One row for each run of numbers that are there."""


EVENTS_KEY = b"umbel.events"
"""In a file of marks: how many events they are of."""

SOURCES_KEY = b"umbel.sources"
"""In a file of marks: what their group was made of, by names in the lake, and what that was made of."""

MARKS = pa.schema([*SENDERS, *list(RUNS)[len(_SENDER) :]])
"""Both in one table, as a file holds them: rows of runs are those that have a first number."""


@dataclass(frozen=True, slots=True)
class Marks:
    senders: pa.Table
    runs: pa.Table

    def as_table(self) -> pa.Table:
        return pa.concat_tables([MARKS.empty_table(), self.senders, self.runs], promote_options="default")

    @staticmethod
    def of_table(table: pa.Table) -> "Marks":
        is_run = pc.is_valid(table.column("first"))
        senders, runs = table.filter(pc.invert(is_run)), table.filter(is_run)
        return Marks(senders.select(SENDERS.names).cast(SENDERS), runs.select(RUNS.names).cast(RUNS))

    def horizon_us(self) -> int | None:
        """The last moment that the lake knows of, by the broker's clock."""
        recorded = pc.max(self.senders.column("recorded_at").cast(pa.int64())).as_py()
        return None if recorded is None else int(recorded)

    def nodes(self) -> pa.Table:
        """One row a node: how far its time is ahead of the broker's; below 0 it is behind, or slow to
        send."""
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
    """From events of any kind, with columns of the lake."""
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
    every = list(parts)
    senders = pa.concat_tables([SENDERS.empty_table(), *(one.senders for one in every)])
    runs = pa.concat_tables([RUNS.empty_table(), *(one.runs for one in every)])
    return Marks(_joined_senders(senders, _sender_of(senders)), _joined_runs(runs, _sender_of(runs)))


def gaps(marks: Marks) -> pa.Table:
    """One row for each run of missing numbers between two that are there: its sender, start, length."""
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
    """The sender of each row, numbered."""
    return groups(*(_column(table, name) for name in SENDER))[0]


def _joined_senders(table: pa.Table, sender: Ints) -> pa.Table:
    group, firsts = groups(pa.array(sender), _column(table, "range"))
    columns = {name: _column(table, name).take(pa.array(firsts)) for name in (*SENDER, "range")}
    for name in ("first_at", "last_at", "ahead_us", "recorded_at"):
        column = _column(table, name)
        values, there = _extreme(column, group, len(firsts), lowest=name == "first_at")
        columns[name] = nullable(values, there, column.type)
    return pa.table(columns, schema=SENDERS)


def _extreme(column: pa.Array, group: Ints, count: int, *, lowest: bool) -> tuple[Ints, Flags]:
    """The lowest or highest value of each group, and whether there is one."""
    there = present(column)
    limits = np.iinfo(np.int64)
    values = np.full(count, limits.max if lowest else limits.min)
    (np.minimum if lowest else np.maximum).at(values, group[there], int_array(column)[there])
    known = np.zeros(count, dtype=bool)
    known[group[there]] = True
    return np.where(known, values, 0), known


def _joined_runs(table: pa.Table, sender: Ints) -> pa.Table:
    """Sorted by sender and number, with those that touch made one."""
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
