"""The pool's steps: one starts and ends the children, one resizes the pool by its load (F4)."""

import asyncio
import logging

from umbel.pools.interface import PoolListener
from umbel.protocol.pool.autoscale import Autoscale, Load, SizeLimits
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext

log = logging.getLogger("umbel.worker.autoscaler")
CHECK_EVERY_S = 0.5


class PoolStep(Step):
    """The step that starts the children before any message is claimed, and ends them after the last one."""

    name = "pool"

    def __init__(self, context: WorkerContext, listener: PoolListener) -> None:
        super().__init__(context)
        self._listener = listener

    async def start(self) -> None:
        """Start the children."""
        await self._context.pool.start(self._listener)

    async def stop(self) -> None:
        """End the children without a grace period: by now no task runs."""
        await self._context.pool.stop(grace_s=0.0)


class Autoscaler(Step):
    """The step that resizes the pool as its load and the queues require; off without `--autoscale`."""

    name = "autoscaler"
    requires = ("tasks",)

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        settings = context.settings
        self._machine: Autoscale | None = None
        if settings.autoscale is not None:
            most, least = settings.autoscale
            self._machine = Autoscale(most=most, least=least, cool_down_s=settings.autoscale_cool_down_s)

    @property
    def is_on(self) -> bool:
        """Whether the worker was started with bounds."""
        return self._machine is not None

    async def start(self) -> None:
        """Begin to resize the pool, if the worker has bounds."""
        if self._machine is not None:
            self.run_in_background(self._resize(self._machine))

    def limit(self, most: int | None, least: int | None) -> tuple[int, int]:
        """Change one bound or both; return both. Surplus children end when they are idle."""
        if self._machine is None:
            raise ValueError("Autoscale not enabled")
        most = self._machine.most if most is None else most
        least = min(self._machine.least, most) if least is None else least
        if not 1 <= least <= most:
            raise ValueError(f"max must be at least min, and min at least 1, not max={most} min={least}")
        self._machine.step(SizeLimits(most, least), asyncio.get_running_loop().time())
        return most, least

    def describe(self) -> dict[str, int] | None:
        """Return the bounds and the size in the form of Celery's `stats`."""
        if self._machine is None:
            return None
        size = self._context.pool.describe()["max-concurrency"]
        return {"max": self._machine.most, "min": self._machine.least, "current": size, "qty": 0}

    async def _resize(self, machine: Autoscale) -> None:
        """Resize the pool periodically; queue depths are read only when the machine needs them."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            load = self._load()
            if machine.wants_depth(load):
                ready = await self._context.ready_messages() or 0  # unknown: none could be fetched either
                now_load = self._load()  # the load may have changed meanwhile
                load = Load(now_load.size, now_load.busy, now_load.waiting + ready)
            for effect in machine.step(load, loop.time()):
                size = self._context.pool.resize(effect.by)
                log.info("pool resized", extra={"by": effect.by, "children": size, "waiting": load.waiting})

    def _load(self) -> Load:
        pool = self._context.pool.describe()
        return Load(pool["max-concurrency"], len(pool["running"]), pool["waiting"])
