"""Umbel's side: several whole workers in one process, each with its own connections and no children.

    python -m benchmarks._coordination.umbel_side nodes HOME FIRST COUNT
    python -m benchmarks._coordination.umbel_side elect NUMBER PAUSE_S

The workers are the real ones with the `solo` pool: what they say to each other is what they say in
processes of their own.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from umbel import App
from umbel.app.settings import override
from umbel.launch.loading import find_app
from umbel.launch.workers import make_worker
from umbel.logs import set_up_logging
from umbel.worker.worker import Worker

app = App("bench", broker=os.environ["BENCH_BROKER"])


@app.task(name="noop", ignore_result=True)
def noop(number: int) -> None:
    """What the elected node sends."""


async def nodes(home: Path, first: int, count: int) -> None:
    found = find_app("benchmarks._coordination.umbel_side:app")
    settings = override(found.app.settings, worker_pool="solo", worker_concurrency=1)
    workers = [
        make_worker(found, settings, node=f"n{number}", run_directory=home / f"run{number}")
        for number in range(first, first + count)
    ]

    async def run(worker: Worker) -> None:
        await worker.run()
        for other in workers:  # only one of them hears the signal
            other.request_stop()

    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(run(worker))


def elect(number: int, pause_s: float) -> None:
    began = time.monotonic()
    app.control.election(f"bench-{number}", "task", noop.s(number).to_map(), timeout=30)
    print(json.dumps({"decided_ms": 1000 * (time.monotonic() - began)}))
    time.sleep(pause_s)
    app.close()


def main(what: str, *arguments: str) -> None:
    if what == "nodes":
        set_up_logging("WARNING")
        home, first, count = arguments
        asyncio.run(nodes(Path(home), int(first), int(count)))
    else:
        number, pause_s = arguments
        elect(int(number), float(pause_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
