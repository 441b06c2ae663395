"""`umbel history`: what was recorded, built into tables and read."""

import click

from umbel.cli.history_rows import ROW_COMMANDS
from umbel.cli.history_sql import sql, tables


@click.group("history")
def command() -> None:
    """Read what was recorded: tables, SQL, a report."""


for one in (tables, sql, *ROW_COMMANDS):
    command.add_command(one)
