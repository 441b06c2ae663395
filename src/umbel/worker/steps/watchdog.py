"""Watchdog: ends a worker that has work and free children and does not take any.

Whatever the cause, a supervisor that starts it again is a better cure than a process that looks
alive; the exit code is not 0 and the last line says why.
"""

import asyncio

from umbel.brokers.interface import Queues, ready_for
from umbel.errors import BrokerError, WorkerStalled
from umbel.protocol.pool.stall import StallWatch
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.steps.tasks import Tasks

LOOK_EVERY_S = 20.0
PATIENCE_S = 60.0


class Watchdog(Step):
    name = "watchdog"
    requires = ("tasks",)

    def __init__(self, context: WorkerContext, tasks: Tasks) -> None:
        super().__init__()
        self._context = context
        self._queues: Queues = context.broker
        self._tasks = tasks
        self._watch = StallWatch(patience_s=PATIENCE_S)

    async def start(self) -> None:
        self.run_in_background(self._look_on())

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._context.shutdown.is_stopping:  # it takes nothing, and means to
                return
            # One that waits for a store has a reason, and would lose outcomes that it keeps for it.
            room = 0 if self._tasks.cannot_settle else self._context.pool.room()
            received = self._context.counters.received
            if not self._watch.is_idle(received=received, room=room):
                continue
            ready = await self._ready()
            if self._watch.is_stalled(ready=ready, now=loop.time()):
                raise WorkerStalled(
                    f"{ready} messages are ready and {room} could run, but none was fetched for "
                    f"{PATIENCE_S:.0f} s: this worker is stalled and stops; restart it"
                )

    async def _ready(self) -> int | None:
        try:
            depths = await self._queues.queues(self._context.queues)
        except BrokerError:
            return None
        return ready_for(self._context.queues, depths)
