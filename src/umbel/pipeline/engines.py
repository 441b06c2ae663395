"""Engines: where the jobs of a build run: processes of this machine, or Spark; the only place that configures
Spark.

Errors of Spark, Java, Arrow and the disk become one line each.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from umbel.pipeline.faults import BuildFailed, JavaExited, NoSpark, UnreadFile
from umbel.pipeline.folding import Answer, work
from umbel.pipeline.java import find_java_home
from umbel.stores.interface import unavailable

# ---- session ---------------------------------------------------------------------------------------
#
# Where Spark runs, and the only place that configures it.
#
# On this machine Spark gets a share of its memory and all of its cores; anywhere else (`--master`) the
# cluster's own configuration holds. Spark gives out jobs and reads no tables, so nothing that they mean
# depends on how it is configured. `sc://` is Spark Connect: the session lives in a server, so nothing about
# the JVM can be set.

MEBIBYTE = 1024**2
HEAP_MAX_MIB = 1024
"""Heap of the driver on this machine: processes of Python do the work, next to Java."""
HEAP_MIN_MIB = 768
CONNECT_PORT = 15002
REACH_S = 10.0
QUICK_JAVA = "-XX:TieredStopAtLevel=1"
"""Java only distributes jobs here: further compilation would take a third of the time of a short build."""
KEEPS_MEMORY: Mapping[str, str] = {
    "MIMALLOC_PURGE_DELAY": "-1",  # Arrow's
    "MALLOC_MMAP_THRESHOLD_": str(32 * MEBIBYTE),
    "MALLOC_TRIM_THRESHOLD_": str(256 * MEBIBYTE),  # numpy's
}
"""Variables of processes that run jobs: freed memory stays with the process, because the next step needs it.
Returning and requesting it again would take an eighth of a build's CPU."""
LOG = "spark.log"
"""The log of Java, in the work folder."""

LAPTOP: Mapping[str, str] = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",  # names and addresses of laptops change while they run
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


