"""`umbel schedule`: what is periodic, when it was and will be sent, and who sees to it."""

from collections.abc import Callable

import click

from umbel.app.app import App
from umbel.app.cluster.periodic import Periodic
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, json_option
from umbel.cli.show.printing import duration, print_json, print_table, say
from umbel.errors import nearest
from umbel.launch.loading import find_app
from umbel.launch.timetable import Found, Names, change_pauses, leader_of, read_timetable

COLUMNS = ("name", "task", "rule", "catch_up", "last", "next")


class NoSuchPeriodic(click.ClickException):
    exit_code = exits.NOT_FOUND


@click.group("schedule")
def command() -> None:
    """The app's periodic tasks: list them, run one now, pause and resume."""


@command.command("ls")
@app_option
@json_option
def ls(app_name: str | None, as_json: bool) -> int:
    """List the periodic tasks, when each was last sent and is due next, and which worker leads."""
    app = _app(app_name)

    lease, found = ask_broker(app_name, lambda broker: read_timetable(app, broker))
    leader = leader_of(lease)
    if as_json:
        tasks = [one.as_data() for one in found]
        print_json({"leader": leader or None, "term": lease.term, "tasks": tasks})
    elif not found:
        click.echo("umbel: this app has no periodic tasks; define one with @app.periodic(every=60)", err=True)
    else:
        print_table(COLUMNS, [_row(one) for one in found])
        say(f"leader: {leader or 'none (no worker with periodic tasks is running)'}", err=True)
    return exits.OK


@command.command("run")
@app_option
@click.argument("name")
@json_option
def run(app_name: str | None, name: str, as_json: bool) -> int:
    """Send the task of NAME now, in addition to its slots."""
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
    """Skip the slots of NAME until it is resumed. Also works while no worker is running."""
    return _change(app_name, names, lambda paused: paused | set(names), "paused")


@command.command("resume")
@app_option
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def resume(app_name: str | None, names: tuple[str, ...]) -> int:
    """Send NAME again, from its next slot on."""
    return _change(app_name, names, lambda paused: paused - set(names), "resumed")


def _row(one: Found) -> list[str]:
    data = one.as_data()
    last = "-" if one.last_us is None else f"{duration((one.now_us - one.last_us) / 1e6)} ago"
    due = "paused" if one.paused else f"in {duration((one.next_us - one.now_us) / 1e6)}"
    task = "" if data["task"] == data["name"] else data["task"]
    return [data["name"], task, data["rule"], data["catch_up"], last, due]


def _app(app_name: str | None) -> "App":

    return find_app(app_name).app


def _find(app: "App", name: str) -> "Periodic":
    known = {one.name: one for one in app.periodic_tasks}
    if name in known:
        return known[name]
    near = nearest(name, sorted(known))
    hint = f"; did you mean {near!r}?" if near else "; `umbel schedule ls` lists them"
    raise NoSuchPeriodic(f"unknown periodic task {name!r}{hint}")


def _change(app_name: str | None, names: tuple[str, ...], edit: Callable[[Names], Names], done: str) -> int:
    app = _app(app_name)
    for name in names:
        _find(app, name)
    if not ask_broker(app_name, lambda broker: change_pauses(broker, edit)):
        raise click.ClickException("another process is changing which periodic tasks are paused; try again")
    click.echo(f"{done}: {', '.join(names)}", err=True)
    return exits.OK
