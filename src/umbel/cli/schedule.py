"""`umbel schedule` and `umbel outbox`: commands about periodic tasks, and about outboxes and their relays."""

from collections.abc import Callable, Sequence
from time import time
from typing import Any

import click

from umbel.app.app import App
from umbel.app.cluster.periodic import Periodic
from umbel.brokers.interface import Broker
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, duration, json_option, print_json, print_table, say
from umbel.errors import BrokerUnavailable, ConfigurationError, nearest
from umbel.launch.loading import find_app
from umbel.launch.timetable import Names, PeriodicState, change_pauses, leader_of, read_timetable
from umbel.outbox.database import Address, OutboxDatabase, need_driver, parse_address
from umbel.outbox.table import COUNT_MAX, DEFAULT_TABLE, POSTGRESQL, SQLITE, Statements, decode_progress
from umbel.protocol.leadership.coordination import LeaseReply
from umbel.text import numbered

# ---- schedule --------------------------------------------------------------------------------------

COLUMNS = ("name", "task", "rule", "catch_up", "last", "next")


class NoSuchPeriodic(click.ClickException):
    """Raised for an unknown periodic task; exit code 3."""

    exit_code = exits.NOT_FOUND


@click.group("schedule")
def command() -> None:
    """List, run, pause and resume the app's periodic tasks."""


@command.command("ls")
@app_option
@json_option
def ls(app_name: str | None, as_json: bool) -> int:
    """List the periodic tasks, when each was last sent and is due next, and the worker that sends them."""
    app = _app(app_name)

    lease, found = ask_broker(app_name, lambda broker: read_timetable(app, broker))
    leader = leader_of(lease)
    if as_json:
        tasks = [entry.as_data() for entry in found]
        print_json({"leader": leader or None, "term": lease.term, "tasks": tasks})
    elif not found:
        click.echo("umbel: this app has no periodic tasks; define one with @app.periodic(every=60)", err=True)
    else:
        print_table(COLUMNS, [_row(entry) for entry in found])
        say(f"leader: {leader or 'none (no worker with periodic tasks is running)'}", err=True)
    return exits.OK


@command.command("run")
@app_option
@click.argument("name")
@json_option
def run(app_name: str | None, name: str, as_json: bool) -> int:
    """Send the periodic task NAME now, in addition to its schedule."""
    app = _app(app_name)
    try:
        result = _find(app, name).signature.clone().apply_async()
    finally:
        app.close()
    if as_json:
        print_json({"name": name, "id": result.id})
    else:
        click.echo(result.id)
    return exits.OK


@command.command("pause")
@app_option
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def pause(app_name: str | None, names: tuple[str, ...]) -> int:
    """Do not send the periodic task NAME until it is resumed. Also works while no worker is running."""
    return _change(app_name, names, lambda paused: paused | set(names), "paused")


@command.command("resume")
@app_option
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def resume(app_name: str | None, names: tuple[str, ...]) -> int:
    """Resume the periodic task NAME; it is sent at its next scheduled time."""
    return _change(app_name, names, lambda paused: paused - set(names), "resumed")


def _row(entry: PeriodicState) -> list[str]:
    """Return the row of a periodic task."""
    data = entry.as_data()
    last = "-" if entry.last_us is None else f"{duration((entry.now_us - entry.last_us) / 1e6)} ago"
    due = "paused" if entry.paused else f"in {duration((entry.next_us - entry.now_us) / 1e6)}"
    task = "" if data["task"] == data["name"] else data["task"]
    return [data["name"], task, data["rule"], data["catch_up"], last, due]


def _app(app_name: str | None) -> "App":
    """Find and return the app."""

    return find_app(app_name).app


def _find(app: "App", name: str) -> "Periodic":
    """Return a periodic task. Raise NoSuchPeriodic with the most similar name if it is unknown."""
    known = {task.name: task for task in app.periodic_tasks}
    if name in known:
        return known[name]
    near = nearest(name, sorted(known))
    hint = f"; did you mean {near!r}?" if near else "; `umbel schedule ls` lists them"
    raise NoSuchPeriodic(f"unknown periodic task {name!r}{hint}")


def _change(app_name: str | None, names: tuple[str, ...], edit: Callable[[Names], Names], done: str) -> int:
    """Change which periodic tasks are paused. All names are checked first, so that nothing changes if one is
    unknown.
    """
    app = _app(app_name)
    for name in names:
        _find(app, name)
    if not ask_broker(app_name, lambda broker: change_pauses(broker, edit)):
        raise click.ClickException("another process is changing which periodic tasks are paused; try again")
    click.echo(f"{done}: {', '.join(names)}", err=True)
    return exits.OK


# ---- outbox ----------------------------------------------------------------------------------------

