"""`umbel schedule`: what is periodic, when it was and will be sent, and who sees to it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from time import time
from typing import Any

import click

from umbel.app.app import App
from umbel.app.cluster.periodic import Periodic
from umbel.app.sending.ids import new_id
from umbel.brokers.interface import ClusterRecord
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, json_option
from umbel.cli.show.printing import duration, print_json, print_table, say
from umbel.errors import nearest
from umbel.launch.loading import find_app
from umbel.protocol.leadership.coordination import LeaseReply
from umbel.wire.schedule import decode_marks, decode_pauses, encode_pauses
from umbel.worker.steps.scheduler import PAUSES_LEASE, SCHEDULER_LEASE

COLUMNS = ("name", "task", "rule", "catch_up", "last", "next")
CHANGE_TTL_S = 5.0
CHANGE_TRIES = 50
TRY_AGAIN_S = 0.1
Names = frozenset[str]


class NoSuchPeriodic(click.ClickException):
    exit_code = exits.NOT_FOUND


@dataclass(frozen=True, slots=True)
class Found:
    """A periodic task as the app has it, with its mark as the leader left it."""

    periodic: "Periodic"
    mark: int | None
    paused: bool
    now_us: int

    @property
    def last_us(self) -> int | None:
        # The mark of a task that is new is the moment it was first seen, which is no slot.
        is_slot = self.mark is not None and self.periodic.entry.rule.until(self.mark) == self.mark
        return self.mark if is_slot else None

    @property
    def next_us(self) -> int:
        return self.periodic.entry.rule.after(max(self.now_us, self.mark or 0))

    def as_data(self) -> dict[str, Any]:
        return {
            "name": self.periodic.name,
            "task": self.periodic.signature.task,
            "rule": self.periodic.said,
            "catch_up": str(self.periodic.entry.catch_up),
            "last": None if self.last_us is None else _iso(self.last_us),
            "next": None if self.paused else _iso(self.next_us),
            "paused": "yes" if self.paused else "",
        }

    def as_row(self) -> list[str]:
        data = self.as_data()
        last = "-" if self.last_us is None else f"{duration((self.now_us - self.last_us) / 1e6)} ago"
        due = "paused" if self.paused else f"in {duration((self.next_us - self.now_us) / 1e6)}"
        task = "" if data["task"] == data["name"] else data["task"]
        return [data["name"], task, data["rule"], data["catch_up"], last, due]


@click.group("schedule")
def command() -> None:
    """The app's periodic tasks: list them, run one now, pause and resume."""


@command.command("ls")
@app_option
@json_option
def ls(app_name: str | None, as_json: bool) -> int:
    """List the periodic tasks, when each was last sent and is due next, and which worker leads."""
    app = _app(app_name)

    async def read(broker: ClusterRecord) -> "tuple[LeaseReply, LeaseReply]":
        store = broker.coordination
        return await store.read_lease(SCHEDULER_LEASE), await store.read_lease(PAUSES_LEASE)

    lease, pauses = ask_broker(app_name, read)
    marks, paused = decode_marks(lease.data), decode_pauses(pauses.data)
    now_us = int(time() * 1_000_000)
    found = [Found(one, marks.get(one.name), one.name in paused, now_us) for one in app.periodic_tasks]
    leader = lease.holder.rsplit(".", 2)[0]  # without process and incarnation
    if as_json:
        tasks = [one.as_data() for one in found]
        print_json({"leader": leader or None, "term": lease.term, "tasks": tasks})
    elif not found:
        click.echo("umbel: this app has no periodic tasks; define one with @app.periodic(every=60)", err=True)
    else:
        print_table(COLUMNS, [one.as_row() for one in found])
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


def _app(app_name: str | None) -> "App":

    return find_app(app_name).app


def _find(app: "App", name: str) -> "Periodic":
    known = {one.name: one for one in app.periodic_tasks}
    if name in known:
        return known[name]
    near = nearest(name, sorted(known))
    hint = f"; did you mean {near!r}?" if near else "; `umbel schedule ls` lists them"
    raise NoSuchPeriodic(f"unknown periodic task {name!r}{hint}")


def _iso(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1_000_000, UTC).isoformat(timespec="seconds")


def _change(app_name: str | None, names: tuple[str, ...], edit: Callable[[Names], Names], done: str) -> int:
    app = _app(app_name)
    for name in names:
        _find(app, name)
    if not ask_broker(app_name, lambda broker: _change_pauses(broker, edit)):
        raise click.ClickException("another process is changing which periodic tasks are paused; try again")
    click.echo(f"{done}: {', '.join(names)}", err=True)
    return exits.OK


async def _change_pauses(broker: ClusterRecord, edit: Callable[[Names], Names]) -> bool:
    """Under the lease that holds them, so that of two who change them at once none is lost."""

    store, holder = broker.coordination, f"cli.{new_id()}"
    for _ in range(CHANGE_TRIES):
        taken = await store.acquire_lease(PAUSES_LEASE, holder, ttl_s=CHANGE_TTL_S)
        if taken.granted:
            wanted = encode_pauses(edit(decode_pauses(taken.data)))
            changed = await store.update_lease(PAUSES_LEASE, holder, taken.term, wanted)
            await store.release_lease(PAUSES_LEASE, holder, taken.term)
            return changed
        await asyncio.sleep(TRY_AGAIN_S)
    return False
