"""`umbel history`: recorded events, built into tables and queried. Commands load when called."""

import click

from umbel.cli.history.build import build
from umbel.cli.history.report import ROW_COMMANDS, compared, database, report, slo, sql, tables


@click.group("history")
def command() -> None:
    """Build tables from what was recorded, and read them: rows, SQL, promises, a report."""


for member in (build, tables, sql, *ROW_COMMANDS, slo, compared, report, database):
    command.add_command(member)
