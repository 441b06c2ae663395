"""Nodes: compute the tables of worker sessions, elections and anomalies."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.precedence import ENDINGS, REJECTED, STATES
from umbel.events.state import BEAT_S, BEATS_MISSED
from umbel.events.tables import TABLES
from umbel.fold.columns import (
    EVENTS,
    INSTANT,
    SCHEMAS,
    Events,
    Flags,
    Ints,
    Rows,
    float_array,
    groups,
    instants,
    int_array,
    made,
    moments,
    nullable,
    present,
    running_max,
    seconds_between,
    starts_of,
)
from umbel.fold.senders import Marks, gaps

# ---- workers ---------------------------------------------------------------------------------------

BEAT_MIN_S, BEAT_MAX_S = 0.001, 86_400.0
OFFLINE = "worker-offline"
BEATS = ("worker-online", "worker-heartbeat", OFFLINE)
_LAST_FIELDS = ("freq", "processed", "sw_ident", "sw_ver", "sw_sys")


def beats_of(others: pa.Table) -> Events:
    """Return the distinct heartbeats, online and offline events."""
    is_beat = pc.is_in(others.column("type"), value_set=pa.array(BEATS))
    table = others.filter(pc.and_(is_beat, pc.is_null(others.column("slot"))))
    beats = Events(table)
    _, firsts = groups(beats.text("hostname"), pa.array(beats.ints("pid")), pa.array(beats.ints("digest")))
    return Events(table.take(pa.array(firsts)))


@dataclass(frozen=True, slots=True)
class _Sessions:
    """Beats sorted by sender and time, and the positions at which sessions begin."""

    rows: Ints
    sender: Ints
    covered_to: Ints
    begins: Ints

    @property
    def ends(self) -> Ints:
        return np.append(self.begins[1:], len(self.rows)) - 1 if len(self.rows) else self.begins

    def number(self) -> Ints:
        """Return the number of each session among the sessions of its sender, starting with 1."""
        sender = self.sender[self.begins]
        since = starts_of(sender)
        return np.arange(1, len(sender) + 1) - np.repeat(since, np.diff(np.append(since, len(sender))))


def workers(others: pa.Table, marks: Marks) -> pa.Table:
    """Return the table `workers`, from the events without a task and the marks of all events.

    Sessions are computed from heartbeats, online and offline events. A heartbeat covers the time until two
    more are due. Heartbeats that overlap belong to the same session; an offline event or a time without
    heartbeats ends it. A union of intervals does not depend on the order or on repeated events. A node is
    alive if its last heartbeat covers the end of the lake. The node's clock skew is considered in this
    comparison.
    """
    beats = beats_of(others)
    sessions = _sessions(beats)
    begins, rows = sessions.begins, sessions.rows
    last = Rows(beats, rows[sessions.ends])
    at, clock = beats.ints("timestamp")[rows], beats.ints("clock")[rows]
    online_at, last_at = _reduced(np.minimum, at, begins), _reduced(np.maximum, at, begins)
    covered_to = _reduced(np.maximum, sessions.covered_to, begins)
    ending = _ending(last, covered_to, marks)
    ended_at = np.where(ending == "offline", last_at, covered_to)
    return made(
        "workers",
        {
            "hostname": last.text("hostname"),
            "pid": last.settled("pid"),
            "inc": last.take("inc"),
            "session": pa.array(sessions.number()),
            "online_at": instants(online_at),
            "last_at": instants(last_at),
            "ended_at": instants(ended_at, ending != "alive"),
            "ending": pa.array(ending, pa.string()),
            "up_s": pa.array(seconds_between(online_at, last_at)),
            "clock_min": pa.array(_reduced(np.minimum, clock, begins)),
            "clock_max": pa.array(_reduced(np.maximum, clock, begins)),
            "n_beats": pa.array(np.diff(np.append(begins, len(rows)))),
            "active_max": _active_max(beats, sessions),
            **{name: last.take(name) for name in _LAST_FIELDS},
        },
    )


def _sessions(beats: Events) -> _Sessions:
    """Sort beats by sender and time, and find where sessions begin."""
    sender, _ = groups(beats.text("hostname"), pa.array(beats.ints("pid")), beats.column("inc"))
    at = beats.ints("timestamp")
    rows = np.lexsort((beats.ints("digest"), beats.ints("clock"), at, sender))
    is_offline = _is_offline(Rows(beats, rows))
    sender, at, covered_to = sender[rows], at[rows], _covered_to(beats)[rows]
    is_new = np.ones(len(rows), dtype=bool)
    is_new[1:] = (
        (sender[1:] != sender[:-1])
        | (at[1:] >= running_max(covered_to, sender)[:-1])
        | (is_offline[:-1] & ~is_offline[1:])
    )
    return _Sessions(rows, sender, covered_to, np.flatnonzero(is_new))


def _covered_to(beats: Events) -> Ints:
    """Return the time until which each heartbeat shows that its node is alive."""
    freq = float_array(beats.column("freq"))
    freq = np.where((freq >= BEAT_MIN_S) & (freq <= BEAT_MAX_S), freq, BEAT_S)
    covers_us = (freq * (BEATS_MISSED * 1_000_000)).astype(np.int64)
    is_offline = _is_offline(Rows(beats, np.arange(beats.count)))
    return beats.ints("timestamp") + np.where(is_offline, 0, covers_us)


def _is_offline(rows: Rows) -> Flags:
    found: Flags = pc.equal(rows.take("type"), OFFLINE).to_numpy(zero_copy_only=False)
    return found


def _ending(last: Rows, covered_to: Ints, marks: Marks) -> "np.ndarray[tuple[int], np.dtype[np.object_]]":
    """Return how each session ended: offline, alive or lost."""
    nodes, horizon_us = marks.nodes(), marks.horizon_us()
    place = pc.index_in(last.text("hostname"), value_set=nodes.column("hostname").combine_chunks())
    ahead_us = int_array(nodes.column("ahead_us").combine_chunks().take(place))
    moment = (0 if horizon_us is None else horizon_us) + _cut(ahead_us)
    is_alive = (covered_to > moment) if horizon_us is not None else np.zeros(len(covered_to), dtype=bool)
    return np.where(_is_offline(last), "offline", np.where(is_alive, "alive", "lost")).astype(object)


def _cut(ahead_us: Ints) -> Ints:
    """Round microseconds by converting them to float seconds and back, as earlier builds did."""
    return (ahead_us / 1_000_000 * 1_000_000).astype(np.int64)


def _active_max(beats: Events, sessions: _Sessions) -> pa.Array:
    """Return the maximum number of running tasks in each session; null if it was not reported."""
    there = beats.has("active")[sessions.rows]
    active = np.where(there, beats.ints("active")[sessions.rows], np.iinfo(np.int64).min)
    most, is_known = (
        _reduced(np.maximum, values, sessions.begins) for values in (active, there.astype(np.int64))
    )
    return nullable(most, is_known > 0, pa.int64())


def _reduced(by: np.ufunc, values: Ints, begins: Ints) -> Ints:
    """Return the reduced value of each session; empty if there are no heartbeats."""
    found: Ints = by.reduceat(values, begins) if len(begins) else values[:0]
    return found


# ---- elections -------------------------------------------------------------------------------------

_ELECT, _ACK, _ELECTED = "worker-elect", "worker-elect-ack", "worker-elected"
_CLOSED = ("done", "failed", "expired")
_FIELDS = (
    "type",
    "hostname",
    "pid",
    "clock",
    "id",
    "eid",
    "topic",
    "phase",
    "winner",
    "term",
    "attempt",
    "policy",
)
ElectionReport = dict[str, Any]
_ESCAPES = str.maketrans(
    {chr(code): f"\\u{code:04X}" for code in range(32)}
    | {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
)


def elections(others: pa.Table) -> pa.Table:
    """Return the table `elections`, from the events without a task.

    A classic election (v1) consists of two sets, the candidates and the nodes that answered; the lowest
    candidate leads. An election by the store (v2) reports its winners with their terms, and its outcome.
    Both rows are functions of sets, so they do not depend on the order or number of reports. Elections are
    few, so this code uses plain Python.
    """
    reports = _election_reports(others)
    classic = _grouped((report for report in reports if report["type"] in (_ELECT, _ACK)), "id")
    stored = _grouped((report for report in reports if report["type"] == _ELECTED), "eid")
    rows = [
        *(_row(name, "v1", events, _classic(events)) for name, events in classic.items()),
        *(_row(name, "v2", events, _by_the_store(events)) for name, events in stored.items()),
    ]
    columns = {name: [row[name] for row in rows] for name in TABLES["elections"].names}
    schema = SCHEMAS["elections"]
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _election_reports(others: pa.Table) -> list[ElectionReport]:
    """Return the reports about elections as dicts."""
    kinds = pc.is_in(others.column("type"), value_set=pa.array([_ELECT, _ACK, _ELECTED]))
    events = Events(others.filter(pc.and_(kinds, pc.is_null(others.column("slot")))))
    columns = {name: events.column(name) for name in _FIELDS}
    columns["at_us"] = events.column("timestamp").cast(pa.int64())
    found: list[ElectionReport] = pa.table(columns).to_pylist()
    return found


def _grouped(reports: Iterable[ElectionReport], by: str) -> dict[str, list[ElectionReport]]:
    found: dict[str, list[ElectionReport]] = {}
    for report in reports:
        if report[by] is not None:
            found.setdefault(report[by], []).append(report)
    return found


def _row(name: str, protocol: str, events: list[ElectionReport], found: ElectionReport) -> ElectionReport:
    """Return the row of one election, with the columns that both protocols share."""
    first, last = _greatest(events, "at_us", min), _greatest(events, "at_us")
    return {
        "election_id": name,
        "protocol": protocol,
        "topic": _greatest(events, "topic"),
        "first_at": first,
        "last_at": last,
        "duration_s": None if first is None else (last - first) / 1_000_000,
        **found,
    }


def _classic(events: list[ElectionReport]) -> ElectionReport:
    """Return the result of an election of protocol v1."""
    stood = _sorted_set(
        (report["clock"], _process(report), report["hostname"], report["pid"])
        for report in events
        if report["type"] == _ELECT
    )
    acks = {report["hostname"] for report in events if report["type"] == _ACK} - {None}
    return {
        "winner": stood[0][2] if stood else None,
        "term": None,
        "outcome": "elected" if stood else None,
        "policy": None,
        "n_candidates": len(stood),
        "candidates": _json_list(
            _json_object(name=hostname, pid=pid, clock=clock) for clock, _, hostname, pid in stood
        ),
        "n_acks": len(acks),
        "attempts": 1,
        "violations": _json_list([] if stood else [_json_text("answers without a candidate")]),
    }


def _by_the_store(events: list[ElectionReport]) -> ElectionReport:
    """Return the result of an election of protocol v2, and violations of its guarantees."""
    elected = [report for report in events if report["phase"] == "elected"]
    won = _sorted_set(
        (report["term"], report["attempt"], report["winner"], report["clock"]) for report in elected
    )
    reigns = {(report["term"], report["winner"]) for report in elected}
    done = {(report["term"], report["winner"]) for report in events if report["phase"] == "done"}
    last = max((_state(report) for report in events), key=_nulls_first)
    broken = ["two winners in one term"] if len({term for term, _ in reigns}) < len(reigns) else []
    broken += ["done by more than one winner"] if len(done) > 1 else []
    return {
        "winner": last[4],
        "term": last[0],
        "outcome": last[3],
        "policy": _greatest(events, "policy"),
        "n_candidates": len({winner for _, winner in reigns}),
        "candidates": _json_list(
            _json_object(name=winner, term=term, clock=clock) for term, _, winner, clock in won
        ),
        "n_acks": 0,
        "attempts": max(_greatest(events, "attempt") or 0, 1),
        "violations": _json_list(map(_json_text, broken)),
    }


def _state(report: ElectionReport) -> tuple[Any, ...]:
    """Return the sort key of a report; later reports have greater keys. It includes phase and winner."""
    is_closed = None if report["phase"] is None else report["phase"] in _CLOSED
    return (report["term"], is_closed, report["at_us"], report["phase"], report["winner"])


def _process(report: ElectionReport) -> str:
    return ".".join(str(part) for part in (report["hostname"], report["pid"]) if part is not None)


def _greatest(events: list[ElectionReport], name: str, choose: Callable[..., Any] = max) -> Any:
    return choose((report[name] for report in events if report[name] is not None), default=None)


def _sorted_set(found: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(set(found), key=_nulls_first)


def _nulls_first(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((field is not None, 0 if field is None else field) for field in fields)


def _json_list(items: Iterable[str]) -> str:
    return f"[{','.join(items)}]"


def _json_object(**fields: str | int | None) -> str:
    """Return a JSON object without null fields."""
    members = (
        f"{_json_text(name)}:{_json_text(value) if isinstance(value, str) else value}"
        for name, value in fields.items()
        if value is not None
    )
    return f"{{{','.join(members)}}}"


def _json_text(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'


# ---- anomalies -------------------------------------------------------------------------------------

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
FIRST_SENDINGS = pa.schema([("name", pa.string()), ("told_since", INSTANT)])
"""For each task name, the time of the first task-sent event."""


def of_bucket(tasks: pa.Table, attempts: pa.Table) -> pa.Table:
    """Return the anomalies that the rows of one bucket show."""
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
    """Return the tasks that may be lost or stuck, or that have no task-sent event."""
    settled = pc.is_in(tasks.column("state"), value_set=pa.array(_SETTLED))
    is_open = pc.invert(settled)
    is_untold = pc.and_(
        pc.and_(pc.is_null(tasks.column("sent_at")), pc.is_valid(tasks.column("received_at"))),
        pc.and_(pc.is_null(tasks.column("parent_id")), pc.is_valid(tasks.column("name"))),
    )
    every = pa.table([*(tasks.column(name) for name in _KEPT), is_open, is_untold], schema=SUSPECTS)
    return every.filter(pc.or_(is_open, is_untold))


def first_sendings(tasks: pa.Table) -> pa.Table:
    """Return the first task-sent event of each task name in a part of the table. `earliest_sendings` merges
    several parts.
    """
    return earliest_sendings(tasks.select(["name", "first_sent_at"]).rename_columns(FIRST_SENDINGS.names))


def earliest_sendings(parts: pa.Table) -> pa.Table:
    """Return the earliest time of each task name in these parts."""
    known = parts.filter(pc.and_(pc.is_valid(parts.column("name")), pc.is_valid(parts.column("told_since"))))
    found = known.group_by("name").aggregate([("told_since", "min")])
    return found.select(["name", "told_since_min"]).rename_columns(FIRST_SENDINGS.names).cast(FIRST_SENDINGS)


def judged(suspected: pa.Table, since: pa.Table, workers: pa.Table, horizon_us: int | None) -> pa.Table:
    """Return the anomalies among suspects. `since` is the result of `earliest_sendings` for all parts;
    `horizon_us` is the end of the lake.

    Anomalies are found in the other tables and in the marks. Those of a single task are found with its
    bucket (`of_bucket`). Others depend on more data, so their tasks are stored as suspects: an open task is
    decided when the alive nodes and the end of the lake are known, and a task without a task-sent event when
    it is known which task names have such events. `judged` can decide the suspects in parts.
    """
    open_tasks = suspected.filter(suspected.column("is_open"))
    untold = suspected.filter(suspected.column("is_untold"))
    return pa.concat_tables([unfinished(open_tasks, workers, horizon_us), never_sent(untold, since)])


def rows(
    found: pa.Table,
    kind: str | pa.Array,
    detail: Sequence[str | None] | pa.Array,
    taken: Mapping[str, str],
) -> pa.Table:
    """Return rows of the table `anomalies` for the rows in `found`. Missing columns are null; `n` is 1 by
    default.
    """
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
    """Describe the clocks of attempts whose events are out of order."""
    clocks = (odd.column(f"{what}_clock").to_pylist() for what in ("received", "started", "ended"))
    return [
        "received at clock {}, started at {}, ended at {}".format(
            *("?" if clock is None else clock for clock in three)
        )
        for three in zip(*clocks, strict=True)
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
    """Return the open suspects that are lost or stuck. A task that is lost is not reported as stuck."""
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
        f"{state}, and no event for {seconds} s"
        for state, seconds in zip(states, silent.tolist(), strict=True)
    ]
    return rows(found, kind, detail, _TASK)


def _is_gone(tasks: pa.Table, workers: pa.Table) -> Flags:
    """Return whether the task's node is known and has no live session; False for unknown nodes."""
    names, is_alive = workers.column("hostname"), pc.equal(workers.column("ending"), "alive")
    known = pc.is_in(tasks.column("worker"), value_set=names.combine_chunks(), skip_nulls=True)
    alive = pc.is_in(
        tasks.column("worker"), value_set=names.filter(is_alive).combine_chunks(), skip_nulls=True
    )
    found: Flags = pc.and_not(known, alive).to_numpy()
    return found


