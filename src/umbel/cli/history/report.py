"""Reading the history: `umbel history sql`, `report`, `slo`, `compare`, and a command for each table.

The listing commands (`umbel history tasks`, `attempts`, `workers`, …) are all made from `LISTINGS`.
"""

import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from umbel.cli import exits
from umbel.cli.history.lake import Moment, Period, history_options, part_options, time_options
from umbel.cli.options import json_option, print_json, print_table
from umbel.errors import ConfigurationError, HistoryError, SlowQuery, nearest
from umbel.events.tables import TABLES
from umbel.history.figures import FIRST, LAST, Span, compare, figures
from umbel.history.isolation import QueryProcess
from umbel.history.markup import count, duration, percent
from umbel.history.query import Answer, Tables, asked, plain, read, require_duckdb, write_database
from umbel.history.query import as_csv as csv_of
from umbel.history.report import main_figures, page
from umbel.history.slo import RATES, judge, parse_objective
from umbel.history.tables import Wanted
from umbel.history.views import VIEWS
from umbel.stores.interface import Where

# ---- sql -------------------------------------------------------------------------------------------

CELL_MAX = 120


@click.command("sql")
@click.argument("query")
@history_options
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=1000,
    show_default=True,
    help="Most rows to print.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds after which the query is cancelled.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def sql(query: str, lake: Where, limit: int, timeout_s: float, as_csv: bool, as_json: bool) -> int:
    """Ask the tables with SQL, in DuckDB's dialect; QUERY may be - to read it from stdin.

    It can only read: no other files, no network, no settings. Times are UTC. It runs in a separate process,
    which is killed at the timeout or when it needs more than 3 GiB of memory.

    \b
    umbel history sql "select name, count(*) n, avg(run_s) from tasks group by name order by n desc"

    Exit code: 0, 1 when the query is wrong or takes too long, 3 when nothing is built yet.
    """
    if as_csv and as_json:
        raise click.UsageError("give only one of --csv and --json")
    require_duckdb()
    text = sys.stdin.read() if query == "-" else query
    work = partial(asked, sql=text, limit=limit, timeout_s=timeout_s)
    try:
        with closing(QueryProcess()) as process:
            answer = process.read(lake, work, Answer, timeout_s=timeout_s)
    except SlowQuery as error:
        raise SlowQuery(f"{error}, or raise --timeout") from None
    if as_json:
        print_json(answer.dicts())
    elif as_csv:
        click.echo(csv_of(answer), nl=False)
    else:
        print_table(answer.columns, [[cell(value) for value in row] for row in answer.rows])
    note_more(answer)
    return exits.OK


