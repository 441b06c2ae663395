"""Session: where Spark runs, and the only place that configures it.

On this machine Spark gets a share of its memory and all of its cores; anywhere else (`--master`) the
cluster's own configuration holds, and only what the tables' meaning depends on is set: time in UTC,
timestamps in microseconds. `sc://` is Spark Connect: the session lives in a server, so nothing about
the JVM can be set.

`spark.sql.execution.useObjectHashAggregateExec` is off: the registers are sorted by task anyway, and
an aggregation that first tries to hash them sorts what it could not hold a second time. Adaptive
planning is off: it would not know how what is kept on disk between two tables is dealt out, and exchange
it again for each of them; how many partitions there are is said by the lake's size instead.
"""

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from umbel.pipeline.faults import NoSpark
from umbel.pipeline.java import find_java_home

MEBIBYTE = 1024**2
HEAP_MAX_MIB = 4096
"""Of the driver on this machine; with what Java needs besides it stays below 6 GiB."""
HEAP_MIN_MIB = 768
FOLD_HEAP_MIB = 1024
"""The same where Python's processes do the work, beside Java."""
PARTITION_BYTES = 8 * MEBIBYTE
"""Of Parquet in the lake, which are some 100 MB of rows in memory."""
PARTITIONS_MAX = 4096
CONNECT_PORT = 15002
REACH_S = 10.0

MEANING: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.mergeSchema": "false",
    "spark.sql.execution.useObjectHashAggregateExec": "false",
    "spark.sql.adaptive.enabled": "false",
}
"""What the tables depend on, wherever Spark runs. A session can be given it at any time."""

LAPTOP: Mapping[str, str] = {
    **MEANING,
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",  # names and addresses of laptops change while they run
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}

TESTS: Mapping[str, str] = {
    **LAPTOP,
    "spark.master": "local[2]",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}


def laptop_conf(
    *, cores: int, memory_bytes: int, lake_bytes: int, heap_max_mib: int = HEAP_MAX_MIB
) -> dict[str, str]:
    """For this machine: a third of its memory within limits, and partitions that fit into it."""
    heap_mib = min(heap_max_mib, max(HEAP_MIN_MIB, memory_bytes // MEBIBYTE // 3))
    return {**LAPTOP, "spark.driver.memory": f"{heap_mib}m"} | partitions_conf(cores, lake_bytes)


def partitions_conf(cores: int, lake_bytes: int) -> dict[str, str]:
    """As many as the lake's bytes ask for, at least two for each core."""
    wanted = max(2 * cores, -(-lake_bytes // PARTITION_BYTES))
    return {"spark.sql.shuffle.partitions": str(min(PARTITIONS_MAX, wanted))}


def this_machine() -> tuple[int, int]:
    """Its cores that we may use, and its memory in bytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def spark_session(
    master: str | None,
    *,
    lake_bytes: int,
    work_folder: Path,
    conf: Mapping[str, str] | None = None,
    heap_max_mib: int = HEAP_MAX_MIB,
) -> Iterator[SparkSession]:
    """A session for one job, stopped with it. `work_folder`: on the lake's disk, for what does not
    fit into memory, and for what Java says."""
    work_folder.mkdir(parents=True, exist_ok=True)
    with _without_comma(work_folder) as work:
        cores, memory_bytes = this_machine()
        here = laptop_conf(
            cores=cores, memory_bytes=memory_bytes, lake_bytes=lake_bytes, heap_max_mib=heap_max_mib
        )
        if is_connect(master):
            spark = _connect(str(master), {**MEANING, **partitions_conf(cores, lake_bytes), **(conf or {})})
        else:
            spark = _open(master, here=here, work_folder=work, conf=dict(conf or {}))
        try:
            yield spark
        finally:
            with contextlib.suppress(PySparkException, Py4JError, OSError):  # its Java may have ended before
                spark.stop()


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
    chosen: dict[str, str] = dict(MEANING)
    if is_local:
        chosen = dict(here)
        chosen |= {
            "spark.local.dir": str(work_folder),
            "spark.sql.warehouse.dir": str(work_folder / "warehouse"),
        }
    if not submitted:
        quiet = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties')}"
        chosen["spark.driver.extraJavaOptions"] = quiet
    if master is not None:
        chosen["spark.master"] = master
    extra_java = conf.pop("spark.driver.extraJavaOptions", "")
    chosen |= conf
    if extra_java:
        chosen["spark.driver.extraJavaOptions"] = (
            f"{chosen.get('spark.driver.extraJavaOptions', '')} {extra_java}"
        )
    log = work_folder / "spark.log"
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
    return spark


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
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"; last log line: {lines[-1][:300]}" if lines else ""
