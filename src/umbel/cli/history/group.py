"""`umbel history`: build tables from recorded events and query them."""

import click

from umbel.cli.history.build import build
from umbel.cli.history.report import ROW_COMMANDS, compared, database, report, slo, sql, tables


@click.group("history")
def command() -> None:
    """Build tables from recorded events, and query them: rows, SQL, objectives, a report."""


for member in (build, tables, sql, *ROW_COMMANDS, slo, compared, report, database):
    command.add_command(member)
