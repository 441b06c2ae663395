"""Links that heal: what becomes of calls, claims and waiters when the server or the way to it fails."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
from tests.servers.ports import free_port
from tests.servers.redis import RedisServer, exchange
from tests.waiting import wait_until
from umbel.brokers.interface import Ack, Broadcast, Broker, BrokerSettings, Delivery, Replaced, Settled
from umbel.brokers.redis.address import parse_address
from umbel.brokers.redis.broker import RedisBroker
from umbel.brokers.redis.keys import CAPABILITIES
from umbel.brokers.redis.scripts import Script
from umbel.errors import BadURL, BrokerError, BrokerUnavailable, StorageFull

QUICK_S = 0.4  # a connect time-out that tests can wait for
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, options=dict(DURABLE))
    server.start()
    yield server
    server.resume()
    server.stop()


def under_test_of(url: str, *, lease_s: float = 10.0) -> BrokerUnderTest:
    return BrokerUnderTest(BrokerSettings(url, connect_timeout_s=QUICK_S, lease_s=lease_s), CAPABILITIES)


@pytest.fixture
def under_test(server: RedisServer) -> Iterator[BrokerUnderTest]:
    under_test = under_test_of(server.url)
    yield under_test
    under_test.close()


async def take_when_it_heals(broker: Broker, *, owner: str = OWNER) -> list[Delivery]:
    async def taken() -> list[Delivery] | None:
        try:
            return list((await take(broker, owner=owner)).deliveries)
        except BrokerError:
            return None

    return await eventually(taken, what="a claim after the server's return")


async def settle_when_it_heals(broker: Broker, deliveries: list[Delivery]) -> Settled:
    async def settled() -> Settled | None:
        try:
            return await broker.settle([Ack(one.tag, [result(one.tag)]) for one in deliveries])  # type: ignore[arg-type]
        except BrokerError:
            return None

    return await eventually(settled, what="a settle after the server's return")


def test_nothing_is_lost_when_the_server_is_killed_and_restarted_in_the_middle(
    server: RedisServer, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a", "b"))
            held = list((await take(broker)).deliveries)
            server.stop(signal.SIGKILL)
            for call in (broker.settle([Ack(held[0].tag)]), broker.claim(OWNER, [QUEUE], 1)):
                with pytest.raises(BrokerUnavailable, match=rf"127\.0\.0\.1:{server.port}"):
                    await call
            server.start()
            assert await settle_when_it_heals(broker, held) == Settled(applied=2)
            await broker.publish(outgoing("c"))
            assert texts(await take_when_it_heals(broker)) == ["c"]
            assert await broker.renew(OWNER)

    run(scenario())


def test_after_an_outage_nobody_is_taken_for_dead_before_all_had_time_to_come_back(
    server: RedisServer,
) -> None:
    under_test = under_test_of(server.url, lease_s=0.5)

    async def scenario() -> None:
        async with under_test.open() as one, under_test.open() as other:
            await one.publish(outgoing("a"))
            held = list((await take(one)).deliveries)
            server.stop(signal.SIGKILL)
            down_since = time.monotonic()

            async def lease_over() -> bool:
                return time.monotonic() > down_since + 0.8

            await eventually(lease_over, what="the end of the lease, unseen")
            server.start()
            assert await eventually(lambda: returned(other), what="an answer") == [0]
            assert await one.renew(OWNER)
            assert await settle_when_it_heals(one, held) == Settled(applied=1)

    async def returned(broker: Broker) -> list[int] | None:
        try:
            return [await broker.return_lost()]
        except BrokerError:
            return None

    run(scenario())


def test_a_claim_whose_reply_never_came_keeps_no_message(
    server: RedisServer, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a", "b", "c"))
            assert not (await take(broker, queues=["other"])).deliveries
            server.pause()
            with pytest.raises(BrokerUnavailable, match="did not answer"):
                await take(broker)
            server.resume()  # and now it carries out what was sent, for nobody
            found: list[str] = []

            async def all_taken() -> bool:
                found.extend(texts(await take_when_it_heals(broker)))
                return len(found) >= 3

            await eventually(all_taken, what="the messages of the claim in doubt")
            assert found == ["a", "b", "c"]

    run(scenario())


def test_a_settle_whose_reply_never_came_is_applied_once(
    server: RedisServer, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a", "b"))
            held = list((await take(broker)).deliveries)
            follow_up = outgoing("next", queue="other")
            server.pause()
            with pytest.raises(BrokerUnavailable):
                await broker.settle([Ack(one.tag, (), follow_up) for one in held])
            server.resume()

            async def settled() -> Settled | None:
                try:
                    return await broker.settle([Ack(one.tag, (), follow_up) for one in held])
                except BrokerError:
                    return None

            assert await eventually(settled, what="the answer") == Settled(applied=2)
            assert texts((await take(broker, queues=["other"])).deliveries) == ["next", "next"]
            assert not (await take(broker)).deliveries

    run(scenario())


def test_waiters_and_subscribers_go_on_after_a_restart(
    server: RedisServer, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker, broker.subscribe("celeryev", ["#"]) as subscription:
            heard_one = asyncio.ensure_future(anext(aiter(subscription)))
            waiting = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S))
            await asyncio.wait([waiting, heard_one], timeout=0.05)
            server.stop(signal.SIGKILL)
            await waiting  # whoever waits is told, and the next call says what is wrong
            with pytest.raises(BrokerUnavailable):
                await broker.wait_ready([QUEUE], LONG_S)
            server.start()

            async def heard() -> bool:
                try:
                    await broker.broadcast([Broadcast("celeryev", "k", b"{}")], ttl_s=10)
                except BrokerError:
                    return False
                return heard_one.done()

            await eventually(heard, what="the subscription's return")
            assert heard_one.result().routing_key == "k"

    run(scenario())


def test_a_result_is_waited_for_across_a_restart(server: RedisServer, under_test: BrokerUnderTest) -> None:
    """And while the server, back again, refuses all because it loads its data, which takes a second here."""
    exchange(server.port, [("SET", number, "") for number in range(3000)])
    server.options["key-load-delay"] = "300"
    waiter, worker = under_test.backend(connect_timeout_s=10.0), under_test.backend(connect_timeout_s=10.0)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(waiter.wait, ["a"], LONG_S)
        on_loop = threads.submit(lambda: asyncio.run(waiter.wait_async(["a"], LONG_S)))
        wait_until(
            lambda: server.ask("PUBSUB", "NUMSUB", "celery-task-meta-a") == [b"celery-task-meta-a", 2],
            what="two waiters",
        )
        server.stop(signal.SIGKILL)
        server.start()
        worker.store([result("a")])
        assert waiting.result(LONG_S) == on_loop.result(LONG_S) == {"a": result("a")}


def test_a_producer_has_a_new_connection_when_the_server_is_back_and_raises_while_it_is_not(
    server: RedisServer, under_test: BrokerUnderTest
) -> None:
    producer = under_test.producer(connect_timeout_s=10.0)
    producer.publish(outgoing("before"))
    server.stop(signal.SIGKILL)
    with pytest.raises(BrokerUnavailable, match="connection refused"):
        producer.publish(outgoing("meanwhile"))
    server.start()
    producer.publish(outgoing("after"))
    assert server.ask("LLEN", QUEUE) == 2
    server.stop(signal.SIGKILL)
    server.start()
    producer.publish(outgoing("at once, although its connection had ended"))
    server.stop()
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="connection refused"):
        under_test.producer().publish(outgoing("too late"))
    assert time.monotonic() - began < 10 * QUICK_S


def test_a_server_that_forgot_its_scripts_is_sent_them_again(
    server: RedisServer, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))
            held = list((await take(broker)).deliveries)
            server.ask("SCRIPT", "FLUSH")
            assert await settle_when_it_heals(broker, held) == Settled(applied=1)

    run(scenario())


def test_verdicts_on_what_the_server_has_forgotten_are_refused(
    server: RedisServer, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))
            (held,) = (await take(broker)).deliveries
            server.ask("FLUSHALL")
            assert (await broker.settle([Ack(held.tag)])).conflicts == {held.tag}
            await broker.publish(outgoing("b"))
            assert texts((await take(broker, owner=PEER)).deliveries) == ["b"]

    run(scenario())


def test_a_full_server_refuses_new_messages_and_lets_the_old_ones_go(
    server: RedisServer, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a", "b"))
            server.ask("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(StorageFull, match="maxmemory"):
                await asyncio.to_thread(under_test.producer().publish, outgoing("c"))
            held = list((await take(broker)).deliveries)
            assert await settle_when_it_heals(broker, held) == Settled(applied=2)

    run(scenario())


def test_the_next_of_several_servers_takes_over(server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    second = RedisServer(tmp_path / "second")
    second.start()
    under_test = under_test_of(f"redis://127.0.0.1:{free_port()}/0;{server.url};{second.url}")

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("first"))
            server.stop()

            async def published() -> bool:
                try:
                    await broker.publish(outgoing("second"))
                except BrokerError:
                    return False
                return True

            await eventually(published, what="the second server's turn")

    try:
        run(scenario())
        under_test.producer().publish(outgoing("third"))
        assert second.ask("LLEN", QUEUE) == 2
        server.start()
        assert server.ask("LLEN", QUEUE) == 1
    finally:
        second.stop()
        under_test.close()


def problem_of(url: str) -> str:
    """What both faces say of an address that cannot be used; one line, and soon."""
    under_test, began = under_test_of(url), time.monotonic()

    async def scenario() -> str:
        with pytest.raises(BrokerUnavailable) as caught:
            async with under_test.open():
                pass
        return str(caught.value)

    said = run(scenario())
    with pytest.raises(BrokerUnavailable) as caught:
        under_test.producer().publish(outgoing("a"))
    assert str(caught.value) == said
    assert "\n" not in said and "s3cret" not in said
    assert time.monotonic() - began < 10 * QUICK_S
    return said


def test_a_wrong_password_user_or_database_is_said_in_one_line(server: RedisServer) -> None:
    place = f"127.0.0.1:{server.port}"
    assert "no password configured" in problem_of(f"redis://:s3cret@{place}/0")
    assert "refuses the user name or password" in problem_of(f"redis://ada:s3cret@{place}/0")
    assert "has no database 99" in problem_of(f"redis://{place}/99")
    server.ask("CONFIG", "SET", "requirepass", "open sesame")
    assert "requires a password" in problem_of(f"redis://{place}/0")
    assert "refuses the user name or password" in problem_of(f"redis://:s3cret@{place}/0")
    right = under_test_of(f"redis://:open%20sesame@{place}/0")
    right.producer().publish(outgoing("a"))
    right.close()


def test_an_address_where_nothing_or_something_else_answers_is_said_in_one_line(
    server: RedisServer, tmp_path: Path
) -> None:
    assert "connection refused" in problem_of(f"redis://:s3cret@127.0.0.1:{free_port()}/0")
    assert "host name is unknown" in problem_of("redis://no-such-host.invalid/0")
    assert "no such socket" in problem_of(f"unix://{tmp_path}/none.sock")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        threading.Thread(target=_speak_http, args=(stranger,), daemon=True).start()
        assert "does not speak the Redis protocol" in problem_of(
            f"redis://127.0.0.1:{stranger.getsockname()[1]}/0"
        )
    server.pause()
    assert "no answer within" in problem_of(server.url)


def _speak_http(stranger: socket.socket) -> None:
    while True:
        try:
            link, _ = stranger.accept()
        except OSError:
            return
        with link:
            link.recv(4096)
            link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            link.recv(4096)


def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    server = RedisServer(tmp_path, options={"unixsocket": str(path)})
    server.start()
    under_test = under_test_of(f"unix://{path}?db=3")

    async def scenario() -> list[str]:
        async with under_test.open() as broker:
            return texts((await take(broker)).deliveries)

    try:
        under_test.producer().publish(outgoing("a"))
        assert server.ask("LLEN", QUEUE, database=3) == 1
        assert run(scenario()) == ["a"]
    finally:
        under_test.close()
        server.stop()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis:/localhost", "write redis://"),
        ("redis://localhost:port/0", "write redis://"),
        ("redis://:s3cret@localhost:99999/0", "write redis://"),
        ("redis://localhost/zero", "'zero' is not a number"),
        ("redis://:s3cret#x@localhost/0", "%23"),
        ("redis://localhost/0?dp=1", "unknown option 'dp'"),
        ("redis://localhost/0?ssl_ca_certs=a", "unknown option"),
        ("unix://localhost/path", "three slashes"),
        ("sentinel://:s3cret@localhost/0", "master_name=NAME"),
        ("sentinel://localhost/0?master_name=a;sentinel://other/0?master_name=b", "different masters"),
        ("sentinel://localhost/0?master_name=a;redis://:s3cret@other/0", "cannot be mixed"),
        ("redis://localhost/0?master_name=a", "unknown option"),
    ],
)
def test_a_mistyped_address_is_refused_with_what_to_write(url: str, problem: str) -> None:
    with pytest.raises(BadURL, match=problem) as caught:
        under_test_of(url).producer()
    assert "s3cret" not in str(caught.value)


def test_an_address_is_understood_and_shown_without_its_password() -> None:
    address = parse_address("rediss://ada:p%40ss@example.org:7000/5?ssl_cert_reqs=none")
    assert (address.username, address.password, address.database, address.tls) == ("ada", "p@ss", 5, True)
    assert (address.shown, "p@ss" in repr(address)) == ("example.org:7000", False)
    assert parse_address("redis://localhost").place == parse_address("redis://127.0.0.1:6379/0").place


def test_what_is_claimed_and_settled_while_claims_are_compared_is_not_touched(
    server: RedisServer, under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart the server has no scripts: the comparison is sent twice, and others come in between."""

    async def scenario() -> None:
        async with under_test.open() as broker:
            assert isinstance(broker, RedisBroker)
            replaced: list[Replaced] = []
            broker.on_replaced(replaced.append)
            await broker.renew(OWNER)
            await broker.publish(outgoing("a", "b"))
            (first,) = (await take(broker, limit=1)).deliveries
            claims, run_script = broker._claims, broker._claims._link.run
            between: list[Delivery] = []

            async def run_late(script: Script, *args: Any) -> Any:
                if script.name == "reconcile" and not between:
                    assert (await broker.settle([Ack(first.tag)])).applied == 1
                    between.extend((await take(broker, limit=1)).deliveries)
                return await run_script(script, *args)

            monkeypatch.setattr(claims._link, "run", run_late)
            claims._compared_on = -1  # as after a new connection
            assert await broker.renew(OWNER)
            assert texts(between) == ["b"] and replaced == []
            assert (await take(broker, owner=PEER)).deliveries == []  # it was not returned
            assert (await broker.settle([Ack(between[0].tag)])).applied == 1

    run(scenario())
