"""Engines: who runs the jobs of a build (`folding.py`): processes of this machine, or Spark.

Spark is given numbers, one a partition, and a function that does the job of that number; no row of the
lake goes through it. What a partition tells is what its jobs have written. Where Spark runs one twice
(a retry, a slow executor), it hands over what one of them told.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from umbel.pipeline.failing import gist_of
from umbel.pipeline.faults import BuildFailed, NoSpark, UnreadFile
from umbel.pipeline.folding import Answer, work
from umbel.pipeline.session import KEEPS_MEMORY, this_machine

PROCESS_BYTES = 1536 * 1024**2
"""What one process of this machine may need."""

SHIP = (
    "install it on every machine of the cluster (pip install 'umbel[history]') and name its Python by"
    " --conf spark.pyspark.python=/path/to/python, or ship both with --conf spark.archives=env.tar.gz#env"
)


class Engine(Protocol):
    def run(self, step: str, plan: str, count: int) -> Sequence[Answer]:
        """Do the jobs from 0 to `count` - 1 of a step, and hand over what they told. `plan`: where it is."""
        ...


def told(answers: Sequence[Answer]) -> Sequence[Answer]:
    """The same, or what went wrong in one of them."""
    for one in answers:
        if one.unread:
            raise UnreadFile(
                f"{one.unread} cannot be read: {one.why}; move it away, and try again", one.unread
            )
        if one.failed:
            raise BuildFailed(f"{one.failed}: {one.why}")
    return answers


class LocalEngine:
    """Processes of this machine, without Java; for a single job, this one."""

    def __init__(self) -> None:
        cores, memory_bytes = this_machine()
        self._processes = max(1, min(cores, memory_bytes // 2 // PROCESS_BYTES))
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._started = ExitStack()

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def run(self, step: str, plan: str, count: int) -> Sequence[Answer]:
        if self._processes == 1 or count == 1:
            return told([_answer(work(step, plan, number)) for number in range(count)])
        if self._idle.empty():
            for _ in range(self._processes):
                self._idle.put(self._started.enter_context(_Worker()))

        def do(number: int) -> Answer:
            worker = self._idle.get()
            try:
                return worker.do(step, plan, number)
            finally:
                self._idle.put(worker)

        with ThreadPoolExecutor(self._processes) as threads:
            return told(list(threads.map(do, range(count))))


class _Worker:
    """A process that does jobs until its stdin ends, which it does with this process, however that ends."""

    def __enter__(self) -> "_Worker":
        command = [sys.executable, "-m", "umbel.pipeline.folding"]
        path = os.pathsep.join(
            [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        env = {**KEEPS_MEMORY, **os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.terminate()
        self._process.wait()

    def do(self, step: str, plan: str, number: int) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode((step, plan, number)) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            status = self._process.wait()
            raise BuildFailed(f"a process that folds events ended with status {status}; is memory short?")
        return _answer(line)


class SparkEngine:
    """Executors of Spark."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._is_started = False
        self._sees_lake = False

    def start(self) -> None:
        """Let them start their Python, and see that it has what jobs need: Arrow, numpy, Umbel."""
        if self._is_started:
            return
        try:
            self._collected("check", "", this_machine()[0])
        except PySparkException as error:
            raise NoSpark(f"Spark's executors cannot run Umbel ({_missing(error)}); {SHIP}") from None
        self._is_started = True

    def run(self, step: str, plan: str, count: int) -> Sequence[Answer]:
        self.start()
        found = self._collected(step, plan, count)
        for one in found:
            if one.failed == plan and not self._sees_lake:
                raise NoSpark(
                    f"Spark's executors do not see the lake ({plan}: {one.why});"
                    " give it the same path on every machine, and for S3 the same AWS_* variables"
                )
        self._sees_lake = True
        return told(found)

    def _collected(self, step: str, plan: str, count: int) -> list[Answer]:
        return [_answer(row["told"].encode()) for row in answers(self._spark, step, plan, count).collect()]


def answers(spark: SparkSession, step: str, plan: str, count: int) -> DataFrame:
    """One row for each job, with what it told."""

    def do(batches: Iterator[Any]) -> Iterator[Any]:
        from umbel.pipeline.folding import work  # where it runs

        for batch in batches:
            lines = [work(step, plan, number).decode() for number in batch.column(0).to_pylist()]
            yield pa.RecordBatch.from_pydict({"told": pa.array(lines, pa.string())})

    return spark.range(0, count, 1, count).mapInArrow(do, "told string")


def _answer(line: bytes) -> Answer:
    return msgspec.json.decode(line, type=Answer)


def _missing(error: PySparkException) -> str:
    """What Python said on an executor, which is among the last lines of what Spark says."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "Error:" in line or "Cannot run program" in line]
    return (named[0] if named else gist_of(error))[:300]
