"""What runs in a process of its own, so that its memory and its time are its own.

    python -m benchmarks._pipeline.side generate LAKE EVENTS LATER
    python -m benchmarks._pipeline.side duckdb LAKE
    python -m benchmarks._pipeline.side bucket LAKE LOOSE
    python -m benchmarks._pipeline.side recorder HOME EVENTS
    python -m benchmarks._pipeline.side worker HOME TASKS FLAGS…

Each prints one JSON object.
"""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from umbel.brokers.interface import Broker, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.wire.event import EncodedEvent, by_type, decode_events, encode_event, routing_key

EVENTS_PER_TASK = 3  # received, started, succeeded
LOOK_EVERY_S = 0.2
FILL = 2000
DEADLINE_S = 900.0
READ_MAX = 5000
APP = """
from umbel import App

app = App("made", broker="sqlite:///{database}")

@app.task(ignore_result=True)
def noop():
    pass
"""


def generate(lake: str, events: str, later: str) -> dict[str, Any]:
    from benchmarks._pipeline.synthetic import write_lake

    began = time.perf_counter()
    written = write_lake(Path(lake), int(events), later=int(later))
    return {"events": written, "seconds": time.perf_counter() - began}


def duckdb(lake: str) -> dict[str, Any]:
    import pyarrow.parquet as pq

    from benchmarks._pipeline.duckdb_tasks import write_tasks

    files = sorted((Path(lake) / "events").rglob("*.parquet"))
    target = Path(lake) / "duckdb" / "tasks.parquet"
    target.parent.mkdir(exist_ok=True)
    began = time.perf_counter()
    write_tasks(files, target)
    seconds = time.perf_counter() - began
    return {
        "events": sum(pq.read_metadata(path).num_rows for path in files),
        "tasks": pq.read_metadata(target).num_rows,
        "seconds": seconds,
    }


def bucket(lake: str, loose: str) -> dict[str, Any]:
    """A lake with the same files, as housekeeping leaves it."""
    from umbel.history.housekeeping import compact
    from umbel.history.lake import Lake

    shutil.copytree(Path(loose) / "events", Path(lake) / "events", copy_function=os.link)
    kept = Lake(lake)
    began = time.perf_counter()
    compact(kept)
    seconds = time.perf_counter() - began
    compact(kept, grace_s=0)
    return {"events": sum(kept.read_compacted().rows.values()), "seconds": seconds}


def recorder(home: str, events: str) -> dict[str, Any]:
    """Fill the embedded broker's log, then record all of it."""
    return asyncio.run(_record(Path(home), int(events)))


def worker(home: str, tasks: str, *flags: str) -> dict[str, Any]:
    """How quickly one worker makes events: what it logs of tasks that do nothing, on the embedded broker."""
    return asyncio.run(_work(Path(home), int(tasks), *flags))


async def _record(home: Path, count: int) -> dict[str, Any]:
    from umbel.history.lake import Lake
    from umbel.history.recorder import Recorder

    broker = open_broker(BrokerSettings(url=f"sqlite:///{home / 'log.db'}", event_log_max=2 * count + 1000))
    await broker.open()
    try:
        await broker.register_recorder("recorder")
        await _fill(broker, count)
        stop = asyncio.Event()
        recording = Recorder(broker, Lake(home / "lake"))
        began = time.perf_counter()
        running = asyncio.create_task(recording.run(stop))
        while recording.progress.events < count:
            await asyncio.wait({running}, timeout=0.02)
            if running.done():
                running.result()
        stop.set()
        await running  # what was read is on disk and acknowledged then
        return {"events": count, "seconds": time.perf_counter() - began}
    finally:
        await broker.close()


async def _fill(broker: Broker, count: int) -> None:
    """Events of our workers as they log them: in lists of one type, each sender's numbered without a gap."""
    from benchmarks._events.history import NODES, History

    told: Counter[str] = Counter()

    def told_events() -> Iterator[EncodedEvent]:
        ours = [node for node in NODES if node[2]]
        for event in itertools.islice(History(nodes=ours).events(count), count):
            if "seq" in event:
                told[event["hostname"]] += 1
                event["seq"] = told[event["hostname"]]
            yield routing_key(event["type"]), encode_event(event)

    events = told_events()
    while filled := list(itertools.islice(events, FILL)):
        entries, counts = by_type(filled)
        await broker.log_events(entries, counts=counts)


async def _work(home: Path, tasks: int, *flags: str) -> dict[str, Any]:
    database = home / "made.db"
    (home / "made.py").write_text(APP.format(database=database))
    sys.path.insert(0, str(home))
    import made  # type: ignore[import-not-found]

    broker = open_broker(BrokerSettings(url=f"sqlite:///{database}", event_log_max=20 * tasks + 1000))
    await broker.open()
    await broker.register_recorder("counter")
    made.app.send_many(made.noop.s() for _ in range(tasks))
    environment = {**os.environ, "UMBEL_RUN_DIR": str(home / "run")}
    command = [
        sys.executable,
        "-m",
        "umbel.cli.main",
        "worker",
        "-A",
        "made",
        "-f",
        str(home / "log"),
        *flags,
    ]
    running = _started(command, home, environment)
    try:
        await _wait_for(broker, EVENTS_PER_TASK * tasks)
    finally:
        running.terminate()
        running.wait(30)
    try:
        return await _count(broker, tasks)
    finally:
        await broker.close()
        made.app.close()


def _started(command: list[str], home: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, cwd=home, env=environment)


async def _wait_for(broker: Broker, events: int) -> None:
    """Only the log's length is asked for, now and then: the worker is to have the machine."""
    give_up = time.monotonic() + DEADLINE_S
    while (found := (await broker.event_log()).last_offset) < events:
        if time.monotonic() > give_up:
            raise TimeoutError(f"{found} of {events} events came within {DEADLINE_S:g} s")
        await asyncio.sleep(LOOK_EVERY_S)


async def _count(broker: Broker, tasks: int) -> dict[str, Any]:
    """From the first to the last event of a task, by the broker's clock."""
    place, events, ended, first, last = 0, 0, 0, 0.0, 0.0
    while entries := await broker.read_events("counter", READ_MAX, after=place):
        place = entries[-1].offset
        told = [one for one in entries if one.routing_key.startswith("task.")]
        if told:
            first, last = first or told[0].recorded_at, told[-1].recorded_at
        for one in told:
            found = decode_events(one.body)
            events += len(found)
            ended += sum(event["type"] == "task-succeeded" for event in found)
    if ended < tasks:
        raise RuntimeError(f"{ended} of {tasks} tasks have their end in the log")
    return {"events": events, "tasks": ended, "seconds": max(last - first, 1e-6)}


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "generate": generate,
    "duckdb": duckdb,
    "bucket": bucket,
    "recorder": recorder,
    "worker": worker,
}

if __name__ == "__main__":
    print(json.dumps(STEPS[sys.argv[1]](*sys.argv[2:])))
