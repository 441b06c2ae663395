"""`umbel history report`: the main figures as text, and everything on one page with plots."""

import os
from datetime import datetime
from pathlib import Path

import click

from umbel.cli import exits
from umbel.cli.history.lake import history_options
from umbel.cli.history.moments import part_options, time_options
from umbel.cli.options import json_option
from umbel.cli.show.printing import print_json, print_table
from umbel.errors import HistoryError
from umbel.history.figures import figures
from umbel.history.query import read, require_duckdb
from umbel.history.report import main_figures, page
from umbel.history.wanted import Wanted
from umbel.stores.interface import Where


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
def report(
    lake: Where,
    html: Path | None,
    title: str,
    task: str,
    queue: str,
    since: datetime | None,
    until: datetime | None,
    as_json: bool,
) -> int:
    """Print the main figures of the history; with --html, write them all on one page with plots.

    The page needs no network and no script, and can be sent, kept and printed. An attempt belongs to the time
    in which it ended. Sessions of nodes, elections and clocks are those of all tasks and queues.

    Exit code: 0, or 3 when nothing is built yet.
    """

    require_duckdb()
    found = read(lake, figures, wanted=Wanted(since, until, task, queue))
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
    """All or nothing: a reader of the old page keeps it until the new one is complete."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise HistoryError(
            f"cannot write {str(path)!r}: {error.strerror}; name another file with --html"
        ) from None
