"""LazyGroup: a group of commands that imports only the command that is called.

A command's file can import at its top whatever it needs, and `umbel health` still starts in a moment.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from umbel.errors import nearest


class Lazy(NamedTuple):
    """Where a command is, and the line that lists it without importing it."""

    place: str  # a module below umbel.cli, and after a colon the command's name there if it is not `command`
    summary: str

    def load(self) -> click.Command:
        """Import the command's module and return the command."""
        module, _, name = self.place.partition(":")
        command: click.Command = getattr(import_module(f"umbel.cli.{module}"), name or "command")
        return command


class LazyGroup(click.Group):
    """A group of commands whose modules are imported when they are called."""

    def __init__(self, *arguments: Any, places: Mapping[str, Lazy], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, without importing them."""
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command's module and return its command; None for an unknown name."""
        place = self._places.get(cmd_name)
        return None if place is None else place.load()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a command line; UsageError with the nearest name for a mistyped one."""
        # click guesses among the commands it has loaded, which here are none.
        near = "" if args[0] in self._places else nearest(args[0], self._places)
        if near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near!r}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for --help from their summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.summary) for name, place in self._places.items()])
