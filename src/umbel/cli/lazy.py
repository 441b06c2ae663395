"""LazyGroup: a group of commands that imports a command when it is called.

Importing all commands would take most of the time of a short one such as `umbel health`. With this group the
module of a command can import what it needs at its top.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from umbel.errors import nearest


class Lazy(NamedTuple):
    """The place of a command, and its line in the list of commands, which is shown without importing it."""

    place: str  # a module in umbel.cli, and after a colon the command's name there if it is not `command`
    summary: str

    def load(self) -> click.Command:
        """Import the command's module and return the command."""
        module, _, name = self.place.partition(":")
        command: click.Command = getattr(import_module(f"umbel.cli.{module}"), name or "command")
        return command


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def __init__(self, *arguments: Any, places: Mapping[str, Lazy], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, without importing them."""
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; return None for an unknown name."""
        place = self._places.get(cmd_name)
        return None if place is None else place.load()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command to run. Raise UsageError with the most similar name if it is mistyped."""
        # click suggests names only of commands that it has loaded.
        near = "" if args[0] in self._places else nearest(args[0], self._places)
        if near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near!r}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for --help, using their summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.summary) for name, place in self._places.items()])
