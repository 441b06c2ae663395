"""`umbel history tasks`, `attempts`, `workers`, `workflows`, `queues` and the like: rows, filtered.

One command a table or view, all made from the same list: which columns people see, which column each filter
looks at, and by which time rows are chosen and ordered (newest first). `--json` gives every column.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from umbel.cli import exits
from umbel.cli.history.lake import history_options
from umbel.cli.history.moments import time_options
from umbel.cli.history.sql import cell, note_more
from umbel.cli.options import json_option
from umbel.cli.show.printing import print_json, print_table
from umbel.events.tables import TABLES
from umbel.history.export import plain
from umbel.history.query import read, require_duckdb
from umbel.history.views import VIEWS
from umbel.stores.interface import Where


@dataclass(frozen=True)
class Listing:
    """`filters`: option to column."""

    table: str
    help: str
    shown: tuple[str, ...]
    at: str
    filters: dict[str, str]


LISTINGS = (
    Listing(
        "tasks",
        "List tasks and their states.",
        ("task_id", "name", "state", "state_at", "worker", "retries", "wait_s", "run_s", "exception"),
        "state_at",
        {"state": "state", "name": "name", "worker": "worker", "task": "task_id"},
    ),
    Listing(
        "attempts",
        "List the attempts of tasks.",
        ("task_id", "attempt", "name", "outcome", "worker", "state_at", "wait_s", "run_s", "exception"),
        "state_at",
        {"state": "state", "name": "name", "worker": "worker", "task": "task_id"},
    ),
    Listing(
        "workers",
        "List the sessions of nodes; --state is how they ended: offline, lost or alive.",
        ("hostname", "pid", "session", "online_at", "last_at", "ending", "up_s", "processed", "sw_ident"),
        "last_at",
        {"state": "ending", "worker": "hostname"},
    ),
    Listing(
        "elections",
        "List elections; --state is their outcome, --name their topic, --worker their winner.",
        (
            "election_id",
            "protocol",
            "topic",
            "winner",
            "term",
            "outcome",
            "first_at",
            "duration_s",
            "violations",
        ),
        "first_at",
        {"state": "outcome", "name": "topic", "worker": "winner"},
    ),
    Listing(
        "metrics",
        "List counts and durations per minute, task name, queue and worker.",
        (
            *("minute", "name", "queue", "worker", "n_attempts", "n_succeeded", "n_failed", "n_retried"),
            *("wait_p50_s", "wait_p95_s", "run_p50_s", "run_p95_s"),
        ),
        "minute",
        {"name": "name", "worker": "worker"},
    ),
    Listing(
        "anomalies",
        "List anomalies; --state is their kind, such as `causality` or `run_twice`.",
        ("kind", "at", "subject", "name", "worker", "n", "detail"),
        "at",
        {"state": "kind", "name": "name", "worker": "worker", "task": "task_id"},
    ),
    Listing(
        "workflows",
        "List tasks that led to others: how long the whole took, and where the time went.",
        (
            *("root_id", "name", "n_tasks", "n_failed", "n_open", "ended_at", "duration_s"),
            *("queue_s", "run_s", "retry_s", "follow_s", "path_names"),
        ),
        "ended_at",
        {"name": "name", "queue": "queue", "task": "root_id"},
    ),
    Listing(
        "queues",
        "List what came, waited and ran, per minute and queue.",
        (
            *("minute", "queue", "n_sent", "n_started", "n_ended", "depth", "depth_max", "running"),
            *("wait_p50_s", "wait_p95_s", "backlog_s"),
        ),
        "minute",
        {"queue": "queue"},
    ),
    Listing(
        "lost_time",
        "List tasks that lost time to attempts in vain or to repeats; --state is the last outcome.",
        (
            *("task_id", "name", "outcome", "last_at", "n_attempts", "n_failed", "n_repeats"),
            *("failed_s", "again_s", "repeated_s", "lost_s"),
        ),
        "last_at",
        {"state": "outcome", "name": "name", "queue": "queue", "task": "task_id"},
    ),
    Listing(
        "unusual",
        "List times in which a task's rate, run time or waiting time was unusual; --state is which of these.",
        ("step_at", "name", "what", "value", "usual", "score", "detail"),
        "step_at",
        {"state": "what", "name": "name"},
    ),
)

_FILTER_OPTIONS = {
    "state": click.option("--state", "states", multiple=True, metavar="STATE", help="Only in this state."),
    "name": click.option("--name", metavar="GLOB", help="Only this name, as in 'shop.*'."),
    "worker": click.option("--worker", metavar="GLOB", help="Only this node, as in 'w1@*'."),
    "queue": click.option("--queue", metavar="GLOB", help="Only this queue, as in 'mail*'."),
    "task": click.option("--task", metavar="ID", help="Only tasks whose id starts with ID."),
}


def _command(listing: Listing) -> click.Command:
    def run(lake: Where, limit: int, as_json: bool, **filters: Any) -> int:
        return _list(listing, lake, filters, limit, as_json=as_json)

    options: list[Callable[[Any], Any]] = [
        history_options,
        *(_FILTER_OPTIONS[name] for name in listing.filters),
        time_options,
        click.option("--limit", type=click.IntRange(1, 1_000_000), default=100, show_default=True),
        json_option,
    ]
    for option in reversed(options):
        run = option(run)
    run.__doc__ = f"{listing.help} Newest first.\n\nExit code: 0, or 3 when nothing is built yet."
    return click.command(listing.table.replace("_", "-"))(run)


def _list(listing: Listing, lake: Where, filters: dict[str, Any], limit: int, *, as_json: bool) -> int:

    require_duckdb()
    wheres, parameters = _conditions(listing, filters)
    where = f" where {' and '.join(wheres)}" if wheres else ""
    view = VIEWS.get(listing.table)
    table, source = (view.table, view.source) if view else (TABLES[listing.table], listing.table)
    key = ", ".join(f'"{name}"' for name in table.key)
    query = f'select * from {source}{where} order by "{listing.at}" desc nulls last, {key}'
    answer = read(lake, lambda found: found.ask(f"{query} limit {limit + 1}", parameters, limit=limit))
    rows = answer.dicts()
    if as_json:
        nested = {one.name for one in table.columns if one.kind == "json"}
        print_json(
            [
                {name: unpacked(value) if name in nested else plain(value) for name, value in row.items()}
                for row in rows
            ]
        )
    else:
        print_table(listing.shown, [[cell(row[name]) for name in listing.shown] for row in rows])
    note_more(answer)
    return exits.OK


def unpacked(value: Any) -> Any:
    """JSON in a column of text as the value it is."""

    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value


def _conditions(listing: Listing, filters: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """SQL conditions and what they are compared with; values are never part of the SQL."""
    wheres: list[str] = []
    parameters: dict[str, Any] = {}
    if filters.get("states"):
        wheres.append(f"lower({listing.filters['state']}) in (select lower(unnest($states)))")
        parameters["states"] = list(filters["states"])
    for option in ("name", "worker", "queue"):
        if filters.get(option) is not None:
            wheres.append(f"{listing.filters[option]} glob ${option}")
            parameters[option] = filters[option]
    if filters.get("task") is not None:
        wheres.append(f"starts_with({listing.filters['task']}, $task)")
        parameters["task"] = filters["task"]
    for option, sign in (("since", ">="), ("until", "<")):
        if filters.get(option) is not None:
            wheres.append(f'"{listing.at}" {sign} ${option}')
            parameters[option] = filters[option]
    return wheres, parameters


ROW_COMMANDS = tuple(map(_command, LISTINGS))
