"""Options that select the lake of a history command, and the times, periods and tasks in it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from umbel.app.settings import Settings, assemble
from umbel.cli.options import APP_KEY, FunctionT, chosen_app_option
from umbel.errors import AppNotFound
from umbel.history.figures import FIRST, LAST, Span
from umbel.launch.loading import find_app
from umbel.stores.interface import Where
from umbel.stores.local import is_bucket
from umbel.text import lake_place, without_password

# ---- lake ------------------------------------------------------------------------------------------


class LakePlace(click.Path):
    """The type of --lake: a folder or an address in S3.

    S3 is checked first, because converting an address to a path would lose the `//`.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the place of the lake. Fail if it is neither a folder nor an s3:// address."""
        try:
            named = lake_place(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{without_password(value)!r}: {error}", param, ctx)
        return named if is_bucket(named) else super().convert(named, param, ctx)


def lake_option(function: FunctionT) -> FunctionT:
    """Add --lake. Its default is the environment variable, then the app's `history_lake`, then that
    setting's default.
    """
    option = click.option(
        "--lake",
        metavar="PLACE",
        envvar="UMBEL_HISTORY_LAKE",
        # A group does not know yet whether a subcommand runs, so its function finds the lake.
        callback=lambda ctx, _, value: (
            value if isinstance(ctx.command, click.Group) else find_lake(ctx, value)
        ),
        type=LakePlace(),
        help="Folder or s3://bucket/prefix of the history; default: history_lake, else umbel-lake.",
    )
    return option(function)


def history_options(function: FunctionT) -> FunctionT:
    """Add --lake and --app to a command that needs the app only to find the lake."""
    return chosen_app_option(lake_option(function), is_handed=False)


def find_lake(ctx: click.Context, value: Where | None) -> Where:
    """Return the lake of the option, else the app's, else the default."""
    if value is not None:
        return value
    default, app_name = Settings().history_lake, ctx.meta.get(APP_KEY)
    if ctx.params.get("url") or ctx.resilient_parsing:
        return default  # with -b no app is needed
    try:
        return find_app(app_name).app.settings.history_lake
    except AppNotFound as error:
        if app_name is not None:
            raise
        if error.__cause__ is not None:  # the app exists, but cannot be loaded
            click.echo(f"umbel: {error}; using the lake {default}; use --lake to select another", err=True)
        return default


def find_lake_mode(app_name: str | None, url: str | None) -> int:
    """Return the permission bits for files of the lake, from the app's settings, or without an app from the
    project's.
    """
    settings = assemble({}) if url else find_app(app_name).app.settings
    return settings.lake_mode_bits()


# ---- moments ---------------------------------------------------------------------------------------

AGO = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


class Moment(click.ParamType[datetime]):
    """The type of a time: ISO 8601, in UTC by default, or how long ago, such as 90s, 15m, 2h, 3d, 1w."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Parse a time. Fail if the text is neither ISO 8601 nor a duration."""
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


class Period(click.ParamType[Span]):
    """The type of a period: two times with `..` between them. If one is omitted, the period is open at that
    end.
    """

    name = "period"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Span:
        """Parse a period. Fail if it ends before it begins."""
        if isinstance(value, Span):
            return value
        since, dots, until = str(value).partition("..")
        if not dots or not (since or until):
            self.fail(
                f"{value!r} is not a period; write 2026-11-15T10:00..2026-11-15T11:00, 2h..1h or 1h..",
                param,
                ctx,
            )
        moment = Moment()
        span = Span(
            moment.convert(since, param, ctx) if since else FIRST,
            moment.convert(until, param, ctx) if until else LAST,
        )
        if span.since >= span.until:
            self.fail(f"{value!r} ends before it begins; write the earlier time first", param, ctx)
        return span


def time_options(function: FunctionT) -> FunctionT:
    """Add --since and --until."""
    return _with(
        function,
        click.option("--since", type=Moment(), help="Only since this time (UTC), or 15m, 2h, 3d ago."),
        click.option("--until", type=Moment(), help="Only before this time (UTC), or 15m, 2h, 3d ago."),
    )


def part_options(function: FunctionT) -> FunctionT:
    """Add --task and --queue, which select tasks by name and queue."""
    return _with(
        function,
        click.option("--task", default="", metavar="GLOB", help="Only tasks of this name, as in 'shop.*'."),
        click.option("--queue", default="", metavar="GLOB", help="Only tasks of this queue, as in 'mail*'."),
    )


def _with(function: FunctionT, *options: Callable[[FunctionT], FunctionT]) -> FunctionT:
    """Add options to a command, in this order."""
    for option in reversed(options):
        function = option(function)
    return function
