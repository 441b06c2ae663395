"""`umbel history compare`: each task before and after, or in two periods."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import click

from umbel.cli import exits
from umbel.cli.history.lake import history_options
from umbel.cli.history.moments import Moment, Period, part_options, time_options
from umbel.cli.options import json_option
from umbel.cli.show.printing import print_json, print_table
from umbel.history.comparing import FIRST, LAST, Span, compare
from umbel.history.export import plain
from umbel.history.query import read, require_duckdb
from umbel.history.scales import count, duration, percent
from umbel.history.wanted import Wanted
from umbel.stores.interface import Where

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
        print_table(headings, [[row["name"] or "(not told)", *_cells(row)] for row in rows])
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
