"""Figures: the numbers of a report, counted and measured by SQL over the published tables and views.

Everything is aggregated in SQL: at most STEPS_MAX time steps and a limited number of names, nodes and rows;
rows beyond a limit are counted. So the report of a hundred million events is as large as that of a thousand.
Percentiles are exact.

The period of a report is the time in which the broker's log received the events, because the nodes' own
clocks may be wrong: a node whose clock is in the year 2099 must not stretch the time axis. Attempts that
ended outside the period are counted as `n_outside`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil, floor
from typing import Any

from umbel.events.tables import TABLES
from umbel.history.charts import time_step
from umbel.history.markup import MINUTE
from umbel.history.query import Tables
from umbel.history.tables import Wanted, percentiles
from umbel.history.views import ANY_TASKS, ANY_TIME, OF_PART

# ---- period ----------------------------------------------------------------------------------------

Row = dict[str, Any]


@dataclass(frozen=True)
class Period:
    """The time from `start` to `end` in Unix seconds, divided into steps of `step_s`."""

    start: float
    end: float
    step_s: float

    @property
    def length_s(self) -> float:
        """The seconds from start to end."""
        return self.end - self.start

    @property
    def shown(self) -> tuple[float, float]:
        """From the start of the first step to the end of the last step."""
        times = self.times
        return times[0], times[-1] + self.step_s

    @property
    def times(self) -> list[float]:
        """The start of each time step; the first is a multiple of the step."""
        first = self.start // self.step_s
        steps = int(-(-self.end // self.step_s) - first)
        return [(first + number) * self.step_s for number in range(max(steps, 1))]


# ---- queues, workflows, lost time, unusual times ---------------------------------------------------

NAMES_MAX = 20
DRAWN_MAX = 5
SLOWEST_MAX = 10
UNUSUAL_MAX = 30
UNUSUAL_STEPS = 60
STEPS_MAX = 120


@dataclass(frozen=True)
class Depths:
    """How many messages waited in the deepest queues. Queues are recorded per minute, so no step is
    shorter.
    """

    period: Period
    queues: list[Row]
    """The deepest queue first."""
    steps: list[list[float | None]]
    """The largest depth in each step, for each of the first queues."""


@dataclass(frozen=True)
class Work:
    """The figures of queues, workflows, lost time and unusual times."""

    depths: Depths | None
    workflow_kinds: list[Row]
    slowest: list[Row]
    lost: list[Row]
    unusual: list[Row]
    unusual_step_s: float


def work(tables: Tables, period: Period | None) -> Work:
    """Return the figures of queues, workflows, lost time and unusual times."""
    step_s = max(MINUTE, time_step(period.length_s, UNUSUAL_STEPS)) if period else MINUTE
    return Work(
        depths=_depths(tables, period) if period else None,
        **_workflows(tables),
        lost=tables.rows(_LOST, timeout_s=LONG_S),
        unusual=tables.rows(_UNUSUAL, {"step_s": step_s}, timeout_s=LONG_S),
        unusual_step_s=step_s,
    )


def _workflows(tables: Tables) -> dict[str, list[Row]]:
    """Return the workflows by the name of their first task, and the slowest workflows.

    Only as many tasks are read at a time as fit into the memory that a query may use.
    """
    parts = tables.rows(_IN_TREES, timeout_s=LONG_S)[0]["n"] // TASKS_AT_ONCE + 1
    kinds: dict[str | None, Row] = {}
    slowest: list[Row] = []
    for part in range(parts):
        for row in tables.rows(_KINDS, {"part": part, "parts": parts}, timeout_s=LONG_S):
            slowest += row.pop("slowest") or ()
            known = kinds.setdefault(row["name"], {"name": row["name"], "durations": array("d")})
            known["durations"].extend(row.pop("durations") or ())
            known.update({key: known.get(key, 0) + (row[key] or 0) for key in row if key != "name"})
        slowest.sort(key=lambda row: (row["duration_s"], row["root_id"]), reverse=True)
        del slowest[SLOWEST_MAX:]
    found = sorted(kinds.values(), key=lambda row: (-sum(row["durations"]), row["name"] or ""))[:NAMES_MAX]
    for row in found:
        durations = sorted(row.pop("durations"))
        row |= {"p50_s": _share(durations, 0.5), "p95_s": _share(durations, 0.95)}
    return {"workflow_kinds": found, "slowest": slowest}


def _share(ordered: Sequence[float], share: float) -> float | None:
    """Return a quantile, interpolated between two values like DuckDB's `quantile_cont`."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below, above = ordered[floor(place)], ordered[ceil(place)]
    return below + (above - below) * (place - floor(place))


