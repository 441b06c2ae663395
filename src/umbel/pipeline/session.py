"""Session: where Spark runs, and the only place that configures it.

On this machine Spark gets a share of its memory and all of its cores; anywhere else (`--master`) the
cluster's own configuration holds. Spark gives out jobs and reads no tables, so nothing that they mean depends
on how it is configured. `sc://` is Spark Connect: the session lives in a server, so nothing about the JVM can
be set.
"""

import contextlib
import logging
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from umbel.pipeline.faults import JavaExited, NoSpark
from umbel.pipeline.java import find_java_home

MEBIBYTE = 1024**2
HEAP_MAX_MIB = 1024
"""Of the driver on this machine: Python's processes do the work, beside Java."""
HEAP_MIN_MIB = 768
CONNECT_PORT = 15002
REACH_S = 10.0
QUICK_JAVA = "-XX:TieredStopAtLevel=1"
"""Java only gives out jobs here: to compile it further takes a third of the time of a short build."""
KEEPS_MEMORY: Mapping[str, str] = {
    "MIMALLOC_PURGE_DELAY": "-1",  # Arrow's
    "MALLOC_MMAP_THRESHOLD_": str(32 * MEBIBYTE),
    "MALLOC_TRIM_THRESHOLD_": str(256 * MEBIBYTE),  # numpy's
}
"""Variables of processes that do jobs: what a step of one has freed the next needs. To give it back to the
system and to get it again, cleared, takes an eighth of a build's CPU."""
LOG = "spark.log"
"""What Java says, in the work folder."""

LAPTOP: Mapping[str, str] = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",  # names and addresses of laptops change while they run
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


def laptop_conf(*, memory_bytes: int) -> dict[str, str]:
    """For this machine: a third of its memory within limits."""
    heap_mib = min(HEAP_MAX_MIB, max(HEAP_MIN_MIB, memory_bytes // MEBIBYTE // 3))
    return {**LAPTOP, "spark.driver.memory": f"{heap_mib}m"}


def this_machine() -> tuple[int, int]:
    """Its cores that we may use, and its memory in bytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def spark_session(
    master: str | None,
    *,
    work_folder: Path,
    conf: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """A session for one job, stopped with it. `work_folder`: on the lake's disk, for what does not
    fit into memory, and for what Java says."""
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
    """The folder by a name that Spark does not take for the names of two."""
    if "," not in str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="umbel-spark-") as place:
        link = Path(place) / "work"
        link.symlink_to(folder.resolve())
        yield link


def shown(master: str | None) -> str:
    """Without the options of an address of Spark Connect, among which is its token."""
    return str(master).partition(";")[0]


def is_connect(master: str | None) -> bool:
    return master is not None and master.startswith("sc://")


def _open(
    master: str | None, *, here: Mapping[str, str], work_folder: Path, conf: dict[str, str]
) -> SparkSession:
    """`here`: what holds if Spark runs on this machine."""
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
    """Stop the session in the end. That Java has exited is told once, to what asked it for something: Py4J
    and the end of the session would write about it too, as would PySpark's server for accumulators."""
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
    """Spark's own client retries for many minutes before it reports that no server answers."""
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
    """While the JVM is started: it inherits our stderr, and prints warnings that users cannot act on."""
    with log.open("ab") as file:
        kept = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _last_line(log: Path) -> str:
    said = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in said.splitlines() if line.strip()]
    return f"; last log line: {lines[-1][:300]}" if lines else ""
