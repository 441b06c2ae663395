"""Health: leaves word in the run directory about once a second, for `umbel health`."""

import asyncio
import logging

from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.run_directory import REFRESH_S, remove_state, write_state
from umbel.worker.steps.tasks import Tasks

log = logging.getLogger("umbel.worker.health")


class Health(Step):
    name = "health"
    requires = ("tasks",)

    def __init__(self, context: WorkerContext, tasks: Tasks) -> None:
        super().__init__()
        self._context = context
        self._tasks = tasks
        self._complained = False
        self._place = (context.settings.run_directory, context.identity.node, context.broker.url)

    async def start(self) -> None:
        self._write()
        self.run_in_background(self._write_on())

    async def stop(self) -> None:
        await self.end_background()
        remove_state(*self._place)

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._write()

    def _write(self) -> None:
        identity = self._context.identity
        state = {
            "node": identity.node,
            "pid": identity.pid,
            "incarnation": identity.incarnation,
            "queues": list(self._context.queues),
            "pool": self._context.pool.describe(),
            "held": self._tasks.held,
            "problem": self._tasks.problem,
            "counters": self._context.counters.as_dict(),
        }
        try:
            write_state(*self._place, state)
        except OSError as error:
            if not self._complained:
                log.error("cannot leave word for `umbel health`", extra={"why": str(error)})
            self._complained = True
