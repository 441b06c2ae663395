"""`umbel history sql` and `umbel history tables`: ask anything of the history, and what there is."""

import sys
from typing import Any

import click

from umbel.cli import exits
from umbel.cli.history.lake import history_options
from umbel.cli.options import json_option
from umbel.cli.show.printing import print_json, print_table
from umbel.errors import SlowQuery, nearest
from umbel.events.tables import TABLES
from umbel.history.export import as_csv as csv_of
from umbel.history.export import plain
from umbel.history.query import Answer, Tables, read, require_duckdb
from umbel.history.views import VIEWS
from umbel.stores.interface import Where

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

    It can only read: no other files, no network, no settings. Times are UTC.

    \b
    umbel history sql "select name, count(*) n, avg(run_s) from tasks group by name order by n desc"

    Exit code: 0, 1 when the query is wrong or takes too long, 3 when nothing is built yet.
    """
    if as_csv and as_json:
        raise click.UsageError("give only one of --csv and --json")

    require_duckdb()
    text = sys.stdin.read() if query == "-" else query
    try:
        answer = read(lake, lambda found: found.ask(text, limit=limit, timeout_s=timeout_s))
    except SlowQuery as error:
        raise SlowQuery(f"{error}, or raise --timeout") from None
    if as_json:
        print_json([{name: plain(value) for name, value in row.items()} for row in answer.dicts()])
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
        built = [one.name for one in chosen if one.name in TABLES]
        return {name: int(found.ask(f"select count(*) from {name}").rows[0][0]) for name in built}

    rows = read(lake, counted)
    if as_json:
        print_json(
            [
                {"name": one.name, "doc": one.doc, "rows": rows.get(one.name), "columns": list(one.columns)}
                for one in chosen
            ]
        )
    elif name is None:
        print_table(
            ("table", "rows", "what it holds"),
            [(one.name, rows.get(one.name, "view"), one.doc) for one in chosen],
        )
    else:
        columns = known[name].columns
        print_table(
            ("column", "type", "null", "what it holds"),
            [(one.name, one.kind, "yes" if one.nullable else "no", one.doc) for one in columns],
        )
    return exits.OK


def note_more(answer: "Answer") -> None:
    if answer.more:
        click.echo(
            f"umbel: only the first {len(answer.rows)} rows are shown; raise --limit for more", err=True
        )


def cell(value: Any) -> str:
    """A value as people read it in a table: on one line, and not endlessly long."""
    if value is None:
        return ""
    shown = plain(value)
    text = f"{shown:.6g}" if isinstance(shown, float) else str(shown)
    text = " ".join(text.split())
    return text if len(text) <= CELL_MAX else text[: CELL_MAX - 1] + "…"
