"""Messages over `message_max_bytes`: set aside by their size, unread, while the others go on (N1, N2).

SQLite and Redis look at the size before the bytes go anywhere. RabbitMQ pushes whole messages: it has a limit
of its own (`max_message_size`), and what passes that is buried by the worker that gets it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.redis_scripts import PREFIX, Scripts
from tests.brokers.under_test import OWNER, QUEUE, run, take, texts
from tests.servers.redis import RedisServer
from tests.waiting import until
from umbel.brokers.interface import Ack, Broker, BrokerSettings, Claim, SetAside
from umbel.brokers.redis.claims import REPLY_SLACK_BYTES
from umbel.brokers.redis.holding import envelope_max_bytes
from umbel.brokers.refusals import ENVELOPE_BYTES
from umbel.brokers.registry import open_broker
from umbel.errors import BrokerRefused, BrokerUnavailable
from umbel.wire.message import Message, Outgoing

MOST = 10_000
LARGE = 3 * (MOST + ENVELOPE_BYTES)


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'queue.db'}"
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    yield server.url
    server.ask("FLUSHALL")


@asynccontextmanager
async def opened(url: str, most: int = MOST) -> Any:
    broker = open_broker(BrokerSettings(url, message_max_bytes=most))
    await broker.open()
    try:
        yield broker
    finally:
        await broker.forget_owner(OWNER)
        await broker.close()


def sent(text: str, size: int = 0) -> Outgoing:
    return Outgoing(QUEUE, Message(b'{"task": "t"}', text.ljust(size, "x").encode()))


async def claimed(broker: Broker) -> Claim:
    return await broker.claim(OWNER, [QUEUE], 10)


def test_a_message_over_the_limit_is_a_dead_letter_and_those_behind_it_are_claimed(url: str) -> None:
    async def scenario() -> None:
        async with opened(url) as broker:
            await broker.publish([sent("large", LARGE), sent("a"), sent("larger", 2 * LARGE), sent("b")])
            aside: list[SetAside] = []
            found: list[str] = []
            while len(found) < 2:
                claim = await claimed(broker)
                aside += claim.set_aside
                found += texts(claim.deliveries)
            assert sorted(found) == ["a", "b"] and [one.queue for one in aside] == [QUEUE, QUEUE]
            letters = await broker.dead_letters(10)
            assert [(one.queue, one.message.body) for one in letters] == [(QUEUE, b"")] * 2
            for letter, one in zip(letters, reversed(aside), strict=True):
                assert f"it has {one.size_bytes} bytes, over the limit of {MOST}" in letter.reason
                assert one.size_bytes >= LARGE and "it was not read" in letter.reason

    run(scenario())


def test_such_a_letter_is_requeued_whole_once_the_limit_is_raised(url: str) -> None:
    async def scenario() -> None:
        async with opened(url) as broker:
            await broker.publish([sent("large", LARGE)])
            assert len((await claimed(broker)).set_aside) == 1
            (letter,) = await broker.dead_letters(10)
            with pytest.raises(BrokerRefused, match=r"raise 'message_max_bytes' here and on the workers"):
                await broker.requeue_dead([letter.letter_id])
            assert len(await broker.dead_letters(10)) == 1
        async with opened(url, most=2 * LARGE) as raised:
            assert await raised.requeue_dead([letter.letter_id]) == 1
            assert await raised.dead_letters(10) == []
            (delivery,) = (await take(raised)).deliveries
            assert delivery.message.body == b"large".ljust(LARGE, b"x")
            await raised.settle([Ack(delivery.tag)])

    run(scenario())


def test_such_a_letter_is_dropped_with_its_bytes(url: str, request: pytest.FixtureRequest) -> None:
    async def scenario() -> None:
        async with opened(url) as broker:
            await broker.publish([sent("large", LARGE)])
            await claimed(broker)
            (letter,) = await broker.dead_letters(10)
            assert await broker.drop_dead([letter.letter_id]) == 1
            assert await broker.dead_letters(10) == []

    run(scenario())
    if url.startswith("redis"):
        server: RedisServer = request.getfixturevalue("redis_server")
        assert server.ask("KEYS", "umbel.aside.*") == server.ask("KEYS", "umbel.dead.asides") == []


def test_what_fits_is_claimed_to_the_last_byte(url: str) -> None:
    async def scenario() -> None:
        async with opened(url) as broker:
            await broker.publish([sent("fits", MOST - len(b'{"task": "t"}'))])
            claim = await claimed(broker)
            assert len(claim.deliveries) == 1 and not claim.set_aside

    run(scenario())


# -- Redis --------------------------------------------------------------------------------------------


@pytest.fixture
def scripts(redis_server: RedisServer) -> Iterator[Scripts]:
    yield Scripts(redis_server)
    redis_server.ask("FLUSHALL")


async def set_aside(broker: Broker) -> list[SetAside]:
    while not (aside := (claim := await claimed(broker)).set_aside):
        assert claim.deliveries == (), "the message itself is never handed out"
    return list(aside)


def test_a_message_that_the_server_hands_over_is_set_aside_too(redis_server: RedisServer) -> None:
    """An idle worker of one queue is given the next message by the server, whatever its size."""
    size = 2 * (envelope_max_bytes(MOST) + REPLY_SLACK_BYTES)

    async def scenario() -> None:
        async with opened(redis_server.url) as broker, opened(redis_server.url) as sender:
            await claimed(broker)
            waiting = asyncio.create_task(broker.wait_ready([QUEUE], 60.0, owner=OWNER))
            await until(lambda: redis_server.ask("HLEN", "umbel.handing") == 1, "the server to be asked")
            await sender.publish([sent("large", size)])
            await asyncio.wait([waiting])
            assert isinstance(waiting.exception(), BrokerUnavailable | None)
            (aside,) = await set_aside(broker)
            assert aside.size_bytes > size
            await sender.publish([sent("next")])
            assert texts((await take(broker)).deliveries) == ["next"]

    run(scenario())
    redis_server.ask("FLUSHALL")


def test_large_messages_that_pass_no_script_are_set_aside_by_what_the_server_says_of_them(
    scripts: Scripts,
) -> None:
    large, fits = b"L" * 40_000, b"f" * 9_000
    scripts.fill("q", fits, large, fits, large, large)
    replies = [scripts.claim(ticket=f"n.{number}", apart=True, most_bytes=10_000) for number in (1, 2)]
    assert [size >= 40_000 for reply in replies for _, size in reply.aside] == [True] * 3
    assert [sign for reply in replies for sign in reply.taken[2::4] if sign != b"!"] == [b"+"]
    letters = scripts.letters()
    assert [one["envelope"] for one in letters] == [""] * 3
    bytes_of = [scripts.ask("LRANGE", one["aside"].removeprefix(PREFIX), 0, -1) for one in letters]
    assert bytes_of == [[large]] * 3
    assert scripts.waiting("q") == []


def test_the_bytes_of_a_letter_that_makes_room_go_with_it(scripts: Scripts) -> None:
    scripts.fill("q", b"L" * 40_000)
    assert len(scripts.claim(most_bytes=10_000).aside) == 1
    fill = "for i = 1, 100000 do redis.call('XADD', ARGV[1], '*', 'list', 'q', 'envelope', '{}') end"
    scripts.evaluate(fill, PREFIX + "umbel.dead")
    scripts.fill("q", b"M" * 40_000)
    assert len(scripts.claim(ticket="n.2", most_bytes=10_000).aside) == 1
    found = scripts.keys()
    asides = [key for key in found if "umbel.aside." in key]
    assert [scripts.ask("LINDEX", key.removeprefix(PREFIX), 0) for key in asides] == [b"M" * 40_000]
    assert scripts.ask("ZCARD", "umbel.dead.asides") == 1


def test_where_there_can_be_no_letter_the_worker_gets_the_message(scripts: Scripts) -> None:
    """Nothing is lost, and the worker buries it as it can."""
    large = b"L" * 40_000
    for number, apart in enumerate((False, True), start=1):
        scripts.ask("SET", "umbel.dead", "taken")
        scripts.fill("q", large)
        reply = scripts.claim(ticket=f"n.{number}", apart=apart, most_bytes=10_000)
        assert reply.aside == [] and len(reply.taken) == 4
        found = scripts.keys()
        assert not [key for key in found if "umbel.aside" in key]
