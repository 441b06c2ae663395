"""Anomalies: what should not have been, one row each, seen in the other tables and in the marks.

What one task shows alone is found with its bucket (`of_bucket`). What is an anomaly only beside other
facts is kept as a suspect: an open task, until it is known which nodes are alive and when the lake ends;
a task without a sending, until it is known which names have sendings. `judged` decides on suspects, any
part of them at a time. What nodes show is in `node_anomalies.py`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.precedence import ENDINGS, REJECTED, STATES
from umbel.fold.columns import Flags, Ints, int_array, present, seconds_between
from umbel.fold.moments import moments
from umbel.fold.schemas import INSTANT, SCHEMAS

LOST_AFTER_S = 60
STUCK_AFTER_S = 3600
_SETTLED = (*sorted(STATES[slot] for slot in ENDINGS), REJECTED)
_TASK = {
    "subject": "task_id",
    "at": "state_at",
    "task_id": "task_id",
    "attempt": "retries",
    "name": "name",
    "worker": "worker",
    "clock": "clock",
}
_ATTEMPT = _TASK | {"attempt": "attempt", "pid": "pid"}
_KEPT = ("task_id", "state", "state_at", "clock", "worker", "name", "eta", "retries", "first_received_at")
SUSPECTS = pa.schema(
    [*(SCHEMAS["tasks"].field(name) for name in _KEPT), ("is_open", pa.bool_()), ("is_untold", pa.bool_())]
)
TOLD = pa.schema([("name", pa.string()), ("told_since", INSTANT)])
"""Since when sendings of tasks of a name are reported."""


def of_bucket(tasks: pa.Table, attempts: pa.Table) -> pa.Table:
    """What is certain."""
    odd = attempts.filter(attempts.column("out_of_order"))
    twice = attempts.filter(pc.greater(attempts.column("n_terminal"), 1))
    sent = pc.add(tasks.column("retries"), 1)
    often = tasks.filter(pc.greater(tasks.column("n_deliveries"), sent))
    return pa.concat_tables(
        [
            rows(odd, "causality", _clocks(odd), _ATTEMPT),
            rows(twice, "run_twice", _endings(twice), _ATTEMPT | {"n": "n_terminal"}),
            rows(often, "delivered_twice", _deliveries(often), _TASK | {"n": "n_deliveries"}),
        ]
    )


def suspects(tasks: pa.Table) -> pa.Table:
    """Tasks of a part of the table that may be lost or stuck, or may have been sent without a word."""
    settled = pc.is_in(tasks.column("state"), value_set=pa.array(_SETTLED))
    is_open = pc.invert(settled)
    is_untold = pc.and_(
        pc.and_(pc.is_null(tasks.column("sent_at")), pc.is_valid(tasks.column("received_at"))),
        pc.and_(pc.is_null(tasks.column("parent_id")), pc.is_valid(tasks.column("name"))),
    )
    every = pa.table([*(tasks.column(name) for name in _KEPT), is_open, is_untold], schema=SUSPECTS)
    return every.filter(pc.or_(is_open, is_untold))


def told(tasks: pa.Table) -> pa.Table:
    """Of a part of the table; those of all parts are joined by `first_told`."""
    return first_told(tasks.select(["name", "first_sent_at"]).rename_columns(TOLD.names))


def first_told(parts: pa.Table) -> pa.Table:
    known = parts.filter(pc.and_(pc.is_valid(parts.column("name")), pc.is_valid(parts.column("told_since"))))
    found = known.group_by("name").aggregate([("told_since", "min")])
    return found.select(["name", "told_since_min"]).rename_columns(TOLD.names).cast(TOLD)


def judged(suspected: pa.Table, since: pa.Table, workers: pa.Table, horizon_us: int | None) -> pa.Table:
    """`since`: what `first_told` made of all parts. `workers`: the table. `horizon_us`: the lake's end."""
    open_tasks = suspected.filter(suspected.column("is_open"))
    untold = suspected.filter(suspected.column("is_untold"))
    return pa.concat_tables([unfinished(open_tasks, workers, horizon_us), never_sent(untold, since)])


