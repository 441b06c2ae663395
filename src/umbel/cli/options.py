"""Options that several commands share, and how they print: data to stdout, all else to stderr."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

PIPE_COLUMNS = 10_000
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def app_option(function: FunctionT) -> FunctionT:
    """-A after the command; one before it counts as well."""

    def chosen(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        return value or ctx.find_root().obj

    option = click.option(
        "-A", "--app", "app_name", metavar="MODULE[:ATTR]", callback=chosen, help="The app to work for."
    )
    return option(function)


def broker_option(function: FunctionT) -> FunctionT:
    option = click.option("-b", "--broker", "url", metavar="URL", help="The broker; then no app is needed.")
    return option(function)


def json_option(function: FunctionT) -> FunctionT:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def timeout_option(function: FunctionT) -> FunctionT:
    option = click.option(
        "--timeout", "timeout_s", type=float, default=1.0, show_default=True, help="In seconds."
    )
    return option(function)


def run_directory_option(function: FunctionT) -> FunctionT:
    option = click.option(
        "--run-dir",
        "run_directory",
        envvar="UMBEL_RUN_DIR",
        type=click.Path(path_type=Path),
        help="Where workers leave word of themselves.",
    )
    return option(function)


def lake_option(function: FunctionT) -> FunctionT:
    option = click.option(
        "--lake",
        metavar="DIR",
        envvar="UMBEL_HISTORY_LAKE",
        default="umbel-lake",
        show_default=True,
        type=click.Path(path_type=Path, file_okay=False),
        help="Where history is kept.",
    )
    return option(function)


def can_record() -> bool:
    """Whether what writes history is installed."""
    from importlib.util import find_spec

    return find_spec("pyarrow") is not None


def print_json(data: Any) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(data, enc_hook=str), indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, box=None, pad_edge=False, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    # A pipe has no width: whoever reads it gets each row on a line of its own.
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    console.print(table, crop=False)
