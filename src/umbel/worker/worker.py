"""Worker: builds the steps, supervises them, runs until told to stop.

An error in any step's background work ends the worker: it stops its steps in order, says what
happened and exits non-zero. A worker is never half alive.
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from umbel.backends.interface import Backend
from umbel.brokers.interface import Broker
from umbel.control.client import Asker
from umbel.errors import UmbelError
from umbel.pools.interface import Pool
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.shutdown import Shutdown
from umbel.urls import without_password
from umbel.worker.bootsteps import Step, starting_order
from umbel.worker.context import Counters, Identity, WorkerContext
from umbel.worker.messages.task_events import TaskEvents
from umbel.worker.process.outages import Outages
from umbel.worker.process.run_directory import refuse_second
from umbel.worker.process.saved_state import next_incarnation, read_saved, saved_file
from umbel.worker.process.stack_dump import stacks_on_signal
from umbel.worker.process.stopping import Stopping
from umbel.worker.remote.mailbox_figures import MailboxFigures
from umbel.worker.remote.parts import WorkerParts
from umbel.worker.remote.state import WorkerState
from umbel.worker.settings import WorkerSettings
from umbel.worker.steps.autoscaler import Autoscaler
from umbel.worker.steps.cluster_clock import ClusterClock
from umbel.worker.steps.connection import Connection
from umbel.worker.steps.control import Control
from umbel.worker.steps.elections import ElectionsStep
from umbel.worker.steps.events import Events
from umbel.worker.steps.foreign_scheduler import ForeignSchedulerStep
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.health import Health
from umbel.worker.steps.heart import Heart
from umbel.worker.steps.metrics import Metrics
from umbel.worker.steps.mingle import Mingle
from umbel.worker.steps.outbox import OutboxStep
from umbel.worker.steps.pool import PoolStep
from umbel.worker.steps.recorder import RecorderStep
from umbel.worker.steps.scheduler import Scheduler
from umbel.worker.steps.state_store import StateStore
from umbel.worker.steps.tasks import Tasks
from umbel.worker.steps.watchdog import Watchdog
from umbel.worker.user_code.hooks import Hook, HookRun
from umbel.worker.user_code.notices import Notices
from umbel.worker.user_code.user_steps import UserStep, graph

if TYPE_CHECKING:
    from umbel.events.meters import Meters

log = logging.getLogger("umbel.worker")


class Worker:
    def __init__(self, settings: WorkerSettings, *, broker: Broker, backend: Backend, pool: Pool) -> None:
        saved = read_saved(saved_file(settings.run_directory, settings.node, broker.url))
        incarnation = next_incarnation(saved, time.time_ns() // 1000)
        identity = Identity(settings.node, os.getpid(), incarnation)
        self._context = context = _context(settings, identity, broker, backend, pool)
        events = Events(context)
        heart = Heart(context, events)
        meters = None if settings.metrics_address is None else _meters()
        self._tasks = tasks = Tasks(context, TaskEvents(events, meters))
        self._stopping = Stopping(context, tasks)
        asker = Asker(context.broker)
        gossip = Gossip(context, events, heart, asker)
        clock = ClusterClock(context, gossip, tasks)
        mingle = Mingle(context, events, asker, tasks, gossip, heard_time=clock.answered)
        elections = ElectionsStep(context, events, gossip)
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
            steps=self._step_graph,
        )
        self._state = state = WorkerState(parts)
        connection = Connection(
            context,
            on_replaced=(tasks.revokes.read_again, heart.come_online),  # others may have lost this node
            on_lease_ended=tasks.return_unstarted,
        )
        self._order: list[Step] = []  # in which they start; known when the worker runs
        self._steps: list[Step] = [
            connection,
            clock,  # before anything is judged by time
            RecorderStep(context),  # early, so that it stops late: what others tell at the end is recorded
            PoolStep(context, tasks),
            events,
            StateStore(context, events, saved),
            heart,
            Control(context, events.clock, state, mailbox, mingle.look_around, members=state.known),
            mingle,
            gossip,
            elections,
            tasks,
            Scheduler(context, events, gossip),
            ForeignSchedulerStep(context, events, gossip),
            OutboxStep(context, events, gossip),
            Health(context, connection, tasks),
            Metrics(context, tasks, meters),
            Watchdog(context, tasks),
            autoscaler,
            *map(self._user_step, settings.steps),
        ]

    def _user_step(self, kind: type[Any]) -> UserStep:
        timeout_s = self._context.settings.hooks.timeout_s
        return UserStep(kind, self._state, timeout_s=timeout_s, wait_for=self._stopping.wait_for)

    def _step_graph(self) -> dict[str, list[str]]:
        return graph(self._order)

    @property
    def counters(self) -> Counters:
        return self._context.counters

    def learn(self, tasks: Mapping[str, TaskRules], queues: Iterable[str]) -> None:
        """Know these tasks too, and consume these queues too: an app in this process may define more."""
        for name, rules in tasks.items():
            self._tasks.policy.change(name, rules)
        for queue in queues:
            self._state.add_queue(queue)

    async def run(self) -> None:
        """Run until a stop is asked for; raises what went wrong, after everything is put down."""
        self._order = starting_order(self._steps)
        settings = self._context.settings
        refuse_second(settings.run_directory, settings.node, self._context.broker.url)
        try:
            async with asyncio.TaskGroup() as group:
                await self._run_steps(self._order, group)
        except BaseExceptionGroup as several:
            raise _first_cause(several) from several

    def request_stop(self) -> None:
        """Once: finish what runs. Twice: tell the tasks that run. Three times: return what runs."""
        self._stopping.ask()

    async def _run_steps(self, order: list[Step], group: asyncio.TaskGroup) -> None:
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
                await self._put_down(started)
                if self._context.notices.wanted:
                    await self._stopping.wait_for(self._hook("notices", self._tell_the_rest))

    def _hook(self, name: str, hook: Hook) -> HookRun:
        return HookRun(name, hook, timeout_s=self._context.settings.hooks.timeout_s)

    def _shut_down(self) -> None:
        self._tell_the_rest()  # first: that the worker was asked to stop
        self._context.settings.hooks.shutdown()

    def _tell_the_rest(self) -> None:
        self._context.notices.wait_told(self._context.settings.hooks.timeout_s)

    async def _put_down(self, started: list[Step]) -> None:
        for step in reversed(started):
            try:
                await step.stop()
            except (UmbelError, OSError) as error:
                log.error("bootstep failed to stop cleanly", extra={"step": step.name, "why": str(error)})
        happened = {name: count for name, count in self.counters.as_dict().items() if count}
        log.info("worker stopped", extra=self._context.log_fields(**happened))

    async def _ready(self) -> None:
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
        gc.freeze()  # what is there now stays: the collector need not look at it, which held the loop up
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
    """The plain error inside, so that a user reads one line and not a tree."""
    first = several.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first
