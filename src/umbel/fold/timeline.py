"""Timeline: every event once, in the order of the merge, numbered within its task or its node."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.fold.columns import Events, Rows, nullable
from umbel.fold.order import ATTEMPT_BITS, Ordered, said
from umbel.fold.schemas import made

_SAYING = ("result", "exception", "name", "outcome", "winner", "queue", "signum")
"""The most informative fields of an event; the first that it has is shown."""

_AS_THEY_ARE = ("timestamp", "hostname", "pid", "inc", "seq", "extra", "recorded_at")


def timeline(events: Events, order: Ordered) -> pa.Table:
    """An event that was recorded twice lies next to itself, and the one recorded first stays."""
    subject, digest = order.numbers, events.ints("digest")[order.rows]
    is_first = np.ones(len(subject), dtype=bool)
    is_first[1:] = subject[1:] != subject[:-1]
    is_new = is_first.copy()
    is_new[1:] |= digest[1:] != digest[:-1]
    places = np.flatnonzero(is_new)
    rows, subject = Rows(events, order.rows[places]), subject[places]
    since = np.flatnonzero(is_first[places])  # where each subject begins
    rank = np.arange(1, len(places) + 1) - np.repeat(since, np.diff(np.append(since, len(places))))
    attempt = order.keys[places] & (2**ATTEMPT_BITS - 1)
    task = rows.take("uuid")
    return made(
        "timeline",
        {
            "subject": order.subjects.take(pa.array(subject)) if task.null_count else task,
            "rank": pa.array(rank),
            "task_id": task,
            "attempt": nullable(attempt, said(events)[rows.rows], pa.int64()),
            "type": rows.text("type"),
            "clock": rows.settled("clock"),
            "digest": rows.settled("digest"),
            "detail": _detail(rows, events),
            **{name: rows.take(name) for name in _AS_THEY_ARE},
        },
    )


def _detail(rows: Rows, events: Events) -> pa.Array:
    told = [name for name in _SAYING if events.column(name).null_count < events.count]
    if not told:
        return pa.nulls(len(rows.rows), pa.string())
    return pc.coalesce(*(rows.take(name) for name in told))
