"""The embedded broker in the place of a server: a new file for each run."""

import asyncio
import tempfile
from pathlib import Path

from benchmarks._throughput.servers import Server
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker


class Embedded(Server):
    name, title = "embedded", "embedded"
    shows_unacknowledged = False

    def __init__(self) -> None:
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def empty_url(self) -> str:
        self.stop()
        self._directory = tempfile.TemporaryDirectory(prefix="umbel-bench-")
        return f"sqlite:///{Path(self._directory.name) / 'queue.db'}"

    def cpu_s(self) -> float:
        return 0.0

    def waiting(self, url: str, *, script: str, queue: str) -> int:
        return asyncio.run(_waiting(url, queue))

    def stop(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


async def _waiting(url: str, queue: str) -> int:
    broker = open_broker(BrokerSettings(url))
    await broker.open()
    try:
        depth = (await broker.queues()).get(queue)
        return 0 if depth is None else depth.ready + depth.claimed
    finally:
        await broker.close()


EMBEDDED = Embedded()
