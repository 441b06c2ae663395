"""A lake in S3 says what one in a folder says, and keeps what it has when S3 fails."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.brokers.under_test import run
from tests.cli.conftest import umbel
from tests.cli.running import Umbel
from tests.events.histories import attempt
from tests.fold.running import tables_of
from tests.history.recording import LogWriter, Teller, digests_of
from tests.history.test_recorder import opened, recorded
from tests.pipeline.lakes import HOUR, read, table_of
from tests.pipeline.test_build import HereEngine, Rows, counted, published
from tests.pipeline.test_fold import tables_in
from tests.servers.s3 import S3Server
from tests.waiting import wait_until
from umbel.events.tables import TABLES
from umbel.history.housekeeping import compact, expire
from umbel.history.lake import Lake
from umbel.history.query import Tables
from umbel.history.query import read as ask
from umbel.pipeline import BuildFailed, io
from umbel.pipeline.build import build
from umbel.pipeline.engines import SparkEngine
from umbel.pipeline.io import look_into
from umbel.stores import s3 as leases
from umbel.stores.interface import Where
from umbel.stores.local import store_at

__all__ = ["umbel"]  # a fixture
ROOT = Path(__file__).parents[2]
HISTORY = attempt(0, "sent", "received", "started", "succeeded")


@pytest.fixture(scope="module")
def parts() -> list[pa.Table]:
    return tables_in(seed=17)


def put(lake: Where, name: str, table: pa.Table) -> None:
    draft = store_at(lake).draft(f"{HOUR}/ev-test-1-{name}.parquet")
    pq.write_table(table, draft.sink)
    draft.publish(f"{HOUR}/ev-test-1-{name}.parquet")


def built(lake: Where, engine: HereEngine | None = None) -> Rows:
    build(engine or HereEngine(), lake, look_into(lake, Lake(lake).event_files()))
    return published(lake)


def everything(tables: Tables) -> dict[str, list[tuple[Any, ...]]]:
    return {name: sorted(tables.ask(f"select * from {name}").rows, key=repr) for name in TABLES}


def test_a_lake_in_s3_says_what_one_in_a_folder_says(
    s3_lake: str, tmp_path: Path, parts: Sequence[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As recorded, written by bucket, extended by what is new, and with a day dropped; in every table."""
    monkeypatch.setattr("umbel.fold.buckets.BUCKET_EVENTS", 300)
    monkeypatch.setattr("umbel.pipeline.build.FEW_EVENTS", 10**9)
    told: list[list[Rows]] = []
    for lake in (tmp_path / "lake", s3_lake):
        for number, part in enumerate(parts[:2]):
            put(lake, f"{number:03}", part)
        rows = [built(lake)]
        report = compact(Lake(lake), grace_s=0)
        assert (len(report.replaced), Lake(lake).raw_files()) == (2, [])
        put(lake, "002", parts[2])
        engine = HereEngine()
        rows.append(built(lake, engine))
        assert engine.steps[0] == "deal", "what housekeeping wrote is no news, the file is"
        told.append(rows)
    assert told[0] == told[1]
    assert told[1][1] == counted(tables_of(parts, buckets=1))
    assert ask(s3_lake, everything) == ask(tmp_path / "lake", everything)
    report = expire(Lake(s3_lake), 1)
    assert (report.dropped_days, Lake(s3_lake).event_files()) == (["2026-11-15"], [])
    assert expire(Lake(s3_lake), 1).dropped_days == []


def test_spark_builds_from_s3(
    spark: SparkSession, s3: S3Server, s3_lake: str, parts: Sequence[pa.Table]
) -> None:
    for number, part in enumerate(parts):
        put(s3_lake, f"{number:03}", part)
    environment = spark.sparkContext.environment
    before = dict(environment)
    environment |= s3.environment  # as a cluster has it: spark.executorEnv.AWS_…
    try:
        build(SparkEngine(spark), s3_lake, look_into(s3_lake, Lake(s3_lake).event_files()))
    finally:
        environment.clear()
        environment |= before
    assert published(s3_lake) == counted(tables_of(parts, buckets=1))
    current = json.loads(store_at(s3_lake).read("tables/current.json"))["tables"]
    assert set(current) == set(TABLES)
    there = {f"{s3_lake}/{name}" for name in store_at(s3_lake).names("tables")}
    assert {name for names in current.values() for name in names} <= there


def guided(lake: str, url: str) -> list[list[str]]:
    """What the guide tells to type, for this lake and this broker."""
    guide = (ROOT / "docs/history.md").read_text().split("### A lake in S3")[1]
    lines = [line for line in guide.split("```")[1].splitlines() if line.startswith("$ umbel ")]
    typed = [line.removeprefix("$ umbel ").replace("s3://my-bucket/umbel", lake) for line in lines]
    return [line.replace("redis://localhost/0", url).split() for line in typed]


