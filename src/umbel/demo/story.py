"""Story: what happens in the demo, in its order.

Three workers take mixed load; a fourth runs the tasks of a Celery app. Meanwhile a task is revoked, an
election decided, and the worker that sends the periodic tasks is killed: its tasks are recovered and its
lease goes to another. What the workers told was recorded; when everything has ended, Spark makes history of
it, and what the tasks did, what came back and what history says are compared.
"""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from umbel.app.cluster.periodic import slot_id
from umbel.brokers.interface import Broker, ClusterRecord, EventLog
from umbel.brokers.registry import open_broker
from umbel.demo.ledger import Ledger, Verdict, judge, read_ledger
from umbel.demo.load import BATCHES_PER_S, Sent, elect, send_batch, send_held
from umbel.demo.processes import CHILDREN, Processes, command
from umbel.demo.view import View
from umbel.errors import BrokerError, ConfigurationError, UmbelError
from umbel.monitor.feed import Feed
from umbel.protocol.delivery.states import READY_STATES
from umbel.text import numbered
from umbel.urls import without_password
from umbel.worker.steps.scheduler import SCHEDULER_LEASE

WORKERS = ("demo1", "demo2", "demo3")
CELERY_WORKER = "celery1"
REVOKE_AT, ELECT_AT, KILL_AT = 0.15, 0.3, 0.45  # of the load's time
DUE_AFTER, DUE_MIN_S = 0.3, 4.0  # the revoked task: time enough to revoke it on a busy machine
READY_S = 60.0
ELECTION_S = 30.0
RESULTS_S = 90.0
CAUGHT_UP_S = 60.0
BUILD_S = 1200.0
LOOK_EVERY_S = 0.2
BETWEEN_SLOTS_S = 0.5  # of a second: the periodic task is due at each full one
FORGET_S = 5.0
ALONE_S = 1.0
MORE_EVERY_S = 2.0
T = TypeVar("T")


