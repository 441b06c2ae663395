"""C3: which failed tasks are found, shown and retried, and what a retry is like."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from umbel.brokers.interface import Ack, Broker, BrokerSettings, Bury, Refused
from umbel.brokers.registry import open_broker
from umbel.clock import cluster_now
from umbel.coordination.failures import (
    ANY_CONTENT,
    Wanted,
    again,
    find_failed,
    hides_everything,
    parse_condition,
    retry_failed,
    retry_one,
)
from umbel.errors import BrokerRefused, NotKept
from umbel.protocol.delivery.sensitive import MASK
from umbel.protocol.delivery.trust import Doubt, Doubted, Signed
from umbel.wire.message import Message, Outgoing
from umbel.wire.retried import retry_of
from umbel.wire.signing import Keyring
from umbel.wire.task import TaskCall, TaskHeaders, encode_task

KEYS = Keyring([("k1", b"0123456789abcdef")])


def sent(task_id: str, name: str = "shop.pay", *args: Any, queue: str = "celery") -> Outgoing:
    return Outgoing(queue, encode_task(TaskCall(TaskHeaders(task=name, id=task_id), list(args))))


def within(tmp_path: Path, scenario: Callable[[Broker], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        broker = open_broker(BrokerSettings(f"sqlite:///{tmp_path / 'q.db'}", **settings))
        await broker.open()
        try:
            await scenario(broker)
        finally:
            await broker.close()

    asyncio.run(run())


async def found(broker: Broker, **wanted: Any) -> list[str]:
    where = [parse_condition(one) for one in wanted.pop("where", ())]
    return [one.task_id for one in await find_failed(broker, Wanted(**wanted, where=where))]


async def queued(broker: Broker, queue: str = "celery") -> list[Outgoing]:
    claim = await broker.claim("me", [queue], 100)
    return [Outgoing(one.queue, one.message) for one in claim.deliveries]


def test_failures_and_dead_letters_are_found_by_what_is_said_of_them(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        await broker.publish([sent("t1", "shop.pay", 1), sent("t2", "shop.mail"), sent("t3", queue="other")])
        tags = [one.tag for one in (await broker.claim("me", ["celery", "other"], 9)).deliveries]
        for verdict in (Ack(tags[0], keep="ValueError(1)"), Bury(tags[1], "gave up")):
            await broker.settle([verdict])
        before = cluster_now()
        await broker.settle([Ack(tags[2], keep="KeyError()")])
        await broker.bury([Refused(Outgoing("celery", Message(b"", b"no task")), "it cannot be read")])
        assert await found(broker, name="shop.*") == ["t3", "t2", "t1"]
        assert await found(broker, ids={"t1", "t2", "t9"}) == ["t2", "t1"]
        assert await found(broker, ids={f"t{n}" for n in range(50)}) == ["t3", "t2", "t1"]
        assert await found(broker, name="shop.*", since=before) == ["t3"]
        assert await found(broker, until=before) == ["t2", "t1"]
        assert await found(broker, where=["reason~Error", "queue=cel*"]) == ["t1"]
        assert await found(broker, where=["kind=dead letter", "task=shop.mail"]) == ["t2"]
        assert await found(broker, where=["args~1"]) == ["t1"]
        assert await found(broker, where=["root_id=t1", "sender=*", "retry_of=", "kwargs={}"]) == ["t1"]

    within(tmp_path, scenario)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("reason", "write FIELD=VALUE"), ("color=red", "unknown field 'color'; choose task_id"), ("", "write")],
)
def test_what_is_no_condition_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_condition(text)


def test_of_several_messages_of_one_task_one_is_retried_and_the_others_go(tmp_path: Path) -> None:
    """On RabbitMQ a worker that dies between keeping and acknowledging keeps a message twice."""

    async def scenario(broker: Broker) -> None:
        for reason in ("first", "second"):
            await broker.keep_failed([Refused(sent("t1"), reason), Refused(sent(reason), "broken")])
        done = await retry_failed(broker, await find_failed(broker, Wanted()))
        assert done.sent.keys() == {"t1", "first", "second"} and not done.gone
        assert await broker.failed(100) == []
        assert [one.message.correlation_id for one in await queued(broker)] == [*done.sent.values()]

    within(tmp_path, scenario)


def test_a_retry_that_is_repeated_is_the_same_message_and_another_failure_another(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        await broker.keep_failed([Refused(sent("t1"), "broken")])
        (failed,) = await find_failed(broker, Wanted())
        first, second = (again(failed, None, accept=ANY_CONTENT) for _ in range(2))
        assert first == second and first.message.correlation_id != "t1"
        await broker.bury([Refused(sent("t1"), "gave up")])
        await broker.keep_failed([Refused(sent("t1"), "broken again")])
        others = [again(one, None, accept=ANY_CONTENT) for one in await find_failed(broker, Wanted())]
        assert len({one.message.correlation_id for one in others}) == 3

    within(tmp_path, scenario)


def test_a_task_that_is_gone_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        with pytest.raises(NotKept, match="t1"):
            await retry_one(broker, "t1", accept=ANY_CONTENT)
        call = TaskCall(TaskHeaders(task="shop.pay", id="p1"))
        pickled = Outgoing("celery", encode_task(call, serializer="pickle"))
        await broker.keep_failed([Refused(sent("t1"), "broken"), Refused(pickled, "broken")])
        chosen = await find_failed(broker, Wanted())
        new = await retry_one(broker, "t1", accept=ANY_CONTENT)
        done = await retry_failed(broker, chosen)
        assert (done.sent, done.gone, list(done.refused)) == ({}, ["t1"], ["p1"])
        with pytest.raises(BrokerRefused, match=r"p1 cannot be retried.*pickle"):
            await retry_one(broker, "p1", accept=ANY_CONTENT)
        (message,) = [one.message for one in await queued(broker)]
        assert (message.correlation_id, retry_of(message.headers)) == (new, "t1")
        assert [one.message.correlation_id for one in await broker.failed(9)] == ["p1"]

    within(tmp_path, scenario)


def test_arguments_that_nobody_masked_are_hidden_where_they_may_be_sensitive(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        await broker.keep_failed([Refused(sent("t1", "shop.pay", "4111-1111"), "broken")])
        (shown,) = await find_failed(broker, Wanted(), hides_everything)
        assert (shown.args, shown.kwargs) == (MASK, MASK)
        assert not await find_failed(broker, Wanted(where=[parse_condition("args~4111")]), hides_everything)
        await retry_failed(broker, [shown])
        (new,) = await queued(broker)
        assert b"4111-1111" in new.message.body

    within(tmp_path, scenario)


def test_a_genuine_message_is_signed_again_and_no_other(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        genuine, copy = KEYS.sign_task(sent("t1"), 1.0), KEYS.sign_task(sent("t2"), 1.0)
        replayed = Doubted(Doubt.REPLAYED, "it was used").reason
        await broker.keep_failed([Refused(genuine, "broken"), Refused(sent("forged"), "broken")])
        await broker.bury([Refused(copy, replayed)])
        done = await retry_failed(broker, await find_failed(broker, Wanted()))
        assert "copy" in done.refused["t2"] and done.sent.keys() == {"t1", "forged"}
        new = await queued(broker)
        proofs = {retry_of(one.message.headers): KEYS.check_task(one.message, one.queue)[0] for one in new}
        assert isinstance(proofs["t1"], Signed) and proofs["t1"].at > 1.0
        assert isinstance(proofs["forged"], Doubted)

    within(tmp_path, scenario, keyring=KEYS)