def _depths(tables: Tables, period: Period) -> Depths | None:
    coarse = replace(period, step_s=max(period.step_s, MINUTE))
    start, end = coarse.shown
    rows = tables.rows(_DEPTHS, {"step": coarse.step_s, "end": end}, timeout_s=LONG_S)
    within = [row for row in rows if row["at_s"] >= start]
    deepest = {row["queue"]: row for row in sorted(within, key=lambda row: float(row["peak"]))}
    if not deepest:
        return None
    waited = {row["queue"]: row["waited_s"] for row in tables.rows(_WAITED)}
    queues = [
        {
            "queue": queue,
            "peak": row["peak"],
            "peak_at": row["at_s"],
            "mean": (waited.get(queue) or 0.0) / period.length_s,
            "backlog_s": max(
                (step["backlog_s"] for step in within if step["queue"] == queue and step["backlog_s"]),
                default=0.0,
            ),
        }
        for queue, row in sorted(deepest.items(), key=lambda item: (-item[1]["peak"], item[0] or ""))
    ][:NAMES_MAX]
    drawn = [
        _levels(coarse, [row for row in rows if row["queue"] == queue["queue"]])
        for queue in queues[:DRAWN_MAX]
    ]
    return Depths(coarse, queues, drawn)


def _levels(period: Period, rows: list[Row]) -> list[float | None]:
    """Return the largest depth of each step; a step without changes has the depth of the step before."""
    levels: list[float | None] = []
    depth, remaining = 0, list(reversed(rows))
    for at in period.times:
        peak = depth
        while remaining and remaining[-1]["at_s"] < at + period.step_s:
            row = remaining.pop()
            depth = row["depth"]
            peak = max(peak, row["peak"]) if row["at_s"] >= at else depth
        levels.append(peak)
    return levels


TASKS_AT_ONCE = 1_200_000
"""How many tasks of workflows fit into the memory that a query may use."""
LONG_S = 600.0
"""The time limit of a report's query, which may take longer than an interactive query."""

_DEPTHS = """
    select queue, floor(epoch(minute) / $step) * $step as at_s, max(depth_max) as peak,
        arg_max(depth, minute) as depth, max(backlog_s) as backlog_s
    from queues where epoch(minute) < $end group by 1, 2 order by 1, 2"""

_WAITED = "select queue, sum(wait_s) as waited_s from attempts group by queue"

_IN_TREES = f"""
    select count(*) as n from (select coalesce(root_id, task_id) as root_id from {ANY_TASKS})
        semi join (select root_id from tasks where root_id <> task_id) using (root_id)"""

_KINDS = f"""
    select name, count(*) as n, sum(n_tasks)::bigint as n_tasks, count(*) filter (n_failed > 0) as n_failed,
        count(*) filter (n_open > 0) as n_open, list(duration_s) filter (duration_s is not null) as durations,
        sum(queue_s) as queue_s, sum(run_s) as run_s, sum(retry_s) as retry_s, sum(follow_s) as follow_s,
        arg_max({{'root_id': root_id, 'began_s': epoch(began_at), 'duration_s': duration_s,
            'path_names': left(path_names, 400), 'queue_s': queue_s, 'run_s': run_s, 'retry_s': retry_s,
            'follow_s': follow_s}}, {{'s': duration_s, 'id': root_id}}, {SLOWEST_MAX})
            filter (duration_s is not null) as slowest
    from {OF_PART}($part, $parts) group by name"""

_LOST = f"""
    select name, count(*) as n_tasks, sum(n_failed)::bigint as n_failed, sum(n_repeats)::bigint as n_repeats,
        sum(failed_s) as failed_s, sum(again_s) as again_s, sum(repeated_s) as repeated_s,
        sum(lost_s) as lost_s
    from lost_time group by name order by lost_s desc, name limit {NAMES_MAX}"""

_UNUSUAL = f"""
    select epoch(step_at) as at_s, name, what, value, usual, score, detail
    from unusual(step_s := $step_s) order by abs(score) desc, step_at, name, what limit {UNUSUAL_MAX}"""


# ---- figures ---------------------------------------------------------------------------------------

NODES_MAX = 40
SESSIONS_MAX = 2000
ELECTIONS_MAX = 500
LISTED_MAX = 50


