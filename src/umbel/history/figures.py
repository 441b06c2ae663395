"""Figures: what a report says, counted and measured by SQL over the published tables.

Everything is aggregated before it gets here: at most `STEPS_MAX` time steps, so many names, nodes
and rows, and whatever is left out is counted. So a report of a hundred million events is as large as
that of a thousand. Percentiles are exact, taken from the attempts themselves.

The time shown is when the broker's log took the events: the nodes' own clocks may be wrong, and a
node that lives in the year 2099 must not squeeze all others into one pixel. What lies outside is
counted as `outside`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from umbel.events.tables import TABLES
from umbel.history.period import Period, Row
from umbel.history.query import Tables
from umbel.history.scales import time_step
from umbel.history.spelling import percentiles
from umbel.history.views.view import ANY_TIME
from umbel.history.wanted import Wanted
from umbel.history.work_figures import LONG_S, NAMES_MAX, STEPS_MAX, Work, work

NODES_MAX = 40
SESSIONS_MAX = 2000
ELECTIONS_MAX = 500
LISTED_MAX = 50


@dataclass(frozen=True)
class Figures:
    build: Row
    left_out: frozenset[str]
    """Tables that the build did not make."""
    wanted: Wanted
    recorded: tuple[float, float] | None
    """From when to when there is any history; None where there is none."""
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
        """Attempts that ended in the whole period, idle times included; None where none did."""
        ended = sum(row.get("n_attempts", 0) for row in self.steps)
        return ended / self.period.length_s if self.period and ended else None

    @property
    def peak_per_s(self) -> float | None:
        busiest = self.busiest
        return busiest["n_attempts"] / self.period.step_s if self.period and busiest else None

    @property
    def busiest(self) -> Row | None:
        """The time step in which most attempts ended; None where none did."""
        ended = [row for row in self.steps if row.get("n_attempts")]
        return max(ended, key=lambda row: int(row["n_attempts"]), default=None)


def figures(tables: Tables) -> Figures:
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
    """As far as it is wanted; of a time in which nothing was recorded, that of all attempts."""
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
"""Null where the build did not make the table: that is not the same as none."""


def _steps(tables: Tables, period: Period | None) -> list[Row]:
    """One row for each time step, also those in which nothing ended."""
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
    """Those with the most failures, then the most attempts; the others together as one row."""
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
    """The sessions of the nodes that had the most trouble, then of the others by name."""
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


# Errors that differ in a number only ("order 17 has no customer") are one error.
_ERRORS = f"""
    select name, regexp_replace(left(exception, 200), '[0-9]+', '#', 'g') as exception, count(*) as n,
        count(distinct task_id) as tasks
    from attempts where outcome in ('FAILURE', 'RETRY') and exception is not null
    group by all order by n desc, name, exception limit {NAMES_MAX}"""

_ELECTIONS = f"""
    select election_id, protocol, topic, winner, term, outcome, n_candidates, attempts,
        epoch(first_at) as at_s, duration_s, violations
    from elections order by first_at desc nulls last, election_id limit {ELECTIONS_MAX}"""

# Events reach the log a little after they happened, so a right clock shows slightly below zero. All
# shares are taken at once, of four bytes each: a quantile keeps every value, and each event has one.
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
    judged = row["n_succeeded"] + row["n_failed"]
    return row["n_failed"] / judged if judged else None


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    return [row.get(name) for row in rows]