DIALECTS = {dialect.name: dialect for dialect in (POSTGRESQL, SQLITE)}


@click.group("outbox")
def outbox_command() -> None:
    """Show, create or repair outboxes: tasks are sent only if a database transaction commits."""


@outbox_command.command("status")
@app_option
@json_option
def status(app_name: str | None, as_json: bool) -> int:
    """Show the waiting rows of the app's outboxes, the rows that cannot be published and why, and the
    relay's node.
    """
    databases, table = _outboxes(app_name)
    names = [database.address.lease(table) for database in databases]
    leases: list[LeaseReply | None] = [None for _ in names]
    try:
        leases = _leases(app_name, names)
    # show the counts from the database, which matter most while the broker is down
    except BrokerUnavailable as error:
        say(f"umbel: cannot read which node publishes: {error}", err=True)
    rows = [_outbox_row(database, lease) for database, lease in zip(databases, leases, strict=True)]
    if as_json:
        print_json(rows)
        return exits.OK
    columns = ("database", "waiting", "oldest", "last published", "relay", "set aside")
    print_table(columns, [_shown(row) for row in rows])
    for row in rows:
        for problem in row["problems"]:
            say(f"set aside: row {problem['row']}, task {problem['task_id']}: {problem['problem']}")
    return exits.OK


@outbox_command.command("create")
@app_option
def create(app_name: str | None) -> int:
    """Create the table and its index in the app's outboxes, if they are missing."""
    for database in _outboxes(app_name)[0]:
        is_new = database.create()
        database.close()
        say(f"outbox ready in {database.address.shown}{' (a new file)' if is_new else ''}")
    return exits.OK


@outbox_command.command("sql")
@app_option
@click.option(
    "--dialect", type=click.Choice(tuple(DIALECTS)), help="Default: the dialect of the app's outbox."
)
@click.option("--table", help="Default: the app's outbox_table.")
def sql(app_name: str | None, dialect: str | None, table: str | None) -> int:
    """Print the SQL statements that create the table, for a migration. With --dialect no app is needed."""
    if dialect is None:
        databases, named = _outboxes(app_name)
        kind, table = databases[0].address.dialect, table or named
    else:
        kind = DIALECTS[dialect]
    for statement in Statements(kind, table or DEFAULT_TABLE).create():
        click.echo(f"{statement};")
    return exits.OK


@outbox_command.command("retry")
@app_option
@json_option
def retry(app_name: str | None, as_json: bool) -> int:
    """Publish rows that were set aside, after their cause is fixed."""
    count = 0
    for database in _outboxes(app_name)[0]:
        count += database.retry()
        database.close()
    if as_json:
        print_json({"retried": count})
    else:
        click.echo(f"{numbered(count, 'row')} to publish again")
    return exits.OK


def _outboxes(app_name: str | None) -> tuple[list[OutboxDatabase], str]:
    """Open the app's outboxes. Raise ConfigurationError if it has none."""
    settings = find_app(app_name).app.settings
    addresses: list[Address] = [parse_address(url) for url in settings.outboxes]
    if not addresses:
        raise ConfigurationError(
            "the app names no outbox; set `outbox` to the address of its database, such as postgresql://..."
        )
    for address in addresses:
        need_driver(address)
    return [OutboxDatabase(address, settings.outbox_table) for address in addresses], settings.outbox_table


def _leases(app_name: str | None, names: Sequence[str]) -> list[LeaseReply | None]:
    """Return the lease of each outbox, whose holder is the publishing node; None if the broker has no
    leases.
    """

    async def read(broker: Broker) -> list[LeaseReply | None]:
        if not broker.capabilities.leases:
            return [None for _ in names]
        return [await broker.coordination.read_lease(name) for name in names]

    return ask_broker(app_name, read)


def _outbox_row(database: OutboxDatabase, lease: LeaseReply | None) -> dict[str, Any]:
    """Return the status of one outbox."""
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
        "problems": [
            {"row": problem.row_id, "task_id": problem.task_id, "problem": problem.problem}
            for problem in problems
        ],
    }


def _shown(row: dict[str, Any]) -> list[object]:
    """Return the row of an outbox for the table."""
    ages = [row["oldest_s"], None if (at := row["last_published_at"]) is None else max(0.0, time() - at)]
    oldest, last = ["-" if age is None else f"{duration(age)} ago" for age in ages]
    set_aside = _count(row["set_aside"])
    return [row["database"], _count(row["waiting"]), oldest, last, row["relay"] or "- none -", set_aside]


def _count(number: int) -> object:
    """Return a count as text if it exceeds the limit of counting."""
    return f"more than {COUNT_MAX}" if number > COUNT_MAX else number
