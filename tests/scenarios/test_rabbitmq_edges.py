"""RabbitMQ at its limits: an alarm that stops publishers, and a time-out for consumers."""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic

import pytest

from tests.brokers.under_test import eventually, outgoing, run, take
from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.servers.rabbitmq import RabbitServer
from tests.waiting import wait_until
from umbel import chain
from umbel.brokers.amqp.publisher import AmqpAsyncProducer
from umbel.brokers.interface import Ack, Attempt, Broker, BrokerSettings, Bury, Delivery, Refused, Return
from umbel.brokers.registry import open_broker, open_producer
from umbel.clock import cluster_now
from umbel.errors import BrokerUnavailable

SOAK = bool(os.environ.get("UMBEL_SOAK"))
TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
LONG_S = 120.0
WAITING = 20
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    made = RabbitServer(tmp_path_factory.mktemp("rabbitmq"))
    made.start()
    yield made
    made.stop()


def lines_of(directory: Path) -> list[str]:
    journal = journal_of(str(directory))
    return journal.read_text().splitlines() if journal.exists() else []


def runs(directory: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in lines_of(directory))


def test_under_a_memory_alarm_workers_settle_and_senders_are_told(
    server: RabbitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads nothing more from connections that publish, until the alarm is over."""
    monkeypatch.setattr("umbel.brokers.amqp.blocking.REPLY_TIMEOUT_S", 1.0)
    vhost, results = server.new_vhost(), f"sqlite:///{tmp_path / 'results.db'}"
    settings = {"broker": server.url(vhost), "backend": results, "publish_timeout_s": 1.0}
    with Cluster(tmp_path, TASKS_FILE, **settings) as cluster:
        cluster.start_worker("w", "-c", "1", "-E")
        hold, work = (cluster.app.tasks[f"chaos_tasks.{name}"] for name in ("waits_for_file", "work"))
        sent = [hold.delay(str(tmp_path), "go"), *(work.delay(str(tmp_path), 0.0) for _ in range(WAITING))]
        wait_until(lambda: runs(tmp_path)[sent[0].id], deadline_s=LONG_S, what="the first task to run")
        server.limit_memory(0.0)
        words = r"does not accept messages now \(low on memory\): let queues drain.*vm_memory_high_watermark"
        for _ in range(2):  # on a connection that was open, and on a new one
            with pytest.raises(BrokerUnavailable, match=words):
                work.delay(str(tmp_path), 0.0)
        wait_until(
            lambda: "low on memory" in cluster.log("w"), deadline_s=LONG_S, what="the worker to say so"
        )
        (tmp_path / "go").touch()
        wait_until(lambda: all(one.ready() for one in sent), deadline_s=LONG_S, what="the tasks to end")
        assert "celery\t0" in server.control("list_queues", "-p", vhost, "name", "messages").splitlines()
        server.limit_memory(0.4)
        after = work.delay(str(tmp_path), 0.0)
        after.get(timeout=LONG_S)
        wait_until(lambda: "available again" in cluster.log("w"), deadline_s=LONG_S, what="the end of it")
        assert cluster.stop_worker("w") == 0
        log = cluster.log("w")
    found = runs(tmp_path)
    assert all(found[one.id] == 1 for one in [*sent, after])  # the refused ones may have come late
    assert log.count("low on memory") == 1 and "Traceback" not in log


def test_whatever_is_sent_during_an_alarm_arrives_once(
    server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sender tries again and again, with what it wrote before it knew of the alarm still unread."""
    settings = BrokerSettings(server.url(server.new_vhost()), lease_s=60.0)

    async def scenario() -> None:
        broker, waiting = open_broker(settings), AmqpAsyncProducer(settings)
        blocking = open_producer(settings)
        await broker.open()
        await broker.publish([*outgoing(*"1234", queue="parents"), *outgoing("opened")])
        one, two, three, four = await _taken(broker, "parents")
        await waiting.publish(outgoing("opened"), Attempt())
        await asyncio.to_thread(blocking.publish, outgoing("opened"))
        (refused,) = outgoing("buried by the worker")
        (failed,) = outgoing("failed")
        parked = cluster_now() + 0.2
        senders: list[Callable[[], Awaitable[object]]] = [
            lambda: broker.settle([Ack(one.tag, follow_ups=outgoing("follow-up"))]),
            lambda: broker.settle([Ack(two.tag, keep="it failed")]),
            lambda: broker.settle([Bury(three.tag, "it cannot run")]),
            lambda: broker.settle([Return(four.tag, not_before=parked)]),
            lambda: broker.publish(outgoing("sent by the worker")),
            lambda: broker.bury([Refused(refused, "nobody takes it")]),
            lambda: broker.keep_failed([Refused(failed, "it failed")]),
            lambda: waiting.publish(outgoing("awaited"), Attempt()),
            lambda: asyncio.to_thread(blocking.publish, outgoing("sent by a thread")),
        ]
        with monkeypatch.context() as patched:
            for part in ("handshake", "link", "blocking"):
                patched.setattr(f"umbel.brokers.amqp.{part}.REPLY_TIMEOUT_S", 0.2)
            await asyncio.to_thread(server.control, "set_vm_memory_high_watermark", "0")
            for _ in range(3):
                errors = await asyncio.gather(*(send() for send in senders), return_exceptions=True)
                assert all(isinstance(error, BrokerUnavailable) for error in errors), errors
                assert all("low on memory" in str(error) for error in errors)
        await asyncio.to_thread(server.control, "set_vm_memory_high_watermark", "0.4")
        for send in senders:
            await eventually(_succeeds(send), what="RabbitMQ to accept messages again")
        await eventually(_none_is_delayed(broker), what="the parked message to be due")
        arrived = [message for queue in ("celery", "parents") for message in await _taken(broker, queue)]
        letters, failures = await broker.dead_letters(), await broker.failed(100)
        await broker.close()
        await waiting.close()
        blocking.close()
        sent = ["follow-up", "sent by the worker", "awaited", "sent by a thread", "4"]
        # Where a connection was lost, on a busy machine, what it left unanswered is repeated, marked.
        unmarked = Counter(one.message.correlation_id for one in arrived if not one.redelivered)
        assert unmarked <= Counter([*sent, *["opened"] * 3])
        assert {one.message.correlation_id for one in arrived} == {*sent, "opened"}
        assert sorted(letter.message.correlation_id for letter in letters) == ["3", "buried by the worker"]
        assert sorted(letter.message.correlation_id for letter in failures) == ["2", "failed"]

    run(scenario())


async def _taken(broker: Broker, queue: str) -> Sequence[Delivery]:
    """All that is in the queue."""
    await broker.publish(outgoing("end", queue=queue))
    found: list[Delivery] = []

    async def to_the_end() -> bool:
        found.extend((await take(broker, queues=(queue,))).deliveries)
        return any(delivery.message.correlation_id == "end" for delivery in found)

    await eventually(to_the_end, what=f"the end of {queue}")
    return [delivery for delivery in found if delivery.message.correlation_id != "end"]


def _succeeds(send: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[bool]]:
    async def succeeds() -> bool:
        try:
            await send()
        except BrokerUnavailable:
            return False
        return True

    return succeeds


def _none_is_delayed(broker: Broker) -> Callable[[], Awaitable[bool]]:
    async def none_is() -> bool:
        return not (await broker.queues(["parents"]))["parents"].delayed

    return none_is


@pytest.mark.skipif(not SOAK, reason="as long as an alarm lasts; run with UMBEL_SOAK=1")
def test_chains_during_a_long_memory_alarm_run_each_step_once(server: RabbitServer, tmp_path: Path) -> None:
    """The first steps end, and tasks send others, while RabbitMQ takes nothing for 50 s."""
    vhost, results = server.new_vhost(), f"sqlite:///{tmp_path / 'results.db'}"
    with Cluster(tmp_path, TASKS_FILE, broker=server.url(vhost), backend=results) as cluster:
        cluster.start_worker("w", "-c", "12")
        hold, work, sends = (
            cluster.app.tasks[f"chaos_tasks.{name}"] for name in ("waits_for_file", "work", "sends_work")
        )
        directory = str(tmp_path)
        chains = [chain(hold.si(directory, "go"), work.si(directory, 0.0)).delay() for _ in range(10)]
        senders = [sends.delay(directory, "go") for _ in range(2)]
        wait_until(lambda: len(runs(tmp_path)) == 12, deadline_s=LONG_S, what="the first steps to run")
        server.limit_memory(0.0)
        (tmp_path / "go").touch()
        lifted = monotonic() + 50.0
        wait_until(lambda: monotonic() > lifted, deadline_s=LONG_S, what="a long alarm to pass")
        server.limit_memory(0.4)
        sent = [cluster.app.AsyncResult(sender.get(timeout=LONG_S)) for sender in senders]
        for result in [*chains, *sent]:
            result.get(timeout=LONG_S)
        assert "celery\t0" in server.control("list_queues", "-p", vhost, "name", "messages").splitlines()
        assert cluster.stop_worker("w") == 0
    found = runs(tmp_path)
    assert {found[last.id] for last in chains} == {1}
    unmarked = Counter(line.split()[0] for line in lines_of(tmp_path) if line.split()[1] == "0")
    assert all(unmarked[result.id] <= 1 for result in sent), "what a task sent itself may be there twice"


def test_a_task_that_outlasts_the_consumer_timeout_is_told_of_and_runs_once(
    server: RabbitServer, tmp_path: Path
) -> None:
    """The server takes its message back; when it comes to who ran it, its outcome is applied."""
    for name, value_ms in (("consumer_timeout", 1000), ("channel_tick_interval", 500)):  # for new channels
        server.evaluate(f"application:set_env(rabbit, {name}, {value_ms}).")
    results = f"sqlite:///{tmp_path / 'results.db'}"
    with Cluster(tmp_path, TASKS_FILE, broker=server.url(server.new_vhost()), backend=results) as cluster:
        cluster.start_worker("w", "-c", "1")
        long = cluster.app.tasks["chaos_tasks.waits_for_file"].delay(str(tmp_path), "go")
        wait_until(
            lambda: "consumer_timeout" in cluster.log("w"), deadline_s=LONG_S, what="the worker to say so"
        )
        (tmp_path / "go").touch()
        long.get(timeout=LONG_S)
        short = cluster.app.tasks["chaos_tasks.work"].delay(str(tmp_path), 0.0)
        short.get(timeout=LONG_S)
        assert cluster.stop_worker("w") == 0
        log = cluster.log("w")
    assert runs(tmp_path) == {long.id: 1, short.id: 1}
    assert "raise consumer_timeout in rabbitmq.conf" in log and "Traceback" not in log
