"""C3: which failed tasks are found, shown and retried, and what a retry is like."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from umbel.brokers.interface import Ack, Broker, BrokerSettings, Bury, Refused
from umbel.brokers.registry import open_broker
from umbel.clock import cluster_now
from umbel.control.failures import (
    ANY_CONTENT,
    FailureFilter,
    find_failed,
    hides_everything,
    parse_condition,
    retry_failed,
    retry_message,
    retry_one,
)
from umbel.errors import BrokerRefused, NotKept
from umbel.protocol.delivery.sensitive import MASK
from umbel.protocol.delivery.trust import Proof, Signed
from umbel.wire.call import TaskCall, TaskHeaders
from umbel.wire.message import Message, Outgoing
from umbel.wire.retried import retry_of
from umbel.wire.signing import Keyring, signer_of
from umbel.wire.task import encode_task

KEYRING = Keyring([("k1", b"0123456789abcdef")])
SIGNER = signer_of(KEYRING, "here")
KEYS = {"keyring": KEYRING, "signing_cluster": "here"}


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
    return [one.task_id for one in await find_failed(broker, FailureFilter(**wanted, where=where))]


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
        done = await retry_failed(broker, await find_failed(broker, FailureFilter()))
        assert done.sent.keys() == {"t1", "first", "second"} and not done.gone
        assert await broker.failed(100) == []
        assert [one.message.correlation_id for one in await queued(broker)] == [*done.sent.values()]

    within(tmp_path, scenario)


def test_a_retry_that_is_repeated_is_the_same_message_and_another_failure_another(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        await broker.keep_failed([Refused(sent("t1"), "broken")])
        (failed,) = await find_failed(broker, FailureFilter())
        first, second = (retry_message(failed, None, accept=ANY_CONTENT) for _ in range(2))
        assert first == second and first.message.correlation_id != "t1"
        await broker.bury([Refused(sent("t1"), "gave up")])
        await broker.keep_failed([Refused(sent("t1"), "broken again")])
        others = [
            retry_message(one, None, accept=ANY_CONTENT) for one in await find_failed(broker, FailureFilter())
        ]
        assert len({one.message.correlation_id for one in others}) == 3

    within(tmp_path, scenario)


def test_a_task_that_is_gone_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        with pytest.raises(NotKept, match="t1"):
            await retry_one(broker, "t1", accept=ANY_CONTENT)
        call = TaskCall(TaskHeaders(task="shop.pay", id="p1"))
        pickled = Outgoing("celery", encode_task(call, serializer="pickle"))
        await broker.keep_failed([Refused(sent("t1"), "broken"), Refused(pickled, "broken")])
        chosen = await find_failed(broker, FailureFilter())
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
        (shown,) = await find_failed(broker, FailureFilter(), hides_everything)
        assert (shown.args, shown.kwargs) == (MASK, MASK)
        assert not await find_failed(
            broker, FailureFilter(where=[parse_condition("args~4111")]), hides_everything
        )
        await retry_failed(broker, [shown])
        (new,) = await queued(broker)
        assert b"4111-1111" in new.message.body

    within(tmp_path, scenario)


def test_with_keys_a_retry_is_signed_if_a_worker_vouches_for_its_message(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        genuine, planted = (SIGNER.sign_task(sent(one), 1.0) for one in ("t1", "t2"))
        await broker.keep_failed([vouched(genuine), Refused(sent("t3"), "broken")])
        await broker.bury([Refused(planted, "stale: it did not run")])
        done = await retry_failed(broker, await find_failed(broker, FailureFilter()))
        assert "--even-if-used" in done.refused["t2"] and done.sent.keys() == {"t1", "t3"}
        new = {retry_of(one.message.headers): one for one in await queued(broker)}
        assert is_signed(new["t1"]) and not is_signed(new["t3"])
        insisted = await retry_failed(broker, await find_failed(broker, FailureFilter()), even_if_used=True)
        assert insisted.sent.keys() == {"t2"}

    within(tmp_path, scenario, **KEYS)


def test_a_letter_that_somebody_copies_is_retried_once(tmp_path: Path) -> None:
    """Every retry of it has one mark, so the broker's record of used signatures knows the second."""

    async def scenario(broker: Broker) -> None:
        letter = vouched(SIGNER.sign_task(sent("t1"), 1.0))
        await broker.keep_failed([letter])
        (first,) = await find_failed(broker, FailureFilter())
        await retry_failed(broker, [first])
        await broker.keep_failed([letter])
        (second,) = await find_failed(broker, FailureFilter())
        await retry_failed(broker, [second])
        marks = {proof.mark for one in await queued(broker) if isinstance(proof := proof_of(one), Signed)}
        assert (first.letter.letter_id != second.letter.letter_id, len(marks)) == (True, 1)

    within(tmp_path, scenario, **KEYS)


