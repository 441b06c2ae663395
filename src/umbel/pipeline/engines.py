"""Engines: run the jobs of a build in local processes or on Spark.

This is the only module that configures Spark. Errors of Spark, Java, Arrow and the disk are converted to
errors with a message of one line.
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

from umbel.pipeline import BuildFailed, JavaExited, NoSpark, UnreadFile
from umbel.pipeline.folding import Answer, work
from umbel.pipeline.java import find_java_home
from umbel.stores.interface import unavailable

# ---- session ---------------------------------------------------------------------------------------

MEBIBYTE = 1024**2
HEAP_MAX_MIB = 1024
"""Maximum heap of a local driver. It is small, because Python processes next to Java do the work."""
HEAP_MIN_MIB = 768
CONNECT_PORT = 15002
REACH_S = 10.0
QUICK_JAVA = "-XX:TieredStopAtLevel=1"
"""Java option that limits JIT compilation: Java only distributes jobs, and full compilation takes a third of
the time of a short build.
"""
KEEPS_MEMORY: Mapping[str, str] = {
    "MIMALLOC_PURGE_DELAY": "-1",  # for Arrow
    "MALLOC_MMAP_THRESHOLD_": str(32 * MEBIBYTE),
    "MALLOC_TRIM_THRESHOLD_": str(256 * MEBIBYTE),  # for numpy
}
"""Environment of processes that run jobs. Freed memory stays with the process, because the next step needs
it; returning it to the system and requesting it again takes an eighth of a build's CPU time.
"""
LOG = "spark.log"
"""The name of Java's log file in the work folder."""

LAPTOP: Mapping[str, str] = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",  # names and addresses of laptops change while they run
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


def laptop_conf(*, memory_bytes: int) -> dict[str, str]:
    """Return Spark's settings for this machine. The heap is a third of its memory, within limits."""
    heap_mib = min(HEAP_MAX_MIB, max(HEAP_MIN_MIB, memory_bytes // MEBIBYTE // 3))
    return {**LAPTOP, "spark.driver.memory": f"{heap_mib}m"}


def this_machine() -> tuple[int, int]:
    """Return the number of cores that this process may use, and the machine's memory in bytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def spark_session(
    master: str | None,
    *,
    work_folder: Path,
    conf: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """Open a Spark session, and stop it at the end of the block.

    `work_folder` is for data that does not fit into memory and for Java's log; it should be on the lake's
    disk.

    On this machine Spark gets all cores and a share of the memory. Elsewhere (`--master`) the cluster's
    configuration applies. Spark only distributes jobs and reads no tables, so its configuration cannot
    change the results. `sc://` is Spark Connect: the session runs in a server, so the JVM cannot be
    configured.
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
    """Yield a path to the folder without a comma. Spark interprets a comma as a separator of two folders."""
    if "," not in str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="umbel-spark-") as place:
        link = Path(place) / "work"
        link.symlink_to(folder.resolve())
        yield link


def shown(master: str | None) -> str:
    """Return the address without the options of Spark Connect, which may contain a token."""
    return str(master).partition(";")[0]


def is_connect(master: str | None) -> bool:
    """Return whether the master is a Spark Connect server."""
    return master is not None and master.startswith("sc://")


def _open(
    master: str | None, *, here: Mapping[str, str], work_folder: Path, conf: dict[str, str]
) -> SparkSession:
    """Start a session. `here` contains the settings for Spark on this machine."""
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit started this process, and the JVM runs
    if not submitted:
        os.environ["JAVA_HOME"] = str(find_java_home(os.environ, work_folder / "java"))
        # Without this, executors use the first `python3` on their PATH.
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
    """Stop the session at the end of the block.

    If Java has exited, only one exception reports it: log lines of Py4J, warnings at the end of the session,
    and errors of PySpark's accumulator server are suppressed.
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
    """Connect to a Spark Connect server. Raise NoSpark with a short reason if this fails."""
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
    """Check that the server answers. Spark's client would retry for many minutes before it reports an
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
    """Redirect stderr to a log while the JVM starts, because the JVM prints warnings that do not help
    users.
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

NOT_BUILT = "cannot build the tables; nothing was published"


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Convert errors of the block to BuildFailed, JavaExited or UnreadFile, with `what` and the cause in one
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
    """Return the first non-empty line of an error and its last cause. Java's errors have a hundred lines."""
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)[:400]
    lines = _trace_of(error).splitlines()
    causes = [line.partition("Caused by: ")[2] for line in lines if "Caused by: " in line]
    last = causes[-1].strip()[:200] if causes else ""
    return first if not last or last in first else f"{first} ({last})"


