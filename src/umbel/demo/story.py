"""Story: run the demo, and show its progress.

Three workers run mixed load; a fourth worker runs the tasks of a Celery app. Meanwhile a task is revoked, an
election is held, and the worker that sends the periodic tasks is killed: its tasks are redelivered, and
another worker gets its lease. A recorder stores the events. At the end Spark builds history tables from
them, and the ledger of the tasks, the results and the history are compared.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from umbel.app.cluster.periodic import slot_id
from umbel.brokers.interface import Broker, ClusterRecord, EventLog
from umbel.brokers.registry import open_broker
from umbel.demo import LEDGER, tasks
from umbel.demo.load import (
    BATCHES_PER_S,
    Ledger,
    Sent,
    Verdict,
    elect,
    judge,
    read_ledger,
    send_batch,
    send_gently,
    send_held,
)
from umbel.demo.processes import CHILDREN, Processes, command
from umbel.errors import BrokerError, ConfigurationError, ElectionError, UmbelError
from umbel.monitor.feed import Feed
from umbel.protocol.delivery.states import READY_STATES
from umbel.text import numbered, without_password
from umbel.wire.control import TaskRow, rows
from umbel.worker.steps.scheduler import SCHEDULER_LEASE

# ---- view ------------------------------------------------------------------------------------------

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"alive": "green", "silent": "red", "left": "bright_black"}


class View:
    """Shows the running demo: a live table on a terminal, else a line for each note."""

    def __init__(self, feed: Feed, progress: Callable[[], str]) -> None:
        self._feed = feed
        self._progress = progress
        self._began = time.monotonic()
        self._live: Live | None = None
        if sys.stderr.isatty():
            self._live = Live(console=Console(stderr=True), refresh_per_second=4, get_renderable=self._draw)

    def note(self, text: str) -> None:
        """Print a line with the time since the start."""
        line = f"{time.monotonic() - self._began:5.1f} s  {text}"
        if self._live is None:
            click.echo(line, err=True)
        else:
            self._live.console.print(line, highlight=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> Group:
        """Draw the nodes, the throughput of the last minute, and the progress."""
        now = time.time()
        model = self._feed.model
        table = Table(box=None, pad_edge=False)
        for name in ("node", "state", "clock", "running", "done"):
            table.add_column(name, justify="left" if name in ("node", "state") else "right")
        for member in model.members(now):
            state = member.state if member.state != "silent" else f"silent {member.silent_s:.0f} s"
            numbers = (f"{value:,}" for value in (member.clock, member.active, member.processed))
            table.add_row(member.node, Text(state, style=COLOURS[member.state]), *numbers)
        events, done, failed = model.rates(now)
        clock = model.receiver.clock.value
        pace = f"{done:,.0f} done/s  {failed:,.0f} failed/s  {events:,.0f} events/s  clock {clock:,}"
        bars = f"{_bars(list(model.history(now)))} last minute"
        return Group(table, Text(f"{bars}\n{pace}\n{self._progress()}", no_wrap=True))


def _bars(values: list[int]) -> str:
    """Return a bar chart of the values in one line."""
    highest = max(values, default=0) or 1
    return "".join(BARS[min(len(BARS) - 1, value * len(BARS) // (highest + 1))] for value in values)


# ---- story -----------------------------------------------------------------------------------------

WORKERS = ("demo1", "demo2", "demo3")
CELERY_WORKER = "celery1"
REVOKE_AT, ELECT_AT, KILL_AT = 0.15, 0.3, 0.45  # shares of the load's duration
DUE_AFTER, DUE_MIN_S = 0.3, 4.0  # when the revoked task is due: late enough to revoke it on a busy machine
READY_S = 60.0
ELECTION_S = 30.0
RESULTS_S = 90.0
CAUGHT_UP_S = 60.0
BUILD_S = 1200.0
LOOK_EVERY_S = 0.2
FORGET_S = 5.0
ALONE_S = 1.0
MORE_EVERY_S = 2.0
T = TypeVar("T")


@dataclass(slots=True)
class Outcome:
    """The data of the closing report; every figure was counted or measured."""

    sent: Sent
    states: dict[str, str]
    ledger: Ledger
    verdict: Verdict
    took_s: float
    killed: str = ""
    interrupted: set[str] = field(default_factory=set)
    leaders: list[str] = field(default_factory=list)
    handed_over_s: float = 0.0
    winner: str = ""
    slots: dict[str, int] = field(default_factory=dict)
    figures: dict[str, str] | None = None
    html: Path | None = None
    no_history: str = ""


class Demo:
    """Runs the demo once, and checks its results."""

    def __init__(self, home: Path, seconds: float, *, history: bool, web: bool, celery: bool) -> None:
        from umbel.demo import tasks  # imported now: it reads the environment, which is set by now

        self._run, self._tick, self._celery_queue = tasks.RUN, tasks.TICK, tasks.CELERY_QUEUE
        self._home = home
        self._seconds = seconds
        self._lake = home / "lake" if history else None
        self._web = web
        self._celery = celery
        self._app = tasks.app
        self._sent = Sent()
        self._states: dict[str, str] = {}
        self._leaders: list[str] = []
        self._killed = self._winner = ""
        self._interrupted: set[str] = set()
        self._handed_over_s = 0.0
        self._more_at = 0.0
        self._first_slot = self._last_slot = 0  # slots of the periodic task, in seconds since the epoch

    async def run(self) -> Outcome:
        """Run the whole demo. SIGTERM and SIGHUP stop it like Ctrl-C, with all its processes."""
        itself = asyncio.current_task()
        assert itself is not None
        for signum in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, itself.cancel)
        self._first_slot = int(time.time())
        broker = open_broker(self._app.broker_settings())
        await broker.open()
        feed = Feed(broker, enable=True)
        view = View(feed, self._progress)
        listening = asyncio.create_task(feed.run(), name="umbel-demo-feed")
        try:
            with Processes(self._home) as processes, view:
                took_s = await self._act(broker, feed, processes, view)
        finally:
            listening.cancel()
            await asyncio.wait([listening])
            with suppress(
                BrokerError, TimeoutError
            ):  # otherwise the broker would retain events for this recorder
                async with asyncio.timeout(FORGET_S):
                    await broker.forget_recorder(self._run)
            await broker.close()
            await asyncio.to_thread(self._app.close)
        if self._lake is not None:
            view.note("building history tables with Spark")
        return await self._conclude(took_s)

    # -- while it runs ---------------------------------------------------------------------------

    async def _act(self, broker: Broker, feed: Feed, processes: Processes, view: View) -> float:
        """Run the load and the failures, and return their duration in seconds.

        The recorder starts before the workers, and the workers stop before the recorder has caught up, so
        that the history contains every event of the run.
        """
        where = "the embedded broker"
        if not broker.url.startswith("sqlite"):
            where = without_password(broker.url)
            await asyncio.to_thread(self._must_be_alone, where)
        beside = ", and one for a Celery app," if self._celery else ""
        view.note(f"starting {len(WORKERS)} workers with {CHILDREN} children each{beside} on {where}")
        if self._lake is not None:  # started first, so that the workers' first events are logged
            processes.record(self._lake, self._run)
            await self._until(lambda: self._is_recorded(broker), READY_S, "the recorder")
        if self._web:
            processes.show()
            view.note(
                f"dashboard: {await self._until(lambda: _address(processes), READY_S, 'the dashboard')}"
            )
        start_workers(processes, self._celery_queue if self._celery else "")
        await self._until(lambda: self._are_up(feed, processes), READY_S, "the workers")
        began = time.monotonic()
        view.note(f"sending mixed load for {self._seconds:g} s")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            group.create_task(self._interfere(broker, processes, view))
        view.note(f"sent {numbered(len(self._sent), 'task')}; waiting for the rest to end")
        await self._until(lambda: self._all_ended(processes), RESULTS_S, "results")
        await self._until(self._periodic_tasks_ran, RESULTS_S, "periodic tasks")
        took_s = time.monotonic() - began
        view.note("every task has ended; stopping the workers")
        await asyncio.to_thread(processes.stop_workers)
        if self._lake is not None:
            await self._until(self._is_caught_up, CAUGHT_UP_S, "the recorder")
        return took_s

    def _must_be_alone(self, where: str) -> None:
        """Raise ConfigurationError if other workers use the broker, because they would join the demo's
        cluster.
        """
        others = sorted(self._app.control.ask("ping", timeout=ALONE_S).replies)
        if others:
            remedy = "give the demo a separate database or virtual host"
            raise ConfigurationError(f"other workers use {where}: {', '.join(others[:3])}; {remedy}")

    async def _is_recorded(self, broker: EventLog) -> bool:
        """Return whether the recorder is registered with the broker."""
        return self._run in await broker.recorders()

    async def _send(self) -> None:
        """Send a batch every half second for the duration of the load."""
        began = time.monotonic()
        for number in range(max(1, int(self._seconds * BATCHES_PER_S))):
            await asyncio.sleep(max(0.0, began + number / BATCHES_PER_S - time.monotonic()))
            await asyncio.to_thread(send_batch, self._sent, number, self._home, celery=self._celery)

    async def _interfere(self, broker: ClusterRecord, processes: Processes, view: View) -> None:
        """Revoke a task, hold an election, and kill the leader while the load runs."""
        began = time.monotonic()

        async def at(share: float) -> None:
            await asyncio.sleep(max(0.0, began + share * self._seconds - time.monotonic()))

        await at(REVOKE_AT)
        due_s = max(DUE_MIN_S, DUE_AFTER * self._seconds)
        revoked = await asyncio.to_thread(self._revoke, due_s)
        view.note(f"revoked task {revoked[:8]}…, which was due in {due_s:g} s")
        await at(ELECT_AT)
        self._winner = await asyncio.to_thread(self._elect)
        view.note(f"election decided: {self._winner} was elected and sent the task")
        await at(KILL_AT)
        await self._kill_leader(broker, processes, view)

    def _revoke(self, due_s: float) -> str:
        """Send a task with a countdown, revoke it, and return its id."""
        from umbel.demo.tasks import never

        result = never.apply_async(countdown=due_s)
        self._sent.add("never", result)
        result.revoke()
        return result.id

    def _elect(self) -> str:
        """Hold an election, and return the name of the elected worker."""
        task_id, outcome = elect(0, timeout_s=ELECTION_S)
        if not outcome.ok:
            raise UmbelError(f"the election ended as {outcome.state}: {outcome.outcome}")
        self._sent.add("elected", self._app.AsyncResult(task_id))
        return outcome.winner.partition("@")[0]

    async def _kill_leader(self, broker: ClusterRecord, processes: Processes, view: View) -> None:
        """Kill the worker that sends the periodic tasks, and wait for its successor.

        It is killed only when it runs at least one task, so that the redelivery of its tasks can be checked.
        """
        leader = await self._until(lambda: _leader(broker), READY_S, "a worker that leads")
        release = self._home / "released"
        await self._until(lambda: self._has_hands_full(leader, release), READY_S, f"tasks to run on {leader}")
        await asyncio.to_thread(processes.kill, leader)
        killed_at = time.monotonic()
        self._interrupted = self._held_on(leader)
        release.touch()
        self._killed, self._leaders = leader, [leader]
        running = numbered(len(self._interrupted), "task")
        view.note(f"killed {leader} (-9), leader for periodic tasks, while it ran {running}")

        async def another() -> str:
            found = await _leader(broker)
            return "" if found == leader else found

        successor = await self._until(another, READY_S, "another worker to lead")
        self._handed_over_s = time.monotonic() - killed_at
        self._leaders.append(successor)
        view.note(f"{successor} is the new leader, after {self._handed_over_s:.1f} s")

    async def _has_hands_full(self, node: str, release: Path) -> bool:
        """Return whether the node runs a task that waits for `release`. Send more such tasks until it
        does.
        """
        if time.monotonic() >= self._more_at:
            self._more_at = time.monotonic() + MORE_EVERY_S
            await asyncio.to_thread(send_held, self._sent, release)
        return bool(await asyncio.to_thread(self._held_on, node))

    def _held_on(self, node: str) -> set[str]:
        """Return the ids of held tasks that have started on a node."""
        held = {task_id for task_id, kind in self._sent.kinds.items() if kind == "held"}
        return held & read_ledger(self._home / "ledger").began_on(node)

    async def _are_up(self, feed: Feed, processes: Processes) -> bool:
        """Return whether all workers are alive."""
        processes.check()
        up = {
            member.node.partition("@")[0]
            for member in feed.model.members(time.time())
            if member.state == "alive"
        }
        return up >= processes.workers.keys()

    async def _all_ended(self, processes: Processes) -> bool:
        """Collect new results, and return whether all tasks have ended."""
        processes.check()
        waiting = [task_id for task_id in self._sent.kinds if task_id not in self._states]
        found = await asyncio.to_thread(self._app.backend.read, waiting)
        self._states |= {
            task_id: result.status for task_id, result in found.items() if result.status in READY_STATES
        }
        return len(self._states) == len(self._sent)

    async def _periodic_tasks_ran(self) -> bool:
        """Return whether every periodic task has run that was due before the other tasks ended."""
        self._last_slot = self._last_slot or int(time.time())
        ticks = self._slots_until(self._last_slot)
        ran = read_ledger(self._home / "ledger").ids & ticks.keys()
        return bool(ran) and len(ran) == self._last_slot - min(ticks[task_id] for task_id in ran) + 1

    def _slots_until(self, last: int) -> dict[str, int]:
        """Return the ids of the periodic task's slots, by the seconds since the epoch."""
        return {slot_id(self._tick, at * 1_000_000): at for at in range(self._first_slot, last + 1)}

    async def _is_caught_up(self) -> bool:
        """Return whether the recorder has written all events."""
        status = await _umbel(
            "record", "status", "-A", "umbel.demo.tasks:app", "--lake", str(self._lake), "--json"
        )
        recorders = json.loads(status.stdout)["recorders"] if status.returncode == 0 else []
        return any(recorder["recorder"] == self._run and recorder["lag"] == 0 for recorder in recorders)

    async def _until(self, condition: Callable[[], Awaitable[T]], limit_s: float, what: str) -> T:
        """Wait until a condition holds. Raise UmbelError after the limit."""
        deadline = time.monotonic() + limit_s
        while not (met := await condition()):
            if time.monotonic() > deadline:
                raise UmbelError(
                    f"the demo waited {limit_s:g} s for {what}, without success; the logs are in {self._home}"
                )
            await asyncio.sleep(LOOK_EVERY_S)
        return met

    def _progress(self) -> str:
        """Return a line with the number of sent tasks and results."""
        seen = f", {numbered(len(self._states), 'result')} seen" if self._states else ""
        return f"{len(self._sent):,} sent{seen}"

    # -- afterwards ------------------------------------------------------------------------------

    async def _conclude(self, took_s: float) -> Outcome:
        """Compare all sources, and return the data of the closing report."""
        ledger = read_ledger(self._home / "ledger")
        slots = self._slots_until(int(time.time()))
        outcome = Outcome(self._sent, self._states, ledger, Verdict(), took_s, slots=slots)
        outcome.killed, outcome.interrupted = self._killed, self._interrupted
        outcome.leaders, outcome.winner = self._leaders, self._winner
        outcome.handed_over_s = self._handed_over_s
        history = None if self._lake is None else await self._make_history(outcome)
        outcome.verdict = judge(
            self._sent.kinds,
            self._states,
            ledger,
            history,
            slots,
            self._last_slot,
            self._killed,
            self._interrupted,
        )
        return outcome

    async def _make_history(self, outcome: Outcome) -> dict[str, str] | None:
        """Build the history, and return the state of each task in it. Without Spark, set the reason in the
        outcome and return None.
        """
        at = ("--lake", str(self._lake))
        built = await _umbel("history", "build", *at, "--json")
        if built.returncode == 2:  # no Java or no Spark; stderr contains the reason in one line
            outcome.no_history = built.stderr.strip().removeprefix("umbel: ")
            return None
        html = self._home / "report.html"
        reported = await _umbel(
            "history", "report", *at, "--html", str(html), "--title", "Umbel demo", "--json"
        )
        query = "select task_id, state from tasks"
        asked = await _umbel("history", "sql", query, *at, "--limit", "1000000", "--json")
        for done in (built, reported, asked):
            if done.returncode != 0:
                raise UmbelError(f"`umbel {' '.join(done.args)}` failed: {done.stderr.strip()[-500:]}")
        outcome.html = html
        outcome.figures = json.loads(reported.stdout)["figures"]
        return {row["task_id"]: row["state"] for row in json.loads(asked.stdout)}


