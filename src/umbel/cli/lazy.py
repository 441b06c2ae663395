"""LazyGroup: a group of commands that imports only the one that is called.

So a command's file imports at its top whatever it needs, and `umbel health` answers in a moment.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from umbel.errors import nearest


class Lazy(NamedTuple):
    module: str  # below umbel.cli
    summary: str


class LazyGroup(click.Group):
    def __init__(self, *arguments: Any, places: Mapping[str, Lazy], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self._places.get(cmd_name)
        if place is None:
            return None
        command: click.Command = import_module(f"umbel.cli.{place.module}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click guesses among the commands it has loaded, which here are none.
        near = "" if args[0] in self._places else nearest(args[0], self._places)
        if near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near!r}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.summary) for name, place in self._places.items()])