def _trace_of(error: Exception) -> str:
    return f"{error}\n{getattr(error, '_stackTrace', '')}"


# ---- engines ---------------------------------------------------------------------------------------

PROCESS_BYTES = 1536 * 1024**2
"""Memory that one local process may need."""

SHIP = (
    "install it on every machine of the cluster (pip install 'umbel[history]') and name its Python by"
    " --conf spark.pyspark.python=/path/to/python, or ship both with --conf spark.archives=env.tar.gz#env"
)


class Engine(Protocol):
    """Runs the jobs of a build's steps."""

    def run(self, step: str, plan: str, count: int) -> Sequence[Answer]:
        """Run the jobs 0 to `count` - 1 of a step, and return their answers. `plan` is the address of the
        plan.
        """
        ...


def checked_answers(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers. Raise UnreadFile or BuildFailed if a job failed."""
    for answer in answers:
        if answer.unread:
            raise UnreadFile(
                f"{answer.unread} cannot be read: {answer.why}; move it away, and try again", answer.unread
            )
        if answer.failed:
            raise BuildFailed(f"{answer.failed}: {answer.why}")
    return answers


class LocalEngine:
    """Runs jobs in local processes, without Java. A single job runs in the current process."""

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
        """Run the jobs in local processes. Raise UnreadFile or BuildFailed if one fails."""
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
    """A process that runs jobs until its stdin closes, at the latest when this process exits."""

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
            raise BuildFailed(
                f"a process that folds events exited with status {status}; check the free memory"
            )
        return _answer(line)


class SparkEngine:
    """Runs jobs in Spark executors.

    Spark gets job numbers, one in each partition, and a function that runs the job with that number
    (`folding.py`). No row of the lake passes through Spark; a partition returns the names of the files that
    its job has written. If Spark runs a job twice (a retry, a slow executor), it returns the answer of one
    run.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._is_started = False
        self._sees_lake = False

    def start(self) -> None:
        """Start Python on the executors, and raise NoSpark if Arrow, numpy or Umbel is missing there."""
        if self._is_started:
            return
        try:
            self._collected("check", "", this_machine()[0])
        except PySparkException as error:
            raise NoSpark(f"Spark's executors cannot run Umbel ({_missing(error)}); {SHIP}") from None
        self._is_started = True

    def run(self, step: str, plan: str, count: int) -> Sequence[Answer]:
        """Run the jobs on executors. Raise NoSpark, UnreadFile or BuildFailed if one fails."""
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
    """Return a row for each job, with its answer as JSON."""

    def do(batches: Iterator[Any]) -> Iterator[Any]:
        from umbel.pipeline.folding import work  # imported on the executor

        for batch in batches:
            lines = [work(step, plan, number).decode() for number in batch.column(0).to_pylist()]
            yield pa.RecordBatch.from_pydict({"told": pa.array(lines, pa.string())})

    return spark.range(0, count, 1, count).mapInArrow(do, "told string")


def _answer(line: bytes) -> Answer:
    return msgspec.json.decode(line, type=Answer)


def _missing(error: PySparkException) -> str:
    """Return the error that Python reports on an executor, which Spark's error contains."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "Error:" in line or "Cannot run program" in line]
    return (named[0] if named else gist_of(error))[:300]
