"""What tests of the recorder share: a recorder as a process, events to log, and the lake read back."""

import asyncio
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

from tests.waiting import wait_until
from umbel.brokers.interface import Broker, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.events.merge import eid
from umbel.events.stamp import EventStamper
from umbel.events.view import EventReader
from umbel.history.lake import Lake, parquet
from umbel.protocol.clock import LamportClock
from umbel.wire.event import decode_events, encode_event, routing_key

STEPS = ("task-received", "task-started", "task-succeeded")
READ_MAX = 1000
BRIEF_LEASE_S = 0.5
SAFE_LEASE_S = 10.0  # no pause of a busy machine takes it away
Logged = tuple[str, bytes]


class Teller:
    """A node that tells of its tasks, and knows what it told."""

    def __init__(self, name: str = "w1@x", inc: int = 1000) -> None:
        self._stamper = EventStamper(hostname=name, pid=1, incarnation=inc, clock=LamportClock())

    def skip(self, number: int = 1) -> None:
        for _ in range(number):
            self._stamper.skip()

    def tell(self, count: int) -> list[Logged]:
        """So many events: each task has three."""
        told: list[Logged] = []
        task = ""
        for number in range(count):
            step = STEPS[number % 3]
            task = str(uuid.uuid4()) if number % 3 == 0 else task
            fields = {
                "uuid": task,
                "retries": 0,
                **({"name": "t.add", "args": "(1,)"} if number % 3 == 0 else {}),
            }
            event = self._stamper.stamp(step, fields, at=time())
            told.append((routing_key(step), encode_event(event)))
        return told


def digests_of(told: Sequence[Logged]) -> set[int]:
    reader = EventReader()
    found = [reader.read(event) for _, body in told for event in decode_events(body)]
    return {eid(event) for event in found if event is not None}


def paths_of(lake: Lake) -> list[Path]:
    """Its current files, where it is a folder."""
    return [Path(lake.store.where) / name for name in lake.event_files()]


def rows_of(lake: Path, *columns: str) -> list[dict[str, Any]]:
    """Every row of every current file, as often as it is there."""
    wanted = [*columns] or None
    tables = [parquet().ParquetFile(path).read(columns=wanted) for path in paths_of(Lake(lake))]
    return [row for table in tables for row in table.to_pylist()]


def facts_of(lake: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(lake) if row["type"].startswith("recorder-")]


class RecorderProcess:
    """`umbel record`, as a user starts it."""

    def __init__(self, url: str, lake: Path, *flags: str, file_limit: int | None, lease_s: float) -> None:
        self.lake = lake
        self.log_file = lake.parent / "record.log"

        command = [sys.executable, "-m", "umbel.cli.main", "record", "--broker", url, "--lake", str(lake)]
        if file_limit is not None:
            # The shell's unit is 512 bytes; only the soft limit, so that the test can lift it. Python
            # does not notice that bytecode was cut off at the limit, and would load it ever after.
            limited = f'ulimit -S -f {file_limit // 512}; export PYTHONDONTWRITEBYTECODE=1; exec "$@"'
            command = ["/bin/sh", "-c", limited, "limited", *command]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--rotate", "0.2", "--lease", str(lease_s), *flags],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def allow_large_files(self) -> None:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, unlimited)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def has_said(self, text: str) -> bool:
        assert self.process.poll() is None, f"the recorder ended: {self.log}"
        return text in self.log

    def wait_for(self, text: str) -> None:
        wait_until(lambda: self.has_said(text), what=f"the recorder to say {text!r}")


@contextmanager
def recording(
    url: str, lake: Path, *flags: str, file_limit: int | None = None, lease_s: float = SAFE_LEASE_S
) -> Iterator[RecorderProcess]:
    """One that is to be killed has `BRIEF_LEASE_S`, so that the next one need not wait for long."""
    made = RecorderProcess(url, lake, *flags, file_limit=file_limit, lease_s=lease_s)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.kill()


class LogWriter:
    """A connection to the broker, for tests that are not asynchronous."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self.broker: Broker = self._runner.run(_opened(url))

    def log(self, events: Sequence[Logged]) -> int:
        return self._runner.run(self.broker.log_events(events))

    def register(self, name: str = "recorder") -> None:
        self._runner.run(self.broker.register_recorder(name))

    def is_registered(self, name: str = "recorder") -> bool:
        return name in self._runner.run(self.broker.recorders())

    def lag(self, name: str = "recorder") -> int:
        state = self._runner.run(self.broker.event_log())
        return state.last_offset - state.acknowledged[name]

    def read_all(self, name: str = "recorder") -> list[dict[str, Any]]:
        """Every event that the log holds for a recorder."""
        found: list[dict[str, Any]] = []
        place = 0
        while entries := self._runner.run(self.broker.read_events(name, READ_MAX, after=place)):
            found += [event for one in entries if one.routing_key for event in decode_events(one.body)]
            place = entries[-1].offset
        return found

    def wait_until_recorded(self) -> None:
        wait_until(lambda: self.lag() == 0, what="everything to be acknowledged")

    def close(self) -> None:
        self._runner.run(self.broker.close())
        self._runner.close()

    def __enter__(self) -> "LogWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _opened(url: str, **settings: Any) -> Broker:
    broker = open_broker(BrokerSettings(url, **settings))
    await broker.open()
    return broker


def modes_below(lake: Path) -> set[str]:
    """Of the lake, its folders and its files."""
    found = [lake, *lake.rglob("*")]
    return {f"{'d' if path.is_dir() else 'f'}{path.stat().st_mode & 0o777:04o}" for path in found}
