"""What the recorder does when the world is not as it should be (D1)."""

import asyncio
import json
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.under_test import eventually, run
from tests.history.recording import (
    BRIEF_LEASE_S,
    LogWriter,
    Teller,
    digests_of,
    facts_of,
    recording,
    rows_of,
)
from tests.servers.redis import RedisServer
from tests.waiting import wait_until
from umbel.brokers.interface import Broadcast, Broker, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.errors import ConfigurationError, LakeError
from umbel.events import reorder
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.history.lake import Lake, arrow
from umbel.history.recorder import Recorder, RecorderSettings
from umbel.history.segment import read_memory
from umbel.protocol.leadership.lease import RotationSettings
from umbel.stores.interface import Where

QUICK = RecorderSettings(rotation=RotationSettings(file_max_age_s=0.05, idle_poll_s=0.01))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'queue.db'}"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


async def opened(url: str, **settings: Any) -> Broker:
    broker = open_broker(BrokerSettings(url, **settings))
    await broker.open()
    return broker


async def recorded(broker: Broker, lake: Where) -> None:
    """Run a recorder until everything that is logged is acknowledged."""
    stop = asyncio.Event()
    recorder = Recorder(broker, Lake(lake), QUICK)
    task = asyncio.create_task(recorder.run(stop))

    async def is_done() -> bool:
        if task.done():
            task.result()
        state = await broker.event_log()
        return state.acknowledged.get("recorder") == state.last_offset

    await eventually(is_done, what="everything to be recorded")
    stop.set()
    await task


def test_what_is_no_event_is_kept_as_it_came_and_counted(url: str, tmp_path: Path) -> None:
    lake = tmp_path / "lake"

    async def scenario() -> None:
        broker = await opened(url)
        await broker.register_recorder("recorder")
        told = [("x", b"\xff\x00junk"), ("task.sent", b'{"type":"task-sent"}'), *Teller().tell(3)]
        await broker.log_events(told)
        await recorded(broker, lake)
        await broker.close()

    run(scenario())
    (fact,) = [one for one in facts_of(lake) if one["type"] == "recorder-unreadable"]
    told = json.loads(fact["extra"])
    lines = [json.loads(line) for line in (lake / told["file"]).read_text().splitlines()]
    assert told["count"] == 2
    assert [b64decode(line["body"]) for line in lines] == [b"\xff\x00junk", b'{"type":"task-sent"}']
    assert "names no task" in lines[1]["why"]
    memory = read_memory(Lake(lake), "recorder")
    assert memory is not None and (memory.unreadable, memory.gaps) == (2, 0)