@pytest.mark.parametrize("retries", [0, 3])
def test_of_a_letter_that_is_requeued_and_retried_one_runs(tmp_path: Path, retries: int) -> None:
    """Somebody put it back after it was requeued; a retry counts its attempts from 0 again."""

    async def scenario(broker: Broker) -> None:
        call = TaskCall(TaskHeaders(task="shop.pay", id="t1", retries=retries))
        letter = vouched(SIGNER.sign_task(Outgoing("celery", encode_task(call)), 1.0))
        await broker.bury([letter])
        (dead,) = await broker.dead_letters(10)
        await broker.requeue_dead([dead.letter_id])
        await broker.keep_failed([letter])
        await retry_failed(broker, await find_failed(broker, FailureFilter()))
        proofs = [proof_of(one) for one in await queued(broker)]
        marks = {proof.mark for proof in proofs if isinstance(proof, Signed)}
        assert (len(proofs), len(marks)) == (2, 1)

    within(tmp_path, scenario, **KEYS)


@pytest.mark.parametrize("is_signed", [True, False])
def test_with_keys_no_letter_is_decoded_that_is_not_json(tmp_path: Path, is_signed: bool) -> None:
    """To retry it would run what somebody pickled; `accept_content` is about what children run."""

    async def scenario(broker: Broker) -> None:
        call = TaskCall(TaskHeaders(task="shop.pay", id="p1"), [Explosive(tmp_path)])
        pickled = Outgoing("celery", encode_task(call, serializer="pickle"))
        await broker.keep_failed(
            [vouched(SIGNER.sign_task(pickled, 1.0)) if is_signed else Refused(pickled, "")]
        )
        done = await retry_failed(
            broker, await find_failed(broker, FailureFilter()), accept=("json", "pickle")
        )
        assert "only messages in JSON are retried" in done.refused["p1"]
        assert not (tmp_path / "exploded").exists()

    within(tmp_path, scenario, **KEYS)


def test_where_only_what_is_verified_may_be_retried_the_rest_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        forged = SIGNER.sign_task(sent("t2"), 1.0)
        forged = replace(forged, message=replace(forged.message, body=b"[[9],{},{}]"))
        await broker.keep_failed([vouched(SIGNER.sign_task(sent("t1"), 1.0)), Refused(forged, "broken")])
        await broker.keep_failed([Refused(sent("t3"), "broken")])
        found = await find_failed(broker, FailureFilter())
        done = await retry_failed(broker, found, only_verified=True)
        assert done.sent.keys() == {"t1"}
        assert "forged" in done.refused["t2"] and "unsigned" in done.refused["t3"]

    within(tmp_path, scenario, **KEYS)


def test_what_somebody_writes_in_the_name_of_a_task_does_not_stand_in_for_its_message(tmp_path: Path) -> None:
    async def scenario(broker: Broker) -> None:
        await broker.keep_failed([vouched(SIGNER.sign_task(sent("t1", "shop.pay", 1), 1.0))])
        await broker.keep_failed([Refused(sent("t1", "shop.pay", 1_000_000), "newer")])
        done = await retry_failed(broker, await find_failed(broker, FailureFilter()))
        assert done.sent.keys() == {"t1"}
        (new,) = await queued(broker)
        assert is_signed(new) and b"1000000" not in new.message.body

    within(tmp_path, scenario, **KEYS)


class Explosive:
    """A pickle of it leaves a file where it is read."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "exploded"

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


def vouched(outgoing: Outgoing) -> Refused:
    return Refused(outgoing, SIGNER.vouched("broken", outgoing.message, outgoing.queue, 2.0))


def proof_of(outgoing: Outgoing) -> Proof:
    return SIGNER.check_task(outgoing.message, outgoing.queue)[0]


def is_signed(outgoing: Outgoing) -> bool:
    proof = proof_of(outgoing)
    return isinstance(proof, Signed) and proof.at > 1.0
