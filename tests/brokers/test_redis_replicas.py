"""Grants of a Redis server that has replicas: they are proven, or counted as unproven."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.under_test import LONG_S, OWNER, run
from tests.servers.redis import RedisServer, calls
from tests.waiting import wait_until
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.redis.broker import RedisBroker
from umbel.protocol.leadership.coordination import ElectionRequest, Granted, Policy


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[RedisServer]:
    server = start(tmp_path / "primary")
    yield server
    server.stop()


@pytest.fixture
def replica(tmp_path: Path, primary: RedisServer) -> Iterator[RedisServer]:
    primary.ask("CONFIG", "SET", "repl-diskless-sync-delay", 0)
    server = start(tmp_path / "replica")
    server.ask("REPLICAOF", "127.0.0.1", primary.port)
    wait_until(lambda: is_followed(primary), what="the replica to follow")
    yield server
    server.resume()
    server.stop()


def start(directory: Path) -> RedisServer:
    directory.mkdir()
    server = RedisServer(directory)
    server.start()
    return server


def is_followed(primary: RedisServer) -> bool:
    """Whether a replica has confirmed what was written now; it does not before it has the rest."""
    primary.ask("SET", "written", "1")
    role = primary.ask("ROLE")
    assert isinstance(role, list)
    return bool(role[2]) and int(role[2][0][2]) > 0


def test_a_grant_has_reached_a_replica_when_it_is_told(primary: RedisServer, replica: RedisServer) -> None:
    async def scenario() -> None:
        broker = RedisBroker(BrokerSettings(primary.url))
        await broker.open()
        store = broker.coordination
        won = await store.acquire_lease("beat", OWNER, ttl_s=LONG_S)
        assert replica.ask("HGET", "{coord}:l:beat", "holder") == OWNER.encode()
        assert await store.update_lease("beat", OWNER, won.term, b"data")
        assert replica.ask("HGET", "{coord}:l:beat", "data") == b"data"
        asked = ElectionRequest("e", "task", b"{}", Policy.AT_MOST_ONCE, asked_at=time.time() + 1)
        assert isinstance(await store.claim_election("k", OWNER, asked, ttl_s=LONG_S), Granted)
        assert replica.ask("HGET", "{coord}:e:k", "state") == b"held"
        assert store.unproven == 0
        await broker.close()

    run(scenario())


def test_a_grant_that_no_replica_confirms_in_time_stands_and_is_counted(
    primary: RedisServer, replica: RedisServer
) -> None:
    async def scenario() -> None:
        broker = RedisBroker(BrokerSettings(primary.url))
        await broker.open()
        replica.pause()
        store = broker.coordination
        waiting = asyncio.create_task(store.acquire_lease("beat", OWNER, ttl_s=LONG_S))
        assert await broker.renew(OWNER) is False  # nothing else waits for the replica
        won = await waiting
        assert won.granted and store.unproven == 1
        assert await store.renew_lease("beat", OWNER, won.term, ttl_s=LONG_S)
        assert not await store.renew_lease("beat", OWNER, won.term + 1, ttl_s=LONG_S)
        assert store.unproven == 2
        await broker.close()

    run(scenario())


def test_a_server_without_replicas_is_not_waited_for(primary: RedisServer) -> None:
    async def scenario() -> None:
        broker = RedisBroker(BrokerSettings(primary.url))
        await broker.open()
        won = await broker.coordination.acquire_lease("beat", OWNER, ttl_s=LONG_S)
        assert won.granted and broker.coordination.unproven == 0
        await broker.close()

    run(scenario())
    assert not calls(primary, "wait")


def test_an_election_asked_for_while_workers_live_is_not_taken_for_a_forgotten_one(
    primary: RedisServer,
) -> None:
    """KS4 on a store that nobody has asked anything yet, as when a Celery client starts the election."""

    async def scenario() -> None:
        broker = RedisBroker(BrokerSettings(primary.url))
        await broker.open()
        await broker.renew(OWNER)
        asked = ElectionRequest("e", "task", b"{}", Policy.AT_MOST_ONCE, asked_at=time.time())
        reply = await broker.coordination.claim_election("k", OWNER, asked, ttl_s=LONG_S)
        assert isinstance(reply, Granted)
        await broker.close()

    run(scenario())
