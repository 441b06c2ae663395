"""Lake: the figures of the history page and the recorded changes of the cluster, read by SQL from the lake.

These functions run in the processes that read the lake (`history/isolation.py`), so nothing here may import
the web server. Values are parameters of the SQL, and everything is aggregated there: at most STEPS_MAX steps
of time and GROUPS_MAX names. An attempt belongs to the time at which it ended. Percentiles are exact, texts
are redacted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from umbel.history.charts import time_step
from umbel.history.query import Answer, Tables, as_csv, as_parquet, for_spreadsheets, plain
from umbel.history.tables import percentiles
from umbel.monitor.coordination import STATES, elected, lease_changed, node_of, version_changed
from umbel.monitor.records import Happening, Rates, redact_data
from umbel.protocol.delivery.redaction import redact

# ---- figures ---------------------------------------------------------------------------------------

TIMEOUT_S = 10.0
STEPS_MAX = 240
GROUPS_MAX = 30
GROUPS = {"name": "Task", "queue": "Queue", "worker": "Worker"}

Row = dict[str, Any]
FORMATS: Mapping[str, tuple[str, Callable[[Answer], str | bytes]]] = {
    "csv": ("text/csv; charset=utf-8", lambda answer: as_csv(for_spreadsheets(answer))),
    "parquet": ("application/vnd.apache.parquet", as_parquet),
}
"""The media type of each format of a download, and the function that writes it."""


@dataclass(frozen=True)
class AttemptFilter:
    """Which attempts match: all fields that are set must match."""

    name: str = ""
    queue: str = ""
    worker: str = ""
    since: float | None = None
    until: float | None = None

    def where(self) -> tuple[str, Row]:
        """Return the SQL condition, and the values of its parameters."""
        conditions, values = ["ended_at is not null"], Row()
        for column in GROUPS:
            if value := getattr(self, column):
                conditions.append(f"{column} = ${column}")
                values[column] = value
        for bound, sign in (("since", ">="), ("until", "<")):
            if (at := getattr(self, bound)) is not None:
                conditions.append(f"ended_at {sign} ${bound}")
                values[bound] = datetime.fromtimestamp(at, UTC)
        return " and ".join(conditions), values


@dataclass(frozen=True)
class Past:
    """The figures of the history page: totals, groups, errors, the week, and the comparison around a mark."""

    built_at: str
    build: int
    first: float | None
    last: float | None
    total: Row
    groups: list[Row]
    errors: list[Row]
    week: list[list[int]] = field(default_factory=list)
    """Attempts that ended, by day of the week (Monday first) and hour."""
    halves: list[tuple[str, Row]] = field(default_factory=list)
    """Before and after the mark."""


@dataclass(frozen=True)
class File:
    """The content of a file with the rows of a query, and their number."""

    content: bytes
    rows: int


_FIGURES = f"""count(*) as n, count(*) filter (outcome = 'SUCCESS') as succeeded,
    count(*) filter (outcome = 'FAILURE') as failed, count(*) filter (outcome = 'RETRY') as retried,
    {percentiles("wait_s", "wait_p{}_s", (50, 95))},
    {percentiles("run_s", "run_p{}_s", (50, 95))}"""


def queried(tables: Tables, sql: str, limit: int) -> Answer:
    """Return the rows of a query, with values that JSON can carry."""
    found = _query(tables, sql, limit)
    return replace(found, rows=[tuple(map(plain, row)) for row in found.rows])


def as_file(tables: Tables, sql: str, limit: int, form: str) -> File:
    """Return the rows of a query as a file of this format."""
    found = _query(tables, sql, limit)
    written = FORMATS[form][1](found)
    return File(written.encode() if isinstance(written, str) else written, len(found.rows))


def _query(tables: Tables, sql: str, limit: int) -> Answer:
    found = tables.ask(sql, limit=limit, timeout_s=TIMEOUT_S)
    return replace(found, rows=[tuple(map(_redacted, row)) for row in found.rows])


def _redacted(value: Any) -> Any:
    return redact_data(value) if isinstance(value, str | list | dict) else value


def past(tables: Tables, wanted: AttemptFilter, by: str, mark: float | None) -> Past:
    """Return the figures of the matching attempts, by a column, and before and after `mark` if given."""
    where, values = wanted.where()
    [span] = tables.rows(
        f"select epoch(min(ended_at)) as first, epoch(max(ended_at)) as last from attempts where {where}",
        values,
    )
    [total] = tables.rows(f"select {_FIGURES} from attempts where {where}", values)
    return Past(
        built_at=str(tables.build.facts.get("built_at", "")),
        build=tables.build.number,
        first=span["first"],
        last=span["last"],
        total=total,
        groups=tables.rows(
            f"select {by} as what, {_FIGURES} from attempts where {where} group by {by}"
            f" order by n desc, what limit {GROUPS_MAX}",
            values,
        ),
        errors=_errors(tables, where, values),
        week=_week(tables, where, values),
        halves=[] if mark is None else _halves(tables, where, values, mark),
    )


def rates(tables: Tables, wanted: AttemptFilter) -> Rates:
    """Return the recorded rates in the columns that the rates of the last hour have, for the same charts."""
    where, values = wanted.where()
    [span] = tables.rows(
        f"select epoch(min(ended_at)) as first, epoch(max(ended_at)) as last from attempts where {where}",
        values,
    )
    if span["first"] is None:
        return _columns(1, [], {})
    step = max(1, int(time_step(max(span["last"] - span["first"], 1.0), STEPS_MAX)))
    rows = tables.rows(
        f"select cast(floor(epoch(ended_at) / {step}) * {step} as bigint) as at, {_FIGURES}"
        f" from attempts where {where} group by 1 order by 1",
        values,
    )
    first, last = (int(span[bound] // step * step) for bound in ("first", "last"))
    return _columns(step, list(range(first, last + step, step)), {int(row["at"]): row for row in rows})


def _columns(step: int, times: list[int], rows: dict[int, Row]) -> Rates:
    def counts(name: str) -> list[int | None]:
        return [rows[at][name] if at in rows else 0 for at in times]

    def durations(name: str) -> list[float | None]:
        return [rows[at][name] if at in rows else None for at in times]

    nothing: list[int | None] = [None] * len(times)
    return Rates(
        step_s=step,
        at=[float(at) for at in times],
        sent=nothing,
        done=counts("succeeded"),
        failed=counts("failed"),
        retried=counts("retried"),
        wait_p50_s=durations("wait_p50_s"),
        wait_p95_s=durations("wait_p95_s"),
        run_p50_s=durations("run_p50_s"),
        run_p95_s=durations("run_p95_s"),
        ready=nothing,
        oldest_s=[None] * len(times),
        alive=nothing,
        queues={},
        marks=[],
    )


def _errors(tables: Tables, where: str, values: Row) -> list[Row]:
    rows = tables.rows(
        f"select name, exception, count(*) as n from attempts where {where} and outcome = 'FAILURE'"
        " group by name, exception order by n desc, name limit 10",
        values,
    )
    return [row | {"exception": redact(row["exception"] or "")} for row in rows]


def _week(tables: Tables, where: str, values: Row) -> list[list[int]]:
    week = [[0] * 24 for _ in range(7)]
    for row in tables.rows(
        f"select isodow(ended_at) as day, hour(ended_at) as hour, count(*) as n from attempts where {where}"
        " group by 1, 2",
        values,
    ):
        week[row["day"] - 1][row["hour"]] = row["n"]
    return week


def _halves(tables: Tables, where: str, values: Row, mark: float) -> list[tuple[str, Row]]:
    found = []
    for name, sign in (("before", "<"), ("after", ">=")):
        [row] = tables.rows(
            f"select {_FIGURES} from attempts where {where} and ended_at {sign} $mark",
            values | {"mark": datetime.fromtimestamp(mark, UTC)},
        )
        found.append((name, row))
    return found


# ---- recorded changes ------------------------------------------------------------------------------

CHANGES_MAX = 5000
BEFORE_MAX = 5000
WENT_ON_S = 10  # a node that still reports so long after other nodes declared it lost was not lost
CHANGED_FROM: Mapping[str, tuple[str | None, ...]] = {
    "alive": ("suspect",),
    "suspect": (None, "alive"),
    "lost": (None, "alive", "suspect"),
    "left": (None, "alive", "suspect"),
}
"""The states from which a node changes to this one; None is unknown. Other kinds are always a change: a new
process is shown even if the loss of the previous one was not reported."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded changes of a period, oldest first, complete from `since` to `known_until`.

    They begin with the last change of each node that was present and of each lease that was held when the
    period began. Times are from the nodes' clocks. A suspicion ends with the next recorded heartbeat, because
    no event reports its end. A loss of a node that went on sending events counts as a suspicion.
    """

    happenings: list[Happening]
    since: float
    known_from: float | None
    known_until: float | None
    build: int
    built_at: str
    more: bool = False


def recorded(tables: Tables, since: float, until: float) -> Recorded:
    """Return the changes of a period, after the changes that describe the cluster at its beginning."""
    [known] = tables.rows(_KNOWN)
    rows = tables.rows(_BETWEEN, {"since": since, "until": until, "most": CHANGES_MAX + 1})
    more = len(rows) > CHANGES_MAX
    if more:
        rows.pop()
        since = rows[-1]["at_s"]
    before = tables.rows(_BEFORE, {"since": since, "most": BEFORE_MAX})
    changes = [_happening(row) for row in (*before, *rows)]
    changes += _cleared(tables, changes, until)
    return Recorded(
        happenings=changes_of(changes),
        since=since,
        known_from=known["first"],
        known_until=known["last"],
        build=tables.build.number,
        built_at=str(tables.build.facts.get("built_at", "")),
        more=more,
    )


def changes_of(happenings: Iterable[Happening]) -> list[Happening]:
    """Return the happenings in order, without those that change nothing.

    Several nodes report one loss, and some of them give the reason: it is added to the first report.
    """
    changes: list[Happening] = []
    places: dict[str, int] = {}  # of the last change of each node
    for happening in sorted(happenings, key=lambda item: (item.at, item.kind not in STATES, item.subject)):
        kind, subject = happening.kind, happening.subject
        if kind in STATES:
            before = changes[places[subject]] if subject in places else None
            state = None if before is None else STATES[before.kind]
            if kind in CHANGED_FROM and state not in CHANGED_FROM[kind]:
                if before is not None and before.kind == kind and not before.text:
                    changes[places[subject]] = msgspec.structs.replace(before, text=happening.text)
                continue
            places[subject] = len(changes)
        changes.append(happening)
    return changes


def _happening(row: Row) -> Happening:
    at, kind, subject, text = row["at_s"], row["kind"], row["subject"], row["text"] or ""
    node, term = node_of(row["node"] or ""), row["term"] or 0
    match kind:
        case "lease":
            return lease_changed(subject, node, term, at)
        case "elected":
            return elected(subject, text, node, term, at)
        case "version":
            return version_changed(subject, text, row["node"], at)
        case "suspect" | "lost" if row["node"]:
            found = f"found by {row['node']}"
            return Happening(at=at, kind=kind, subject=subject, text=text or found, node=subject)
        case _:
            return Happening(at=at, kind=kind, subject=subject, text=text, node=subject)


def _cleared(tables: Tables, happenings: Sequence[Happening], until: float) -> list[Happening]:
    """Return the first heartbeat after each suspicion."""
    suspicions = [happening for happening in happenings if happening.kind == "suspect"]
    if not suspicions:
        return []
    values = {
        "nodes": [suspicion.subject for suspicion in suspicions],
        "times": [suspicion.at for suspicion in suspicions],
        "since": min(suspicion.at for suspicion in suspicions),
        "until": until,
    }
    return [
        Happening(at=row["at_s"], kind="alive", subject=row["node"], node=row["node"])
        for row in tables.rows(_HEARTBEAT_AFTER, values)
    ]


# Any program that can write to the broker may have sent these values: texts may have any length, and JSON may
# be invalid.
_CHANGES = f"""
with session as (
    select hostname, online_at, last_at, ended_at, ending, sw_ver,
        lag(sw_ver) over node as sw_ver_before, row_number() over node as number
    from workers window node as (partition by hostname order by online_at, pid)
), report as (
    select epoch(timestamp) as at_s, type, hostname, case when json_valid(extra) then extra end as extra
    from timeline where type in ('worker-suspect', 'worker-lost', 'worker-leader')
), change as (
    select epoch(online_at) as at_s, case when number = 1 then 'joined' else 'returned' end as kind,
        hostname as subject, '' as text, '' as node, 0 as term
    from session
    union all
    select epoch(ended_at), case ending when 'offline' then 'left' else 'lost' end, hostname, '', '', 0
    from session past where ended_at is not null and not exists (
        select 1 from session other where other.hostname = past.hostname
            and other.online_at <= past.ended_at
            and (other.ended_at is null or other.ended_at > past.ended_at))
    union all
    select epoch(online_at), 'version', hostname, left(sw_ver_before, 100), left(sw_ver, 100), 0
    from session where sw_ver <> sw_ver_before
    union all
    select epoch(last_at), 'elected', election_id, left(topic, 200), left(winner, 300), coalesce(term, 0)
    from elections where winner is not null
    union all
    select at_s, case when type = 'worker-lost' and exists (
            select 1 from session where session.hostname = extra->>'$.subject'
                and epoch(online_at) <= at_s and epoch(last_at) > at_s + {WENT_ON_S})
            then 'suspect' else substr(type, 8) end,
        extra->>'$.subject', left(extra->>'$.reason', 200), report.hostname, 0
    from report where type <> 'worker-leader'
    union all
    select at_s, 'lease', extra->>'$.lease', '',
        case when extra->>'$.phase' = 'acquired' then left(extra->>'$.leader', 300) else '' end,
        coalesce(try_cast(extra->>'$.term' as bigint), 0)
    from report where type = 'worker-leader'
)"""
_FIELDS = "select at_s, kind, left(subject, 300) as subject, text, node, term from change"
_BETWEEN = f"""{_CHANGES}
{_FIELDS} where at_s >= $since and at_s < $until and subject <> ''
order by at_s desc, subject limit $most"""
_BEFORE = f"""{_CHANGES}, last as (
    select * from change where at_s < $since and subject <> '' and kind not in ('version', 'elected')
    qualify row_number() over (partition by kind = 'lease', subject order by at_s desc) = 1)
{_FIELDS.replace("from change", "from last")}
where kind not in ('lost', 'left') and (kind <> 'lease' or node <> '') order by at_s desc limit $most"""
_KNOWN = """
select min(first) as first, max(last) as last from (
    select epoch(min(online_at)) as first, epoch(max(last_at)) as last from workers
    union all select epoch(min(first_at)), epoch(max(last_at)) from elections)"""
_HEARTBEAT_AFTER = """
with suspicion as (select unnest($nodes) as node, unnest($times) as at_s),
beat as (
    select hostname as node, epoch(timestamp) as at_s from timeline
    where type in ('worker-online', 'worker-heartbeat') and hostname in (select node from suspicion)
        and epoch(timestamp) between $since and $until)
select distinct beat.node, beat.at_s from suspicion asof join beat
    on suspicion.node = beat.node and suspicion.at_s < beat.at_s"""
