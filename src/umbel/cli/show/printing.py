"""Lines, tables and JSON as every command prints them."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from umbel.text import one_line

PIPE_COLUMNS = 10_000


def say(text: str, *, err: bool = False) -> None:
    """A line with text that came from elsewhere: it can neither move the cursor nor add a line."""
    click.echo(one_line(text), err=err)


def print_json(data: Any) -> None:
    import msgspec  # here, because `umbel health` must start in a moment

    click.echo(msgspec.json.format(msgspec.json.encode(data, enc_hook=str), indent=2))


def duration(seconds: float) -> str:
    """In the two largest of its units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, box=None, pad_edge=False, title_justify="left")
    rows = list(rows)
    for number, column in enumerate(columns):
        counts = bool(rows) and all(isinstance(row[number], int) for row in rows)
        table.add_column(column, overflow="fold", justify="right" if counts else "left")
    for row in rows:
        table.add_row(*(Text(one_line(str(cell))) for cell in row))
    # A pipe has no width: each row is one line.
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    console.print(table, crop=False)
    if not rows:
        click.echo("- none -", err=True)  # a header alone looks as if something failed