def test_what_is_recorded_into_s3_is_read_by_every_command(
    umbel: Umbel, s3_lake: str, tmp_path: Path
) -> None:
    """By the commands of the guide. What they say is what they say of a copy in a folder."""
    told, url = Teller().tell(40), f"sqlite:///{tmp_path / 'queue.db'}"
    record, build, tasks = guided(s3_lake, url)
    with LogWriter(url) as log:
        log.register()
        log.log(told)
        command = [sys.executable, "-m", "umbel.cli.main", *record, "--rotate", "0.2"]
        recorder = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            log.wait_until_recorded()
            recorder.terminate()
            assert recorder.wait(30) == 0
        finally:
            recorder.kill()
    assert [umbel(*command).code for command in (build, tasks)] == [0, 0]
    store, copy = store_at(s3_lake), tmp_path / "copy"
    raw = [pq.read_table(store.open(name)) for name in Lake(s3_lake).event_files()]
    assert digests_of(told) <= set(pa.concat_tables(raw).column("digest").to_pylist())
    for name in store.names(""):
        store_at(copy).put(name, store.read(name))
    said: dict[Where, list[Any]] = {s3_lake: [], copy: []}
    store_at(copy).delete_folder("tables")
    for lake, answers in said.items():
        at = ("--lake", str(lake))
        ran = umbel("history", "build", *at, "--engine", "local", "--follow", "--until-caught-up", "--json")
        assert ran.code == 0, ran
        listed = umbel("history", "tasks", *at, "--json")
        task_id = json.loads(listed.out)[0]["task_id"]
        report = umbel("history", "report", *at, "--html", str(tmp_path / "report.html"), "--json")
        shown = umbel("task", "show", task_id, *at, "--json")
        status = umbel("record", "status", *at, "--json")
        answers += [json.loads(one.out) for one in (listed, report, shown)]
        answers += [json.loads(status.out) | {"lake": ""}, ask(lake, everything)]
    assert said[s3_lake] == said[copy]
    refused = umbel("history", "duckdb", str(tmp_path / "x.duckdb"), "--lake", s3_lake)
    assert refused.code == 1 and "use `umbel history sql`" in refused.err


def test_a_recorder_goes_on_when_s3_answers_again(
    s3: S3Server, s3_lake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: what could not be written is read again; nothing is acknowledged before it is in S3."""
    monkeypatch.setattr("umbel.stores.s3.ATTEMPTS", 1)
    told, url = Teller().tell(20), f"sqlite:///{tmp_path / 'queue.db'}"
    with LogWriter(url) as log:
        log.register()
        log.log(told)
    s3.order({"method": "PUT", "with": "/events/", "status": 503, "times": 1})

    async def scenario() -> None:
        broker = await opened(url)
        await recorded(broker, s3_lake)
        await broker.close()

    run(scenario())
    store = store_at(s3_lake)
    raw = [pq.read_table(store.open(name)) for name in Lake(s3_lake).event_files()]
    assert digests_of(told) <= set(pa.concat_tables(raw).column("digest").to_pylist())
    assert sum(one.startswith("PUT") and "/events/" in one for one in s3.asked()) >= 2


@pytest.mark.parametrize("status", [503, 403])
def test_a_build_that_s3_refuses_says_so_in_one_line_and_sets_nothing_aside(
    umbel: Umbel, s3: S3Server, s3_lake: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("umbel.stores.s3.ATTEMPTS", 1)
    monkeypatch.setattr("umbel.stores.s3.READ_AGAIN_S", 0.0)
    put(s3_lake, "1", table_of(read(HISTORY)))
    before = built(s3_lake)
    put(s3_lake, "2", table_of(read(attempt(1, "received"))))
    files = Lake(s3_lake).event_files()
    found = look_into(s3_lake, files)
    for which in ({"with": "/events/"}, {"with": "/tables/"}):
        s3.order({"method": "GET", **which, "status": status, "times": 10**6})
        with pytest.raises(BuildFailed, match=r"nothing was published: .*S3") as raised:
            build(HereEngine(), s3_lake, found, afresh="events" in which["with"])
        assert len(str(raised.value).splitlines()) == 1
    ran = umbel("history", "build", "--lake", s3_lake, "--engine", "local")
    assert ran.code == 1 and "S3" in ran.err and len(ran.err.splitlines()) == 1
    s3.order()
    assert (published(s3_lake), Lake(s3_lake).event_files()) == (before, files)


def test_a_build_that_is_killed_before_it_publishes_leaves_the_one_before(
    umbel: Umbel, s3: S3Server, s3_lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(s3_lake, "1", table_of(read(HISTORY)))
    before = built(s3_lake)
    put(s3_lake, "2", table_of(read(attempt(1, "received", uuid="other"))))
    s3.order({"method": "PUT", "with": "_manifest/000002", "wait_s": 120, "times": 1})
    command = [sys.executable, "-m", "umbel.cli.main", "history", "build", "--engine", "local"]
    process = subprocess.Popen([*command, "--lake", s3_lake], stdout=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: any("_manifest/000002" in one for one in s3.asked()), deadline_s=120, what="a manifest"
        )
    finally:
        process.kill()
        process.wait()
    assert (published(s3_lake), io.newest_number(s3_lake)) == (before, 1)
    ran = umbel("history", "build", "--lake", s3_lake, "--engine", "local")
    assert (
        ran.code == 1
        and f"process {process.pid} on" in ran.err
        and "if it died, its lease ends within 60 s" in ran.err
    )
    with monkeypatch.context() as later:
        later.setattr(leases, "rivals", lambda own, at, _: ([], [name for name in at if name != own]))
        ran = umbel("history", "build", "--lake", s3_lake, "--engine", "local", "--json")
    assert (json.loads(ran.out)["tasks"], io.newest_number(s3_lake)) == (2, 2)
    assert len(store_at(s3_lake).folders("tables")) == 1 + io.BUILDS_KEPT, "what it had written is gone"


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_is_not_there_is_one_line_for_every_command(umbel: Umbel) -> None:
    at = ("--lake", "s3://no-such-bucket/x")
    for command in (
        ["history", "build", *at, "--engine", "local"],
        ["history", "tasks", *at],
        ["record", "status", *at],
        ["record", "compact", *at],
        ["record", *at, "--broker", "sqlite:///queue.db"],
    ):
        ran = umbel(*command)
        lines = [line for line in ran.err.splitlines() if "there is no such bucket; create it" in line]
        assert (ran.code, len(lines)) == (1, 1), ran
