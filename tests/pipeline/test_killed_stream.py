"""D2: a stream killed with SIGKILL again and again, wherever it is, equals a batch build.

Events come in while it lives and while it does not. Each life is killed at a moment that is drawn: new
files half dealt out, a segment half written, tables half joined, a publication, waiting. What it was really
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

from benchmarks._pipeline.synthetic import slices
from tests.pipeline.lakes import HOUR, arrow_schema, read, table_of
from tests.pipeline.leavings import Leavings
from tests.pipeline.test_build import HereEngine
from tests.pipeline.test_equality import random_histories
from tests.pipeline.test_follow import contents, look, numbered
from tests.waiting import wait_until
from umbel.events.tables import TABLES
from umbel.pipeline import io
from umbel.pipeline.build import build

SOAK = bool(os.environ.get("UMBEL_SOAK"))
KILLS, EVENTS, HISTORIES, FILES = (50, 200_000, 500, 200) if SOAK else (2, 2_000, 20, 9)
TWICE = 0.05
# At full count Spark runs the jobs, else processes of this machine, which start within a second.
ENGINE = ["--master", "local[2]", "--conf", "spark.driver.memory=1g"] if SOAK else ["--engine", "local"]
# The command as it is, but with limits that this lake reaches: else segments would be sealed too rarely.
COMMAND = f"""
from umbel.fold import buckets
from umbel.pipeline import plan
buckets.SEGMENT_EVENTS, buckets.HOT_EVENTS = {EVENTS // 50}, {EVENTS // 10}
plan.TIERS, plan.RECENT_MAX = ((0, {EVENTS // 10}, 3), ({EVENTS // 10}, {EVENTS}, 2)), 4
from umbel.cli.main import main
main()
"""
AIMS = (
    "tables/2*/scratch/deal.json",  # new files begun
    "tables/2*/scratch/*.arrow",  # some dealt out
    "tables/2*/kept/part-*",  # folding begun
    "tables/2*/timeline/part-*",  # a segment half written
    "tables/2*/scratch/since.parquet",  # nodes folded
    "tables/2*/scratch/join.json",  # joining begun
    "tables/2*/state.json",  # all written
    "tables/_manifest/0*.json",  # published
)
JITTER_S = (0.0, 0.0, 0.05, 0.5, 2.0) if SOAK else (0.0, 0.02)


class Stream:
    """`umbel history build --follow`, alive until it is killed."""

    def __init__(self, lake: Path, log: Path, *options: str) -> None:
        command = [sys.executable, "-c", COMMAND, "history", "build", "--lake", str(lake)]
        command += [*ENGINE, "--follow", "--every", "0.1", *options]
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
    wire = numbered(random_histories(HISTORIES))
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
def test_a_stream_killed_again_and_again_equals_a_batch(tmp_path: Path) -> None:
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
    manifest, streamed = io.newest_manifest(lake), contents(lake)
    batch = build(HereEngine(), lake, look(lake), afresh=True)
    assert contents(lake) == streamed
    assert set(streamed) == set(TABLES)
    events, tasks = truth_of(lake)
    assert manifest is not None and streamed["tasks"].total() == tasks
    assert (manifest.origin, manifest.events, manifest.rows) == ("stream", batch.events, batch.rows)
    assert streamed["timeline"].total() == events
    if SOAK:
        assert landed.keys() >= {"deal", "fold", "join"}, landed


def live_and_die(
    lake: Path, log: Path, chance: random.Random, record: Callable[[], object], *, what: str
) -> str:
    """One life of the stream; what it was doing when it was killed. `record`: while it lives."""
    sign = chance.choice(AIMS)
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
