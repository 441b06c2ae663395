"""Worker: builds the steps, supervises them, and runs until it is asked to stop.

Stopping is the shell of `protocol/shutdown.py`: signals and control requests ask for it, and the worker then
stops taking messages, waits for running tasks, and returns the rest.
"""

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, assert_never

from umbel.backends.interface import Backend
from umbel.brokers.interface import Broker
from umbel.control.client import ControlClient
from umbel.errors import UmbelError
from umbel.pools.interface import Pool
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.machine import Tick
from umbel.protocol.shutdown import (
    Cut,
    Drained,
    Event,
    InterruptTasks,
    QuitRequested,
    Shutdown,
    ShutdownPhase,
    StopRequested,
    StopTaking,
    TasksRunning,
)
from umbel.text import without_password
from umbel.worker.bootsteps import Step, UserStep, starting_order
from umbel.worker.connection import Connection
from umbel.worker.context import Counters, Identity, WorkerContext, WorkerSettings
from umbel.worker.daemon import receives_signals, stacks_on_signal
from umbel.worker.delivery.take import Tasks
from umbel.worker.delivery.task_events import TaskEvents
from umbel.worker.events import Events
from umbel.worker.outages import Outages
from umbel.worker.remote.control import Control
from umbel.worker.remote.mailbox import MailboxFigures
from umbel.worker.remote.view import WorkerParts, WorkerView
from umbel.worker.run_directory import refuse_second
from umbel.worker.steps.cluster_clock import ClusterClock
from umbel.worker.steps.elections import ElectionsStep
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.health import Health, Metrics, Watchdog
from umbel.worker.steps.heart import Heart
from umbel.worker.steps.mingle import Mingle
from umbel.worker.steps.outbox import OutboxStep
from umbel.worker.steps.pool import Autoscaler, PoolStep
from umbel.worker.steps.recorder import RecorderStep
from umbel.worker.steps.scheduler import ForeignSchedulerStep, Scheduler
from umbel.worker.steps.state_store import StateStore, next_incarnation, read_saved_state, saved_state_file
from umbel.worker.user_code import Hook, HookRun, Notices

if TYPE_CHECKING:
    from umbel.events.meters import Meters


log = logging.getLogger("umbel.worker")

# ---- stopping --------------------------------------------------------------------------------------

LOG_EVERY_S = 10.0
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
QUITTING = signal.SIGQUIT
_HOW = {ShutdownPhase.WARM: "warm", ShutdownPhase.SOFT: "soft"}


