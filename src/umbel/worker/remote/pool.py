"""The process itself: its children, its memory, its end (`control.state.PoolSection`)."""

import asyncio
import resource
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from umbel.errors import NotSupported
from umbel.pools.interface import Restartable
from umbel.pools.stacks import stacks_of
from umbel.worker.remote.parts import WorkerNode, WorkerParts

SAMPLES_MAX = 100


class WorkerPool(WorkerNode):
    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)

    def resize_pool(self, by: int) -> int:
        return self._context.pool.resize(by)

    @property
    def is_autoscaled(self) -> bool:
        return self._parts.autoscaler.is_on

    def autoscale(self, most: int | None, least: int | None) -> tuple[int, int]:
        return self._parts.autoscaler.limit(most, least)

    def restart_pool(self, *, reload: bool) -> None:
        pool = self._context.pool
        if not self._context.settings.pool_restarts:
            raise ValueError("Pool restarts not enabled")
        if not isinstance(pool, Restartable):
            raise NotSupported(f"the {pool.describe()['implementation']} pool has no children to replace")
        pool.restart(reload=reload)

    async def stacks(self) -> dict[str, dict[str, str]]:
        pool = self._context.pool.describe()
        running = {pid: task_id for task_id, pid in pool["running"].items()}
        found = await asyncio.gather(*map(stacks_of, pool["processes"]))
        return {
            str(pid): {"task_id": running.get(pid, ""), "stack": stack}
            for pid, stack in zip(pool["processes"], found, strict=True)
        }

    def memory_samples(self, count: int) -> Sequence[float]:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:  # not Linux
            return ()
        self._samples.append(pages * resource.getpagesize() / 2**20)
        return list(self._samples)[-count:]

    def stop(self) -> None:
        self._parts.stop()
