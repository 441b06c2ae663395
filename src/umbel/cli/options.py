"""Options that several commands share, and how they print: data to stdout, all else to stderr."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from umbel.text import one_line

PIPE_COLUMNS = 10_000
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_APP = "umbel.app"


def app_option(function: FunctionT) -> FunctionT:
    """-A after the command; one before it counts as well."""
    return _app_option(function, is_handed=True)


def broker_option(function: FunctionT) -> FunctionT:
    option = click.option(
        "-b", "--broker", "url", metavar="URL", is_eager=True, help="The broker; then no app is needed."
    )
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
    """Which lake a command works on, for all of them: the one that is named, by option or variable;
    else that of the app (`history_lake`); else, where there is no app, the app's default."""
    option = click.option(
        "--lake",
        metavar="DIR",
        envvar="UMBEL_HISTORY_LAKE",
        # A group's own command may not be the one that runs: it asks when it does.
        callback=lambda ctx, _, value: (
            value if isinstance(ctx.command, click.Group) else find_lake(ctx, value)
        ),
        type=click.Path(path_type=Path, file_okay=False),
        help="Where history is kept; else the app's history_lake, else umbel-lake.",
    )
    return option(function)


def history_options(function: FunctionT) -> FunctionT:
    """For commands that need an app only to find the lake."""
    return _app_option(lake_option(function), is_handed=False)


def _app_option(function: FunctionT, *, is_handed: bool) -> FunctionT:
    def chosen(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        ctx.meta[_APP] = value or ctx.find_root().obj
        return value or ctx.find_root().obj

    option = click.option(
        "-A",
        "--app",
        "app_name",
        metavar="MODULE[:ATTR]",
        callback=chosen,
        is_eager=True,  # before --lake, which may depend on it
        expose_value=is_handed,
        help="The app to work for.",
    )
    return option(function)


def find_lake(ctx: click.Context, value: Path | None) -> Path:
    """The lake that was named, else the app's."""
    if value is not None:
        return value
    from umbel.app.loading import find_app
    from umbel.app.settings import Settings
    from umbel.errors import AppNotFound

    default, app_name = Path(Settings().history_lake), ctx.meta.get(_APP)
    if ctx.params.get("url") or ctx.resilient_parsing:
        return default  # a broker was named so that no app is needed
    try:
        return Path(find_app(app_name).app.settings.history_lake)
    except AppNotFound as error:
        if app_name is not None:
            raise
        if error.__cause__ is not None:  # there is an app, and it cannot be loaded
            click.echo(f"umbel: {error}; taking {default} for the lake, --lake names another", err=True)
        return default


def find_lake_mode(app_name: str | None, url: str | None) -> int:
    """Who may read a lake that is recorded now: as the app says; without one, as the folder's settings do."""
    from umbel.app.loading import find_app
    from umbel.app.settings import assemble

    settings = assemble({}) if url else find_app(app_name).app.settings
    return settings.lake_mode_bits()


def can_record() -> bool:
    """Whether what writes history is installed."""
    from importlib.util import find_spec

    return find_spec("pyarrow") is not None


def say(text: str, *, err: bool = False) -> None:
    """A line with text that came from elsewhere: it can neither move the cursor nor add a line."""
    click.echo(one_line(text), err=err)


def print_json(data: Any) -> None:
    import msgspec

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
    # A pipe has no width: whoever reads it gets each row on a line of its own.
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    console.print(table, crop=False)
    if not rows:
        click.echo("- none -", err=True)  # a header alone looks as if something failed
