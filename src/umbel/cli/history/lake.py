"""Which lake a command works on."""

from pathlib import Path
from typing import Any

import click

from umbel.app.configuration.settings import Settings, assemble
from umbel.cli.options import APP_KEY, FunctionT, chosen_app_option
from umbel.errors import AppNotFound
from umbel.launch.loading import find_app
from umbel.stores.interface import Where
from umbel.stores.opening import is_bucket
from umbel.urls import lake_place, without_password


class LakePlace(click.Path):
    """A folder by its path, or a place in S3. Checked before it is a path, which has no `//` any more."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            named = lake_place(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{without_password(value)!r}: {error}", param, ctx)
        return named if is_bucket(named) else super().convert(named, param, ctx)


def lake_option(function: FunctionT) -> FunctionT:
    """Which lake a command works on, for all of them: the one that is named, by option or variable;
    else that of the app (`history_lake`); else, where there is no app, the app's default."""
    option = click.option(
        "--lake",
        metavar="PLACE",
        envvar="UMBEL_HISTORY_LAKE",
        # A group's own command may not be the one that runs: it asks when it does.
        callback=lambda ctx, _, value: (
            value if isinstance(ctx.command, click.Group) else find_lake(ctx, value)
        ),
        type=LakePlace(),
        help="Where the history is, a folder or s3://bucket/prefix; default: history_lake, else umbel-lake.",
    )
    return option(function)


def history_options(function: FunctionT) -> FunctionT:
    """For commands that need an app only to find the lake."""
    return chosen_app_option(lake_option(function), is_handed=False)


def find_lake(ctx: click.Context, value: Where | None) -> Where:
    """The lake that was named, else the app's."""
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
    """Who may read a lake that is recorded now: as the app says; without one, as the folder's settings do."""
    settings = assemble({}) if url else find_app(app_name).app.settings
    return settings.lake_mode_bits()
