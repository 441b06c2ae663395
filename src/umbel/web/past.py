"""Past: what the history page asks of the lake's tables, by SQL whose values are parameters.

Everything is aggregated there: at most `STEPS_MAX` steps of time, `GROUPS_MAX` names. An attempt counts
where it ended. Percentiles are exact.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from umbel.history.query import Tables
from umbel.history.scales import time_step
from umbel.history.spelling import percentiles
from umbel.monitor.shapes import Rates
from umbel.web.redaction import redact

STEPS_MAX = 240
GROUPS_MAX = 30
GROUPS = {"name": "Task", "queue": "Queue", "worker": "Worker"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """Which attempts: each field that is set narrows."""

    name: str = ""
    queue: str = ""
    worker: str = ""
    since: float | None = None
    until: float | None = None

    def where(self) -> tuple[str, Row]:
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


_FIGURES = f"""count(*) as n, count(*) filter (outcome = 'SUCCESS') as succeeded,
    count(*) filter (outcome = 'FAILURE') as failed, count(*) filter (outcome = 'RETRY') as retried,
    {percentiles("wait_s", "wait_p{}_s", (50, 95))},
    {percentiles("run_s", "run_p{}_s", (50, 95))}"""


def past(tables: Tables, wanted: Wanted, by: str, mark: float | None) -> Past:
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


def rates(tables: Tables, wanted: Wanted) -> Rates:
    """The same columns as those of the last hour, so that one chart draws both."""
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
    first, last = (int(span[one] // step * step) for one in ("first", "last"))
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