@dataclass(frozen=True)
class Figures:
    """All figures of a report."""

    build: Row
    left_out: frozenset[str]
    """The tables that are missing in the build."""
    wanted: Wanted
    recorded: tuple[float, float] | None
    """The first and last time of the history; None if there is none."""
    period: Period | None
    totals: Row
    states: list[Row]
    steps: list[Row]
    tasks: list[Row]
    nodes: list[Row]
    queues: list[Row]
    work: Work
    errors: list[Row]
    sessions: list[Row]
    elections: list[Row]
    skews: list[Row]
    anomaly_kinds: list[Row]
    anomalies: list[Row]

    @property
    def mean_per_s(self) -> float | None:
        """Attempts per second over the whole period, including idle times; None if none ended."""
        ended = sum(row.get("n_attempts", 0) for row in self.steps)
        return ended / self.period.length_s if self.period and ended else None

    @property
    def peak_per_s(self) -> float | None:
        """Attempts per second in the busiest time step; None if none ended."""
        busiest = self.busiest
        return busiest["n_attempts"] / self.period.step_s if self.period and busiest else None

    @property
    def busiest(self) -> Row | None:
        """The time step in which most attempts ended; None if none ended."""
        ended = [row for row in self.steps if row.get("n_attempts")]
        return max(ended, key=lambda row: int(row["n_attempts"]), default=None)


def figures(tables: Tables) -> Figures:
    """Return all figures of a report."""
    recorded = _recorded(tables)
    period = _period(recorded, tables.wanted)
    return Figures(
        build={"number": tables.build.number, **tables.build.facts},
        left_out=frozenset(TABLES) - frozenset(tables.build.files),
        wanted=tables.wanted,
        recorded=recorded,
        period=period,
        totals=_totals(tables, period),
        states=tables.rows(
            "select state, count(*) as n from tasks group by state order by n desc, state limit 50"
        ),
        steps=_steps(tables, period),
        tasks=_by(tables, "name"),
        nodes=_by(tables, "worker"),
        queues=_by(tables, "queue"),
        work=work(tables, period),
        errors=tables.rows(_ERRORS, timeout_s=LONG_S),
        sessions=_sessions(tables),
        elections=tables.rows(_ELECTIONS),
        skews=tables.rows(_SKEWS, timeout_s=LONG_S),
        anomaly_kinds=tables.rows(
            "select kind, count(*) as rows from anomalies group by kind order by rows desc, kind"
        ),
        anomalies=tables.rows(_ANOMALIES),
    )


def _recorded(tables: Tables) -> tuple[float, float] | None:
    """Return the first and last time of the wanted part, or of all attempts if it has no records."""
    for sql in _SPANS:
        [found] = tables.rows(sql)
        if found["first"] is not None:
            return found["first"], found["last"]
    return None


_SPANS = (
    "select epoch(min(recorded_at)) as first, epoch(max(recorded_at)) as last from timeline",
    "select epoch(min(coalesce(sent_at, state_at))) as first, epoch(max(state_at)) as last from attempts",
    f"select epoch(min(coalesce(sent_at, state_at))) as first, epoch(max(state_at)) as last from {ANY_TIME}",
)


def _period(recorded: tuple[float, float] | None, wanted: Wanted) -> Period | None:
    if recorded is None:
        return None
    start = max(recorded[0], wanted.since.timestamp()) if wanted.since else recorded[0]
    end = min(recorded[1], wanted.until.timestamp()) if wanted.until else recorded[1]
    end = max(end, start + 1.0)
    return Period(start, end, time_step(end - start, STEPS_MAX))


_QUANTILES = ", ".join(percentiles(f"{what}_s", f"{what}_p{{}}_s", (50, 95, 99)) for what in ("wait", "run"))
_OUTCOMES = """
    count(*) as n_attempts,
    count(*) filter (outcome = 'SUCCESS') as n_succeeded,
    count(*) filter (outcome = 'FAILURE') as n_failed,
    count(*) filter (outcome = 'RETRY') as n_retried,
    count(*) filter (outcome = 'REVOKED') as n_revoked,
    count(*) filter (outcome = 'REJECTED') as n_rejected,
    count(*) filter (outcome is null) as n_open"""


def _totals(tables: Tables, period: Period | None) -> Row:
    start, end = period.shown if period else (0.0, 0.0)
    [totals] = tables.rows(
        f"""select {_OUTCOMES}, {_QUANTILES},
        count(*) filter (
            outcome is not null and not coalesce(epoch(ended_at) >= $start and epoch(ended_at) < $end, false)
        ) as n_outside
        from attempts""",
        {"start": start, "end": end},
        timeout_s=LONG_S,
    )
    for name, (table, what) in _COUNTS.items():
        is_built = table in tables.build.files
        totals[name] = tables.ask(f"select count({what}) from {table}").rows[0][0] if is_built else None
    return totals


_COUNTS = {
    "tasks": ("tasks", "*"),
    "tasks_retried": ("tasks", "case when retries > 0 then 1 end"),
    "events": ("timeline", "*"),
    "nodes": ("workers", "distinct hostname"),
    "sessions": ("workers", "*"),
    "sessions_lost": ("workers", "case when ending = 'lost' then 1 end"),
    "elections": ("elections", "*"),
    "elections_broken": ("elections", "case when violations <> '[]' then 1 end"),
    "anomalies": ("anomalies", "*"),
}
"""What is counted in which table. The number is null if the build lacks the table, which is not the same as
0.
"""


