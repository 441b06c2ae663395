"""`umbel history duckdb`: the tables and views for other tools."""

from pathlib import Path

import click

from umbel.cli import exits
from umbel.cli.history.lake import history_options
from umbel.history.database import write_database
from umbel.stores.interface import Where


@click.command("duckdb")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@history_options
def database(file: Path, lake: Where) -> int:
    """Write FILE, a DuckDB database in which other tools find the tables and views: dbt, notebooks, BI.

    It holds no rows: it reads the newest build's Parquet files where they are. Those go away some builds
    later, so write it again after each build.

    Exit code: 0, or 3 when nothing is built yet.
    """
    build = write_database(lake, file)
    click.echo(f"umbel: wrote {file}, build {build.number}", err=True)
    return exits.OK
