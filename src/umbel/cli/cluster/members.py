"""`umbel members`: who is in the cluster, and who comes and goes.

Without `--watch` the workers are asked what they know; with it this process listens to the nodes as
they do, with the same machine, and so needs no running Umbel worker. It only listens:
unlike a worker, it announces no losses.
"""

import asyncio
import json
import os
import socket
from collections.abc import Coroutine
from random import uniform
from time import localtime, strftime, time
from typing import Any

import click

from umbel.brokers.interface import Broadcast
from umbel.cli import exits
from umbel.cli.broker import ClusterBroker, ask_broker, ask_in_time
from umbel.cli.options import app_option, broker_option, json_option
from umbel.cli.show.printing import print_json, print_table, say
from umbel.control.client import Asker
from umbel.coordination.driver import drive, fairly
from umbel.errors import BrokerError, WireError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.membership.events import (
    Answered,
    Cleared,
    Effect,
    Event,
    Introduced,
    Joined,
    Left,
    Lost,
    Member,
    Probe,
    Probed,
    Suspected,
)
from umbel.protocol.membership.gossip import Membership
from umbel.protocol.membership.opinions import HEARTBEAT_S, Opinion, is_better
from umbel.wire.event import decode_events
from umbel.wire.gossip import describe, read_worker_event

INBOX_MAX = 10_000
ASKING_MAX = 100
COLUMNS = ("node", "state", "software", "pid", "clock", "silent_s", "reason")


@click.command("members")
@app_option
@broker_option
@click.option(
    "--watch", is_flag=True, help="Print which nodes join, go silent, leave or are lost, until Ctrl-C."
)
@click.option(
    "--timeout", "timeout_s", type=float, default=1.0, show_default=True, help="Seconds to wait for replies."
)
@json_option
def command(app_name: str | None, url: str | None, watch: bool, timeout_s: float, as_json: bool) -> int:
    """Show the nodes of the cluster: alive, suspect, lost, left.

    Exit code: 0, or 69 when no node answered.
    """
    if watch:
        try:
            ask_broker(app_name, lambda broker: Watch(broker, as_json=as_json).run(timeout_s), url=url)
        except KeyboardInterrupt:
            return exits.OK
    rows = ask_in_time(
        app_name, lambda broker, left_s: known_members(Asker(broker), left_s), timeout_s, url=url
    )
    if as_json:
        print_json(rows)
    elif rows:
        print_table(COLUMNS, [[row.get(column, "") for column in COLUMNS] for row in rows])
    if not rows:
        click.echo("umbel: no node answered; start one with `umbel worker`", err=True)
    return exits.OK if rows else exits.NOBODY_ANSWERED


async def known_members(asker: Asker, timeout_s: float) -> list[dict[str, Any]]:
    """What the workers know of one another, and other nodes that answer; by name."""
    told, pinged = await asyncio.gather(
        asker.ask("members", destination=["@v2"], timeout_s=timeout_s),
        asker.ask("ping", timeout_s=timeout_s),
    )
    rows: dict[str, dict[str, Any]] = {}
    for view in told.replies.values():
        for row in view if isinstance(view, list) else ():
            known = rows.get(row["node"])
            if known is None or is_better(_opinion(row), _opinion(known)):
                rows[row["node"]] = row
    for node in pinged.replies:  # whatever others think of it
        row = rows.setdefault(node, {"node": node, "software": "unknown"})
        rows[node] = row | {"state": "alive", "silent_s": 0.0, "reason": ""}
    return [rows[node] for node in sorted(rows)]


def _opinion(row: dict[str, Any]) -> Opinion:
    return Opinion(row["state"], row["silent_s"], row.get("incarnation", 0), row.get("freq_s", HEARTBEAT_S))


class Watch:
    def __init__(self, broker: ClusterBroker, *, as_json: bool) -> None:
        self._broker = broker
        self._asker = Asker(broker)
        self._as_json = as_json
        pid = os.getpid()
        self._machine = Membership(f"gen{pid}@{socket.gethostname()}", 1, pid, uniform)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(maxsize=INBOX_MAX)
        self._group = asyncio.TaskGroup()
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self, timeout_s: float) -> None:
        async with self._group:
            self._group.create_task(drive(self._machine, self._inbox, self._perform))
            async with self._broker.subscribe(EVENT_EXCHANGE, ["worker.#"]) as heard:
                self._group.create_task(self._begin(timeout_s))
                async for broadcast in fairly(heard):
                    await self._take(broadcast)

    async def _begin(self, timeout_s: float) -> None:
        """The nodes that are there already; nodes that join later are heard."""
        for row in await known_members(self._asker, timeout_s):
            if row["state"] in ("alive", "suspect") and row.get("pid"):
                run = (row["incarnation"], row["pid"])
                await self._inbox.put(
                    Introduced(row["node"], *run, row["clock"], row["freq_s"], row["software"])
                )

    async def _take(self, broadcast: Broadcast) -> None:
        try:
            events = decode_events(broadcast.body)
        except WireError as error:
            say(f"umbel: cannot read an event: {error}", err=True)
            return
        for event in events:
            for told in read_worker_event(event):
                await self._inbox.put(told)

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Joined(member, returned):
                self._show("returned" if returned else "joined", member)
            case Suspected(member):
                self._show("suspect", member)
            case Cleared(member):
                self._show("alive", member)
            case Left(member):
                self._show("left", member)
            case Lost(member, by):
                self._show("lost", member, by=by)
            case Probe(member, ping):
                self._beside(self._probe(member))
                if ping:
                    self._beside(self._ping(member))

    def _beside(self, asking: Coroutine[Any, Any, None]) -> None:
        if len(self._asking) >= ASKING_MAX:
            asking.close()
            return
        task = self._group.create_task(_kept_quiet(asking))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _probe(self, member: Member) -> None:
        evidence = await self._broker.probe(member.node, member.inc)
        await self._inbox.put(Probed(member.node, member.inc, member.pid, evidence.value))

    async def _ping(self, member: Member) -> None:
        answers = await self._asker.ask("ping", destination=[member.node], timeout_s=max(1.0, member.freq_s))
        if member.node in answers.replies:
            await self._inbox.put(Answered(member.node))

    def _show(self, what: str, member: Member, **more: str) -> None:
        if self._as_json:
            click.echo(json.dumps({"at": time(), "change": what, **describe(member, time()), **more}))
        else:
            why = f": {member.reason}" if member.reason else ""
            say(f"{strftime('%H:%M:%S', localtime())} {member.node} {what}{why}")


async def _kept_quiet(asking: Coroutine[Any, Any, None]) -> None:
    """A question that the broker does not take now is asked again soon."""
    try:
        await asking
    except BrokerError:
        return
