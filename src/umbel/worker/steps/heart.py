"""Heart: says that this node is here, every `heartbeat_interval_s`, and when it leaves.

The same fields as Celery's heartbeats, so that Flower and Celery workers see this node; `freq`
is the true interval, because peers take a node for lost after twice that time.
"""

import asyncio
import os
import platform

from umbel.events.stamp import SOFTWARE
from umbel.version import VERSION
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.steps.events import Events


class Heart(Step):
    name = "heart"
    requires = ("events",)

    def __init__(self, context: WorkerContext, events: Events) -> None:
        super().__init__()
        self._context = context
        self._events = events
        self._interval_s = context.settings.heartbeat_interval_s

    async def start(self) -> None:
        self._beat("worker-online")
        self.run_in_background(self._beat_on())

    async def stop(self) -> None:
        await self.end_background()
        self._beat("worker-offline")

    def beat(self) -> None:
        """One more beat, now: somebody asked for it."""
        self._beat("worker-heartbeat")

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._beat("worker-heartbeat")

    def _beat(self, event_type: str) -> None:
        self._events.tell(
            event_type,
            freq=self._interval_s,
            active=len(self._context.pool.describe()["running"]),
            processed=self._context.counters.processed,
            loadavg=[round(load, 2) for load in os.getloadavg()],
            sw_ident=SOFTWARE,
            sw_ver=VERSION,
            sw_sys=platform.system(),
        )
