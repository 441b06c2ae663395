"""What brokers make of data that was replaced under them: unknown claims, claims of a backup, files."""

import asyncio
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    PEER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    outgoing,
    result,
    run,
    take,
    texts,
)
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from umbel.brokers.amqp import topology as amqp
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.handshake import locations_from_url
from umbel.brokers.interface import Ack, Broker, BrokerSettings, Claim, Permit, Replaced, Return, Settled
from umbel.brokers.redis.keys import CAPABILITIES as REDIS
from umbel.brokers.sqlite.files import Presence
from umbel.brokers.sqlite.store import CAPABILITIES as SQLITE
from umbel.errors import AccessRefused, BrokerUnavailable
from umbel.protocol.delivery.limits import Terms

LONG_LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class Data:
    """`save` keeps the data as it is, `restore` puts that in place of what there is."""

    under_test: BrokerUnderTest
    save: Callable[[], object]
    restore: Callable[[], object]


@pytest.fixture(params=["sqlite", "redis"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Data]:
    if request.param == "sqlite":
        path = tmp_path / "umbel.db"
        settings = BrokerSettings(f"sqlite:///{path}", lease_s=LONG_LEASE_S)
        yield Data(
            BrokerUnderTest(settings, SQLITE),
            lambda: _copy(path, tmp_path / "backup"),
            lambda: _move(tmp_path / "backup", path),
        )
        return
    server = RedisServer(tmp_path)
    server.start()

    def save() -> None:
        server.ask("SAVE")
        shutil.copy(tmp_path / "dump.rdb", tmp_path / "backup")

    def restore() -> None:
        server.stop(signal.SIGKILL)
        shutil.copy(tmp_path / "backup", tmp_path / "dump.rdb")
        server.start()

    yield Data(BrokerUnderTest(BrokerSettings(server.url, lease_s=LONG_LEASE_S), REDIS), save, restore)
    server.stop()


def _copy(path: Path, backup: Path) -> None:
    with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(backup)) as copy:
        live.backup(copy)


def _move(backup: Path, path: Path) -> None:
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink()
    backup.replace(path)


async def heal(broker: Broker) -> None:
    """The first call after a restart may find the old connection."""

    async def renewed() -> bool | None:
        try:
            return await broker.renew(OWNER)
        except BrokerUnavailable:
            return None

    assert await eventually(renewed, what="the server to be back")


def test_claims_that_a_backup_lacks_are_unknown_and_those_it_has_again_go_back(data: Data) -> None:
    """N2: of what this process holds, what the data still has is settled as ever."""

    async def scenario() -> None:
        told: list[Replaced] = []
        async with data.under_test.open() as broker:
            broker.on_replaced(told.append)
            await broker.renew(OWNER)
            await broker.publish(outgoing("kept", "settled since"))
            kept, settled_since = (await take(broker, 2)).deliveries
            data.save()
            await broker.settle([Ack(settled_since.tag)])
            await broker.publish(outgoing("unknown"))
            (unknown,) = (await take(broker)).deliveries
            data.restore()

            await heal(broker)
            assert [one.unknown for one in told] == [1]
            assert await broker.permit([Permit(unknown.tag, "u", "t:k", Terms(1))]) == {unknown.tag: None}
            again = await eventually(lambda: _some(broker), what="what the backup had claimed")
            assert texts(again.deliveries) == ["settled since"]
            assert again.deliveries[0].redelivered
            settled = await broker.settle([Ack(kept.tag), Ack(unknown.tag, [result("t", "done")])])
            assert settled == Settled(1, unknown=frozenset({unknown.tag}))
            assert await broker.renew(OWNER)
            assert len(told) == 1
            depth = (await broker.queues())[QUEUE]
            assert (depth.ready, depth.claimed) == (0, 1)

    run(scenario())


async def _some(broker: Broker) -> Claim | None:
    claim = await take(broker)
    return claim if claim.deliveries else None


def test_a_settle_before_the_next_renewal_finds_out_by_itself(tmp_path: Path) -> None:
    """On Redis only renewals look; a claim that has ended is reason enough to look at once."""
    server = RedisServer(tmp_path)
    server.start()

    async def scenario() -> None:
        told: list[Replaced] = []
        under_test = BrokerUnderTest(BrokerSettings(server.url, lease_s=LONG_LEASE_S), REDIS)
        async with under_test.open() as broker:
            broker.on_replaced(told.append)
            await broker.renew(OWNER)
            await broker.publish(outgoing("first"))
            (first,) = (await take(broker)).deliveries
            server.ask("FLUSHALL")
            await broker.publish(outgoing("second"))
            (second,) = (await take(broker)).deliveries  # under another epoch
            settled = await broker.settle([Ack(first.tag), Ack(second.tag)])
            assert settled == Settled(1, unknown=frozenset({first.tag}))
            assert [one.unknown for one in told] == [1]
            await broker.publish(outgoing("third"))
            (third,) = (await take(broker)).deliveries
            server.ask("FLUSHALL")
            assert await broker.permit([Permit(third.tag, "id", "t:k", Terms(1))]) == {third.tag: None}
            assert [one.unknown for one in told] == [1, 1]
            assert await broker.settle([Return(third.tag)]) == Settled(0, unknown=frozenset({third.tag}))

    try:
        run(scenario())
    finally:
        server.stop()


