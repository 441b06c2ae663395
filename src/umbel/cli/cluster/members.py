"""`umbel members`: who is in the cluster, and who comes and goes.

Without `--watch` the workers are asked what they know; with it this process listens to the nodes as
they do, with the same machine, and so needs no running Umbel worker. It only listens:
unlike a worker, it announces no losses.
"""

import asyncio
import json
from time import localtime, strftime, time

import click

from umbel.brokers.interface import Broadcast
from umbel.cli import exits
from umbel.cli.broker import ask_broker, ask_in_time
from umbel.cli.options import app_option, broker_option, json_option
from umbel.cli.show.printing import print_json, print_table, say
from umbel.control.client import Asker
from umbel.coordination.driver import fairly
from umbel.errors import BrokerError, WireError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.monitor.membership import ClusterBroker, MembershipWatch, known_members
from umbel.protocol.membership.events import Member
from umbel.wire.event import decode_events
from umbel.wire.gossip import describe

ASK_AGAIN_S = 1.0
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


class Watch:
    def __init__(self, broker: ClusterBroker, *, as_json: bool) -> None:
        self._broker = broker
        self._asker = Asker(broker)
        self._as_json = as_json
        self._members = MembershipWatch(broker, self._asker, self._show)

    async def run(self, timeout_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._members.run())
            async with self._broker.subscribe(EVENT_EXCHANGE, ["worker.#"]) as heard:
                group.create_task(self._begin(timeout_s))
                async for broadcast in fairly(heard):
                    await self._take(broadcast)

    async def _begin(self, timeout_s: float) -> None:
        """The nodes that are there already; nodes that join later are heard."""
        while True:
            try:
                return await self._members.introduce(await known_members(self._asker, timeout_s))
            except BrokerError as error:
                say(f"umbel: cannot ask which nodes are there; retrying: {error}", err=True)
                await asyncio.sleep(ASK_AGAIN_S)

    async def _take(self, broadcast: Broadcast) -> None:
        try:
            events = decode_events(broadcast.body)
        except WireError as error:
            say(f"umbel: cannot read an event: {error}", err=True)
            return
        for event in events:
            await self._members.take(event)

    def _show(self, what: str, member: Member, by: str) -> None:
        if self._as_json:
            more = {"by": by} if what == "lost" else {}
            click.echo(json.dumps({"at": time(), "change": what, **describe(member, time()), **more}))
        else:
            why = f": {member.reason}" if member.reason else ""
            say(f"{strftime('%H:%M:%S', localtime())} {member.node} {what}{why}")
