"""Options and output functions that commands share: -A, --broker, --json, tables."""

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

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
APP_KEY = "umbel.app"
LEVELS = ("debug", "info", "warning", "warn", "error", "critical", "fatal")
_CELERYS = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")
_BROKER_VARIABLES = ("UMBEL_BROKER", *_CELERYS)
_SAME_LEVEL = {"warn": "warning", "fatal": "critical"}


def app_option(function: FunctionT) -> FunctionT:
    """Add -A to a command; its value may also be given before the command."""
    return chosen_app_option(function, is_handed=True)


def broker_option(function: FunctionT) -> FunctionT:
    """Add -b to a command that needs no app if -b is given."""
    return _broker_option("Address of the broker; no app is needed then.")(function)


def other_broker_option(function: FunctionT) -> FunctionT:
    """Add -b to a command that also needs the app."""
    return _broker_option("Address of the broker, instead of the app's own.")(function)


def _broker_option(what: str) -> Callable[[FunctionT], FunctionT]:
    """Return the option -b with this help."""
    return click.option("-b", "--broker", "url", metavar="URL", is_eager=True, help=what)


def use_broker(url: str | None) -> None:
    """Override the app's broker address, in this process and in those that it starts."""
    if url is not None:
        os.environ |= dict.fromkeys(_BROKER_VARIABLES, url)


def json_option(function: FunctionT) -> FunctionT:
    """Add --json, which is passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def even_if_used_option(function: FunctionT) -> FunctionT:
    """Add --even-if-used to a command that sends messages again."""
    what = "With 'signing_keys': also sign messages that no worker vouches for; they may be copies."
    return click.option("--even-if-used", is_flag=True, help=what)(function)


def log_options(default: str) -> Callable[[FunctionT], FunctionT]:
    """Add --loglevel and --log-format; `level_of` reads the level."""
    level = click.option(
        "-l",
        "--loglevel",
        type=click.Choice(LEVELS, case_sensitive=False),
        envvar="UMBEL_LOG_LEVEL",
        show_envvar=True,
        help=f"Log level; default: {default}.",
    )
    form = click.option(
        "--log-format",
        type=click.Choice(("plain", "json"), case_sensitive=False),
        envvar="UMBEL_LOG_FORMAT",
        show_envvar=True,
        help="Format of log lines; default: plain.",
    )
    return lambda function: level(form(function))


def level_of(given: str) -> str:
    """Return the lower-case name of a log level; an alias such as `warn` becomes its level."""
    return _SAME_LEVEL.get(given.lower(), given.lower())


def timeout_option(function: FunctionT) -> FunctionT:
    """Add --timeout, the seconds to wait for replies."""
    option = click.option(
        "--timeout",
        "timeout_s",
        type=float,
        help="Seconds to wait for replies; default: 5, or 1 if no worker is known and none replies.",
    )
    return option(function)


def run_directory_option(function: FunctionT) -> FunctionT:
    """Add --run-dir, the directory of the workers' state files."""
    option = click.option(
        "--run-dir",
        "run_directory",
        envvar="UMBEL_RUN_DIR",
        type=click.Path(path_type=Path),
        help="Directory of the workers' state files.",
    )
    return option(function)


def chosen_app_option(function: FunctionT, *, is_handed: bool) -> FunctionT:
    """Add -A. Its value, also when given before the command, is stored under APP_KEY, and passed if
    `is_handed`.
    """

    def chosen(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        ctx.meta[APP_KEY] = value or ctx.find_root().obj
        return value or ctx.find_root().obj

    option = click.option(
        "-A",
        "--app",
        "app_name",
        metavar="MODULE[:ATTR]",
        callback=chosen,
        is_eager=True,  # evaluated before --lake, whose default may depend on the app
        expose_value=is_handed,
        help="The app.",
    )
    return option(function)


# ---- printing --------------------------------------------------------------------------------------

PIPE_COLUMNS = 10_000


def say(text: str, *, err: bool = False) -> None:
    """Print a line with untrusted text. It is escaped, so that it cannot move the cursor or add a line."""
    click.echo(one_line(text), err=err)


def print_json(data: Any) -> None:
    """Print data as indented JSON."""
    import msgspec  # here, because `umbel health` must start in a moment

    click.echo(msgspec.json.format(msgspec.json.encode(data, enc_hook=str), indent=2))


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as "2 h 5 min"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Print a table. A terminal folds cells to its width; a pipe gets one line for each row."""
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
    # A pipe has no width, so that each row is one line.
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    console.print(table, crop=False)
    if not rows:
        click.echo("- none -", err=True)  # only a header would look like a failure


# ---- phases ----------------------------------------------------------------------------------------


def phase_text(found: "Stopping") -> str:
    """Return the shutdown phase as text, such as "draining, 3 running, 12 s left"; "running" for a worker
    that is not stopping.
    """
    phase = found.phase or ""
    if phase in ("", "running"):
        return phase
    running = "" if found.running is None else f", {found.running} running"
    return f"{phase}{running}" + ("" if found.left_s is None else f", {found.left_s:.0f} s left")
