"""`umbel events`, `umbel top` and `umbel mark`: watch the cluster live, set marks on its charts."""

import asyncio
from collections.abc import Iterable
from time import localtime, strftime
from typing import Any

import click
import msgspec

from umbel.brokers.interface import Broker, Subscription
from umbel.cli import completion, exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, broker_option, json_option, say
from umbel.control.client import ControlClient
from umbel.events.reorder import ReorderWindow
from umbel.events.stamp import EVENT_EXCHANGE, EventReceiver, ReceivedEvent
from umbel.events.types import TIME_MAX_S
from umbel.monitor.feed import Feed
from umbel.patterns import fits_glob
from umbel.protocol.clock import LamportClock
from umbel.text import one_line, without_password
from umbel.web.action_events import MARK, EventPublisher
from umbel.wire.event import decode_events, group_of
from umbel.wire.show import brief

# ---- events ----------------------------------------------------------------------------------------
#
# `umbel events`: events of the cluster, live, in causal order.
#
# It subscribes to events at the broker as any monitor does, so events of Celery's workers and clients are
# shown as well. Each event is delayed for a moment (`--window`) and sorted by its logical time. Events from
# before the command started are not shown: see `umbel history`.

INBOX_MAX = 1000
LISTENING = "umbel: listening for events"  # events sent from now on are shown
ENVELOPE = ("type", "hostname", "pid", "clock", "timestamp", "utcoffset", "inc", "seq", "uuid")
GLOB = frozenset("*?[")


@click.command("events")
@app_option
@broker_option
@click.option(
    "--type", "types", multiple=True, metavar="GLOB", help="Only these types: task-failed, 'worker-*'."
)
@click.option("--task", "tasks", multiple=True, metavar="ID", help="Only tasks whose id starts with ID.")
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="GLOB",
    shell_complete=completion.nodes,
    help="Only events from these nodes: 'w1@*'.",
)
@click.option("-E", "--enable", is_flag=True, help="Ask all workers to send task events from now on.")
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many events.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), help="Stop after this many seconds.")
@click.option(
    "--window",
    "window_s",
    type=click.FloatRange(0, 60),
    default=0.5,
    show_default=True,
    help="Seconds to delay events to put them in order.",
)
@json_option
def events_command(
    app_name: str | None,
    url: str | None,
    types: tuple[str, ...],
    tasks: tuple[str, ...],
    nodes: tuple[str, ...],
    enable: bool,
    limit: int | None,
    timeout_s: float | None,
    window_s: float,
    as_json: bool,
) -> int:
    """Show the cluster's events in Lamport order, until Ctrl-C; with --json one object per line.

    Workers send task events only on request: start them with -E, or use --enable here. Clients send
    that they sent a task with task_send_sent_event.

    Exit code: 0, or 3 if no event came.
    """
    wanted = Wanted(types, tasks, nodes)
    tail = Tail(wanted, window_s=window_s, limit=limit, as_json=as_json)
    try:
        ask_broker(app_name, lambda broker: tail.run(broker, timeout_s, enable=enable), url=url)
    except KeyboardInterrupt:
        tail.show(tail.window.rest())
    if tail.window.late:
        click.echo(f"umbel: {tail.window.late} events came too late to be in order; raise --window", err=True)
    return exits.OK if tail.shown else exits.NOT_FOUND


class Wanted:
    """Which events are shown."""

    def __init__(self, types: Iterable[str], tasks: Iterable[str], nodes: Iterable[str]) -> None:
        self._types, self._tasks, self._nodes = tuple(types), tuple(tasks), tuple(nodes)

    def __contains__(self, event: dict[str, Any]) -> bool:
        return (
            _matches(event["type"], self._types)
            and _matches(str(event.get("hostname", "")), self._nodes)
            and (not self._tasks or str(event.get("uuid", "")).startswith(self._tasks))
        )

    def patterns(self) -> list[str]:
        """Routing patterns to subscribe to: only groups of the wanted types where they are named."""
        groups = {group_of(event_type) for event_type in self._types} or ({"task"} if self._tasks else {"*"})
        return ["#"] if GLOB & set("".join(groups)) else sorted(f"{group}.#" for group in groups)


