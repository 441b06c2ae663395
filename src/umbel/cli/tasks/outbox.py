"""`umbel outbox`: the tables into which transactions write their tasks, and who publishes them."""

from collections.abc import Sequence
from time import time
from typing import Any

import click

from umbel.brokers.interface import Broker
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, json_option
from umbel.cli.show.printing import duration, print_json, print_table, say
from umbel.errors import BrokerUnavailable, ConfigurationError
from umbel.launch.loading import find_app
from umbel.outbox.addresses import Address, parse_address
from umbel.outbox.database import OutboxDatabase, need_driver
from umbel.outbox.dialects import COUNT_MAX, DEFAULT_TABLE, POSTGRESQL, SQLITE, Statements
from umbel.outbox.progress import decode_progress
from umbel.protocol.leadership.coordination import LeaseReply

DIALECTS = {one.name: one for one in (POSTGRESQL, SQLITE)}


@click.group("outbox")
def command() -> None:
    """The outboxes: tasks that are sent if, and only if, a database transaction commits."""


@command.command("status")
@app_option
@json_option
def status(app_name: str | None, as_json: bool) -> int:
    """Show what waits in the app's outboxes, what was set aside and why, and which node publishes."""
    databases, table = _outboxes(app_name)
    names = [one.address.lease(table) for one in databases]
    leases: list[LeaseReply | None] = [None for _ in names]
    try:
        leases = _leases(app_name, names)
    except BrokerUnavailable as error:  # what waits is known all the same, and wanted most then
        say(f"umbel: who publishes is not known: {error}", err=True)
    rows = [_row(one, lease) for one, lease in zip(databases, leases, strict=True)]
    if as_json:
        print_json(rows)
        return exits.OK
    columns = ("database", "waiting", "oldest", "last published", "relay", "set aside")
    print_table(columns, [_shown(row) for row in rows])
    for row in rows:
        for one in row["problems"]:
            say(f"set aside: row {one['row']}, task {one['task_id']}: {one['problem']}")
    return exits.OK


@command.command("create")
@app_option
def create(app_name: str | None) -> int:
    """Make the table and its index in the app's outboxes, where they are missing."""
    for database in _outboxes(app_name)[0]:
        is_new = database.create()
        database.close()
        say(f"outbox ready in {database.address.shown}{' (a new file)' if is_new else ''}")
    return exits.OK


@command.command("sql")
@app_option
@click.option("--dialect", type=click.Choice(tuple(DIALECTS)), help="Default: that of the app's outbox.")
@click.option("--table", help="Default: the app's outbox_table.")
def sql(app_name: str | None, dialect: str | None, table: str | None) -> int:
    """Print the statements that make the table, for a migration. With --dialect no app is needed."""
    if dialect is None:
        databases, named = _outboxes(app_name)
        kind, table = databases[0].address.dialect, table or named
    else:
        kind = DIALECTS[dialect]
    for statement in Statements(kind, table or DEFAULT_TABLE).create():
        click.echo(f"{statement};")
    return exits.OK


@command.command("retry")
@app_option
@json_option
def retry(app_name: str | None, as_json: bool) -> int:
    """Have the rows published that were set aside, once the cause is repaired."""
    count = 0
    for database in _outboxes(app_name)[0]:
        count += database.retry()
        database.close()
    if as_json:
        print_json({"retried": count})
    else:
        click.echo(f"{count} to be published again")
    return exits.OK


def _outboxes(app_name: str | None) -> tuple[list[OutboxDatabase], str]:
    settings = find_app(app_name).app.settings
    addresses: list[Address] = [parse_address(url) for url in settings.outboxes]
    if not addresses:
        raise ConfigurationError(
            "the app names no outbox; set `outbox` to the address of its database, such as postgresql://..."
        )
    for address in addresses:
        need_driver(address)
    return [OutboxDatabase(one, settings.outbox_table) for one in addresses], settings.outbox_table


def _leases(app_name: str | None, names: Sequence[str]) -> list[LeaseReply | None]:
    """Who publishes; None where the broker has no leases, so that nobody does."""

    async def read(broker: Broker) -> list[LeaseReply | None]:
        if not broker.capabilities.leases:
            return [None for _ in names]
        return [await broker.coordination.read_lease(name) for name in names]

    return ask_broker(app_name, read)


def _row(database: OutboxDatabase, lease: LeaseReply | None) -> dict[str, Any]:
    counts, problems = database.counts(), database.problems()
    database.close()
    progress = decode_progress(lease.data if lease is not None else b"")
    # node@host.pid.incarnation
    node = lease.holder.rsplit(".", 2)[0] if lease is not None and lease.holder else None
    return {
        "database": database.address.shown,
        "waiting": counts.waiting,
        "oldest_s": counts.oldest_s,
        "published": progress.published,
        "last_published_at": progress.at or None,
        "relay": node,
        "set_aside": counts.set_aside,
        "problems": [{"row": one.row_id, "task_id": one.task_id, "problem": one.problem} for one in problems],
    }


def _shown(row: dict[str, Any]) -> list[object]:
    ages = [row["oldest_s"], None if (at := row["last_published_at"]) is None else max(0.0, time() - at)]
    oldest, last = ["-" if age is None else f"{duration(age)} ago" for age in ages]
    set_aside = _count(row["set_aside"])
    return [row["database"], _count(row["waiting"]), oldest, last, row["relay"] or "- none -", set_aside]


def _count(number: int) -> object:
    return f"more than {COUNT_MAX}" if number > COUNT_MAX else number