class Stopping:
    """Turns signals and stop requests into an ordered shutdown.

    All other steps continue meanwhile: the worker sends heartbeats, holds its leases, answers remote control
    and acknowledges tasks that end, until no task runs. A request cancels a start that is under way
    (`unless_asked`), and ends the wait for a user's hook (`wait_for`).
    """

    def __init__(self, context: WorkerContext, tasks: Tasks) -> None:
        self._machine = context.shutdown
        self._notices = context.notices
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        self._hurried = False  # asked more than once, or to quit
        self._hook: HookRun | None = None
        self._start: asyncio.Timeout | None = None

    def ask(self) -> None:
        """Once: finish running tasks. Twice: interrupt them. Three times: return their messages."""
        self._hurry(self._machine.is_stopping)
        self._step(StopRequested())

    def quit(self) -> None:
        """Return running messages at once."""
        self._hurry(True)
        self._step(QuitRequested())

    def _take_signal(self, signum: signal.Signals) -> None:
        self.quit() if signum is QUITTING else self.ask()
        self._notices.call("stopping", signal=signum.name, how=_HOW.get(self._machine.phase, "cold"))

    async def asked(self) -> None:
        """Return when a stop was requested."""
        await self._asked.wait()

    @asynccontextmanager
    async def unless_asked(self) -> AsyncIterator[None]:
        """Cancel the body of the `async with` when the worker is asked to stop."""
        try:
            async with asyncio.timeout(None) as self._start:
                if self._asked.is_set():
                    self._cancel_start()
                yield
        except TimeoutError:
            if self._start is None or not self._start.expired():
                raise
            log.info("shutdown requested during start-up")
        finally:
            self._start = None

    async def wait_for(self, hook: HookRun) -> None:
        """Wait until the hook has returned, its time is over, or a stop is requested (again)."""
        self._hook = hook
        if self._hurried:
            hook.stop_waiting()
        await hook.ended()
        self._hook = None

    def _hurry(self, hurried: bool) -> None:
        self._hurried = self._hurried or hurried
        if self._hook is not None:
            self._hook.stop_waiting()

    def _cancel_start(self) -> None:
        if self._start is not None:
            self._start.reschedule(self._loop.time())

    async def drain(self) -> None:
        """Wait until no task runs, or cut off those that do."""
        machine = self._machine
        self._step(TasksRunning(self._tasks.running))
        if machine.running and machine.phase is ShutdownPhase.WARM:
            left_s = round(machine.left_s(self._loop.time()) or 0.0, 1)
            log.info(
                "waiting for running tasks to finish", extra={"count": machine.running, "grace_s": left_s}
            )
        while machine.phase is not ShutdownPhase.DONE:
            if machine.phase is ShutdownPhase.COLD:
                await self._tasks.cut()
            else:
                await self._wait()
            self._step(TasksRunning(self._tasks.running))
            self._step(Tick())

    async def _wait(self) -> None:
        """Wait until a task ends or a deadline is due; log every ten seconds how many tasks still run."""
        log_at = self._loop.time() + LOG_EVERY_S
        deadline = self._machine.deadline
        try:
            async with asyncio.timeout_at(log_at if deadline is None else min(deadline, log_at)):
                await self._tasks.changed()
        except TimeoutError:
            left_s = round(self._machine.left_s(self._loop.time()) or 0.0, 1)
            fields = {"running": self._machine.running, "left_s": left_s}
            log.info(self._machine.phase.value, extra=fields)

    def _step(self, event: Event | Tick) -> None:
        for effect in self._machine.step(event, self._loop.time()):
            match effect:
                case StopTaking():
                    self._tasks.stop_taking()
                    self._asked.set()
                    self._cancel_start()
                case InterruptTasks():
                    count = self._tasks.interrupt()
                    log.warning("second shutdown request: interrupting running tasks", extra={"count": count})
                case Cut(count):
                    log.warning("running tasks interrupted; returned to their queues", extra={"count": count})
                    self._tasks.note_change()
                case Drained():
                    pass
                case _:
                    assert_never(effect)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle the stop signals inside the `with`."""
        wanted = [*ASKING, QUITTING] if receives_signals() else []
        if wanted and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: ignore a closed terminal
            wanted.remove(signal.SIGHUP)
        for signum in wanted:
            self._loop.add_signal_handler(signum, self._take_signal, signum)
        try:
            yield
        finally:
            for signum in wanted:
                self._loop.remove_signal_handler(signum)


# ---- worker ----------------------------------------------------------------------------------------


class Worker:
    """One worker process, built from its settings, broker, result backend and pool.

    An error in any step's background work ends the worker: it stops its steps in order, logs the error and
    exits non-zero. A worker never continues with some of its steps failed.
    """

    def __init__(self, settings: WorkerSettings, *, broker: Broker, backend: Backend, pool: Pool) -> None:
        saved = read_saved_state(saved_state_file(settings.run_directory, settings.node, broker.url))
        incarnation = next_incarnation(saved, time.time_ns() // 1000)
        identity = Identity(settings.node, os.getpid(), incarnation)
        self._context = context = _context(settings, identity, broker, backend, pool)
        events = Events(context)
        heart = Heart(context, events)
        meters = None if settings.metrics_address is None else _meters()
        self._tasks = tasks = Tasks(context, TaskEvents(events, meters))
        self._stopping = Stopping(context, tasks)
        asker = ControlClient(context.broker)
        gossip = Gossip(context, events, heart, asker)
        clock = ClusterClock(context, gossip, tasks)
        mingle = Mingle(context, events, asker, tasks, gossip, take_time=clock.answered)
        elections = ElectionsStep(context, events, gossip, heart)
        autoscaler = Autoscaler(context)
        mailbox = MailboxFigures()
        parts = WorkerParts(
            context,
            events,
            heart,
            tasks,
            gossip,
            mingle,
            autoscaler,
            mailbox,
            elect=elections.asked,
            stop=self._stopping.ask,
            steps=lambda: {step.name: list(step.requires) for step in self._order},
        )
        self._view = view = WorkerView(parts)
        connection = Connection(
            context,
            # Peers may have declared this node lost: it comes online again, with a reserved clock.
            on_replaced=(tasks.revokes.read_again, events.reserve_again, heart.come_online),
            on_lease_ended=tasks.return_unstarted,
        )
        self._order: list[Step] = []  # the starting order; known when the worker runs
        self._steps: list[Step] = [
            connection,
            clock,  # before anything is judged by time
            RecorderStep(context),  # early, so that it stops late: events of the shutdown are recorded
            PoolStep(context, tasks),
            events,
            StateStore(context, events, saved),
            Control(context, events.clock, view, mailbox, mingle.check_alone, members=view.known_members),
            mingle,
            heart,
            gossip,
            elections,
            tasks,
            Scheduler(context, gossip),
            ForeignSchedulerStep(context, gossip),
            OutboxStep(context, gossip),
            Health(context, connection, tasks),
            Metrics(context, tasks, meters),
            Watchdog(context, tasks),
            autoscaler,
            *(UserStep(kind, context, view, self._stopping.wait_for) for kind in settings.steps),
        ]

    @property
    def counters(self) -> Counters:
        """What happened to messages since the worker started."""
        return self._context.counters

    def learn(self, tasks: Mapping[str, TaskRules], queues: Iterable[str]) -> None:
        """Add tasks and queues that an app in this process defined later."""
        for name, rules in tasks.items():
            self._tasks.policy.change(name, rules)
        for queue in queues:
            self._view.add_queue(queue)

    async def run(self) -> None:
        """Run until a stop is requested; raises the first error, after all steps have stopped."""
        self._order = starting_order(self._steps)
        settings = self._context.settings
        refuse_second(settings.run_directory, settings.node, self._context.broker.url)
        try:
            async with asyncio.TaskGroup() as group:
                await self._run_steps(self._order, group)
        except BaseExceptionGroup as several:
            raise _first_cause(several) from several

    def request_stop(self) -> None:
        """Once: finish running tasks. Twice: interrupt them. Three times: return their messages."""
        self._stopping.ask()

    async def _run_steps(self, order: list[Step], group: asyncio.TaskGroup) -> None:
        """Start the steps in order, wait for a stop request, drain, and stop them in the reverse order."""
        hooks, started = self._context.settings.hooks, list[Step]()
        with self._stopping.on_signals(), stacks_on_signal(self._context.pool):
            await self._stopping.wait_for(self._hook("worker_init", hooks.init))
            try:
                async with self._stopping.unless_asked():
                    for step in order:
                        step.adopt(group)
                        started.append(step)
                        await step.start()
                if not self._context.shutdown.is_stopping:
                    await self._ready()
                await self._stopping.asked()
                hook = self._hook("worker_shutdown", self._shut_down)
                await self._stopping.drain()  # while every step goes on
                await self._stopping.wait_for(hook)
            finally:
                await self._stop_steps(started)
                if self._context.notices.wanted:
                    await self._stopping.wait_for(self._hook("notices", self._wait_for_notices))

    def _hook(self, name: str, hook: Hook) -> HookRun:
        return HookRun(name, hook, timeout_s=self._context.settings.hooks.timeout_s)

    def _shut_down(self) -> None:
        self._wait_for_notices()  # first: the notice of the stop request
        self._context.settings.hooks.shutdown()

    def _wait_for_notices(self) -> None:
        self._context.notices.wait_called(self._context.settings.hooks.timeout_s)

    async def _stop_steps(self, started: list[Step]) -> None:
        for step in reversed(started):
            try:
                await step.stop()
            except (UmbelError, OSError) as error:
                log.error("bootstep failed to stop cleanly", extra={"step": step.name, "why": str(error)})
        happened = {name: count for name, count in self.counters.as_dict().items() if count}
        log.info("worker stopped", extra=self._context.log_fields(**happened))

    async def _ready(self) -> None:
        """Log that the worker takes tasks, and call the hook `worker_ready`."""
        settings, pool = self._context.settings, self._context.pool.describe()
        fields = self._context.log_fields(
            pid=self._context.identity.pid,
            broker=without_password(self._context.broker.url),
            queues=",".join(settings.queues),
            pool=pool["implementation"],
            children=pool["max-concurrency"],
            tasks=len(settings.tasks),
        )
        log.info("worker ready", extra=fields)
        gc.freeze()  # objects of the start live for ever: collecting them again would block the loop
        await self._stopping.wait_for(self._hook("worker_ready", settings.hooks.ready))


def _meters() -> "Meters":
    from umbel.events.meters import Meters  # few workers serve metrics

    return Meters()


def _context(
    settings: WorkerSettings, identity: Identity, broker: Broker, backend: Backend, pool: Pool
) -> WorkerContext:
    return WorkerContext(
        settings,
        identity,
        broker,
        backend,
        pool,
        outages=Outages("broker", without_password(broker.url)),
        store_outages=Outages("result store", without_password(backend.url)),
        queues=list(settings.queues),
        notices=Notices(settings.notices),
        shutdown=Shutdown(grace_s=settings.grace_s, soft_s=settings.soft_grace_s),
    )


def _first_cause(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the plain error inside, so that a user reads one line and not a tree."""
    first = several.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first
