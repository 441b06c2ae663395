"""Work figures: what a report says of queues, workflows, lost time and unusual times, from the views.

As in `figures.py` everything is aggregated by SQL, and each list has its limit.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from umbel.history.period import Period, Row
from umbel.history.query import Tables
from umbel.history.scales import MINUTE, time_step
from umbel.history.views.view import ANY_TASKS
from umbel.history.views.workflows import OF_PART

NAMES_MAX = 20
DRAWN_MAX = 5
SLOWEST_MAX = 10
UNUSUAL_MAX = 30
UNUSUAL_STEPS = 60
STEPS_MAX = 120


@dataclass(frozen=True)
class Depths:
    """How much waited in the deepest queues. A queue is known minute by minute, so no step is shorter."""

    period: Period
    queues: list[Row]
    """Deepest first."""
    steps: list[list[float | None]]
    """For each of the first queues the most that waited in each step."""


@dataclass(frozen=True)
class Work:
    depths: Depths | None
    workflow_kinds: list[Row]
    slowest: list[Row]
    lost: list[Row]
    unusual: list[Row]
    unusual_step_s: float


def work(tables: Tables, period: Period | None) -> Work:
    step_s = max(MINUTE, time_step(period.length_s, UNUSUAL_STEPS)) if period else MINUTE
    return Work(
        depths=_depths(tables, period) if period else None,
        **_workflows(tables),
        lost=tables.rows(_LOST, timeout_s=LONG_S),
        unusual=tables.rows(_UNUSUAL, {"step_s": step_s}, timeout_s=LONG_S),
        unusual_step_s=step_s,
    )


def _workflows(tables: Tables) -> dict[str, list[Row]]:
    """By the name of the first task, and the slowest of all; so many tasks at a time as fit into memory."""
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
    """As DuckDB's `quantile_cont`: between two values where it falls between them."""
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
                (one["backlog_s"] for one in within if one["queue"] == queue and one["backlog_s"]),
                default=0.0,
            ),
        }
        for queue, row in sorted(deepest.items(), key=lambda item: (-item[1]["peak"], item[0] or ""))
    ][:NAMES_MAX]
    drawn = [
        _levels(coarse, [row for row in rows if row["queue"] == one["queue"]]) for one in queues[:DRAWN_MAX]
    ]
    return Depths(coarse, queues, drawn)


def _levels(period: Period, rows: list[Row]) -> list[float | None]:
    """The most of each step; where nothing changed, what was there before."""
    levels: list[float | None] = []
    depth, left = 0, list(reversed(rows))
    for at in period.times:
        peak = depth
        while left and left[-1]["at_s"] < at + period.step_s:
            row = left.pop()
            depth = row["depth"]
            peak = max(peak, row["peak"]) if row["at_s"] >= at else depth
        levels.append(peak)
    return levels


TASKS_AT_ONCE = 1_200_000
"""Of workflows: what their paths need of the memory that a query may use."""
LONG_S = 600.0
"""A report is not a question of a moment."""

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
