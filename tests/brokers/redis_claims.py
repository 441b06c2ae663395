"""Words to speak of the claims of a worker on Redis: what is lost on the way, what a step costs."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.brokers.under_test import (
    OWNER,
    outgoing,
    take,
)
from tests.servers.redis import RedisServer, calls
from umbel.brokers.interface import Broker, Delivery
from umbel.brokers.redis.broker import RedisBroker
from umbel.brokers.redis.claims import Claims
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.scripts import Script
from umbel.errors import BrokerUnavailable

LEASE_S = 1000.0
INFLIGHT = f"umbel.inflight.{OWNER}"
MARK = "0123456789abcdef" * 2
STRICT = {"remembers_signatures": True}


def claims_of(broker: Broker) -> Claims:
    assert isinstance(broker, RedisBroker)
    return broker._claims


def cut(broker: Broker) -> None:
    """The connection of the claims is lost."""
    claims_of(broker)._link.close()


@contextmanager
def interrupted(script_name: str, *, keeps_link: bool = False) -> Iterator[None]:
    """Calls of this script are carried out, and nobody learns of it."""
    run_script = Link.run

    async def run_and_forget(link: Link, script: Script, *args: Any) -> Any:
        reply = await run_script(link, script, *args)
        if script.name != script_name:
            return reply
        if keeps_link:
            raise asyncio.CancelledError
        link.close()
        raise BrokerUnavailable("cut")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Link, "run", run_and_forget)
        yield


@contextmanager
def costs(server: RedisServer, count: int) -> Iterator[None]:
    """So many calls of scripts."""
    before = calls(server, "evalsha")
    yield
    assert calls(server, "evalsha") - before == count


async def hold(broker: Broker, *names: str, owner: str = OWNER) -> list[Delivery]:
    await broker.publish(outgoing(*names))
    return list((await take(broker, owner=owner)).deliveries)


def end_lease(server: RedisServer, owner: str) -> None:
    server.ask("ZADD", "umbel.owners", "XX", 0, owner)
