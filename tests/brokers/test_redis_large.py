"""Large messages on Redis lie apart from their claims: whatever happens to a claim, they are whole."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.contract_limits import LimitsContract
from tests.brokers.contract_messages import MessagesContract
from tests.brokers.contract_verdicts import OwnershipContract, VerdictsContract
from tests.brokers.redis_claims import INFLIGHT, claims_of, costs, cut, end_lease
from tests.brokers.redis_scripts import marked
from tests.brokers.test_redis_rights import SOAK, documented_rights
from tests.brokers.under_test import OWNER, PEER, QUEUE, BrokerUnderTest, outgoing, run, take, take_one, texts
from tests.servers.redis import RedisServer
from umbel.brokers.interface import Ack, Broker, BrokerSettings, Bury, Delivery, Return, Started, Verdict
from umbel.brokers.redis.holding import LARGE_BYTES, LargeMessages
from umbel.brokers.redis.keys import CAPABILITIES
from umbel.brokers.redis.link import Link
from umbel.errors import BrokerUnavailable
from umbel.wire.message import Message, Outgoing, unreadable

LARGE = ["a" * LARGE_BYTES, "b" * LARGE_BYTES, "c" * LARGE_BYTES]
TOO_DEEP = 50_000  # also where a library has raised the limit of recursion


def large(queue: str = QUEUE) -> list[Outgoing]:
    return [Outgoing(queue, Message(b'{"task": "t"}', text.encode())) for text in LARGE]


def apart(server: RedisServer) -> list[bytes]:
    found = server.ask("KEYS", "umbel.apart.*")
    assert isinstance(found, list)
    return found


async def take_apart(broker: Broker) -> list[Delivery]:
    """The first claim sees that messages are large, and the next has them apart."""
    await broker.publish(large())
    first = await take_one(broker)
    found = (await take(broker)).deliveries
    await broker.settle([Ack(first.tag)])
    return list(found)


@contextmanager
def before_reading(act: Callable[[Link], Awaitable[None]]) -> Iterator[None]:
    """Something happens between a claim and the reading of its messages, once."""
    call_all = Link.call_all

    async def late(link: Link, commands: Sequence[Any]) -> Any:
        monkeypatch.setattr(Link, "call_all", call_all)
        await act(link)
        return await call_all(link, commands)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Link, "call_all", late)
        yield


def of_log(entry: list[object], name: bytes) -> object:
    """One part of an entry of `ACL LOG`."""
    return entry[entry.index(name) + 1]


# -- how it goes --------------------------------------------------------------------------------------


def test_large_messages_are_read_apart_and_are_gone_when_they_end(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            held = await take_apart(broker)
            assert texts(held) == LARGE[1:]
            assert len(apart(redis_server)) == 2
            assert redis_server.ask("HGET", INFLIGHT, held[0].tag) == b""
            await broker.settle([Ack(one.tag) for one in held])
            assert apart(redis_server) == []
            assert redis_server.ask("HLEN", INFLIGHT) == 1  # the epoch

    run(scenario())


def test_small_messages_after_large_ones_lie_with_their_claims_again(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.settle([Ack(one.tag) for one in await take_apart(broker)])
            await broker.publish(outgoing("x", "y"))
            small = [await take_one(broker), await take_one(broker)]
            assert texts(small) == ["x", "y"]
            assert apart(redis_server) == [f"umbel.apart.{small[0].tag}".encode()]  # the first tells

    run(scenario())


def test_many_small_messages_are_not_large(patient: BrokerUnderTest, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.publish(outgoing(*(f"{one:1000}" for one in range(20))))
            await take(broker, 10)
            await take(broker)
            assert apart(redis_server) == []

    run(scenario())


def test_large_messages_of_two_queues_come_by_one_claim(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.publish([*large(), *large("other")])
            await take(broker, 1)
            with costs(redis_server, 1):
                held = (await take(broker, queues=(QUEUE, "other"))).deliveries
            assert sorted(texts(held)) == sorted([*LARGE[1:], *LARGE])
            assert {apart_key.decode() for apart_key in apart(redis_server)} == {
                f"umbel.apart.{one.tag}" for one in held
            }

    run(scenario())


ENDS: dict[str, Callable[[Delivery], Verdict]] = {
    "returned": lambda one: Return(one.tag),
    "delayed": lambda one: Return(one.tag, not_before=4e9),
    "buried": lambda one: Bury(one.tag, "it broke"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_claim_that_ends_otherwise_leaves_the_message_whole_and_nothing_apart(
    patient: BrokerUnderTest, redis_server: RedisServer, end: str
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            held = await take_apart(broker)
            await broker.settle([ENDS[end](one) for one in held])
            assert apart(redis_server) == []
            if end == "returned":
                assert texts((await take(broker)).deliveries) == LARGE[1:]
            elif end == "buried":
                letters = await broker.dead_letters()
                assert sorted(letter.message.body.decode() for letter in letters) == LARGE[1:]
            else:
                waiting = redis_server.ask("ZRANGE", f"umbel.delayed.{QUEUE}", 0, -1)
                assert isinstance(waiting, list)
                assert sorted(len(one) > LARGE_BYTES for one in waiting) == [True, True]

    run(scenario())


def test_a_start_that_is_counted_keeps_the_message(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            held = await take_apart(broker)
            await broker.settle([Started(held[0].tag)])
            await broker.settle([Return(one.tag) for one in held])
            again = (await take(broker)).deliveries
            assert texts(again) == LARGE[1:] and [one.starts for one in again] == [1, 0]

    run(scenario())


def test_what_a_lost_owner_held_comes_back_whole(patient: BrokerUnderTest, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with patient.open() as broker, patient.open() as peer:
            await take_apart(broker)
            end_lease(redis_server, OWNER)
            again = (await take(peer, owner=PEER)).deliveries
            assert texts(again) == LARGE[1:] and all(one.redelivered for one in again)
            assert apart(redis_server) == []

    run(scenario())


# -- what goes wrong ----------------------------------------------------------------------------------


def test_messages_that_could_not_be_read_go_back(patient: BrokerUnderTest, redis_server: RedisServer) -> None:
    """The connection is lost between the claim and the reading."""

    async def lost(link: Link) -> None:
        link.close()
        raise BrokerUnavailable("cut")

    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.publish(large())
            first = await take_one(broker)
            with before_reading(lost), pytest.raises(BrokerUnavailable, match="cut"):
                await take(broker)
            again = (await take(broker)).deliveries
            assert texts(again) == LARGE[1:] and not any(one.redelivered for one in again)
            await broker.settle([Ack(one.tag) for one in (first, *again)])
            assert apart(redis_server) == []

    run(scenario())


def test_what_is_not_due_goes_on_waiting(patient: BrokerUnderTest, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.settle([Ack(one.tag) for one in await take_apart(broker)])
            redis_server.ask("LPUSH", QUEUE, marked("d" * LARGE_BYTES, not_before=4e9))
            await broker.publish(outgoing("after it"))
            assert texts((await take(broker)).deliveries) == ["after it"]
            delayed = redis_server.ask("ZRANGE", f"umbel.delayed.{QUEUE}", 0, -1, "WITHSCORES")
            assert isinstance(delayed, list)
            assert len(delayed[0]) > LARGE_BYTES and float(delayed[1]) == 4e9
            assert len(apart(redis_server)) == 1  # of the one that was taken

    run(scenario())


def test_a_message_whose_text_was_removed_is_a_malformed_one(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """By somebody who deletes keys of ours: it is told of, and keeps nobody waiting."""

    async def deleted(_: Link) -> None:
        redis_server.ask("DEL", *apart(redis_server)[:1])

    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.publish(large())
            await take_one(broker)
            with before_reading(deleted):
                held = (await take(broker)).deliveries
            assert sorted(one.message == unreadable(b"") for one in held) == [False, True]
            await broker.settle([Bury(one.tag, "malformed") for one in held])
            assert apart(redis_server) == []

    run(scenario())


def test_a_message_whose_claim_ended_before_it_was_read_is_not_taken(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """Else an empty one would be told of as malformed, while a peer has the true one."""

    async def given_up(_: Link) -> None:
        end_lease(redis_server, OWNER)
        async with patient.open() as peer:
            assert texts((await take(peer, owner=PEER)).deliveries) == LARGE

    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.publish(large())
            await take_one(broker)
            with before_reading(given_up):
                assert (await take(broker)).deliveries == []

    run(scenario())


@pytest.mark.parametrize(
    "mark", ['{"x": ' + "[" * TOO_DEEP + "]" * TOO_DEEP + "}", '{"not_before": "soon"}', "{", "7"]
)
def test_a_mark_that_cannot_be_read_keeps_nobody_waiting(
    patient: BrokerUnderTest, redis_server: RedisServer, mark: str
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.settle([Ack(one.tag) for one in await take_apart(broker)])
            redis_server.ask("LPUSH", QUEUE, '{"umbel": ' + mark + ', "body": "' + "d" * LARGE_BYTES + '"}')
            await broker.publish(outgoing("after it"))
            held = (await take(broker)).deliveries
            assert [one.message.headers for one in held] == [b"", b'{"task": "t"}']
            await broker.settle([Bury(held[0].tag, "malformed"), Ack(held[1].tag)])
            assert apart(redis_server) == []

    run(scenario())


def test_a_key_of_another_type_in_place_of_the_queue_is_passed_over(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """SORT reads sets too, and would take their members for messages."""

    async def scenario() -> None:
        async with patient.open() as broker:
            await take_apart(broker)
            redis_server.ask("DEL", QUEUE)
            redis_server.ask("SADD", QUEUE, "no message")
            assert (await take(broker)).deliveries == []
            assert redis_server.ask("SCARD", QUEUE) == 1

    run(scenario())


def test_a_user_who_may_not_sort_has_large_messages_in_the_ordinary_way(redis_server: RedisServer) -> None:
    redis_server.ask("FLUSHALL")
    redis_server.ask(*[right for right in documented_rights() if right != "+sort"], "-sort")
    redis_server.ask("ACL", "LOG", "RESET")
    url = redis_server.url.replace("redis://", "redis://umbel:word@")
    under_test = BrokerUnderTest(BrokerSettings(url), CAPABILITIES)

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(large())
            held = [await take_one(broker) for _ in LARGE]
            assert texts(held) == LARGE and apart(redis_server) == []
            log = redis_server.ask("ACL", "LOG")
            assert isinstance(log, list)
            (entry,) = log
            assert (of_log(entry, b"object"), of_log(entry, b"count")) == (b"sort", 1)  # it is tried once

    run(scenario())
    under_test.close()


def test_a_connection_that_was_lost_does_not_end_a_claim_apart(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            held = await take_apart(broker)
            cut(broker)
            await broker.renew(OWNER)
            assert (await take(broker)).deliveries == []
            await broker.settle([Ack(one.tag) for one in held])
            assert apart(redis_server) == []
            assert claims_of(broker)._large.is_wanted

    run(scenario())


# -- everything else that a broker promises, with every message apart ---------------------------------


@pytest.fixture
def under_test(on_redis: BrokerUnderTest) -> Iterator[BrokerUnderTest]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        always = property(lambda _: True, lambda _, value: None)
        monkeypatch.setattr(LargeMessages, "is_wanted", always, raising=False)
        yield on_redis


if TYPE_CHECKING or SOAK:

    class Apart(BrokerContract):
        """All of the contract in a soak."""

else:

    class Apart(MessagesContract, OwnershipContract, VerdictsContract, LimitsContract):
        """What deals with claimed messages, always."""


class TestRedisApart(Apart):
    """A message that lies apart keeps every promise of one that does not."""
