"""`umbel queues`: what waits, emptying it, pausing it, moving it."""

from functools import partial

import click
from msgspec.structs import asdict

from umbel.app.secrecy import has_secrets
from umbel.brokers.interface import Queues
from umbel.cli import completion, exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, broker_option, json_option
from umbel.cli.show.printing import print_json, print_table
from umbel.cli.tasks.queue_control import move, pause, resume
from umbel.launch.loading import find_app
from umbel.monitor.messages import waiting_row
from umbel.protocol.delivery.sensitive import hides_nothing

PEEK_MAX = 1000
COLUMNS = ("queue", "ready", "delayed", "claimed", "limited", "paused")


@click.group("queues")
def command() -> None:
    """List, look into, empty, pause or resume the queues, or move their messages."""


@command.command("ls")
@app_option
@broker_option
@json_option
def ls(app_name: str | None, url: str | None, as_json: bool) -> int:
    """List the queues with their counts of waiting, delayed and running messages, and which are paused.

    Limited are those that wait for a limit of the whole cluster.
    """
    depths = ask_broker(app_name, lambda broker: broker.queues(), url=url)
    rows = [
        (name, depth.ready, depth.delayed, depth.claimed, depth.limited, depth.paused)
        for name, depth in sorted(depths.items())
    ]
    if as_json:
        print_json([dict(zip(COLUMNS, row, strict=True)) for row in rows])
    else:
        print_table(COLUMNS, [(*counts, "yes" if paused else "") for *counts, paused in rows])
    return exits.OK


@command.command("peek")
@app_option
@broker_option
@click.argument("queue", shell_complete=completion.queues)
@click.option("--limit", type=click.IntRange(1, PEEK_MAX), default=20, show_default=True)
@json_option
def peek(app_name: str | None, url: str | None, queue: str, limit: int, as_json: bool) -> int:
    """Show the next messages of QUEUE without taking them.

    The app knows which arguments are sensitive, and hides them whoever sent them; with --broker alone, those
    are hidden that their sender hid.
    """
    deliveries = ask_broker(app_name, lambda broker: broker.peek(queue, limit), url=url)
    hides = hides_nothing if url and not app_name else partial(has_secrets, find_app(app_name).app)
    rows = [asdict(waiting_row(delivery, hides)) for delivery in deliveries]
    if as_json:
        print_json(rows)
    else:
        columns = ("task_id", "task", "args", "kwargs", "retries", "starts")
        print_table(columns, [[row[column] for column in columns] for row in rows])
    return exits.OK


@command.command("purge")
@app_option
@broker_option
@click.argument("queue", shell_complete=completion.queues)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def purge(app_name: str | None, url: str | None, queue: str, yes: bool, as_json: bool) -> int:
    """Remove all waiting messages from QUEUE. Running tasks are not affected."""

    async def empty(broker: Queues) -> int | None:
        count = "all"
        if broker.capabilities.depths:
            depth = (await broker.queues()).get(queue)
            count = str(depth.ready + depth.delayed + depth.limited if depth else 0)
        question = f"Remove {count} messages from {queue!r}?"
        if count != "0" and not yes and not click.confirm(question, err=True):
            return None
        return await broker.purge(queue)

    removed = ask_broker(app_name, empty, url=url)
    if removed is None:
        raise click.Abort
    if as_json:
        print_json({"queue": queue, "removed": removed})
    else:
        click.echo(f"{removed} messages removed from {queue}")
    return exits.OK


for _command in (pause, resume, move):
    command.add_command(_command)