def start_workers(processes: Processes, celery_queue: str) -> None:
    """Start the three workers, and the worker of the Celery app if it has a queue."""
    for name in WORKERS:
        processes.start(name)
    if celery_queue:
        processes.start_celery(CELERY_WORKER, celery_queue)


async def _address(processes: Processes) -> str:
    return processes.address()


async def _leader(broker: ClusterRecord) -> str:
    """Return the worker that sends the periodic tasks; "" if there is none."""
    try:
        return (await broker.coordination.read_lease(SCHEDULER_LEASE)).holder.partition("@")[0]
    except BrokerError:
        return ""


async def _umbel(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an `umbel` command; kill it if the demo ends first."""
    process = await asyncio.create_subprocess_exec(
        *command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(BUILD_S):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise UmbelError(
            f"`umbel {' '.join(arguments)}` did not finish within {BUILD_S:g} s, so the demo stopped it; "
            "run it in a terminal to see why"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, stdout.decode(), stderr.decode())


# ---- staying ---------------------------------------------------------------------------------------

BATCH_EVERY_S = 1.0
ELECTION_EVERY, ELECTION_AT = 60, 10  # batches
KILL_EVERY, STAY_KILL_AT, BACK_AT = 180, 30, 65  # batches
LOOKS_MAX = 10
ASK_S = 2.0
STAY_ELECTION_S = 5.0


async def stay(home: Path, say: Callable[[str], None], *, web: bool, celery: bool) -> None:
    """Run the cluster with the dashboard until it is interrupted.

    After the demo, a cluster with the dashboard runs until it is interrupted. It has changing load, an
    election every minute, and every three minutes a worker is killed while it runs tasks, and restarted. The
    dashboard also shows the demo itself, because its state file contains the last hour. Only the logs grow:
    results expire, and no ledger is written.
    """
    itself = asyncio.current_task()
    assert itself is not None
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, itself.cancel)
    os.environ.pop(LEDGER, None)
    try:
        with Processes(home) as processes:
            start_workers(processes, tasks.CELERY_QUEUE if celery else "")
            page = await _show(processes, say) if web else ""
            say(f"the cluster keeps running, with logs in {home}; press Ctrl-C to stop it # x")
            await _StayingDemo(home, processes, say, page, celery=celery).on()
    finally:
        await asyncio.to_thread(tasks.app.close)


async def _show(processes: Processes, say: Callable[[str], None]) -> str:
    """Start the dashboard, and return its address once it is ready."""
    processes.show()
    while not (address := processes.address()):
        processes.check()
        await asyncio.sleep(LOOK_EVERY_S)
    say(f"dashboard: {address}")
    return address.partition("/session")[0]


class _StayingDemo:
    """The cluster that runs after the demo, with changing load and failures."""

    def __init__(
        self, home: Path, processes: Processes, say: Callable[[str], None], page: str, *, celery: bool
    ) -> None:
        self._processes = processes
        self._say = say
        self._page = page
        self._celery = celery
        self._release = home / "released"
        self._away = ""  # the worker that was killed

    async def on(self) -> None:
        """Run until cancelled, one batch each second."""
        for number in count():
            self._processes.check()
            # the broker is unavailable; try again with the next batch
            with suppress(BrokerError, ElectionError):
                await self._act(number)
            await asyncio.sleep(BATCH_EVERY_S)

    async def _act(self, number: int) -> None:
        """Run one second of the demo. Processes are not started in a thread, so that none can start after
        the end.
        """
        if number % KILL_EVERY == BACK_AT:
            self._start_again()
        await asyncio.to_thread(send_gently, number, celery=self._celery)
        if number % ELECTION_EVERY == ELECTION_AT:
            await asyncio.to_thread(elect, 1 + number // ELECTION_EVERY, timeout_s=STAY_ELECTION_S)
        if number % KILL_EVERY == STAY_KILL_AT:
            await self._kill_one(number // KILL_EVERY)

    async def _kill_one(self, turn: int) -> None:
        """Kill a worker while it runs a task, which is redelivered to another worker."""
        self._release.unlink(missing_ok=True)
        try:
            await asyncio.to_thread(send_held, Sent(), self._release)
            running = await self._held()
            if running:
                name = min(running, key=lambda worker: (WORKERS.index(worker) - turn) % len(WORKERS))
                self._processes.kill(name)
                self._away = name
                self._say(f"killed {name} (-9) while it ran task {self._link(running[name])}")
        finally:
            self._release.touch()

    async def _held(self) -> dict[str, str]:
        """Return a held task that each worker runs, by worker."""
        for _ in range(LOOKS_MAX):
            if found := await asyncio.to_thread(_held_now, len(self._processes.workers)):
                return found
            await asyncio.sleep(LOOK_EVERY_S)
        return {}

    def _link(self, task_id: str) -> str:
        """Return the address of a task's page; its id without a dashboard."""
        return f"{self._page}/tasks/{task_id}" if self._page else task_id

    def _start_again(self) -> None:
        """Restart the worker that was killed."""
        if self._away:
            self._processes.start(self._away)
            self._say(f"restarted {self._away}")
            self._away = ""


def _held_now(workers: int) -> dict[str, str]:
    """Return a held task that runs on each worker now."""
    answers = tasks.app.control.ask("active", timeout=ASK_S, limit=workers)
    return {
        name: row.id
        for node, reply in answers.replies.items()
        for row in rows(reply, TaskRow)
        if (name := node.partition("@")[0]) in WORKERS  # other workers may use the same broker
        and row.id is not None
        and row.type == tasks.held.name
    }
