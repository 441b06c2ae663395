"""D2: a stream over the lake publishes what a build from all events does, also when it is cut off."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.lakes import Wire, record
from tests.pipeline.test_build import HereEngine, published
from tests.pipeline.test_equality import random_histories
from umbel.events.tables import TABLES
from umbel.history.lake import Lake
from umbel.pipeline import BuildFailed, io
from umbel.pipeline.build import Following, build, follow
from umbel.pipeline.engines import Engine, SparkEngine
from umbel.pipeline.io import Found, look_into
from umbel.stores.local import LocalStore

NODE: Wire = {"hostname": "u1@a", "pid": 1, "inc": 7}


def numbered(events: list[Wire]) -> list[Wire]:
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
    events = numbered(random_histories(15))
    for number in range(6):
        record(tmp_path, f"{number:03d}", [*events[number::5], *events[: 3 * number]])
    return tmp_path


def look(lake: Path, thorough: bool = False) -> Found:
    return look_into(lake, Lake(lake).raw_files(), thorough=thorough)


def contents(lake: Path) -> dict[str, Counter[tuple[Any, ...]]]:
    """The published tables, row by row, without an order."""
    return published(lake)


def caught_up(engine: Engine, lake: Path, **how: Any) -> list[io.Manifest]:
    made: list[io.Manifest] = []
    following = Following(look=partial(look, lake), published=made.append, until_caught_up=True, **how)
    follow(engine, lake, following)
    return made


def test_a_stream_equals_a_build_of_all(
    spark: SparkSession, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: in several rounds on Spark, one of them cut off before its state was written, one before its
    manifest."""
    late = sorted(lake.glob("events/*/*/*.parquet"))[3:]
    for path in late:
        path.rename(lake / path.name)
    caught_up(SparkEngine(spark), lake)
    before = contents(lake)
    (lake / late[0].name).rename(late[0])
    for name in (io.STATE, "000002.json"):
        with monkeypatch.context() as cut:
            cut.setattr(LocalStore, "put", _die_at(name, LocalStore.put))
            with pytest.raises(BuildFailed, match=r"nothing was published|previous build stays in use"):
                caught_up(HereEngine(), lake)
        assert contents(lake) == before
    for path in late[1:]:
        (lake / path.name).rename(path)
    engine = HereEngine()
    (streamed,) = caught_up(engine, lake)
    assert engine.steps == ["deal", "fold", "join"]
    told = contents(lake)
    batch = build(HereEngine(), lake, look(lake), afresh=True)
    assert contents(lake) == told
    assert list(told) == list(TABLES)
    assert (streamed.origin, batch.origin) == ("stream", "batch")
    assert streamed.rows == batch.rows and streamed.rows["anomalies"] > 0
    assert streamed.events == batch.events


def test_a_round_without_news_publishes_nothing(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made, looks = HereEngine(), list[io.Manifest](), list[int]()

    class Stop:
        def is_set(self) -> bool:
            return len(looks) == 3

        def wait(self, _seconds: float) -> None:
            looks.append(len(made))

    stop: Any = Stop()
    follow(engine, lake, Following(look=partial(look, lake), published=made.append), stop=stop)
    assert looks == [1, 1, 1]


def _die_at(name: str, write: Any) -> Any:
    def dying(store: LocalStore, at: str, data: bytes) -> None:
        if at.endswith(f"/{name}"):
            raise OSError("cut off")
        write(store, at, data)

    return dying
