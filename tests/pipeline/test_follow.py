"""D2: a stream over the lake publishes what a batch build over the same files does, also when killed."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.lakes import Wire, record
from tests.pipeline.test_equality import random_histories
from umbel.events.tables import TABLES
from umbel.pipeline import io
from umbel.pipeline.engines import SparkEngine
from umbel.pipeline.faults import BuildFailed
from umbel.pipeline.files import Found, look_into
from umbel.pipeline.jobs import partials as partials_module
from umbel.pipeline.jobs.build import build
from umbel.pipeline.jobs.follow import Following, follow
from umbel.pipeline.jobs.partials import Partials

NODE: Wire = {"hostname": "u1@a", "pid": 1, "inc": 7}


def counted(events: list[Wire]) -> list[Wire]:
    """As Umbel's senders number them, with two left out; heartbeats and an election among them."""
    others = [
        {"type": "worker-heartbeat", "clock": 5 + n, "timestamp": 10.0 + n, "freq": 2.0, **NODE, "seq": 2 * n}
        for n in range(20)
        if n not in {7, 8}
    ]
    elected: Wire = {"type": "worker-elected", "eid": "e1", "phase": "elected", "winner": "u1@a", "term": 1}
    return [*events, *others, {**elected, **NODE, "clock": 9, "timestamp": 11.0, "seq": 1}]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Six files; events of one task are in several, some events in two."""
    events = counted(random_histories(15))
    for number in range(6):
        record(tmp_path, f"{number:03d}", [*events[number::5], *events[: 3 * number]])
    return tmp_path


def look(lake: Path, *, thorough: bool = False) -> Found:
    return look_into(sorted(lake.glob("events/*/*/*.parquet")), thorough=thorough)


def contents(spark: SparkSession, lake: Path) -> dict[str, list[str]]:
    """The published tables, row by row, without an order."""
    manifest = io.newest_manifest(lake)
    assert manifest is not None
    return {
        table: sorted(str(row) for row in io.read_table(spark, lake, manifest.build, table).collect())
        for table in manifest.tables
    }


def caught_up(spark: SparkSession, lake: Path, **how: Any) -> list[io.Manifest]:
    published: list[io.Manifest] = []
    looking = partial(look, lake)
    following = Following(look=looking, published=published.append, until_caught_up=True, **how)
    follow(spark, lake, following)
    return published


@pytest.mark.skipif(
    not os.environ.get("UMBEL_SOAK"),
    reason="so does one that is killed, which runs; UMBEL_SOAK=1 runs this",
)
@pytest.mark.timeout(400)
def test_a_stream_equals_a_batch(spark: SparkSession, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: in several rounds, with batches put together in between, and with one cut off in the middle."""
    monkeypatch.setattr(partials_module, "BATCHES_MAX", 0)
    late = sorted(lake.glob("events/*/*/*.parquet"))[4:]
    for path in late:
        path.rename(lake / path.name)
    unplanned = Partials(lake).checkpoint / "offsets/.0.8c5f.tmp"  # it died when it planned its first batch
    unplanned.parent.mkdir(parents=True)
    unplanned.touch()
    caught_up(spark, lake, files_per_batch=4, only=["tasks"])
    assert Partials(lake).taken().upto == 0
    for path in late:
        (lake / path.name).rename(path)
        path.touch()
    with monkeypatch.context() as cut:
        cut.setattr(io, "write_file", _die_at("_done.json", io.write_file))
        with pytest.raises(BuildFailed, match="resumes where it stopped"):
            caught_up(spark, lake, files_per_batch=1)
    (streamed,) = caught_up(spark, lake, files_per_batch=1)
    told = contents(spark, lake)
    batch = build(SparkEngine(spark), lake, look(lake))
    assert contents(spark, lake) == told
    assert list(told) == list(TABLES)
    assert (streamed.origin, batch.origin) == ("stream", "batch")
    assert streamed.rows == batch.rows and streamed.rows["anomalies"] > 0
    assert streamed.events == batch.events
    names = sorted(str(path.relative_to(lake)) for path in lake.glob("events/*/*/*.parquet"))
    assert io.read_json(lake / "stream/_passed.json", dict[str, list[str]]) == {"files": names}


def test_states_of_another_version_are_refused(lake: Path) -> None:
    io.write_json(lake / "stream/_version.json", {"states": 99})
    with pytest.raises(BuildFailed, match="version 99"):
        Partials(lake).open()


def test_states_whose_checkpoint_is_gone_are_refused(lake: Path) -> None:
    """D2: the stream would count its batches anew and take the first for those that the base has."""
    io.write_json(lake / "stream/_base.json", {"files": ["events/one.parquet"], "events": 1, "upto": 3})
    with pytest.raises(BuildFailed, match="is rebuilt from the events"):
        Partials(lake).open()


def _die_at(name: str, write: Any) -> Any:
    def dying(path: Path, data: bytes) -> None:
        if path.name == name:
            raise OSError("cut off")
        write(path, data)

    return dying
