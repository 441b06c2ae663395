"""D3: on a real Spark cluster, a master and two workers from the installed package, tables are the same."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil
import pyspark
import pytest
from pyspark.sql import SparkSession

from tests.fold.running import tables_of
from tests.pipeline.lakes import record
from tests.pipeline.test_build import counted, published, recorded
from tests.pipeline.test_equality import random_histories
from tests.pipeline.test_fold import tables_in
from tests.pipeline.test_follow import contents, look, numbered
from tests.pipeline.test_killed_build import BUILDS, KILLS, assert_only_what_was_told, command_of, killer
from tests.pipeline.test_s3 import put
from tests.servers.s3 import S3Server
from tests.waiting import wait_until
from umbel.events.tables import TABLES
from umbel.pipeline.build import build
from umbel.pipeline.engines import SparkEngine
from umbel.pipeline.java import find_java_home
from umbel.stores.interface import Where

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="six more JVMs; UMBEL_SOAK=1 runs it"),
]

BIN = Path(pyspark.__file__).parent / "bin"
# Small buckets: a build of a few events has many jobs.
SUBMITTED = """
from umbel.cli.main import main
from umbel.fold import buckets

buckets.BUCKET_EVENTS = 150
main()
"""
START_S = 200.0
QUICK_START = "-XX:TieredStopAtLevel=1"
CONF = {
    "spark.driver.extraJavaOptions": QUICK_START,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.executor.extraJavaOptions": QUICK_START,
    "spark.executor.memory": "512m",
    "spark.pyspark.python": sys.executable,
    "spark.ui.enabled": "false",
}
SPECULATING = {
    "spark.speculation": "true",
    "spark.speculation.interval": "20ms",
    "spark.speculation.minTaskRuntime": "0ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.1",
}
"""A job that takes longer than half of them is run a second time when there is nothing else to do."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[str]:
    """The address of a master with two workers of one core each."""
    environment = os.environ | {
        "JAVA_HOME": str(find_java_home(os.environ, folder / "java")),
        "SPARK_DAEMON_MEMORY": "128m",
        "SPARK_DAEMON_JAVA_OPTS": "-Dspark.master.rest.enabled=false -XX:TieredStopAtLevel=1",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
    }
    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> Path:
            log = folder / f"{name}.log"
            with log.open("wb") as file:
                command = [str(BIN / "spark-class"), *arguments]
                process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return log

        deploy = "org.apache.spark.deploy"
        log = start(
            "master", f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"
        )
        started = re.compile(r"Starting Spark master at (spark://\S+)")
        said = wait_until(lambda: started.search(log.read_text()), deadline_s=START_S, what="the master")
        for name in ("one", "two"):
            place = ("--work-dir", str(folder / name), "--webui-port", "0")
            start(name, f"{deploy}.worker.Worker", "--cores", "1", "--memory", "600m", *place, said[1])
        wait_until(
            lambda: log.read_text().count("Registering worker") == 2, deadline_s=START_S, what="two workers"
        )
        yield said[1]


class Submitted:
    """`umbel history build`, submitted to the cluster with spark-submit."""

    def __init__(self, cluster: str, folder: Path) -> None:
        self._cluster = cluster
        self._script = folder / "umbel_submitted.py"
        self._script.write_text(SUBMITTED)

    def build(self, lake: Where, conf: Mapping[str, str], *asked: str) -> str:
        """What Spark said."""
        options = [part for name, value in {**CONF, **conf}.items() for part in ("--conf", f"{name}={value}")]
        ran = subprocess.run(
            [
                *(str(BIN / "spark-submit"), "--master", self._cluster, *options, str(self._script)),
                *("history", "build", "--lake", str(lake), "--json", *asked),
            ],
            env=os.environ | {"PYSPARK_DRIVER_PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stderr

    def executors(self) -> list[psutil.Process]:
        """Java's processes that run jobs of this cluster."""
        below = psutil.Process().children(recursive=True)
        return [one for one in below if any("ExecutorBackend" in word for word in command_of(one))]


@pytest.fixture(scope="module")
def submitted(cluster: str, folder: Path) -> Submitted:
    return Submitted(cluster, folder)


def test_a_cluster_makes_the_same_tables(
    spark: SparkSession, submitted: Submitted, folder: Path, tmp_path: Path
) -> None:
    """D3: submitted to a standalone cluster with spark-submit, both workers at work."""
    lake = tmp_path / "lake"
    events = numbered(random_histories(20))
    for number in range(4):
        record(lake, f"{number:03d}", [*events[number::4], *events[:number]])
    build(SparkEngine(spark), lake, look(lake))
    local = contents(lake)
    submitted.build(lake, {}, "--afresh")
    assert contents(lake) == local
    assert list(local) == list(TABLES)
    for name in ("one", "two"):
        assert list((folder / name).glob("app-*/*")), f"the worker {name} had nothing to do"


def test_a_cluster_builds_from_s3(submitted: Submitted, s3: S3Server, s3_lake: str) -> None:
    parts = tables_in(seed=19)
    for number, part in enumerate(parts):
        put(s3_lake, f"{number:03}", part)
    submitted.build(s3_lake, {f"spark.executorEnv.{name}": value for name, value in s3.environment.items()})
    assert published(s3_lake) == counted(tables_of(parts, buckets=1))


def test_executors_that_are_killed_change_nothing(submitted: Submitted, tmp_path: Path) -> None:
    """D2: each when it has written and not told of it; what is slow is run twice as well."""
    lake = tmp_path / "lake"
    parts = tables_in(seed=23)
    recorded(lake, parts)
    expected = counted(tables_of(parts, buckets=1))
    twice = 0
    for _ in range(BUILDS):
        with killer(lake / "tables", submitted.executors) as killed:
            said = submitted.build(lake, SPECULATING, "--afresh")
        assert len(killed) == KILLS
        assert published(lake) == expected
        assert_only_what_was_told(lake)
        twice += said.count("as speculatable")
    assert twice
