"""D3: Spark as a service (Spark Connect), by option: the same tables, or one clear refusal."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyspark
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from tests.events.histories import attempt
from tests.pipeline.lakes import record
from tests.pipeline.test_equality import random_histories
from tests.pipeline.test_follow import contents, look, numbered
from tests.servers.ports import free_port
from tests.waiting import wait_until
from umbel.cli.history.group import command
from umbel.events.tables import TABLES
from umbel.pipeline import io
from umbel.pipeline.build import build
from umbel.pipeline.engines import SparkEngine
from umbel.pipeline.java import find_java_home

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
START_S = 200.0
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.ui.enabled": "false",
    "spark.master": "local[2]",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server that was started from the installed package."""
    port = free_port()
    conf = CONF | {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.local.dir": str(tmp_path / "local"),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    options = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    environment = os.environ | {"JAVA_HOME": str(find_java_home(os.environ, tmp_path / "java"))}
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(SUBMIT), "--class", SERVER, *options], env=environment, stdout=file, stderr=file
        )

    def is_there() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    try:
        wait_until(is_there, deadline_s=START_S, what="the Spark Connect server")
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def umbel(lake: Path, master: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: one process has sessions of one kind only."""
    build_it = ["history", "build", "--lake", str(lake), "--master", master, *options]
    return subprocess.run(
        [sys.executable, "-m", "umbel.cli.main", *build_it],
        env={name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.scenario
@pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="two more JVMs; UMBEL_SOAK=1 runs it")
@pytest.mark.timeout(900)
def test_a_server_makes_the_same_tables(spark: SparkSession, server: str, tmp_path: Path) -> None:
    """D3: every table, by a client that has no Java; what the server cannot be told is refused."""
    pytest.importorskip("grpc_status")
    lake = tmp_path / "lake"
    events = numbered(random_histories(20))
    for number in range(4):
        record(lake, f"{number:03d}", [*events[number::4], *events[:number]])
    build(SparkEngine(spark), lake, look(lake))
    local, before = contents(lake), io.newest_number(lake)
    ran = umbel(lake, server, "--json", "--afresh")
    assert ran.returncode == 0, ran.stderr
    assert (ran.stderr, io.newest_number(lake)) == ("", before + 1)
    assert contents(lake) == local
    assert list(local) == list(TABLES)

    refused = umbel(lake, server, "--conf", "spark.sql.warehouse.dir=/elsewhere")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
    assert "spark.sql.warehouse.dir" in refused.stderr and server in refused.stderr
    assert io.newest_number(lake) == before + 1


@pytest.mark.parametrize(
    ("master", "problem"),
    [
        ("sc://127.0.0.1:{port}", "no Spark Connect server answers at sc://127"),
        ("sc://h:x", "is not an address"),
    ],
)
def test_a_server_that_is_not_there_is_said_at_once(tmp_path: Path, master: str, problem: str) -> None:
    """Spark's own client would try for ten minutes."""
    record(tmp_path, "1", attempt(0, "sent", "received"))
    asked = ["build", "--lake", str(tmp_path), "--master", master.format(port=free_port()) + "/;token=MARK"]
    result = CliRunner().invoke(command, asked, standalone_mode=False)
    assert problem in str(result.exception), result.output
    assert "MARK" not in str(result.exception)
    assert not (tmp_path / "tables").exists()
