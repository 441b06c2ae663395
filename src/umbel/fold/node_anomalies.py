"""Node anomalies: what nodes, recorders and elections show that should not be."""

import json
import re
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.fold.anomalies import rows
from umbel.fold.columns import Events, Ints
from umbel.fold.groups import groups
from umbel.fold.marks import Marks, gaps
from umbel.fold.schemas import EVENTS
from umbel.fold.workers import beats_of

SKEW_S = 5.0
BEHIND_S = 60.0
"""Behind, or slow to send: an event may lie in a buffer for a while."""
LEAP = 1_000_000
_RECORDER = ("recorder-gap", "recorder-lost", "recorder-deaf", "recorder-unreadable")
_NODE = {"subject": "hostname", "worker": "hostname", "pid": "pid"}
_EVENT = _NODE | {"at": "timestamp", "inc": "inc", "clock": "clock"}
_WHOLE = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)


def of_nodes(others: pa.Table, elections: pa.Table, marks: Marks) -> pa.Table:
    """From the events without a task, the table `elections`, and the marks of all events."""
    return pa.concat_tables(
        [
            *_of_clocks(others),
            _skewed(marks),
            _missing(marks),
            _of_elections(elections),
            _of_recorders(others),
        ]
    )


def _of_clocks(others: pa.Table) -> tuple[pa.Table, pa.Table]:
    """A node's clock as its signs of life show it, in the order of its processes and their events."""
    beats = beats_of(others)
    node, clock = beats.codes("hostname"), beats.ints("clock")
    order = np.lexsort((beats.ints("digest"), clock, beats.ints("timestamp"), beats.ints("inc"), node))
    order = order[clock[order] > 0]
    after = np.flatnonzero(node[order][1:] == node[order][:-1]) + 1
    step = clock[order[after]] - clock[order[after - 1]]
    return (
        _steps(beats, order, after[step < 0], "clock_reset"),
        _steps(beats, order, after[step > LEAP], "clock_jump"),
    )


def _steps(beats: Events, order: Ints, after: Ints, kind: str) -> pa.Table:
    clock, places = beats.ints("clock"), pa.array(order[after])
    found = pa.table(
        {
            "hostname": beats.text("hostname").take(places),
            "pid": pa.array(beats.ints("pid")).take(places),
            "clock": pa.array(clock).take(places),
            **{name: beats.column(name).take(places) for name in ("inc", "timestamp")},
        }
    )
    steps = zip(clock[order[after - 1]].tolist(), clock[order[after]].tolist(), strict=True)
    return rows(found, kind, [f"from {before} to {now}" for before, now in steps], _EVENT)


def _skewed(marks: Marks) -> pa.Table:
    nodes = marks.nodes()
    ahead_s = pc.divide(nodes.column("ahead_us").cast(pa.float64()), 1_000_000.0)
    is_off = pc.or_(pc.greater(ahead_s, SKEW_S), pc.less(ahead_s, -BEHIND_S)).fill_null(False)
    detail = [
        f"{_one_decimal(abs(one))} s {'ahead of' if one > 0 else 'behind'} the broker's time"
        for one in ahead_s.filter(is_off).to_pylist()
    ]
    return rows(nodes.filter(is_off), "time_skew", detail, _NODE | {"at": "last_at"})


def _one_decimal(seconds: float) -> str:
    """Halves are rounded up, as the digits are written."""
    return str(Decimal(repr(seconds)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def _missing(marks: Marks) -> pa.Table:
    found = gaps(marks)
    told = zip(found.column("n").to_pylist(), found.column("start").to_pylist(), strict=True)
    detail = [f"{count} events from number {start} on" for count, start in told]
    return rows(found, "seq_gap", detail, _NODE | {"at": "at", "inc": "inc", "n": "n"})


def _of_elections(elections: pa.Table) -> pa.Table:
    found = elections.filter(pc.not_equal(elections.column("violations"), "[]"))
    of = {"subject": "election_id", "at": "last_at", "worker": "winner"}
    return rows(found, "election", found.column("violations"), of)


def _of_recorders(others: pa.Table) -> pa.Table:
    is_told = pc.is_in(others.column("type"), value_set=pa.array(_RECORDER))
    told = others.filter(pc.and_(is_told, pc.is_null(others.column("slot"))))
    _, firsts = groups(*(told.column(name).combine_chunks() for name in ("hostname", "digest")))
    found = Events(told.take(pa.array(firsts)))
    table = pa.table({name: found.column(name) for name in EVENTS.names})
    counts = pa.array([_count(text) for text in found.column("extra").to_pylist()], pa.int64())
    kind = pc.replace_substring(found.column("type"), "-", "_")
    return rows(table.append_column("n", counts), kind, found.column("extra"), _EVENT | {"n": "n"})


def _count(extra: str | None) -> int:
    """How many events a recorder tells of: numbers from first to last, those lost, or as it counted."""
    told = _read(extra)
    first, last = _whole(told.get("first")), _whole(told.get("last"))
    if first is not None and last is not None:
        return last - first + 1
    lost, count = _whole(told.get("lost")), _whole(told.get("count"))
    return next((one for one in (lost, count) if one is not None), 1)


def _read(extra: str | None) -> dict[str, Any]:
    try:
        told = json.loads(extra or "{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _whole(value: Any) -> int | None:
    text = value if isinstance(value, str) else str(value)
    number = int(text) if _WHOLE.fullmatch(text) else None
    return number if number is not None and -(2**63) <= number < 2**63 else None