def laptop_conf(*, memory_bytes: int) -> dict[str, str]:
    """Spark's settings on this machine: a third of its memory, within limits."""
    heap_mib = min(HEAP_MAX_MIB, max(HEAP_MIN_MIB, memory_bytes // MEBIBYTE // 3))
    return {**LAPTOP, "spark.driver.memory": f"{heap_mib}m"}


def this_machine() -> tuple[int, int]:
    """The cores of this machine that this process may use, and its memory in bytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def spark_session(
    master: str | None,
    *,
    work_folder: Path,
    conf: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """A session of Spark, stopped at the end of the block. `work_folder`: on the lake's disk, for data that
    does not fit into memory, and for the log of Java.
    """
    work_folder.mkdir(parents=True, exist_ok=True)
    with _without_comma(work_folder) as work:
        _, memory_bytes = this_machine()
        if is_connect(master):
            spark = _connect(str(master), conf or {})
        else:
            here = laptop_conf(memory_bytes=memory_bytes)
            spark = _open(master, here=here, work_folder=work, conf=dict(conf or {}))
        try:
            with _stopped_quietly(spark):
                yield spark
        except JavaExited as error:
            raise JavaExited(f"{error}{_last_line(work / LOG)}") from error


@contextlib.contextmanager
def _without_comma(folder: Path) -> Iterator[Path]:
    """The folder by a name without a comma, which Spark would take for two folders."""
    if "," not in str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="umbel-spark-") as place:
        link = Path(place) / "work"
        link.symlink_to(folder.resolve())
        yield link


def shown(master: str | None) -> str:
    """The address without the options of Spark Connect, one of which is its token."""
    return str(master).partition(";")[0]


def is_connect(master: str | None) -> bool:
    """Whether the master is a server of Spark Connect."""
    return master is not None and master.startswith("sc://")


def _open(
    master: str | None, *, here: Mapping[str, str], work_folder: Path, conf: dict[str, str]
) -> SparkSession:
    """Start a session. `here`: settings that apply if Spark runs on this machine."""
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit started us: the JVM is there
    if not submitted:
        os.environ["JAVA_HOME"] = str(find_java_home(os.environ, work_folder / "java"))
        # Executors would take any `python3` of their PATH.
        own = os.environ.get("PYSPARK_PYTHON", sys.executable)
        os.environ["PYSPARK_PYTHON"] = conf.get("spark.pyspark.python", own)
    is_local = not submitted and (master is None or master.startswith("local"))
    chosen = {f"spark.executorEnv.{name}": value for name, value in KEEPS_MEMORY.items()}
    if is_local:
        chosen |= {
            **here,
            "spark.local.dir": str(work_folder),
            "spark.sql.warehouse.dir": str(work_folder / "warehouse"),
        }
    if not submitted:
        quiet = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties')}"
        chosen["spark.driver.extraJavaOptions"] = f"{quiet} {QUICK_JAVA}" if is_local else quiet
    if master is not None:
        chosen["spark.master"] = master
    extra_java = conf.pop("spark.driver.extraJavaOptions", "")
    chosen |= conf
    if extra_java:
        chosen["spark.driver.extraJavaOptions"] = (
            f"{chosen.get('spark.driver.extraJavaOptions', '')} {extra_java}"
        )
    log = work_folder / LOG
    builder: Any = SparkSession.builder.appName("umbel history")
    for name, value in chosen.items():
        builder = builder.config(name, value)
    try:
        with _stderr_in(log) if not submitted else contextlib.nullcontext():
            spark: SparkSession = builder.getOrCreate()
    except (PySparkException, RuntimeError, OSError) as error:
        last = _last_line(log)
        raise NoSpark(
            f"Spark cannot start on {chosen.get('spark.master', 'its master')}: {error}{last}"
        ) from None
    accumulators: Any = spark.sparkContext._accumulatorServer
    accumulators.handle_error = partial(_print_unless_closed, accumulators.handle_error)
    return spark


@contextlib.contextmanager
def _stopped_quietly(spark: SparkSession) -> Iterator[None]:
    """Stop the session in the end. If Java has exited, one exception says so; further log lines of Py4J, of
    the session's end and of PySpark's server for accumulators are suppressed.
    """
    root = logging.getLogger()
    root.addFilter(_is_not_py4js)
    try:
        yield
    finally:
        with warnings.catch_warnings(), contextlib.suppress(PySparkException, Py4JError, OSError):
            warnings.filterwarnings("ignore", "Unable to cleanly shutdown", RuntimeWarning)
            spark.stop()
        root.removeFilter(_is_not_py4js)


def _is_not_py4js(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"


def _print_unless_closed(print_traceback: Callable[[object, object], None], *connection: object) -> None:
    if not isinstance(sys.exception(), EOFError | ConnectionError):
        print_traceback(*connection)


def _connect(url: str, conf: Mapping[str, str]) -> SparkSession:
    _reach(url)
    try:
        spark: SparkSession = SparkSession.builder.remote(url).getOrCreate()
        for name, value in conf.items():
            spark.conf.set(name, value)
    except ImportError:
        raise NoSpark(f"{shown(url)} is Spark Connect, which needs: pip install 'umbel[connect]'") from None
    except PySparkException as error:
        gist = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise NoSpark(f"the Spark Connect server at {shown(url)} failed: {gist[:400]}") from None
    return spark


def _reach(url: str) -> None:
    """Check that a server answers: Spark's own client would retry for many minutes before it reports an
    error.
    """
    try:
        place = urlsplit(shown(url))
        host, port = place.hostname or "", place.port or CONNECT_PORT
    except ValueError as error:
        raise NoSpark(
            f"{shown(url)} is not an address of a Spark Connect server ({error}); try sc://host:15002"
        ) from None
    try:
        socket.create_connection((host, port), REACH_S).close()
    except OSError as error:
        raise NoSpark(
            f"no Spark Connect server answers at {shown(url)}: {error};"
            " start one there, or leave --master out"
        ) from None


@contextlib.contextmanager
def _stderr_in(log: Path) -> Iterator[None]:
    """Redirect stderr to a log while the JVM starts: it inherits stderr, and prints warnings that are no use
    to users.
    """
    with log.open("ab") as file:
        former = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            yield
        finally:
            os.dup2(former, 2)
            os.close(former)


def _last_line(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return f"; last log line: {lines[-1][:300]}" if lines else ""


# ---- failing ---------------------------------------------------------------------------------------
#
# Errors of Spark, Java, Arrow or the disk as one line after what they mean.

NOT_BUILT = "cannot build the tables; nothing was published"


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turn errors of the block into BuildFailed, JavaExited or UnreadFile: `what`, then the cause in one
    line.
    """
    try:
        yield
    except (UnreadFile, BuildFailed) as error:
        raise type(error)(f"{what}: {error}") from error
    except (PySparkException, Py4JJavaError) as error:
        raise BuildFailed(f"{what}: {gist_of(error)}") from error
    except (Py4JError, ConnectionError) as error:  # Java does not answer
        raise JavaExited(f"{what}: Java exited") from error
    except OSError as error:
        cause = unavailable(error) or error
        raise BuildFailed(f"{what}: {cause.filename or 'the disk'}: {cause.strerror or cause}") from error


def gist_of(error: Exception) -> str:
    """The first line of an error that is not empty, and the last cause; Java's errors have a hundred
    lines.
    """
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)[:400]
    lines = _trace_of(error).splitlines()
    causes = [line.partition("Caused by: ")[2] for line in lines if "Caused by: " in line]
    last = causes[-1].strip()[:200] if causes else ""
    return first if not last or last in first else f"{first} ({last})"


def _trace_of(error: Exception) -> str:
    return f"{error}\n{getattr(error, '_stackTrace', '')}"


# ---- engines ---------------------------------------------------------------------------------------
#
# What runs the jobs of a build (`folding.py`): processes of this machine, or Spark.
#
# Spark gets job numbers, one per partition, and a function that does the job of that number; no row of the
# lake passes through Spark. A partition returns what its job has written. If Spark runs a job twice (a
# retry, a slow executor), it returns the answer of one run.

PROCESS_BYTES = 1536 * 1024**2
"""Memory that one process of this machine may need."""

SHIP = (
    "install it on every machine of the cluster (pip install 'umbel[history]') and name its Python by"
    " --conf spark.pyspark.python=/path/to/python, or ship both with --conf spark.archives=env.tar.gz#env"
)


class Engine(Protocol):
    """Runs the jobs of a build's steps."""

    def run(self, step: str, plan: str, count: int) -> Sequence[Answer]:
        """Run the jobs 0 to `count` - 1 of a step, and return their answers. `plan`: the address of the
        plan.
        """
        ...


def checked_answers(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers; raises UnreadFile or BuildFailed if a job could not be done."""
    for answer in answers:
        if answer.unread:
            raise UnreadFile(
                f"{answer.unread} cannot be read: {answer.why}; move it away, and try again", answer.unread
            )
        if answer.failed:
            raise BuildFailed(f"{answer.failed}: {answer.why}")
    return answers


class LocalEngine:
    """Runs jobs in processes of this machine, without Java; a single job runs in this process."""

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
        """Run the jobs in processes of this machine; raises UnreadFile or BuildFailed."""
        if self._processes == 1 or count == 1:
            return checked_answers([_answer(work(step, plan, number)) for number in range(count)])
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
            return checked_answers(list(threads.map(do, range(count))))


class _Worker:
    """A process that does jobs until its stdin closes, which happens at the latest when this process ends."""

    def __enter__(self) -> "_Worker":
        command = [sys.executable, "-P", "-m", "umbel.pipeline.folding"]
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
    """Runs jobs in executors of Spark."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._is_started = False
        self._sees_lake = False

    def start(self) -> None:
        """Start Python on the executors, and check that it has what jobs need: Arrow, numpy, Umbel.

        Raises NoSpark otherwise.
        """
        if self._is_started:
            return
        try:
            self._collected("check", "", this_machine()[0])
        except PySparkException as error:
            raise NoSpark(f"Spark's executors cannot run Umbel ({_missing(error)}); {SHIP}") from None
        self._is_started = True

    def run(self, step: str, plan: str, count: int) -> Sequence[Answer]:
        """Run the jobs on executors; raises NoSpark, UnreadFile or BuildFailed."""
        self.start()
        found = self._collected(step, plan, count)
        for answer in found:
            if answer.failed == plan and not self._sees_lake:
                raise NoSpark(
                    f"Spark's executors do not see the lake ({plan}: {answer.why});"
                    " give it the same path on every machine, and for S3 the same AWS_* variables"
                )
        self._sees_lake = True
        return checked_answers(found)

    def _collected(self, step: str, plan: str, count: int) -> list[Answer]:
        return [_answer(row["told"].encode()) for row in answers(self._spark, step, plan, count).collect()]


def answers(spark: SparkSession, step: str, plan: str, count: int) -> DataFrame:
    """One row for each job, with its answer as JSON."""

    def do(batches: Iterator[Any]) -> Iterator[Any]:
        from umbel.pipeline.folding import work  # imported on the executor

        for batch in batches:
            lines = [work(step, plan, number).decode() for number in batch.column(0).to_pylist()]
            yield pa.RecordBatch.from_pydict({"told": pa.array(lines, pa.string())})

    return spark.range(0, count, 1, count).mapInArrow(do, "told string")


def _answer(line: bytes) -> Answer:
    return msgspec.json.decode(line, type=Answer)


def _missing(error: PySparkException) -> str:
    """The error of Python on an executor, from among the last lines of Spark's error."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "Error:" in line or "Cannot run program" in line]
    return (named[0] if named else gist_of(error))[:300]
