"""Options and output that all commands share: -A, --broker, --json, tables and errors."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from umbel.text import one_line

if TYPE_CHECKING:
    from umbel.wire.control import Stopping


# ---- options ---------------------------------------------------------------------------------------
#
# Options that several commands share.

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
APP_KEY = "umbel.app"
LEVELS = ("debug", "info", "warning", "warn", "error", "critical", "fatal")
_CELERYS = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")
_BROKER_VARIABLES = ("UMBEL_BROKER", *_CELERYS)
_SAME_LEVEL = {"warn": "warning", "fatal": "critical"}


def app_option(function: FunctionT) -> FunctionT:
    """Add -A after the command; -A before the command counts as well."""
    return chosen_app_option(function, is_handed=True)


def broker_option(function: FunctionT) -> FunctionT:
    """Add -b for commands that need no app when it is given."""
    return _broker_option("Address of the broker; no app is needed then.")(function)


def other_broker_option(function: FunctionT) -> FunctionT:
    """Add -b for commands that need the app as well."""
    return _broker_option("Address of the broker, instead of the app's own.")(function)


def _broker_option(what: str) -> Callable[[FunctionT], FunctionT]:
    return click.option("-b", "--broker", "url", metavar="URL", is_eager=True, help=what)


def use_broker(url: str | None) -> None:
    """Make this the broker's address for the app, in this process and in those that it starts."""
    if url is not None:
        os.environ |= dict.fromkeys(_BROKER_VARIABLES, url)


def json_option(function: FunctionT) -> FunctionT:
    """Add --json, handed over as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def even_if_used_option(function: FunctionT) -> FunctionT:
    """Add --even-if-used, for commands that send messages again."""
    what = "With 'signing_keys': sign also what no worker vouches for. It may be a copy of what ran."
    return click.option("--even-if-used", is_flag=True, help=what)(function)


def log_options(default: str) -> Callable[[FunctionT], FunctionT]:
    """Add --loglevel and --log-format; `level_of` reads the level."""
    level = click.option(
        "-l",
        "--loglevel",
        type=click.Choice(LEVELS, case_sensitive=False),
        envvar="UMBEL_LOG_LEVEL",
        show_envvar=True,
        help=f"Level of the log; default: {default}.",
    )
    form = click.option(
        "--log-format",
        type=click.Choice(("plain", "json"), case_sensitive=False),
        envvar="UMBEL_LOG_FORMAT",
        show_envvar=True,
        help="How a line of the log is written; default: plain.",
    )
    return lambda function: level(form(function))


def level_of(given: str) -> str:
    """The name of a log level in lower case; aliases such as `warn` become their level."""
    return _SAME_LEVEL.get(given.lower(), given.lower())


def timeout_option(function: FunctionT) -> FunctionT:
    """Add --timeout, the seconds to wait for replies."""
    option = click.option(
        "--timeout",
        "timeout_s",
        type=float,
        help="Seconds to wait for replies; default: 5, or 1 without a reply where the workers are unknown.",
    )
    return option(function)


def run_directory_option(function: FunctionT) -> FunctionT:
    """Add --run-dir, the directory of the workers' state files."""
    option = click.option(
        "--run-dir",
        "run_directory",
        envvar="UMBEL_RUN_DIR",
        type=click.Path(path_type=Path),
        help="Directory in which workers keep their state files.",
    )
    return option(function)


def chosen_app_option(function: FunctionT, *, is_handed: bool) -> FunctionT:
    """Add -A; its value, or that before the command, is stored under APP_KEY and handed over if wanted."""

    def chosen(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        ctx.meta[APP_KEY] = value or ctx.find_root().obj
        return value or ctx.find_root().obj

    option = click.option(
        "-A",
        "--app",
        "app_name",
        metavar="MODULE[:ATTR]",
        callback=chosen,
        is_eager=True,  # before --lake, which may depend on it
        expose_value=is_handed,
        help="The app.",
    )
    return option(function)


# ---- printing --------------------------------------------------------------------------------------
#
# Lines, tables and JSON as every command prints them.

PIPE_COLUMNS = 10_000


def say(text: str, *, err: bool = False) -> None:
    """Print a line with text from outside, escaped: it can neither move the cursor nor add a line."""
    click.echo(one_line(text), err=err)


def print_json(data: Any) -> None:
    """Print data as indented JSON."""
    import msgspec  # here, because `umbel health` must start in a moment

    click.echo(msgspec.json.format(msgspec.json.encode(data, enc_hook=str), indent=2))


def duration(seconds: float) -> str:
    """A duration in its two largest units, such as "2 h 5 min"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Print rows below their columns; on a terminal folded to its width, in a pipe one line each."""
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


# ---- phases ----------------------------------------------------------------------------------------
#
# The phase of a shutdown in a few words, for `umbel status` and `umbel health`.


def phase_text(found: "Stopping") -> str:
    """The phase, such as "draining, 3 running, 12 s left"; "running" for a worker that is not stopping."""
    phase = found.phase or ""
    if phase in ("", "running"):
        return phase
    running = "" if found.running is None else f", {found.running} running"
    return f"{phase}{running}" + ("" if found.left_s is None else f", {found.left_s:.0f} s left")
