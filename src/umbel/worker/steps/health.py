"""Health: leaves word in the run directory about once a second, for `umbel health`.

A service manager that waits for word (systemd, `Type=notify`) gets it at the same time.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

from umbel.urls import without_password
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.process.run_directory import REFRESH_S, remove_state, write_state
from umbel.worker.process.service import tell_manager
from umbel.worker.steps.connection import Connection
from umbel.worker.steps.tasks import Tasks

log = logging.getLogger("umbel.worker.health")


class Health(Step):
    name = "health"
    requires = ("tasks",)

    def __init__(self, context: WorkerContext, connection: Connection, tasks: Tasks) -> None:
        super().__init__()
        self._context = context
        self._connection = connection
        self._tasks = tasks
        self._complained = False
        self._directory = Path.cwd()
        self._place = (context.settings.run_directory, context.identity.node, context.broker.url)

    async def start(self) -> None:
        self._write()
        tell_manager("READY=1")
        self.run_in_background(self._write_on())

    async def stop(self) -> None:
        await self.end_background()
        remove_state(*self._place)

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._write()
            tell_manager("WATCHDOG=1", *(["STOPPING=1"] if self._context.shutdown.is_stopping else []))

    def _write(self) -> None:
        identity, shutdown = self._context.identity, self._context.shutdown
        problem = self._tasks.problem or self._connection.problem
        is_consuming = bool(self._context.queues) and not problem
        state = {
            "node": identity.node,
            "pid": identity.pid,
            "incarnation": identity.incarnation,
            "broker": without_password(self._context.broker.url),
            "directory": str(self._directory),
            "queues": list(self._context.queues),
            "pool": self._context.pool.describe(),
            "held": self._tasks.claimed,
            "problem": problem,
            "store_replaced": self._replaced(),
            "ready": is_consuming and not shutdown.is_stopping,
            "stopping": shutdown.describe(asyncio.get_running_loop().time()),
            "counters": self._context.counters.as_dict(),
        }
        self._leave(state)

    def _replaced(self) -> dict[str, Any] | None:
        """When the broker's data was last found to be other data, and how much it did not know."""
        if self._connection.replaced is None:
            return None
        at, replaced = self._connection.replaced
        return {"at": at, "what": replaced.what, "unknown": replaced.unknown}

    def _leave(self, state: dict[str, Any]) -> None:
        try:
            write_state(*self._place, state)
        except OSError as error:
            if not self._complained:
                log.error(
                    "cannot write the status file that `umbel health` reads; retrying",
                    extra={"why": str(error)},
                )
            self._complained = True
