"""PoolStep: starts the children before anything is consumed, ends them after."""

from umbel.pools.interface import PoolListener
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext


class PoolStep(Step):
    name = "pool"

    def __init__(self, context: WorkerContext, listener: PoolListener) -> None:
        super().__init__()
        self._pool = context.pool
        self._listener = listener

    async def start(self) -> None:
        await self._pool.start(self._listener)

    async def stop(self) -> None:
        await self._pool.stop(grace_s=0.0)
