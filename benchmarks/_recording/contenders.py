"""One worker, by who records its events: nobody, somebody elsewhere, a process beside it, or itself."""

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks._harness.benchmark import clean_environment
from benchmarks._harness.processes import CPU_TICK_S, BenchmarkFailed, Running, running, wait_for
from benchmarks._throughput.contenders import UMBEL, Contender
from benchmarks._throughput.servers import Server
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.history.recorder import DEFAULT_NAME

EVENTS_PER_TASK = 3  # received, started, succeeded
Recorder = Literal["none", "elsewhere", "beside", "itself"]


@dataclass(frozen=True)
class Recorded:
    name: str
    recorder: Recorder
    worker: Contender

    is_peer = False

    def at_commit(self, name: str, source: Path) -> "Recorded":
        return replace(self, name=name, worker=self.worker.at_commit(name, source))

    def settings(self, home: Path) -> Mapping[str, str]:
        return self.worker.settings(home)

    def measure(self, home: Path, server: Server, tasks: int) -> Mapping[str, float]:
        url = server.empty_url()
        self.worker.fill(home, url, tasks, each=1)
        if self.recorder != "none":
            asyncio.run(_register(url))
        beside = self._recording(home, url) if self.recorder == "beside" else nullcontext()
        with beside as recorder:
            before_s = recorder.cpu_s() if recorder else 0.0
            with self.worker.draining(home, url, server, tasks) as (_, drain):
                recorder_s = max(recorder.cpu_s() - before_s, CPU_TICK_S) if recorder else 0.0
        logged = asyncio.run(_logged(url)) if self.recorder != "none" else 0
        if left := self.worker.waiting(server, url):
            raise BenchmarkFailed(f"{self.name} left {left:,} messages that it had run")
        return {
            "drain": drain.tasks_per_s,
            "drain_cpu": drain.cpu_us,
            **({"server_cpu": drain.server_cpu_us} if server.cpu_s() else {}),
            **({"recorder_cpu": recorder_s / tasks * 1e6} if recorder else {}),
            **({"unlogged": max(0.0, 1 - logged / tasks / EVENTS_PER_TASK)} if logged else {}),
        }

    @contextmanager
    def _recording(self, home: Path, url: str) -> Iterator[Running]:
        umbel = (sys.executable, "-m", "umbel.cli.main")
        command = [*umbel, "record", "--broker", url, "--lake", str(home / "lake")]
        environment = clean_environment(source=self.worker.source)
        with running("recorder", command, environment=environment, directory=home) as recorder:
            wait_for(lambda: "recording" in recorder.log.read_text(), "begin to record", recorder)
            yield recorder


async def _register(url: str) -> None:
    broker = open_broker(BrokerSettings(url))
    await broker.open()
    try:
        await broker.register_recorder(DEFAULT_NAME)
    finally:
        await broker.close()


async def _logged(url: str) -> int:
    """How many events were ever logged; those of the workers themselves are few."""
    broker = open_broker(BrokerSettings(url))
    await broker.open()
    try:
        return (await broker.event_log()).last_offset
    finally:
        await broker.close()


_WORKER = replace(UMBEL, worker=f"{UMBEL.worker} -E", shares={}, drains_only=True)

LOGGED = Recorded("logged", "elsewhere", _WORKER)
EVENTS = Recorded("events", "none", _WORKER)
BESIDE = Recorded("beside", "beside", _WORKER)
ITSELF = Recorded("itself", "itself", replace(_WORKER, worker=f"{_WORKER.worker} --record lake"))
