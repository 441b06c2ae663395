"""D2: a stream killed with SIGKILL again and again, wherever it is, equals a batch build.

Events come in while it lives and while it does not. Each life is killed at a moment that is drawn: a
batch half written, written and not told, a fold, a publication half made, waiting. What it was really
doing is read from what it left, and counted. Sometimes Python dies, sometimes its Java, mostly both.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from benchmarks._pipeline.synthetic import slices
from tests.pipeline.lakes import HOUR, arrow_schema, read, table_of
from tests.pipeline.leavings import Leavings
from tests.pipeline.test_equality import random_histories
from tests.pipeline.test_follow import contents, counted, look
from tests.waiting import wait_until
from umbel.events.tables import TABLES
from umbel.pipeline import io
from umbel.pipeline.engines import SparkEngine
from umbel.pipeline.jobs.build import build

SOAK = bool(os.environ.get("UMBEL_SOAK"))
KILLS, EVENTS, HISTORIES, FILES = (50, 200_000, 500, 200) if SOAK else (1, 2_000, 20, 6)
FIGURES = tuple(TABLES) if SOAK else ("tasks", "attempts")
TWICE = 0.05
CONF = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}
# The command as it is, but with batches put together after three: else that would be seen too rarely.
COMMAND = """
from umbel.pipeline.jobs import partials
partials.BATCHES_MAX = 3
from umbel.cli.main import main
main()
"""
AIMS = (
    "stream/checkpoint/offsets/*",  # a batch planned
    "stream/batches/*/states/_temporary",  # a batch begun
    "stream/batches/*/others/*",  # a part of a batch
    "stream/batches/*/marks/_SUCCESS",  # all parts of a batch
    "stream/batches/*/_done.json",  # a batch told
    "stream/base-*/states/*",  # a fold begun
    "stream/base-*/marks/_SUCCESS",  # a fold written
    "tables/2*/tasks/_temporary",  # a publication begun
    "tables/2*/attempts/_SUCCESS",  # half a publication
    "tables/2*/{last}/_SUCCESS",  # all tables of a publication
    "tables/_manifest/0*.json",  # a publication
)
JITTER_S = (0.0, 0.0, 0.05, 0.5, 2.0)


class Stream:
    """`umbel history build --follow`, alive until it is killed."""

    def __init__(self, lake: Path, log: Path, *options: str) -> None:
        conf = [part for name, value in CONF.items() for part in ("--conf", f"{name}={value}")]
        command = [sys.executable, "-c", COMMAND, "history", "build", "--lake", str(lake)]
        command += ["--master", "local[2]", "--tables", ",".join(FIGURES), *conf]
        command += ["--follow", "--every", "0.1", "--files-per-batch", "1", *options]
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    def live_on(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def kill(self, whom: str) -> None:
        """`whom`: python, java or both of them."""
        java = [one for one in psutil.Process(self.process.pid).children(recursive=True) if is_java(one)]
        if whom == "both" or not java:
            os.killpg(self.process.pid, signal.SIGKILL)
        elif whom == "python":
            self.process.kill()
        else:
            java[0].kill()
        self.process.wait(60)
        psutil.wait_procs(java, timeout=60)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill("both")


def is_java(process: psutil.Process) -> bool:
    try:
        return "java" in process.name()
    except psutil.Error:
        return False


def recorded(lake: Path, chance: random.Random) -> Iterator[Path]:
    """The lake's files, each there when it is asked for; some events are in several."""
    wire = counted(random_histories(HISTORIES))
    schema = arrow_schema()
    told = [table_of(read(wire)), *(one.cast(schema) for one in slices(EVENTS - len(wire)))]
    events = pa.concat_tables(told)
    rows = [*range(events.num_rows), *chance.choices(range(events.num_rows), k=int(EVENTS * TWICE))]
    chance.shuffle(rows)
    (lake / HOUR).mkdir(parents=True)
    for number in range(FILES):
        path = lake / HOUR / f"ev-test-1-{number:06d}.parquet"
        pq.write_table(events.take(pa.array(rows[number::FILES])), hidden := path.with_name(f".{path.name}"))
        hidden.rename(path)
        yield path


def truth_of(lake: Path) -> tuple[int, int]:
    """How many events and tasks there are, each once, read without Spark."""
    columns = ["uuid", "hostname", "digest", "slot"]
    files = sorted((lake / HOUR).glob("ev-*.parquet"))
    table = pa.concat_tables([pq.read_table(path, columns=columns) for path in files])
    subject = pc.coalesce(table["uuid"], table["hostname"])
    once = pa.table({"subject": subject, "digest": table["digest"]}).group_by(["subject", "digest"])
    tasks = table.filter(pc.is_valid(table["slot"]))["uuid"]
    return once.aggregate([]).num_rows, pc.count_distinct(tasks).as_py()


@pytest.mark.scenario
@pytest.mark.timeout(7200 if SOAK else 400)
def test_a_stream_killed_again_and_again_equals_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    """D2: nothing lost, nothing doubled, in every table, wherever it was killed."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    lake, log = tmp_path / "lake[s] {1,2}*?", tmp_path / "stream.log"  # as it is, not as a pattern
    files, landed = recorded(lake, chance), Counter[str]()
    for kill in range(KILLS):
        for _ in range(FILES // (KILLS + 1)):
            next(files)
        landed[live_and_die(lake, log, chance, lambda: next(files, None), what=f"life {kill}")] += 1
    for _ in files:
        pass
    stream = Stream(lake, log, "--until-caught-up")
    try:
        assert stream.process.wait(900) == 0, log.read_text()[-4000:]
    finally:
        stream.end()
    print(f"killed {KILLS} times: {dict(landed.most_common())}")
    assert not list(Path().glob("2}*")), "Spark took the comma for the end of its folder's name"
    manifest, streamed = io.newest_manifest(lake), contents(spark, lake)
    batch = build(SparkEngine(spark), lake, look(lake), only=list(FIGURES))
    assert contents(spark, lake) == streamed
    assert set(streamed) == set(FIGURES)
    events, tasks = truth_of(lake)
    assert manifest is not None and len(streamed["tasks"]) == tasks
    assert (manifest.origin, manifest.events, manifest.rows) == ("stream", batch.events, batch.rows)
    if SOAK:
        assert manifest.events >= EVENTS and len(streamed["timeline"]) == events
        assert {name.split(":")[0] for name in landed} >= {"batch", "fold", "publication"}, landed


def live_and_die(
    lake: Path, log: Path, chance: random.Random, record: Callable[[], object], *, what: str
) -> str:
    """One life of the stream; what it was doing when it was killed. `record`: while it lives."""
    sign = chance.choice(AIMS if SOAK else AIMS[:5]).format(last=FIGURES[-1])
    whom = chance.choice(["python", "java", "both", "both"])
    leavings, before = Leavings(lake), set(lake.glob(sign))
    stream = Stream(lake, log)
    try:
        wait_until(leavings.are_new, deadline_s=300, what=f"{what} to begin, {log}")
        record()
        wait_until(
            lambda: set(lake.glob(sign)) - before or stream.process.poll() is not None,
            deadline_s=300,
            what=f"{what} to come to {sign}, {log}",
        )
        assert stream.process.poll() is None, log.read_text()[-4000:]
        stream.live_on(chance.choice(JITTER_S))
        stream.kill(whom)
    finally:
        stream.end()
    assert "Traceback" not in log.read_text(), "that Java has ended is said in one line"
    print(f"{what}: {whom} killed, {leavings.phase()}", flush=True)
    return leavings.phase()