def never_sent(untold: pa.Table, since: pa.Table) -> pa.Table:
    """Return the suspects that were received after the first task-sent event of their name. Other suspects
    are ignored, because many clients send no such events.
    """
    place = pc.index_in(
        untold.column("name").combine_chunks(), value_set=since.column("name").combine_chunks()
    )
    told_since = since.column("told_since").combine_chunks().take(place)
    is_late = pc.greater(untold.column("first_received_at").combine_chunks(), told_since).fill_null(False)
    late = untold.filter(is_late)
    return rows(late, "received_without_sent", pa.repeat("no task-sent event", late.num_rows), _TASK)


# ---- node anomalies --------------------------------------------------------------------------------

SKEW_S = 5.0
BEHIND_S = 60.0
"""Larger than SKEW_S, because an event may be buffered before it is recorded."""
LEAP = 1_000_000
_RECORDER = ("recorder-gap", "recorder-lost", "recorder-deaf", "recorder-unreadable")
_NODE = {"subject": "hostname", "worker": "hostname", "pid": "pid"}
_EVENT = _NODE | {"at": "timestamp", "inc": "inc", "clock": "clock"}
_WHOLE = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)


def of_nodes(others: pa.Table, elections: pa.Table, marks: Marks) -> pa.Table:
    """Return the anomalies of nodes, clocks, elections and recorders."""
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
    """Return the resets and jumps of logical clocks, from the heartbeats of each node in the order of its
    processes and events.
    """
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
    """Return anomalies for the heartbeats at which a clock changed."""
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
    """Return anomalies for nodes whose clocks differ too much from the broker's clock."""
    nodes = marks.nodes()
    ahead_s = pc.divide(nodes.column("ahead_us").cast(pa.float64()), 1_000_000.0)
    is_off = pc.or_(pc.greater(ahead_s, SKEW_S), pc.less(ahead_s, -BEHIND_S)).fill_null(False)
    detail = [
        f"{_one_decimal(abs(seconds))} s {'ahead of' if seconds > 0 else 'behind'} the broker's time"
        for seconds in ahead_s.filter(is_off).to_pylist()
    ]
    return rows(nodes.filter(is_off), "time_skew", detail, _NODE | {"at": "last_at"})