def _steps(tables: Tables, period: Period | None) -> list[Row]:
    """Return one row for each time step, including steps in which nothing ended."""
    if period is None:
        return []
    start, end = period.shown
    found = tables.rows(
        f"""select floor(epoch(ended_at) / $step)::bigint as step, {_OUTCOMES}, {_QUANTILES}
        from attempts where outcome is not null and epoch(ended_at) >= $start and epoch(ended_at) < $end
        group by step order by step""",
        {"step": period.step_s, "start": start, "end": end},
        timeout_s=LONG_S,
    )
    known = {row["step"]: row for row in found}
    return [{"at": at, **known.get(round(at / period.step_s), {})} for at in period.times]


def _by(tables: Tables, column: str) -> list[Row]:
    """Return outcomes by a column: most failures first, then most attempts; the rest is one row."""
    return tables.rows(
        f"""with ranked as (
            select {column} as key, row_number() over (
                order by count(*) filter (outcome = 'FAILURE') desc, count(*) desc, {column} nulls last
            ) as place from attempts group by {column}
        )
        select case when place <= {NAMES_MAX} then key end as key, count(distinct place) as keys,
            place > {NAMES_MAX} as is_rest, {_OUTCOMES}, {_QUANTILES}
        from attempts join ranked on attempts.{column} is not distinct from ranked.key
        group by 1, 3, least(place, {NAMES_MAX} + 1)
        order by least(place, {NAMES_MAX} + 1)""",
        timeout_s=LONG_S,
    )


def _sessions(tables: Tables) -> list[Row]:
    """Return the sessions of the nodes that were lost most often, then of the other nodes by name."""
    return tables.rows(
        f"""with chosen as (
            select hostname from workers group by hostname
            order by count(*) filter (ending = 'lost') desc, hostname limit {NODES_MAX}
        )
        select hostname, pid, session, epoch(online_at) as start, epoch(coalesce(ended_at, last_at)) as end,
            ending, up_s, clock_min, clock_max, processed, sw_ident, sw_ver
        from workers where hostname in (select hostname from chosen)
        order by hostname, start nulls first, pid, session limit {SESSIONS_MAX}"""
    )


# Errors that differ only in a number ("order 17 has no customer") count as the same error.
_ERRORS = f"""
    select name, regexp_replace(left(exception, 200), '[0-9]+', '#', 'g') as exception, count(*) as n,
        count(distinct task_id) as tasks
    from attempts where outcome in ('FAILURE', 'RETRY') and exception is not null
    group by all order by n desc, name, exception limit {NAMES_MAX}"""

_ELECTIONS = f"""
    select election_id, protocol, topic, winner, term, outcome, n_candidates, attempts,
        epoch(first_at) as at_s, duration_s, violations
    from elections order by first_at desc nulls last, election_id limit {ELECTIONS_MAX}"""

# Events reach the log a moment after they happened, so a correct clock shows slightly below zero. All shares
# are computed at once, of floats of four bytes: a quantile stores all values, and each event has one.
_SKEWS = f"""
    select hostname, n, shares[1] as low_s, shares[2] as middle_s, shares[3] as high_s
    from (
        select hostname, count(*) as n, quantile_cont(skew_s, [0.05, 0.5, 0.95]) as shares
        from (
            select hostname, ((epoch_us(timestamp) - epoch_us(recorded_at)) / 1e6)::float as skew_s
            from timeline
            where hostname is not null and timestamp > timestamptz '1980-01-01' and recorded_at is not null
        )
        group by hostname
    )
    order by abs(middle_s) desc, hostname limit {NODES_MAX}"""

_ANOMALIES = f"""
    select kind, epoch("at") as at_s, subject, name, worker, n, detail from anomalies
    order by "at" desc nulls last, kind, subject limit {LISTED_MAX}"""


def failure_rate(row: Row) -> float | None:
    """Return the share of failures among successes and failures; None if there is neither."""
    ended = row["n_succeeded"] + row["n_failed"]
    return row["n_failed"] / ended if ended else None


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    """Return one column of rows; None where a row lacks it."""
    return [row.get(name) for row in rows]


# ---- comparing -------------------------------------------------------------------------------------

TASKS_MAX = 1000
FIRST, LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Span:
    """A period from `since` up to `until`, exclusive."""

    since: datetime = FIRST
    until: datetime = LAST


def compare(tables: Tables, before: Span, after: Span) -> list[Row]:
    """Return each task's figures in two periods and their changes, the task with most attempts first."""
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
