"""Results over RabbitMQ or Redis (rpc): they reach the client that asked, and nobody else."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from tests.brokers.under_test import LONG_S, outgoing, result, run, take_one
from tests.servers.ports import free_ports
from tests.servers.rabbitmq import amqp_url, shared_server
from tests.servers.redis import RedisServer, redis_server, redis_url
from tests.servers.way import Way
from tests.waiting import wait_until
from umbel import App
from umbel.backends.interface import ChordPart
from umbel.backends.registry import open_backend
from umbel.backends.rpc import Post, RpcBackend
from umbel.backends.rpc_amqp import AmqpPost
from umbel.backends.rpc_redis import RedisPost
from umbel.brokers.interface import Ack, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.errors import BadURL, BrokerError, NotSupported
from umbel.wire.message import StoredResult

__all__ = ["amqp_url", "redis_server", "redis_url"]


@pytest.fixture(params=["amqp_url", "redis_url"])
def broker_url(request: pytest.FixtureRequest) -> str:
    url = request.getfixturevalue(request.param)
    assert isinstance(url, str)
    return url


@pytest.fixture
def backend(broker_url: str) -> Iterator[RpcBackend]:
    backend = open_rpc(broker_url)
    yield backend
    backend.close()


@pytest.fixture
def worker(broker_url: str) -> Iterator[Post]:
    """Sends results as a worker does."""
    worker = post(broker_url)
    yield worker
    worker.close()


def open_rpc(broker_url: str, result_expires_s: float = 86_400.0) -> RpcBackend:
    backend = open_backend("rpc://", BrokerSettings(broker_url, result_expires_s=result_expires_s))
    assert isinstance(backend, RpcBackend)
    return backend


def post(broker_url: str) -> Post:
    kind = AmqpPost if broker_url.startswith("amqp") else RedisPost
    return kind(broker_url, BrokerSettings(broker_url))


def send(worker: Post, address: str, *results: StoredResult) -> None:
    worker.send([replace(one, reply_to=address) for one in results])


def test_waiting_ends_with_the_first_final_state(backend: RpcBackend, worker: Post) -> None:
    address = backend.reply_to
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(backend.wait, ["a", "b"], LONG_S)
        send(worker, address, result("a", "STARTED"), result("other"))
        send(worker, address, result("b", "FAILURE"))
        assert waiting.result(LONG_S / 2) == {"b": result("b", "FAILURE")}
    assert backend.read(["a", "other"]) == {"a": result("a", "STARTED"), "other": result("other")}


def test_the_first_success_stays_and_a_forgotten_result_is_gone(backend: RpcBackend, worker: Post) -> None:
    statuses = ("STARTED", "RETRY", "FAILURE", "SUCCESS", "FAILURE", "STARTED")
    send(worker, backend.reply_to, *(result("a", status, status) for status in statuses), result("end"))
    assert backend.wait(["end"], LONG_S)
    assert backend.read(["a"]) == {"a": result("a", "SUCCESS", "SUCCESS")}
    backend.forget(["a", "unknown"])
    assert not backend.read(["a"])


def test_eight_threads_and_the_event_loop_can_wait_at_once(backend: RpcBackend, worker: Post) -> None:
    address = backend.reply_to

    async def scenario() -> None:
        waiting = [asyncio.create_task(backend.wait_async([str(number)], LONG_S)) for number in range(3)]
        waiting[1].cancel()
        await asyncio.to_thread(send, worker, address, *(result(str(number)) for number in range(8)))
        async with asyncio.timeout(LONG_S / 2):
            assert [set(await waiting[number]) for number in (0, 2)] == [{"0"}, {"2"}]
        assert await backend.wait_async(["never"], 0.05) == {}

    with ThreadPoolExecutor(8) as threads:
        found = [threads.submit(backend.wait, [str(number)], LONG_S) for number in range(8)]
        run(scenario())
        assert [set(one.result(LONG_S / 2)) for one in found] == [{str(number)} for number in range(8)]


def test_results_are_received_from_the_first_server_that_answers(amqp_url: str) -> None:
    (port,) = free_ports(1)
    listed = AmqpPost(f"amqp://127.0.0.1:{port}//;{amqp_url}", BrokerSettings(amqp_url))
    worker = post(amqp_url)
    for address in ("one", "two"):  # each connection begins with the next server
        inbox = listed.open(address)
        send(worker, address, result("a"))
        assert [task_id for task_id, _ in inbox.receive()] == ["a"]
        inbox.close()
    worker.close()


def test_waiting_ends_at_the_time_out_and_for_nothing_at_once(backend: RpcBackend) -> None:
    assert backend.wait(["a"], 0.05) == {}
    assert backend.wait([], None) == {}


def test_a_result_is_gone_after_its_retention(broker_url: str) -> None:
    backend = open_rpc(broker_url, result_expires_s=0.05)
    backend.store([result("a")])
    wait_until(lambda: not backend.read(["a"]), what="the end of the retention")
    backend.close()


def test_results_ride_with_the_ack_to_whoever_asked(broker_url: str, backend: RpcBackend) -> None:
    assert backend.shares_settle(broker_url)
    assert not backend.shares_settle("amqp://elsewhere//")
    assert not backend.shares_settle("redis://elsewhere/0")
    assert not backend.shares_settle("sqlite:///umbel.db")
    address = backend.reply_to

    async def scenario() -> None:
        broker = open_broker(BrokerSettings(broker_url))
        await broker.open()
        await broker.publish(outgoing("asked", reply_to=address))
        delivery = await take_one(broker)
        await broker.settle([Ack(delivery.tag, [replace(result("asked"), reply_to=address)])])
        assert set(await backend.wait_async(["asked"], LONG_S)) == {"asked"}
        await broker.close()

    run(scenario())


def test_a_result_that_is_stored_with_an_address_is_sent_there(broker_url: str, backend: RpcBackend) -> None:
    worker = open_rpc(broker_url)
    worker.store([replace(result("a"), reply_to=backend.reply_to), result("b")])
    assert set(backend.wait(["a"], LONG_S)) == {"a"}
    assert not backend.read(["b"])
    assert set(worker.read(["a", "b"])) == {"b"}
    worker.close()


def test_a_client_that_is_gone_holds_nobody_up(worker: Post) -> None:
    send(worker, "nobody-listens", result("a"))


def test_a_forked_child_has_an_address_of_its_own(backend: RpcBackend, worker: Post) -> None:
    address = backend.reply_to
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, backend.reply_to.encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    theirs = os.read(read_end, 100).decode()
    os.close(read_end)
    os.close(write_end)
    assert theirs and theirs != address
    send(worker, address, result("a"))
    assert set(backend.wait(["a"], LONG_S)) == {"a"}


def test_a_lost_link_is_made_again_under_the_same_address() -> None:
    server = shared_server()
    way, vhost = Way(server.port), server.new_vhost()
    backend = open_backend(
        f"amqp://guest:guest@127.0.0.1:{way.port}/{vhost}", BrokerSettings("amqp://unused//")
    )
    assert isinstance(backend, RpcBackend)
    worker = post(server.url(vhost))
    address = backend.reply_to
    way.cut()

    def arrived() -> bool:
        send(worker, address, result("a"))  # what is sent while the link is down is lost
        return bool(backend.read(["a"]))

    wait_until(arrived, what="a result over the new link")
    worker.close()
    backend.close()
    way.end()


def test_on_redis_nothing_is_lost_with_a_link(redis_server: RedisServer) -> None:
    way = Way(redis_server.port)
    backend, worker = open_rpc(f"redis://127.0.0.1:{way.port}/0"), post(redis_server.url)
    address = backend.reply_to
    way.cut()
    names = [str(number) for number in range(2500)]
    for name in names:
        send(worker, address, result(name))
    wait_until(lambda: len(backend.read(names)) == len(names), what="all results over the new link")
    wait_until(lambda: not redis_server.ask("EXISTS", address), what="an empty list")
    worker.close()
    backend.close()
    way.end()


def test_on_redis_a_list_that_nobody_reads_ends_with_the_retention(redis_server: RedisServer) -> None:
    worker = post(redis_server.url)
    send(worker, "nobody-listens", result("a"))
    left_ms = redis_server.ask("PTTL", "nobody-listens")
    assert isinstance(left_ms, int) and 86_000_000 < left_ms <= 86_400_000
    worker.close()


def test_closing_leaves_no_thread_behind(broker_url: str) -> None:
    before = threading.active_count()
    backend = open_rpc(broker_url)
    backend.wait(["a"], 0.01)
    backend.close()
    wait_until(lambda: threading.active_count() == before, what="its thread to end")


def test_what_is_no_result_map_is_passed_over(backend: RpcBackend, worker: Post) -> None:
    send(worker, backend.reply_to, StoredResult("a", "", b"\xff nonsense"), result("b"))
    assert set(backend.wait(["a", "b"], LONG_S)) == {"b"}


@pytest.mark.parametrize("payload", [b"\xff", b'{"status": "\xff"}', b'{"a":' * 100_000, b"[" * 100_000, b""])
def test_no_payload_ends_the_receiving(backend: RpcBackend, worker: Post, payload: bytes) -> None:
    """N1: the thread that receives is one for the whole process."""
    send(worker, backend.reply_to, StoredResult("bad", "SUCCESS", payload), result("good"))
    assert backend.wait(["good"], LONG_S) == {"good": result("good")}


def test_chords_are_refused_with_a_remedy(backend: RpcBackend) -> None:
    part = ChordPart("g", 0, "a", "SUCCESS", b"1")
    calls: list[Callable[[], object]] = [
        lambda: backend.start_chord("g", 1),
        lambda: backend.add_chord_part(part),
        lambda: backend.claim_chord("g", "a"),
        lambda: backend.end_chord("g", []),
        lambda: backend.grow_chord("g", "a"),
        lambda: backend.save_group("g", b"{}"),
        lambda: backend.read_group("g"),
        lambda: backend.forget_group("g"),
    ]
    for refused in calls:
        with pytest.raises(NotSupported, match="redis://"):
            refused()


def test_rpc_needs_a_broker_that_carries_it() -> None:
    with pytest.raises(BadURL, match="leave 'backend' out"):
        open_backend("rpc://", BrokerSettings("sqlite:///umbel.db"))


def test_an_unreachable_broker_is_said_when_the_address_is_asked_for() -> None:
    backend = open_backend("amqp://guest:guest@127.0.0.1:1//", BrokerSettings("amqp://unused//"))
    with pytest.raises(BrokerError, match="cannot reach RabbitMQ"):
        backend.wait(["a"], 1.0)


def test_tasks_and_the_steps_of_a_chain_carry_the_address(broker_url: str) -> None:
    app = App("tasks", broker=broker_url, backend="rpc://")

    @app.task(name="tasks.add")
    def add(x: int, y: int) -> int:
        return x + y

    backend = app.backend
    assert isinstance(backend, RpcBackend)
    (add.s(1, 1) | add.s(1)).apply_async()

    async def scenario() -> None:
        broker = open_broker(BrokerSettings(broker_url))
        await broker.open()
        message = (await take_one(broker)).message
        assert message.reply_to == backend.reply_to
        assert backend.reply_to.encode() in message.body
        await broker.close()

    run(scenario())
    app.close()
