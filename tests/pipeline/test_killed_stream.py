"""D2: a stream whose process is killed with SIGKILL between and within batches equals a batch build."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.lakes import record
from tests.pipeline.test_equality import random_histories
from tests.pipeline.test_follow import contents, counted, look
from tests.waiting import wait_until
from umbel.events.tables import TABLES
from umbel.pipeline.jobs.build import build

SOAK = bool(os.environ.get("UMBEL_SOAK"))
KILLS, HISTORIES, FILES = (50, 6_000, 400) if SOAK else (1, 40, 6)
FIGURES = TABLES if SOAK else ("tasks", "attempts")
CONF = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}


def following(lake: Path, log: Path) -> "subprocess.Popen[bytes]":
    options = [part for name, value in CONF.items() for part in ("--conf", f"{name}={value}")]
    command = [
        sys.executable,
        "-m",
        "umbel.cli.main",
        "history",
        "build",
        "--lake",
        str(lake),
        "--master",
        "local[2]",
    ]
    command += [
        "--follow",
        "--until-caught-up",
        "--tables",
        ",".join(FIGURES),
        "--files-per-batch",
        "2",
        *options,
    ]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


@pytest.mark.scenario
@pytest.mark.timeout(3600 if SOAK else 400)
def test_a_stream_killed_again_and_again_equals_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    lake, log = tmp_path / "lake", tmp_path / "stream.log"
    events = counted(random_histories(HISTORIES))
    for number in range(FILES):
        record(lake, f"{number:04d}", [*events[number::FILES], *chance.choices(events, k=5)])
    parts = lake / "stream/batches"
    for kill in range(KILLS):
        # It dies with a batch just done, or with one of which only a part is written.
        sign = chance.choice(["*/_done.json", "*/states/_SUCCESS", "*/others/*"])
        before = set(parts.glob(sign))
        process = following(lake, log)
        try:
            wait_until(
                lambda: set(parts.glob(sign)) - before or process.poll() is not None,  # noqa: B023
                deadline_s=300,
                what=f"life {kill} to come to {sign}",
            )
        finally:
            process.kill()
            process.wait()
    last = following(lake, log)
    try:
        assert last.wait(600) == 0, log.read_text()
    finally:
        last.kill()
        last.wait()
    streamed = contents(spark, lake)
    build(spark, lake, look(lake), only=list(FIGURES))
    assert contents(spark, lake) == streamed
    assert set(streamed) == set(FIGURES)