def test_numbers_that_do_not_come_are_written_down(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the recorder was restarted in between: what it knows of senders is in the lake."""
    monkeypatch.setattr(reorder, "SETTLED_AFTER_S", 0.0)
    lake, teller = tmp_path / "lake", Teller()

    async def scenario() -> None:
        broker = await opened(url)
        await broker.register_recorder("recorder")
        await broker.log_events(teller.tell(3))
        teller.skip(2)
        await broker.log_events(teller.tell(3))
        await recorded(broker, lake)
        teller.skip()
        await broker.log_events(teller.tell(1))
        await recorded(broker, lake)
        await broker.close()

    run(scenario())
    gaps = [one for one in facts_of(lake) if one["type"] == "recorder-gap"]
    said = [json.loads(one["extra"]) for one in gaps]
    assert [(one["first"], one["last"]) for one in said] == [(4, 5), (9, 9)]
    assert {(one["hostname"], one["pid"], one["inc"]) for one in gaps} == {("w1@x", 1, 1000)}
    memory = read_memory(Lake(lake), "recorder")
    assert memory is not None and (memory.gaps, memory.missing, memory.starts) == (2, 3, 2)


def test_what_the_log_dropped_is_counted(url: str, tmp_path: Path) -> None:
    lake = tmp_path / "lake"

    async def scenario() -> None:
        broker = await opened(url, event_log_max=10)
        await recorded(broker, lake)
        await broker.log_events(Teller().tell(25))
        await recorded(broker, lake)
        await broker.close()

    run(scenario())
    (fact,) = [one for one in facts_of(lake) if one["type"] == "recorder-lost"]
    assert json.loads(fact["extra"])["lost"] == 15
    assert len([row for row in rows_of(lake) if row["type"].startswith("task-")]) == 10


def test_a_full_disk_loses_nothing(redis: RedisServer, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk; it is lifted as a disk is made free."""
    url, lake, told = redis.url, tmp_path / "lake", Teller().tell(3000)
    with LogWriter(url) as log:
        log.register()
        log.log(told)
        # Enough for small files and the lock, too little for a file of events.
        with recording(url, lake, file_limit=8192) as recorder:
            recorder.wait_for("cannot write to")
            assert "retrying; the broker retains them until then" in recorder.log
            assert log.lag() == 3000
            assert Lake(lake).event_files() == []
            recorder.allow_large_files()
            log.wait_until_recorded()
            assert recorder.stop() == 0
    assert {row["digest"] for row in rows_of(lake) if row["type"].startswith("task-")} == digests_of(told)
    assert not list((lake / "events").glob(".*"))


def test_a_second_recorder_stands_by_and_takes_over(url: str, tmp_path: Path) -> None:
    lake, teller = tmp_path / "lake", Teller()
    with LogWriter(url) as log, recording(url, lake, lease_s=BRIEF_LEASE_S) as first:
        first.wait_for("history segment written")
        with recording(url, lake, "--no-wait") as refused:
            assert refused.process.wait(30) == 75
            assert "records already" in refused.log
        with recording(url, lake) as second:
            second.wait_for("standing by")
            told = teller.tell(30)
            log.log(told)
            first.kill()
            log.wait_until_recorded()
            assert second.stop() == 0
    assert {row["digest"] for row in rows_of(lake) if row["type"].startswith("task-")} == digests_of(told)


def test_two_recorders_of_a_name_do_not_share_a_lake_although_their_brokers_differ(
    url: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        broker = await opened(url)
        with (
            Lake(tmp_path / "lake").locked("recorder", "a recorder"),
            pytest.raises(LakeError, match=r"is already using .*use another name or lake"),
        ):
            await Recorder(broker, Lake(tmp_path / "lake"), QUICK).run(asyncio.Event())
        await broker.close()

    run(scenario())


def test_who_lost_the_lease_keeps_what_it_read_and_acknowledges_nothing(url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        broker = await opened(url)
        start = await broker.register_recorder("recorder")
        await broker.log_events(Teller().tell(30))
        looks = iter([True] * 3)
        unhurried = RecorderSettings(rotation=RotationSettings(idle_poll_s=0.01))  # closes no file by itself
        recorder = Recorder(broker, Lake(tmp_path / "lake"), unhurried, holding=lambda: next(looks, False))
        await recorder.run(asyncio.Event())
        assert await broker.register_recorder("recorder") == start
        await broker.close()

    run(scenario())
    assert len(rows_of(tmp_path / "lake")) >= 30  # another reads them again: they have one digest


def test_a_broker_that_forgot_everything_is_recorded_anew(redis: RedisServer, tmp_path: Path) -> None:
    lake, teller = tmp_path / "lake", Teller()
    with LogWriter(redis.url) as log, recording(redis.url, lake) as recorder:
        log.register()
        before, after = teller.tell(30), teller.tell(30)
        log.log(before)
        log.wait_until_recorded()
        redis.ask("FLUSHALL")
        wait_until(log.is_registered, what="the recorder to register again")
        assert log.log(after) == 30
        log.wait_until_recorded()
        assert recorder.stop() == 0
    assert {row["digest"] for row in rows_of(lake) if row["type"].startswith("task-")} == digests_of(
        [*before, *after]
    )
    assert "recorder-lost" in {fact["type"] for fact in facts_of(lake)}


def test_on_redis_what_is_broadcast_only_is_recorded_once(redis: RedisServer, tmp_path: Path) -> None:
    """What says that it is in the log is taken from there."""
    lake, teller = tmp_path / "lake", Teller()
    ours, told = teller.tell(3), Teller("celery@y").tell(6)

    async def scenario() -> None:
        broker = await opened(redis.url)
        stop = asyncio.Event()
        task = asyncio.create_task(Recorder(broker, Lake(lake), QUICK).run(stop))

        async def is_listening() -> bool:
            assert not task.done(), task.result()
            heard = await broker.broadcast(
                [Broadcast(EVENT_EXCHANGE, "x.y", b'{"type":"x-y"}', b"{}")], ttl_s=5
            )
            return bool(heard)

        await eventually(is_listening, what="the recorder to listen")
        await broker.log_events(ours)
        logged = [Broadcast(EVENT_EXCHANGE, key, body, b'{"logged":true}') for key, body in ours]
        alone = [Broadcast(EVENT_EXCHANGE, key, body, b'{"hostname":"celery@y"}') for key, body in told[:3]]
        several = b"[" + b",".join(body for _, body in told[3:]) + b"]"
        await broker.broadcast([*logged, *alone], ttl_s=5)
        await broker.broadcast([Broadcast(EVENT_EXCHANGE, "task.multi", several, b"{}")], ttl_s=5)

        async def is_there() -> bool:
            found = [row for row in rows_of(lake, "type") if row["type"].startswith("task-")]
            return len(found) >= 9

        await eventually(is_there, what="all nine events in the lake")
        stop.set()
        await task
        await broker.close()

    run(scenario())
    found = [row["digest"] for row in rows_of(lake) if row["type"].startswith("task-")]
    assert sorted(found) == sorted(digests_of([*ours, *told]))


class Died(BaseException):
    """What a kill looks like from inside: nothing after it happens."""


def test_one_that_dies_between_its_file_and_the_acknowledgement_writes_the_same_events_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, told = tmp_path / "lake", Teller().tell(30)

    async def die(name: str, offset: int) -> None:
        raise Died

    async def scenario() -> None:
        broker = await opened(url)
        await broker.register_recorder("recorder")
        await broker.log_events(told)
        with monkeypatch.context() as patched:
            patched.setattr(broker, "acknowledge_events", die)
            with pytest.raises(Died):
                await Recorder(broker, Lake(lake), QUICK).run(asyncio.Event())
        await recorded(broker, lake)
        await broker.close()

    run(scenario())
    found = [row["digest"] for row in rows_of(lake) if row["type"].startswith("task-")]
    assert len(found) == 60
    assert set(found) == digests_of(told)


def test_who_has_no_pyarrow_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    arrow.cache_clear()
    with pytest.raises(ConfigurationError, match=r"pip install 'umbel\[history\]'"):
        arrow()