def test_a_message_that_the_server_handed_over_and_then_forgot_is_unknown(tmp_path: Path) -> None:
    """It runs before the server knows that it is held; what the server is then given lacks it."""
    server = RedisServer(tmp_path)
    server.start()

    async def scenario() -> None:
        told: list[Replaced] = []
        under_test = BrokerUnderTest(BrokerSettings(server.url, lease_s=LONG_LEASE_S), REDIS)
        async with under_test.open() as broker, under_test.open() as other:
            broker.on_replaced(told.append)
            await broker.renew(OWNER)
            await take(broker)
            server.ask("SAVE")
            waiting = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S, owner=OWNER))
            await eventually(lambda: _is_blocked(server), what="the server to be asked")
            await other.publish(outgoing("handed"))
            await waiting
            (handed,) = (await take(broker)).deliveries
            server.stop(signal.SIGKILL)  # before the next turn of the loop, in which it would be adopted
            server.start()
            await heal(broker)
            assert [one.unknown for one in told] == [1]
            assert await broker.settle([Ack(handed.tag)]) == Settled(0, unknown=frozenset({handed.tag}))

    try:
        run(scenario())
    finally:
        server.stop()


async def _is_blocked(server: RedisServer) -> bool:
    return b"blocked_clients:1" in cast("bytes", server.ask("INFO", "clients"))


def test_a_lease_that_has_ended_is_no_replacement(tmp_path: Path) -> None:
    """What others took back is theirs: a conflict, as before."""
    server = RedisServer(tmp_path)
    server.start()

    async def scenario() -> None:
        told: list[Replaced] = []
        under_test = BrokerUnderTest(BrokerSettings(server.url, lease_s=0.3), REDIS)
        async with under_test.open() as broker, under_test.open() as other:
            broker.on_replaced(told.append)
            await broker.renew(OWNER)
            await broker.publish(outgoing("late"))
            (late,) = (await take(broker)).deliveries
            await eventually(other.return_lost, what="the lease to end")
            await take(broker, 0)  # what a busy worker does first
            assert await broker.settle([Return(late.tag)]) == Settled(0, frozenset({late.tag}))
            await broker.renew(OWNER)
            server.ask("CLIENT", "KILL", "TYPE", "normal")  # another connection is reason to compare
            await heal(broker)
            assert told == []
            assert (await take(other, owner=PEER)).deliveries

    try:
        run(scenario())
    finally:
        server.stop()


def test_claims_go_with_a_deleted_queue_of_rabbitmq() -> None:
    server = shared_server()
    url = server.url(server.new_vhost())

    async def scenario() -> None:
        told: list[Replaced] = []
        async with BrokerUnderTest(BrokerSettings(url), amqp.CAPABILITIES).open() as broker:
            broker.on_replaced(told.append)
            await broker.publish(outgoing("gone"))
            gone = await eventually(lambda: _some(broker), what="the message")
            link = BlockingLink(locations_from_url(url)[0], timeout_s=10.0, name="a stranger")
            link.call(Method.QUEUE_DELETE, 0, QUEUE, False, False, False)
            link.close()
            await eventually(lambda: _true(told), what="word of it")
            tag = gone.deliveries[0].tag
            assert await broker.settle([Ack(tag)]) == Settled(0, unknown=frozenset({tag}))
            assert told == [Replaced(f"the queue {QUEUE!r} was deleted", 1)]

    run(scenario())


async def _true(value: object) -> bool:
    return bool(value)


@pytest.mark.parametrize("endings", [("-wal", "-shm"), ("-wal",), ("-shm",), ("-lock",)])
def test_side_files_that_are_deleted_cost_nothing_that_was_acknowledged(
    endings: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "umbel.db"
    under_test = BrokerUnderTest(BrokerSettings(f"sqlite:///{path}"), SQLITE)
    producer = under_test.producer()
    producer.publish(outgoing("before"))
    for ending in endings:
        Path(f"{path}{ending}").unlink()
    producer.publish(outgoing("after"))

    async def scenario() -> None:
        async with under_test.open() as broker:
            assert texts((await take(broker, 10)).deliveries) == ["before", "after"]

    try:
        run(scenario())
    finally:
        under_test.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_producer_never_writes_to_a_file_that_is_gone(tmp_path: Path) -> None:
    """N2: what it sent after the file was replaced, however soon, is in the file that is there."""
    path = tmp_path / "umbel.db"
    under_test = BrokerUnderTest(BrokerSettings(f"sqlite:///{path}"), SQLITE)
    producer = under_test.producer()
    for turn in range(20):
        producer.publish(outgoing(f"{turn}"))
        for ending in ("", "-wal", "-shm"):
            Path(f"{path}{ending}").rename(f"{path}.{turn}{ending}")
    producer.publish(outgoing("last"))
    path.rename(tmp_path / "moved")
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(AccessRefused, match="not a usable database"):
        producer.publish(outgoing("nowhere"))
    path.unlink()
    path.mkdir()
    with pytest.raises(AccessRefused, match="is not a file"):
        producer.publish(outgoing("nowhere"))
    path.rmdir()
    producer.publish(outgoing("there"))
    under_test.close()
    for turn in range(20):
        with closing(sqlite3.connect(f"{path}.{turn}")) as db:
            assert db.execute("SELECT count(*) FROM messages").fetchone() == (1,)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone() == (1,)


def test_a_change_within_one_tick_of_the_clock_is_noticed(tmp_path: Path) -> None:
    """The directory has the same time before and after; it is not trusted while that time is new."""
    path = tmp_path / "umbel.db"
    path.touch()
    now_ns = time.time_ns() + 10**10  # so that it is new, however long this takes
    presence = Presence(path)
    presence.note_opened()
    os.utime(tmp_path, ns=(now_ns, now_ns))
    assert presence.missing() == ""
    path.rename(tmp_path / "moved")
    os.utime(tmp_path, ns=(now_ns, now_ns))
    assert presence.missing() == str(path)
