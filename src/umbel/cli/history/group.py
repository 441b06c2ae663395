"""`umbel history`: recorded events, built into tables and queried. Each command has a separate file."""

import click

from umbel.cli.history.build import build
from umbel.cli.history.compare import compared
from umbel.cli.history.database import database
from umbel.cli.history.report import report
from umbel.cli.history.rows import ROW_COMMANDS
from umbel.cli.history.slo import slo
from umbel.cli.history.sql import sql, tables


@click.group("history")
def command() -> None:
    """Build tables from what was recorded, and read them: rows, SQL, promises, a report."""


for one in (build, tables, sql, *ROW_COMMANDS, slo, compared, report, database):
    command.add_command(one)