def _one_decimal(seconds: float) -> str:
    """Return a number with one decimal; halves are rounded up."""
    return str(Decimal(repr(seconds)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def _missing(marks: Marks) -> pa.Table:
    """Return anomalies for gaps in the sequence numbers."""
    found = gaps(marks)
    ranges = zip(found.column("n").to_pylist(), found.column("start").to_pylist(), strict=True)
    detail = [f"{count} events from number {start} on" for count, start in ranges]
    return rows(found, "seq_gap", detail, _NODE | {"at": "at", "inc": "inc", "n": "n"})


def _of_elections(elections: pa.Table) -> pa.Table:
    """Return anomalies for elections that violated a guarantee."""
    found = elections.filter(pc.not_equal(elections.column("violations"), "[]"))
    of = {"subject": "election_id", "at": "last_at", "worker": "winner"}
    return rows(found, "election", found.column("violations"), of)


def _of_recorders(others: pa.Table) -> pa.Table:
    """Return anomalies for the problems that recorders have reported."""
    is_report = pc.is_in(others.column("type"), value_set=pa.array(_RECORDER))
    reports = others.filter(pc.and_(is_report, pc.is_null(others.column("slot"))))
    _, firsts = groups(*(reports.column(name).combine_chunks() for name in ("hostname", "digest")))
    found = Events(reports.take(pa.array(firsts)))
    table = pa.table({name: found.column(name) for name in EVENTS.names})
    counts = pa.array([_count(text) for text in found.column("extra").to_pylist()], pa.int64())
    kind = pc.replace_substring(found.column("type"), "-", "_")
    return rows(table.append_column("n", counts), kind, found.column("extra"), _EVENT | {"n": "n"})


def _count(extra: str | None) -> int:
    """Return the number of events that a recorder's report is about: from first to last, lost ones, or its
    count.
    """
    report = _read(extra)
    first, last = _whole(report.get("first")), _whole(report.get("last"))
    if first is not None and last is not None:
        return last - first + 1
    lost, count = _whole(report.get("lost")), _whole(report.get("count"))
    return next((number for number in (lost, count) if number is not None), 1)


def _read(extra: str | None) -> dict[str, Any]:
    try:
        report = json.loads(extra or "{}")
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _whole(value: Any) -> int | None:
    text = value if isinstance(value, str) else str(value)
    number = int(text) if _WHOLE.fullmatch(text) else None
    return number if number is not None and -(2**63) <= number < 2**63 else None
