"""SoloPool: one job at a time, in one thread of the main process.

For debugging and for platforms where processes are dear. The event loop stays free, but a job that
holds the interpreter delays it, and a job that crashes takes the worker down.
"""

from msgspec.structs import replace

from umbel.pools.interface import PoolSettings
from umbel.pools.threads import ThreadsPool


class SoloPool(ThreadsPool):
    name = "solo"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(replace(settings, concurrency=1))
