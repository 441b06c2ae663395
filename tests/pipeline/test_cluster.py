"""D3: on a real Spark cluster, a master and two workers from the installed package, tables are the same."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from tests.pipeline.lakes import record
from tests.pipeline.test_equality import random_histories
from tests.pipeline.test_follow import contents, counted, look
from tests.waiting import wait_until
from umbel.events.tables import TABLES
from umbel.pipeline.engines import SparkEngine
from umbel.pipeline.java import find_java_home
from umbel.pipeline.jobs.build import build

BIN = Path(pyspark.__file__).parent / "bin"
SUBMITTED = "from umbel.cli.main import main\n\nmain()\n"
START_S = 200.0
# Each table is some seconds of six JVMs on two cores.
WANTED = list(TABLES) if os.environ.get("UMBEL_SOAK") else ["tasks"]
QUICK_START = "-XX:TieredStopAtLevel=1"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a master with two workers of one core each."""
    environment = os.environ | {
        "JAVA_HOME": str(find_java_home(os.environ, tmp_path / "java")),
        "SPARK_DAEMON_MEMORY": "128m",
        "SPARK_DAEMON_JAVA_OPTS": "-Dspark.master.rest.enabled=false -XX:TieredStopAtLevel=1",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path / "local"),
    }
    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> Path:
            log = tmp_path / f"{name}.log"
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
            place = ("--work-dir", str(tmp_path / name), "--webui-port", "0")
            start(name, f"{deploy}.worker.Worker", "--cores", "1", "--memory", "600m", *place, said[1])
        wait_until(
            lambda: log.read_text().count("Registering worker") == 2, deadline_s=START_S, what="two workers"
        )
        yield said[1]


@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="three more JVMs; UMBEL_SOAK=1 runs it")
def test_a_cluster_makes_the_same_tables(spark: SparkSession, cluster: str, tmp_path: Path) -> None:
    """D3: submitted to a standalone cluster with spark-submit, both workers at work."""
    lake = tmp_path / "lake"
    events = counted(random_histories(20))
    for number in range(4):
        record(lake, f"{number:03d}", [*events[number::4], *events[:number]])
    build(SparkEngine(spark), lake, look(lake), only=WANTED)
    local = contents(lake)

    script = tmp_path / "umbel_submitted.py"
    script.write_text(SUBMITTED)
    settings = {
        "spark.executor.memory": "512m",
        "spark.pyspark.python": sys.executable,
        "spark.ui.enabled": "false",
    }
    settings |= {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": QUICK_START,
        "spark.executor.extraJavaOptions": QUICK_START,
    }
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    submit = [str(BIN / "spark-submit"), "--master", cluster, *options, str(script)]
    ran = subprocess.run(
        [*submit, "history", "build", "--lake", str(lake), "--tables", ",".join(WANTED), "--json"],
        env=os.environ | {"PYSPARK_DRIVER_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert contents(lake) == local
    assert list(local) == WANTED
    for name in ("one", "two"):
        assert list((tmp_path / name).glob("app-*/*")), f"the worker {name} had nothing to do"