class Tail:
    """Shows events as they come, in causal order, until the limit or the end of the time."""

    def __init__(self, wanted: Wanted, *, window_s: float, limit: int | None, as_json: bool) -> None:
        self.shown = 0
        self.window = ReorderWindow(window_s)
        self._wanted = wanted
        self._limit = limit
        self._as_json = as_json
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue(maxsize=INBOX_MAX)
        self._receiver = EventReceiver(LamportClock(), decode_events)

    async def run(self, broker: Broker, timeout_s: float | None, *, enable: bool) -> None:
        """Subscribe to events and show them, until the limit, the timeout or cancellation."""
        clock_mark = await broker.coordination.raise_clock(0)
        self._receiver = EventReceiver(LamportClock(clock_mark), decode_events)
        async with broker.subscribe(EVENT_EXCHANGE, self._wanted.patterns()) as subscription:
            click.echo(LISTENING, err=True)
            if enable:
                await ControlClient(broker).tell("enable_events")
            reading = asyncio.create_task(self._read(subscription))
            showing = asyncio.create_task(self._show_on())
            try:
                done, _ = await asyncio.wait(
                    {reading, showing}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
            finally:
                reading.cancel()
                showing.cancel()
                await asyncio.gather(reading, showing, return_exceptions=True)
        self.show(self.window.rest())

    async def _read(self, subscription: Subscription) -> None:
        async for broadcast in subscription:
            await self._inbox.put(broadcast.body)

    async def _show_on(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_full():
            try:
                async with asyncio.timeout_at(self.window.deadline):
                    self._take(await self._inbox.get(), loop.time())
            except TimeoutError:
                pass
            self.show(self.window.due(loop.time()))

    def _take(self, body: bytes, now: float) -> None:
        before = self._receiver.undecodable
        received = self._receiver.receive(body)
        for event in received:
            if event.event in self._wanted:
                self.show(self.window.put(event, now, size_bytes=len(body) // len(received)))
        if self._receiver.undecodable > before:
            say(f"umbel: cannot read an event: {self._receiver.last_error}", err=True)

    def show(self, events: Iterable[ReceivedEvent]) -> None:
        """Print events, up to the limit."""
        for event in events:
            if not self._is_full():
                self.shown += 1
                click.echo(_as_json(event) if self._as_json else _as_line(event))

    def _is_full(self) -> bool:
        return self._limit is not None and self.shown >= self._limit


def _matches(text: str, globs: tuple[str, ...]) -> bool:
    return not globs or any(fits_glob(text, glob) for glob in globs)


def _as_json(received: ReceivedEvent) -> str:
    """The event as it was on the wire, with the clock by which it is ordered as `order`."""

    return msgspec.json.encode({**received.event, "order": received.clock}, enc_hook=str).decode()


def _as_line(received: ReceivedEvent) -> str:
    event = received.event
    fields = [
        f"{one_line(name)}={one_line(brief(value))}"
        for name, value in event.items()
        if name not in ENVELOPE and value is not None
    ]
    words = [event.get("hostname"), event["type"], event.get("uuid")]
    shown = [one_line(str(word)) for word in words if word is not None]
    return "  ".join([_time_of(event), f"{received.clock:>8}", *shown, " ".join(fields)]).rstrip()


def _time_of(event: dict[str, Any]) -> str:
    at = event.get("timestamp")
    if not isinstance(at, int | float) or not 0 <= at <= TIME_MAX_S:
        return "--:--:--.---"
    return f"{strftime('%H:%M:%S', localtime(at))}.{int(at * 1000) % 1000:03}"


# ---- top -------------------------------------------------------------------------------------------
#
# `umbel top`: the cluster in the terminal: members, queues, tasks in their order, one task's story.


@click.command("top")
@app_option
@broker_option
@click.option("--no-enable", is_flag=True, help="Do not ask workers to send task events.")
def top_command(app_name: str | None, url: str | None, no_enable: bool) -> int:
    """Watch the cluster in the terminal; the keys are shown below.

    Asks the workers to send task events, as `umbel events -E` does.
    """
    try:
        from umbel.top import Top
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        raise click.ClickException("umbel top needs textual: pip install 'umbel[top]'") from None

    async def watch(broker: Broker) -> None:
        feed = Feed(broker, enable=not no_enable)
        await Top(feed, without_password(broker.url)).run_async()

    ask_broker(app_name, watch, url=url)
    return exits.OK


# ---- mark ------------------------------------------------------------------------------------------
#
# `umbel mark`: a moment that people care about, on the charts and in the history: a deploy.

TEXT_MAX = 200


@click.command("mark")
@app_option
@broker_option
@click.argument("text")
def mark_command(app_name: str | None, url: str | None, text: str) -> int:
    """Set a mark TEXT, as in `umbel mark "v1.4"`: running dashboards show it on their charts."""
    if not 0 < len(text.strip()) <= TEXT_MAX:
        raise click.UsageError(f"TEXT must have 1 to {TEXT_MAX} characters, not {len(text.strip())}")

    async def tell(broker: Broker) -> None:
        clock = LamportClock(await broker.coordination.raise_clock(0))
        await EventPublisher(broker, clock, "mark").publish(MARK, {"text": text.strip()})

    ask_broker(app_name, tell, url=url)
    return exits.OK