@dataclass(slots=True)
class Outcome:
    """All that the closing report says; every figure was counted or measured."""

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
    def __init__(self, home: Path, seconds: float, *, history: bool, web: bool, celery: bool) -> None:
        from umbel.demo import tasks  # which read the environment, and that is set by now

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
        self._first_slot = self._last_slot = 0  # of the periodic task: seconds since the epoch

    async def run(self) -> Outcome:
        """A terminal that is closed and a service manager end it as Ctrl-C does: no process stays behind."""
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
            with suppress(BrokerError, TimeoutError):  # no other process reads what is logged for us
                async with asyncio.timeout(FORGET_S):
                    await broker.forget_recorder(self._run)
            await broker.close()
            await asyncio.to_thread(self._app.close)
        if self._lake is not None:
            view.note("building history tables with Spark")
        return await self._conclude(took_s)

    # -- while it runs ---------------------------------------------------------------------------

    async def _act(self, broker: Broker, feed: Feed, processes: Processes, view: View) -> float:
        where = "the embedded broker"
        if not broker.url.startswith("sqlite"):
            where = without_password(broker.url)
            await asyncio.to_thread(self._must_be_alone, where)
        beside = ", and one for a Celery app," if self._celery else ""
        view.note(f"starting {len(WORKERS)} workers with {CHILDREN} children each{beside} on {where}")
        if self._lake is not None:  # first, so that the workers' first events are logged
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
        """Workers of one broker are one cluster: they would lead for each other, and see ours die."""
        others = sorted(self._app.control.ask("ping", timeout=ALONE_S).replies)
        if others:
            remedy = "give the demo a separate database or virtual host"
            raise ConfigurationError(f"other workers use {where}: {', '.join(others[:3])}; {remedy}")

    async def _is_recorded(self, broker: EventLog) -> bool:
        return self._run in await broker.recorders()

    async def _send(self) -> None:
        began = time.monotonic()
        for number in range(max(1, int(self._seconds * BATCHES_PER_S))):
            await asyncio.sleep(max(0.0, began + number / BATCHES_PER_S - time.monotonic()))
            await asyncio.to_thread(send_batch, self._sent, number, self._home, celery=self._celery)

    async def _interfere(self, broker: ClusterRecord, processes: Processes, view: View) -> None:
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
        from umbel.demo.tasks import never

        result = never.apply_async(countdown=due_s)
        self._sent.add("never", result)
        result.revoke()
        return result.id

    def _elect(self) -> str:
        task_id, outcome = elect(0, timeout_s=ELECTION_S)
        if not outcome.ok:
            raise UmbelError(f"the election ended as {outcome.state}: {outcome.outcome}")
        self._sent.add("elected", self._app.AsyncResult(task_id))
        return outcome.winner.partition("@")[0]

    async def _kill_leader(self, broker: ClusterRecord, processes: Processes, view: View) -> None:
        leader = await self._until(lambda: _leader(broker), READY_S, "a worker that leads")
        release = self._home / "released"
        await self._until(lambda: self._has_hands_full(leader, release), READY_S, f"tasks to run on {leader}")
        if "fenced_publish" in broker.capabilities.reasons:  # such a broker loses what a leader just sends
            await asyncio.sleep((BETWEEN_SLOTS_S - time.time()) % 1.0)
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
        """Others may have taken all that were sent; they can hold so many, and then the node gets one."""
        if time.monotonic() >= self._more_at:
            self._more_at = time.monotonic() + MORE_EVERY_S
            await asyncio.to_thread(send_held, self._sent, release)
        return bool(await asyncio.to_thread(self._held_on, node))

    def _held_on(self, node: str) -> set[str]:
        held = {one for one, kind in self._sent.kinds.items() if kind == "held"}
        return held & read_ledger(self._home / "ledger").began_on(node)

    async def _are_up(self, feed: Feed, processes: Processes) -> bool:
        processes.check()
        up = {one.node.partition("@")[0] for one in feed.model.members(time.time()) if one.state == "alive"}
        return up >= processes.workers.keys()

    async def _all_ended(self, processes: Processes) -> bool:
        processes.check()
        waiting = [one for one in self._sent.kinds if one not in self._states]
        found = await asyncio.to_thread(self._app.backend.read, waiting)
        self._states |= {one: kept.status for one, kept in found.items() if kept.status in READY_STATES}
        return len(self._states) == len(self._sent)

    async def _periodic_tasks_ran(self) -> bool:
        """Whether each that was due when everything else had ended ran: stopped workers give back theirs."""
        self._last_slot = self._last_slot or int(time.time())
        ticks = self._slots_until(self._last_slot)
        ran = read_ledger(self._home / "ledger").ids & ticks.keys()
        return bool(ran) and len(ran) == self._last_slot - min(ticks[one] for one in ran) + 1

    def _slots_until(self, last: int) -> dict[str, int]:
        return {slot_id(self._tick, at * 1_000_000): at for at in range(self._first_slot, last + 1)}

    async def _is_caught_up(self) -> bool:
        status = await _umbel(
            "record", "status", "-A", "umbel.demo.tasks:app", "--lake", str(self._lake), "--json"
        )
        recorders = json.loads(status.stdout)["recorders"] if status.returncode == 0 else []
        return any(one["recorder"] == self._run and one["lag"] == 0 for one in recorders)

    async def _until(self, condition: Callable[[], Awaitable[T]], limit_s: float, what: str) -> T:
        deadline = time.monotonic() + limit_s
        while not (met := await condition()):
            if time.monotonic() > deadline:
                raise UmbelError(
                    f"the demo waited {limit_s:g} s for {what}, without success; the logs are in {self._home}"
                )
            await asyncio.sleep(LOOK_EVERY_S)
        return met

    def _progress(self) -> str:
        seen = f", {numbered(len(self._states), 'result')} seen" if self._states else ""
        return f"{len(self._sent):,} sent{seen}"

    # -- afterwards ------------------------------------------------------------------------------

    async def _conclude(self, took_s: float) -> Outcome:
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
        """The state of every task as Spark has it; None, and the reason, where there is no Spark."""
        at = ("--lake", str(self._lake))
        built = await _umbel("history", "build", *at, "--json")
        if built.returncode == 2:  # no Java, no Spark: said in one line
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
    for name in WORKERS:
        processes.start(name)
    if celery_queue:
        processes.start_celery(CELERY_WORKER, celery_queue)


async def _address(processes: Processes) -> str:
    return processes.address()


async def _leader(broker: ClusterRecord) -> str:
    try:
        return (await broker.coordination.read_lease(SCHEDULER_LEASE)).holder.partition("@")[0]
    except BrokerError:
        return ""


async def _umbel(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of ours, which ends with the demo if that is ended."""
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
