"""The lake in the dashboard: figures and rows for the history page, changes of the cluster for the time
slider.

Figures come of SQL whose values are parameters, and everything is aggregated there: at most STEPS_MAX steps
of time and GROUPS_MAX names. An attempt counts where it ended. These functions run in the processes that read
the lake (`history/isolation.py`), so nothing here may import the web server.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import msgspec

from umbel.history.charts import time_step
from umbel.history.query import Answer, Tables, as_csv, as_parquet, for_spreadsheets, plain
from umbel.history.tables import percentiles
from umbel.monitor.coordination import STATES, elected, lease_changed, node_of, version_changed
from umbel.monitor.records import Happening, Rates
from umbel.protocol.delivery.redaction import redact
from umbel.web.redaction import redact_data

# ---- past ------------------------------------------------------------------------------------------
#
# What the history page asks of the lake's tables: figures, and the rows of a query.
#
# Figures come of SQL whose values are parameters. Everything is aggregated there: at most `STEPS_MAX` steps
# of time, `GROUPS_MAX` names. An attempt counts where it ended. Percentiles are exact. Rows are redacted.

TIMEOUT_S = 10.0
STEPS_MAX = 240
GROUPS_MAX = 30
GROUPS = {"name": "Task", "queue": "Queue", "worker": "Worker"}

Row = dict[str, Any]
FORMATS: Mapping[str, tuple[str, Callable[[Answer], str | bytes]]] = {
    "csv": ("text/csv; charset=utf-8", lambda answer: as_csv(for_spreadsheets(answer))),
    "parquet": ("application/vnd.apache.parquet", as_parquet),
}
"""By the format of a download: the media type, and the function that writes it."""


@dataclass(frozen=True)
class AttemptFilter:
    """Which attempts: each field that is set narrows."""

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
    """The figures of the history page: totals, groups, errors, the week, and the comparison around a mark.

    Percentiles are exact; texts are redacted.
    """

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
    """Return the recorded rates in the columns of the last hour's, so that one chart draws both."""
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


# ---- recorded --------------------------------------------------------------------------------------
#
# Who came and went, and who was elected, read from the lake's tables for the time slider.
#
# Sessions of nodes say who came, left and went silent. What nodes said of one another (suspicions, losses)
# and of leases is in the timeline, elections have a separate table. The answer has the shape of the
# dashboard's own events, so one replay shows both. Before it stand the last changes of the nodes that
# were there and of the leases that were held when the time began.
#
# At most CHANGES_MAX changes are read, the newest; `since` says from when on none is missing. Times are
# those of the nodes' clocks. A suspicion ends with the next heartbeat that was recorded: nobody announces
# that. A loss that was reported of a node whose heartbeats went on is a suspicion.

CHANGES_MAX = 5000
STANDING_MAX = 5000
KEPT_S = 60.0
KEPT_MAX = 8
WENT_ON_S = 10  # a node that reports so long after others declared it lost was not lost
GONE = ("lost", "left")


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded changes of a period, oldest first, complete from `since` to `known_until`.

    Times are those of the nodes' clocks. A suspicion ends with the next recorded heartbeat, as no event
    reports its end. A loss reported of a node that sent events for longer counts as a suspicion.
    """

    happenings: list[Happening]
    since: float
    known_from: float | None
    known_until: float | None
    build: int
    built_at: str
    more: bool = False


class RecordedCache:
    """A cache of recorded changes: dragging the slider asks for the same period again and again."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[float, float], tuple[float, Recorded]] = OrderedDict()
        self._reading = asyncio.Lock()  # concurrent callers wait for the same answer

    async def recall(self, since: float, until: float, read: Callable[[], Awaitable[Recorded]]) -> Recorded:
        """Return the cached changes of a period, or call `read`; concurrent callers share one read."""
        found = self._known(since, until)
        if found is not None:
            return found
        async with self._reading:
            found = self._known(since, until)
            if found is None:
                found = await read()
                self._kept[since, until] = monotonic(), found
                self._kept.move_to_end((since, until))
                if len(self._kept) > KEPT_MAX:
                    self._kept.popitem(last=False)
            return found

    def _known(self, since: float, until: float) -> Recorded | None:
        read_at, found = self._kept.get((since, until), (0.0, None))
        return found if monotonic() - read_at <= KEPT_S else None


def recorded(tables: Tables, since: float, until: float) -> Recorded:
    """Return the changes of a period, after the state of nodes and leases at its beginning."""
    [known] = tables.rows(_KNOWN)
    rows = tables.rows(_BETWEEN, {"since": since, "until": until, "most": CHANGES_MAX + 1})
    more = len(rows) > CHANGES_MAX
    if more:
        rows.pop()
        since = rows[-1]["told_at"]
    standing = tables.rows(_STANDING, {"since": since, "most": STANDING_MAX})
    changes = [change for row in (*standing, *rows) if (change := _happening(row)) is not None]
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
    """Return the events in order, without those that change nothing.

    Several nodes report one loss, and some give a reason.
    """
    changes: list[Happening] = []
    places: dict[str, int] = {}  # of the last change of each node
    for happening in sorted(
        happenings, key=lambda happening: (happening.at, happening.kind not in STATES, happening.subject)
    ):
        if happening.kind in STATES:
            place = places.get(happening.subject)
            before = None if place is None else changes[place]
            if not _is_change(happening.kind, None if before is None else STATES[before.kind]):
                if (
                    place is not None
                    and before is not None
                    and happening.kind == before.kind
                    and not before.text
                ):
                    changes[place] = msgspec.structs.replace(before, text=happening.text)
                continue
            places[happening.subject] = len(changes)
        changes.append(happening)
    return changes


