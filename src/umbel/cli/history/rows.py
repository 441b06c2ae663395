"""`umbel history tasks`, `attempts`, `workers`, `elections`, `metrics`, `anomalies`: rows, filtered.

One command a table, all made from the same list: which columns people see, which column each filter
looks at, and by which time rows are chosen and ordered (newest first). `--json` gives every column.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import msgspec

from umbel.cli import exits
from umbel.cli.history.lake import history_options
from umbel.cli.history.sql import cell, note_more, plain
from umbel.cli.options import json_option
from umbel.cli.show.printing import print_json, print_table
from umbel.events.tables import TABLES
from umbel.history.query import read, require_duckdb

AGO = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


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
)

_FILTER_OPTIONS = {
    "state": click.option("--state", "states", multiple=True, metavar="STATE", help="Only in this state."),
    "name": click.option("--name", metavar="GLOB", help="Only this name, as in 'shop.*'."),
    "worker": click.option("--worker", metavar="GLOB", help="Only this node, as in 'w1@*'."),
    "task": click.option("--task", metavar="ID", help="Only tasks whose id starts with ID."),
}


class Moment(click.ParamType[datetime]):
    """A time in ISO 8601 (UTC where it does not say), or how long ago: 90s, 15m, 2h, 3d, 1w."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        text = str(value).strip()
        try:
            if text[-1:] in AGO:
                return datetime.now(UTC) - timedelta(seconds=float(text[:-1]) * AGO[text[-1]])
            at = datetime.fromisoformat(text)
        except (ValueError, OverflowError):
            self.fail(
                f"{text!r} is not a time; write 2026-11-15T10:00, or how long ago: 90s, 15m, 2h, 3d",
                param,
                ctx,
            )
        return at if at.tzinfo else at.replace(tzinfo=UTC)


def _command(listing: Listing) -> click.Command:
    def run(lake: Path, limit: int, as_json: bool, **filters: Any) -> int:
        return _list(listing, lake, filters, limit, as_json=as_json)

    options: list[Callable[[Any], Any]] = [
        history_options,
        *(_FILTER_OPTIONS[name] for name in listing.filters),
        click.option("--since", type=Moment(), help="Not before this time (UTC), or 15m, 2h, 3d ago."),
        click.option("--until", type=Moment(), help="Before this time (UTC), or 15m, 2h, 3d ago."),
        click.option("--limit", type=click.IntRange(1, 1_000_000), default=100, show_default=True),
        json_option,
    ]
    for option in reversed(options):
        run = option(run)
    run.__doc__ = f"{listing.help} Newest first.\n\nExit code: 0, or 3 when nothing is built yet."
    return click.command(listing.table)(run)


def _list(listing: Listing, lake: Path, filters: dict[str, Any], limit: int, *, as_json: bool) -> int:

    require_duckdb()
    wheres, parameters = _conditions(listing, filters)
    where = f" where {' and '.join(wheres)}" if wheres else ""
    key = ", ".join(f'"{name}"' for name in TABLES[listing.table].key)
    query = f'select * from {listing.table}{where} order by "{listing.at}" desc nulls last, {key}'
    answer = read(lake, lambda found: found.ask(f"{query} limit {limit + 1}", parameters, limit=limit))
    rows = answer.dicts()
    if as_json:
        nested = {one.name for one in TABLES[listing.table].columns if one.kind == "json"}
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
    for option in ("name", "worker"):
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
