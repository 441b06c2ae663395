"""Which lake a command of the history works on, and which times, periods and tasks of it."""

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
#
# Which lake a command works on.


class LakePlace(click.Path):
    """The type of --lake: a folder, or a place in S3.

    S3 is checked first, because a path loses the `//` of an address.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The place of the lake; refuses an address that is neither a folder nor s3://."""
        try:
            named = lake_place(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{without_password(value)!r}: {error}", param, ctx)
        return named if is_bucket(named) else super().convert(named, param, ctx)


def lake_option(function: FunctionT) -> FunctionT:
    """Add --lake: the lake that the option or its variable names, else the app's `history_lake`, else its
    default.
    """
    option = click.option(
        "--lake",
        metavar="PLACE",
        envvar="UMBEL_HISTORY_LAKE",
        # The command of a group may not be the one that runs, so it finds its lake itself.
        callback=lambda ctx, _, value: (
            value if isinstance(ctx.command, click.Group) else find_lake(ctx, value)
        ),
        type=LakePlace(),
        help="Where the history is, a folder or s3://bucket/prefix; default: history_lake, else umbel-lake.",
    )
    return option(function)


def history_options(function: FunctionT) -> FunctionT:
    """Add --lake and --app, for commands that need an app only to find the lake."""
    return chosen_app_option(lake_option(function), is_handed=False)


def find_lake(ctx: click.Context, value: Where | None) -> Where:
    """The lake that the option names, else the app's, else the default."""
    if value is not None:
        return value
    default, app_name = Settings().history_lake, ctx.meta.get(APP_KEY)
    if ctx.params.get("url") or ctx.resilient_parsing:
        return default  # a broker was named so that no app is needed
    try:
        return find_app(app_name).app.settings.history_lake
    except AppNotFound as error:
        if app_name is not None:
            raise
        if error.__cause__ is not None:  # there is an app, and it cannot be loaded
            click.echo(f"umbel: {error}; using the lake {default}, --lake names another", err=True)
        return default


def find_lake_mode(app_name: str | None, url: str | None) -> int:
    """Permission bits of a lake that is recorded: by the app's settings, or without an app by those of the
    project.
    """
    settings = assemble({}) if url else find_app(app_name).app.settings
    return settings.lake_mode_bits()


# ---- moments ---------------------------------------------------------------------------------------
#
# Times, periods and patterns as the commands of the history take them.

AGO = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


class Moment(click.ParamType[datetime]):
    """A time in ISO 8601 (UTC where it does not say), or how long ago: 90s, 15m, 2h, 3d, 1w."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """A time from ISO 8601 or from how long ago it was; refuses anything else."""
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
    """Two times with `..` between them; an omitted one is the beginning or the end of the history."""

    name = "period"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Span:
        """A period from two times; refuses one that ends before it begins."""
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
        click.option("--since", type=Moment(), help="Not before this time (UTC), or 15m, 2h, 3d ago."),
        click.option("--until", type=Moment(), help="Before this time (UTC), or 15m, 2h, 3d ago."),
    )


def part_options(function: FunctionT) -> FunctionT:
    """Add --task and --queue, which choose tasks by name and queue."""
    return _with(
        function,
        click.option("--task", default="", metavar="GLOB", help="Only tasks of this name, as in 'shop.*'."),
        click.option("--queue", default="", metavar="GLOB", help="Only of this queue, as in 'mail*'."),
    )


def _with(function: FunctionT, *options: Callable[[FunctionT], FunctionT]) -> FunctionT:
    for option in reversed(options):
        function = option(function)
    return function