def _is_change(kind: str, before: str | None) -> bool:
    match kind:
        case "alive":
            return before == "suspect"
        case "suspect":
            return before in (None, "alive")
        case "lost" | "left":
            return before not in GONE
        case _:
            return True  # a new process is shown even if the previous one was not reported lost


def _happening(row: dict[str, Any]) -> Happening | None:
    at, kind, subject, text = row["told_at"], row["kind"], row["subject"], row["text"] or ""
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
    accused = [suspicion for suspicion in happenings if suspicion.kind == "suspect"]
    if not accused:
        return []
    values = {
        "nodes": [suspicion.subject for suspicion in accused],
        "times": [suspicion.at for suspicion in accused],
        "since": min(suspicion.at for suspicion in accused),
        "until": until,
    }
    return [
        Happening(at=row["told_at"], kind="alive", subject=row["node"], node=row["node"])
        for row in tables.rows(_HEARD_AFTER, values)
    ]


# Other programs wrote these columns: texts may have any length, and JSON may be invalid.
_CHANGES = f"""
with session as (
    select hostname, online_at, last_at, ended_at, ending, sw_ver,
        lag(sw_ver) over node as sw_ver_before, row_number() over node as number
    from workers window node as (partition by hostname order by online_at, pid)
), said as (
    select epoch(timestamp) as told_at, type, hostname, case when json_valid(extra) then extra end as extra
    from timeline where type in ('worker-suspect', 'worker-lost', 'worker-leader')
), change as (
    select epoch(online_at) as told_at, case when number = 1 then 'joined' else 'returned' end as kind,
        hostname as subject, '' as text, '' as node, 0 as term
    from session
    union all
    select epoch(ended_at), case ending when 'offline' then 'left' else 'lost' end, hostname, '', '', 0
    from session one where ended_at is not null and not exists (
        select 1 from session other where other.hostname = one.hostname
            and other.online_at <= one.ended_at
            and (other.ended_at is null or other.ended_at > one.ended_at))
    union all
    select epoch(online_at), 'version', hostname, left(sw_ver_before, 100), left(sw_ver, 100), 0
    from session where sw_ver <> sw_ver_before
    union all
    select epoch(last_at), 'elected', election_id, left(topic, 200), left(winner, 300), coalesce(term, 0)
    from elections where winner is not null
    union all
    select told_at, case when type = 'worker-lost' and exists (
            select 1 from session where session.hostname = extra->>'$.subject'
                and epoch(online_at) <= told_at and epoch(last_at) > told_at + {WENT_ON_S})
            then 'suspect' else substr(type, 8) end,
        extra->>'$.subject', left(extra->>'$.reason', 200), said.hostname, 0
    from said where type <> 'worker-leader'
    union all
    select told_at, 'lease', extra->>'$.lease', '',
        case when extra->>'$.phase' = 'acquired' then left(extra->>'$.leader', 300) else '' end,
        coalesce(try_cast(extra->>'$.term' as bigint), 0)
    from said where type = 'worker-leader'
)"""
_FIELDS = "select told_at, kind, left(subject, 300) as subject, text, node, term from change"
_BETWEEN = f"""{_CHANGES}
{_FIELDS} where told_at >= $since and told_at < $until and subject <> ''
order by told_at desc, subject limit $most"""
_STANDING = f"""{_CHANGES}, last as (
    select * from change where told_at < $since and subject <> '' and kind not in ('version', 'elected')
    qualify row_number() over (partition by kind = 'lease', subject order by told_at desc) = 1)
{_FIELDS.replace("from change", "from last")}
where kind not in ('lost', 'left') and (kind <> 'lease' or node <> '') order by told_at desc limit $most"""
_KNOWN = """
select min(first) as first, max(last) as last from (
    select epoch(min(online_at)) as first, epoch(max(last_at)) as last from workers
    union all select epoch(min(first_at)), epoch(max(last_at)) from elections)"""
_HEARD_AFTER = """
with accused as (select unnest($nodes) as node, unnest($times) as told_at),
beat as (
    select hostname as node, epoch(timestamp) as told_at from timeline
    where type in ('worker-online', 'worker-heartbeat') and hostname in (select node from accused)
        and epoch(timestamp) between $since and $until)
select distinct beat.node, beat.told_at from accused asof join beat
    on accused.node = beat.node and accused.told_at < beat.told_at"""