def rows(
    found: pa.Table,
    kind: str | pa.Array,
    detail: Sequence[str | None] | pa.Array,
    taken: Mapping[str, str],
) -> pa.Table:
    """The table's columns from those of what was found; what it has nothing for is null, `n` then 1."""
    count, schema = found.num_rows, SCHEMAS["anomalies"]
    given = {
        "kind": pa.repeat(kind, count) if isinstance(kind, str) else kind,
        "detail": detail if isinstance(detail, pa.Array | pa.ChunkedArray) else pa.array(detail, pa.string()),
        "n": pa.repeat(1, count),
    }
    given |= {name: found.column(column) for name, column in taken.items()}
    return pa.table(
        [given[field.name] if field.name in given else pa.nulls(count, field.type) for field in schema],
        schema=schema,
    )


def _clocks(odd: pa.Table) -> list[str]:
    clocks = (odd.column(f"{what}_clock").to_pylist() for what in ("received", "started", "ended"))
    return [
        "received at clock {}, started at {}, ended at {}".format(
            *("?" if one is None else one for one in told)
        )
        for told in zip(*clocks, strict=True)
    ]


def _endings(twice: pa.Table) -> list[str]:
    numbers, counts = (twice.column(name).to_pylist() for name in ("attempt", "n_terminal"))
    return [f"attempt {number} ended {count} times" for number, count in zip(numbers, counts, strict=True)]


def _deliveries(often: pa.Table) -> list[str]:
    counts, numbers = (often.column(name).to_pylist() for name in ("n_deliveries", "retries"))
    return [
        f"{count} deliveries of {number + 1} attempts" for count, number in zip(counts, numbers, strict=True)
    ]


def unfinished(open_tasks: pa.Table, workers: pa.Table, horizon_us: int | None) -> pa.Table:
    """Of suspects that are open those that are lost or stuck, not both."""
    if horizon_us is None:
        return SCHEMAS["anomalies"].empty_table()
    state_at = open_tasks.column("state_at").combine_chunks()
    silent_s = seconds_between(int_array(state_at), np.full(len(state_at), horizon_us))
    is_known = present(state_at)
    eta_us, has_eta = moments(open_tasks.column("eta").combine_chunks())
    is_lost = is_known & _is_gone(open_tasks, workers) & (silent_s > LOST_AFTER_S)
    is_stuck = is_known & (~has_eta | (eta_us <= horizon_us)) & (silent_s > STUCK_AFTER_S)
    places = np.flatnonzero(is_lost | is_stuck)
    found = open_tasks.take(pa.array(places))
    kind = pa.array(np.where(is_lost[places], "lost", "stuck"), pa.string())
    silent: Ints = silent_s[places].astype(np.int64)
    states = found.column("state").to_pylist()
    detail = [
        f"{state}, and no event for {one} s" for state, one in zip(states, silent.tolist(), strict=True)
    ]
    return rows(found, kind, detail, _TASK)


def _is_gone(tasks: pa.Table, workers: pa.Table) -> Flags:
    """Whether the task's node is one that has no session any more. Of an unknown node nothing is known."""
    names, is_alive = workers.column("hostname"), pc.equal(workers.column("ending"), "alive")
    known = pc.is_in(tasks.column("worker"), value_set=names.combine_chunks(), skip_nulls=True)
    alive = pc.is_in(
        tasks.column("worker"), value_set=names.filter(is_alive).combine_chunks(), skip_nulls=True
    )
    found: Flags = pc.and_not(known, alive).to_numpy()
    return found


def never_sent(untold: pa.Table, since: pa.Table) -> pa.Table:
    """Of suspects without a sending those of names whose sendings are reported, and after the first: many
    clients report none."""
    place = pc.index_in(
        untold.column("name").combine_chunks(), value_set=since.column("name").combine_chunks()
    )
    told_since = since.column("told_since").combine_chunks().take(place)
    is_late = pc.greater(untold.column("first_received_at").combine_chunks(), told_since).fill_null(False)
    late = untold.filter(is_late)
    return rows(late, "received_without_sent", pa.repeat("no task-sent event", late.num_rows), _TASK)