@click.command("tables")
@history_options
@click.argument("name", required=False)
@json_option
def tables(lake: Where, name: str | None, as_json: bool) -> int:
    """List the tables and how many rows they have; with NAME, the columns of one and what they hold.

    A view is computed from the tables when it is asked for, so its rows are not counted.

    Exit code: 0, or 3 when nothing is built yet.
    """
    require_duckdb()
    known = {**TABLES, **{name: view.table for name, view in VIEWS.items()}}
    if name is not None and name not in known:
        near = nearest(name, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise click.UsageError(f"unknown table {name!r}; the tables are {', '.join(known)}{hint}")
    chosen = known.values() if name is None else [known[name]]

    def counted(found: Tables) -> dict[str, int]:
        built = [table.name for table in chosen if table.name in TABLES]
        return {name: int(found.ask(f"select count(*) from {name}").rows[0][0]) for name in built}

    rows = read(lake, counted)
    if as_json:
        print_json(
            [
                {
                    "name": table.name,
                    "doc": table.doc,
                    "rows": rows.get(table.name),
                    "columns": list(table.columns),
                }
                for table in chosen
            ]
        )
    elif name is None:
        print_table(
            ("table", "rows", "what it holds"),
            [(table.name, rows.get(table.name, "view"), table.doc) for table in chosen],
        )
    else:
        columns = known[name].columns
        print_table(
            ("column", "type", "null", "what it holds"),
            [
                (column.name, column.kind, "yes" if column.nullable else "no", column.doc)
                for column in columns
            ],
        )
    return exits.OK


def note_more(answer: Answer) -> None:
    """Print on stderr that there are more rows than the limit, if there are."""
    if answer.more:
        click.echo(
            f"umbel: only the first {len(answer.rows)} rows are shown; raise --limit for more", err=True
        )


def cell(value: Any) -> str:
    """Return a value as a cell of a printed table: on one line, and at most CELL_MAX characters."""
    if value is None:
        return ""
    shown = plain(value)
    text = f"{shown:.6g}" if isinstance(shown, float) else str(shown)
    text = " ".join(text.split())
    return text if len(text) <= CELL_MAX else text[: CELL_MAX - 1] + "…"


# ---- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing:
    """A listing command.

    `shown` has the columns that people see (`--json` prints all). Rows are chosen and ordered by the time in
    the column `at`. `filters` has the column that each option filters.
    """

    table: str
    help: str
    shown: str
    at: str
    filters: dict[str, str]


LISTINGS = (
    Listing(
        "tasks",
        "List tasks and their states.",
        "task_id name state state_at worker retries wait_s run_s exception",
        "state_at",
        {"state": "state", "name": "name", "worker": "worker", "task": "task_id"},
    ),
    Listing(
        "attempts",
        "List the attempts of tasks.",
        "task_id attempt name outcome worker state_at wait_s run_s exception",
        "state_at",
        {"state": "state", "name": "name", "worker": "worker", "task": "task_id"},
    ),
    Listing(
        "workers",
        "List the sessions of nodes; --state is how they ended: offline, lost or alive.",
        "hostname pid session online_at last_at ending up_s processed sw_ident",
        "last_at",
        {"state": "ending", "worker": "hostname"},
    ),
    Listing(
        "elections",
        "List elections; --state is their outcome, --name their topic, --worker their winner.",
        "election_id protocol topic winner term outcome first_at duration_s violations",
        "first_at",
        {"state": "outcome", "name": "topic", "worker": "winner"},
    ),
    Listing(
        "metrics",
        "List counts and durations per minute, task name, queue and worker.",
        "minute name queue worker n_attempts n_succeeded n_failed n_retried wait_p50_s wait_p95_s "
        "run_p50_s run_p95_s",
        "minute",
        {"name": "name", "worker": "worker"},
    ),
    Listing(
        "anomalies",
        "List anomalies; --state is their kind, such as `causality` or `run_twice`.",
        "kind at subject name worker n detail",
        "at",
        {"state": "kind", "name": "name", "worker": "worker", "task": "task_id"},
    ),
    Listing(
        "workflows",
        "List tasks that led to others: how long the whole took, and where the time went.",
        "root_id name n_tasks n_failed n_open ended_at duration_s queue_s run_s retry_s follow_s path_names",
        "ended_at",
        {"name": "name", "queue": "queue", "task": "root_id"},
    ),
    Listing(
        "queues",
        "List what came, waited and ran, per minute and queue.",
        "minute queue n_sent n_started n_ended depth depth_max running wait_p50_s wait_p95_s backlog_s",
        "minute",
        {"queue": "queue"},
    ),
    Listing(
        "lost_time",
        "List tasks that lost time to attempts in vain or to repeats; --state is the last outcome.",
        "task_id name outcome last_at n_attempts n_failed n_repeats failed_s again_s repeated_s lost_s",
        "last_at",
        {"state": "outcome", "name": "name", "queue": "queue", "task": "task_id"},
    ),
    Listing(
        "unusual",
        "List times in which a task's rate, run time or waiting time was unusual; --state is which of these.",
        "step_at name what value usual score detail",
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
        nested = {column.name for column in table.columns if column.kind == "json"}
        print_json(
            [
                {name: unpacked(value) if name in nested else plain(value) for name, value in row.items()}
                for row in rows
            ]
        )
    else:
        shown = listing.shown.split()
        print_table(shown, [[cell(row[name]) for name in shown] for row in rows])
    note_more(answer)
    return exits.OK


def unpacked(value: Any) -> Any:
    """Return the value of a text column that holds JSON; any other value unchanged."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value


def _conditions(listing: Listing, filters: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return SQL conditions and their parameters; values from outside are never part of the SQL."""
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


# ---- database --------------------------------------------------------------------------------------


@click.command("duckdb")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@history_options
def database(file: Path, lake: Where) -> int:
    """Write FILE, a DuckDB database in which other tools find the tables and views: dbt, notebooks, BI.

    It holds no rows: it reads the newest build's Parquet files where they are. Those go away some builds
    later, so write it again after each build.

    Exit code: 0, or 3 when nothing is built yet.
    """
    build = write_database(lake, file)
    click.echo(f"umbel: wrote {file}, build {build.number}", err=True)
    return exits.OK


# ---- report ----------------------------------------------------------------------------------------


@click.command("report")
@history_options
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write the page to.",
)
@click.option("--title", default="Umbel history", show_default=True, help="Title of the page.")
@part_options
@time_options
@json_option
def report(lake: Where, html: Path | None, title: str, as_json: bool, **part: Any) -> int:
    """Print the main figures of the history; with --html, write them all on one page with plots.

    The page needs no network and no script, and can be sent, kept and printed. An attempt belongs to the time
    in which it ended. Sessions of nodes, elections and clocks are those of all tasks and queues.

    Exit code: 0, or 3 when nothing is built yet.
    """
    require_duckdb()
    found = read(lake, figures, wanted=Wanted(**part))
    if html is not None:
        write_page(html, page(found, title=title))
    if as_json:
        print_json(
            {"figures": main_figures(found), "totals": found.totals, "html": str(html) if html else None}
        )
    else:
        print_table(("figure", "value"), main_figures(found).items())
        if html is not None:
            click.echo(f"umbel: wrote {html}", err=True)
    return exits.OK


def write_page(path: Path, text: str) -> None:
    """Write the page atomically, so that the old page stays until the new page is complete.

    HistoryError if that fails.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)  # of a process that died, or a link that another user put there
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise HistoryError(
            f"cannot write {str(path)!r}: {error.strerror}; name another file with --html"
        ) from None


# ---- slo -------------------------------------------------------------------------------------------


@click.command("slo")
@click.argument("objective")
@history_options
@part_options
@time_options
@json_option
def slo(objective: str, lake: Where, as_json: bool, **part: Any) -> int:
    """Say whether OBJECTIVE was kept, by which figure, and how much of its error budget was used.

    \b
    umbel history slo "p95 wait < 2s" --task 'shop.*' --since 1d
    umbel history slo "p99 run < 500ms"
    umbel history slo "p95 total < 1m"          from being sent to the end, retries included
    umbel history slo "failure rate < 1%"
    umbel history slo "success rate > 99.9%"

    A burn rate of 1 uses the whole budget: of p95, one in twenty.

    Exit code: 0 when it was kept, 1 when it was not, 2 when it is not an objective, 3 when nothing is built
    yet or nothing ended that could be judged.
    """
    try:
        wanted = parse_objective(objective)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    require_duckdb()
    tasks = Wanted(**part)
    verdict = read(lake, lambda tables: judge(tables, wanted), wanted=tasks)
    if verdict is None:
        about = f" ({tasks.said()})" if tasks else ""
        click.echo(f"umbel: nothing ended that could be judged{about}; name another time or task", err=True)
        return exits.NOT_FOUND
    if as_json:
        print_json(asdict(verdict) | {name: part[name] for name in ("task", "queue", "since", "until")})
    else:
        shown = percent if wanted.measure in RATES else duration
        burn = "no budget, and it was broken" if verdict.burn_rate is None else f"{verdict.burn_rate:.3g}"
        rows = {
            "objective": verdict.objective,
            "kept": "yes" if verdict.is_kept else "no",
            "figure": shown(verdict.figure),
            "judged": count(verdict.n),
            "broke it": f"{count(verdict.n_bad)} ({percent(verdict.n_bad / verdict.n)})",
            "burn rate": burn,
        }
        print_table(("what", "value"), rows.items())
    return exits.OK if verdict.is_kept else exits.FAILED


# ---- compare ---------------------------------------------------------------------------------------

SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("attempts", "n", count),
    ("failure rate", "failure_rate", percent),
    ("wait p50", "wait_p50_s", duration),
    ("wait p95", "wait_p95_s", duration),
    ("run p50", "run_p50_s", duration),
    ("run p95", "run_p95_s", duration),
)


@click.command("compare")
@click.argument("periods", nargs=-1, type=Period(), metavar="[FIRST SECOND]")
@history_options
@click.option("--mark", type=Moment(), help="Compare what ended before this time with what ended after it.")
@part_options
@time_options
@json_option
def compared(
    periods: tuple[Span, ...],
    lake: Where,
    mark: datetime | None,
    task: str,
    queue: str,
    since: datetime | None,
    until: datetime | None,
    as_json: bool,
) -> int:
    """Compare each task's figures in two periods, or before and after a mark.

    \b
    umbel history compare --mark 2026-11-15T10:00 --since 2026-11-15T08:00 --until 2026-11-15T12:00
    umbel history compare 2d..1d 1d..
    umbel history compare 2026-11-14T10:00..2026-11-14T11:00 2026-11-15T10:00..2026-11-15T11:00

    An attempt counts in the period in which it ended. The periods may have different lengths: then only
    durations and failure rates can be compared, not numbers.

    Exit code: 0, or 3 when nothing is built yet.
    """
    before, after = _spans(periods, mark, since, until)
    require_duckdb()
    rows = read(lake, lambda tables: compare(tables, before, after), wanted=Wanted(task=task, queue=queue))
    if as_json:
        print_json([{name: plain(value) for name, value in row.items()} for row in rows])
    else:
        headings = ("task", *(name for name, _, _ in SHOWN))
        print_table(headings, [[row["name"] or "(unknown)", *_cells(row)] for row in rows])
    return exits.OK


def _spans(
    periods: tuple[Span, ...], mark: datetime | None, since: datetime | None, until: datetime | None
) -> tuple[Span, Span]:
    whole = Span(since or FIRST, until or LAST)
    if mark is not None and not periods:
        if not whole.since < mark < whole.until:
            raise click.UsageError(
                f"the mark {mark.isoformat()} is not between --since and --until; move one of them"
            )
        return replace(whole, until=mark), replace(whole, since=mark)
    if len(periods) != 2 or mark or since or until:
        raise click.UsageError(
            f"got {len(periods)} periods{' and a mark' if mark else ''}; give two periods, as in 2d..1d 1d..,"
            " or --mark TIME with --since and --until"
        )
    return periods[0], periods[1]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{form(row[f'{key}_before'])} → {form(row[f'{key}_after'])}{_change(row[f'{key}_change'], key)}"
        for _, key, form in SHOWN
    ]


def _change(change: float | None, key: str) -> str:
    if change is None or not change:
        return ""
    points = " points" if key == "failure_rate" else " %"
    return f" ({change * 100:+.3g}{points})"
