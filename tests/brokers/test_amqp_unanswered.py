"""A message that RabbitMQ has not answered for: written once on its connection, redelivered on another."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.brokers.test_amqp_awaited import hear
from tests.brokers.under_test import (
    OWNER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    outgoing,
    result,
    run,
    take,
    take_one,
    texts,
)
from tests.servers.rabbitmq import shared_server
from tests.servers.way import Way
from umbel.brokers.amqp import confirms, publishing, topology, verdicts
from umbel.brokers.amqp.broker import AmqpBroker
from umbel.brokers.amqp.confirms import Unanswered, Unconfirmed
from umbel.brokers.amqp.consumer import Consumer
from umbel.brokers.amqp.envelope import MessageState, decode_properties, encode
from umbel.brokers.amqp.frames import Incoming, Method
from umbel.brokers.amqp.producer import AmqpProducer
from umbel.brokers.amqp.publisher import AmqpAsyncProducer
from umbel.brokers.amqp.publishing import Post
from umbel.brokers.amqp.session import Session
from umbel.brokers.amqp.topology import CAPABILITIES, TaskQueues
from umbel.brokers.interface import (
    SENT_REMEMBERED_S,
    Ack,
    Attempt,
    Broker,
    BrokerSettings,
    Delivery,
    Return,
    Started,
)
from umbel.clock import cluster_now
from umbel.errors import BrokerUnavailable, MayHaveArrived
from umbel.wire.message import Message, Outgoing

PARENTS = "parents"
Seen = list[tuple[str, bool]]


@dataclass
class Sender:
    """Somebody who sends, and how many batches of it RabbitMQ has not answered for."""

    send: Callable[[Sequence[Outgoing]], Awaitable[None]]
    under_way: Callable[[], int]


Opened = Callable[[BrokerUnderTest], AbstractAsyncContextManager[Sender]]


@pytest.fixture
def under_test(way: Way) -> Iterator[BrokerUnderTest]:
    """Its links do not end because they are silent for a while."""
    url = f"amqp://guest:guest@127.0.0.1:{way.port}/{shared_server().new_vhost()}"
    under_test = BrokerUnderTest(BrokerSettings(url, lease_s=60.0, connect_timeout_s=4.0), CAPABILITIES)
    yield under_test
    under_test.close()


def session_of(broker: Broker) -> Session:
    assert isinstance(broker, AmqpBroker)
    session = broker._sessions.alive
    assert session is not None
    return session


def under_way(broker: Broker) -> int:
    unconfirmed: list[Unconfirmed] = [
        channel._unconfirmed for channel in session_of(broker).publisher._channels.values()
    ]
    return sum(map(len, unconfirmed))


@asynccontextmanager
async def worker(under_test: BrokerUnderTest) -> AsyncIterator[Sender]:
    async with under_test.open() as broker:
        await broker.publish(outgoing("first"))
        yield Sender(broker.publish, lambda: under_way(broker))


@asynccontextmanager
async def settling_worker(under_test: BrokerUnderTest) -> AsyncIterator[Sender]:
    """What it sends are the follow-ups of claimed messages."""
    async with under_test.open() as broker:
        await broker.publish([*outgoing("first"), *outgoing("p1", "p2", queue=PARENTS)])
        parents = await all_of(broker, 2, PARENTS)

        async def settle(batch: Sequence[Outgoing]) -> None:
            await broker.settle([Ack(parents[0].tag, follow_ups=batch)])
            del parents[0]

        yield Sender(settle, lambda: under_way(broker))


@asynccontextmanager
async def awaiting_client(under_test: BrokerUnderTest) -> AsyncIterator[Sender]:
    producer = AmqpAsyncProducer(under_test.settings)
    await producer.publish(outgoing("first"), Attempt())
    assert producer._publisher is not None
    channel = producer._publisher._channels["/"]

    async def publish(batch: Sequence[Outgoing]) -> None:
        attempt = Attempt()
        try:
            await producer.publish(batch, attempt)
        except BaseException:
            assert attempt.is_out, "so the caller gets SendUnknown"
            raise

    yield Sender(publish, lambda: len(channel._unconfirmed))
    await producer.close()


@asynccontextmanager
async def blocking_client(under_test: BrokerUnderTest) -> AsyncIterator[Sender]:
    producer = under_test.producer()
    assert isinstance(producer, AmqpProducer)
    producer.publish(outgoing("first"))
    link = producer._link
    assert link is not None
    yield Sender(lambda batch: asyncio.to_thread(producer.publish, batch), lambda: len(link._unconfirmed))


async def all_of(broker: Broker, number: int, queue: str) -> list[Delivery]:
    found: list[Delivery] = []

    async def enough() -> bool:
        found.extend((await take(broker, queues=(queue,))).deliveries)
        return len(found) >= number

    await eventually(enough, what=f"{number} messages in {queue}")
    return found


async def arrived(under_test: BrokerUnderTest) -> Seen:
    """All that is in the queue, in its order, and whether it may have run."""
    seen: Seen = []
    async with under_test.open() as broker:
        await broker.publish(outgoing("end"))

        async def to_the_end() -> bool:
            deliveries = (await take(broker)).deliveries
            seen.extend((each.message.correlation_id, each.redelivered) for each in deliveries)
            return ("end", False) in seen

        await eventually(to_the_end, what="the end of the queue")
    return [(text, flag) for text, flag in seen if text not in ("first", "end")]


async def until_under_way(sender: Sender) -> None:
    async def is_under_way() -> bool:
        return sender.under_way() > 0

    await eventually(is_under_way, what="messages to be under way")


# -- on the same connection --------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [worker, settling_worker, awaiting_client])
def test_what_was_given_up_under_way_is_not_written_when_it_is_sent_again(
    opened: Opened, way: Way, under_test: BrokerUnderTest
) -> None:
    """A worker that stops gives up what it settles, and settles it again."""

    async def scenario() -> None:
        async with opened(under_test) as sender:
            way.silence()
            given_up = asyncio.ensure_future(sender.send(outgoing("a", "b")))
            await until_under_way(sender)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            again = asyncio.ensure_future(sender.send(outgoing("a", "b", "c")))
            way.resume()
            await again
            await sender.send(outgoing("a"))  # its answer is known: this is another one
        assert await arrived(under_test) == [(text, False) for text in "abca"]

    run(scenario())


@pytest.mark.parametrize("opened", [worker, awaiting_client])
def test_a_server_that_confirms_late_keeps_its_connection_and_gets_nothing_twice(
    opened: Opened, under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose queue has lost the majority of its replicas, or whose disk is slow."""
    vhost = under_test.settings.url.rpartition("/")[2]
    found = f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost}">>, queue, <<"{QUEUE}">>))'

    def stop(what: str) -> None:
        shared_server().evaluate(f"{found}, sys:{what}(amqqueue:get_pid(Q)).")

    async def scenario() -> None:
        async with opened(under_test) as sender:
            await asyncio.to_thread(stop, "suspend")
            try:
                monkeypatch.setattr("umbel.brokers.amqp.handshake.REPLY_TIMEOUT_S", 0.1)
                for _ in range(3):
                    with pytest.raises(BrokerUnavailable, match="has not confirmed messages in time"):
                        await sender.send(outgoing("late"))
                monkeypatch.undo()
            finally:
                await asyncio.to_thread(stop, "resume")
            await sender.send(outgoing("late"))
        assert await arrived(under_test) == [("late", False)]

    run(scenario())


def test_a_link_ends_when_too_much_on_it_is_not_answered(
    way: Way, under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given up stays in memory until it is answered."""
    monkeypatch.setattr("umbel.brokers.amqp.link.BATCHES_MAX", 2)

    async def scenario() -> None:
        async with worker(under_test) as sender:
            way.silence()
            sent = [asyncio.ensure_future(sender.send(outgoing(text))) for text in "abc"]
            for sending in sent:
                with pytest.raises(BrokerUnavailable, match="has not confirmed 2 batches"):
                    await sending
            way.resume()

    run(scenario())


def test_a_settle_that_fails_at_a_later_step_does_not_repeat_the_earlier_ones(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury, calls = verdicts.bury, list[int]()

    async def fails_once(*given: object) -> list[bool]:
        calls.append(1)
        if len(calls) == 1:
            raise BrokerUnavailable("the connection was lost")
        return await bury(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(verdicts, "bury", fails_once)

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("parent", queue=PARENTS))
            (parent,) = await all_of(broker, 1, PARENTS)
            unroutable = Outgoing("", outgoing("astray")[0].message, exchange="amq.direct", routing_key="k")
            ack = Ack(parent.tag, follow_ups=[*outgoing("a"), unroutable])
            with pytest.raises(BrokerUnavailable):
                await broker.settle([ack])
            assert (await broker.settle([ack])).applied == 1
            (letter,) = await broker.dead_letters()
            assert letter.message.correlation_id == "astray"
        assert await arrived(under_test) == [("a", False)]

    run(scenario())


def test_during_an_alarm_a_worker_claims_what_is_ready_and_parks_nothing(under_test: BrokerUnderTest) -> None:
    """A message that came before it is due waits here until it can be parked."""

    async def scenario() -> None:
        async with under_test.open() as broker, under_test.open() as sender:
            await broker.publish(outgoing("first"))
            assert texts((await take(broker)).deliveries) == ["first"]
            link = session_of(broker).publisher._link
            hear(link, Method.CONNECTION_BLOCKED, "low on memory")
            early = outgoing("early")[0].message
            await session_of(sender).send([not_due(early, cluster_now() + 1000.0)])
            await sender.publish(outgoing("ready"))
            assert texts(await all_of(broker, 1, QUEUE)) == ["ready"]
            (consumer,) = session_of(broker).claims.consumers()
            assert [arrived.message for arrived in consumer.early] == [early]
            await broker.wait_ready([QUEUE], 0.05, owner="nobody")
            with pytest.raises(BrokerUnavailable, match=r"does not accept messages now \(low on memory\)"):
                await broker.publish(outgoing("never"))
            hear(link, Method.CONNECTION_UNBLOCKED)
            assert not (await take(broker)).deliveries and not consumer.early
            assert (await sender.queues([QUEUE]))[QUEUE].delayed == 1

    run(scenario())


# -- on another connection ---------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [worker, awaiting_client, blocking_client])
def test_what_a_lost_connection_left_unanswered_is_sent_as_redelivered(
    opened: Opened, way: Way, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with opened(under_test) as sender:
            way.silence()
            lost = asyncio.ensure_future(sender.send(outgoing("a")))
            await until_under_way(sender)
            way.cut()
            way.resume()
            with pytest.raises(BrokerUnavailable):
                await lost

            async def sent_again() -> bool:
                try:
                    await sender.send(outgoing("a", "b"))
                except BrokerUnavailable:
                    return False
                return True

            await eventually(sent_again, what="a new connection")
            await sender.send(outgoing("c"))
        seen = await arrived(under_test)
        assert [run for run in seen if run != ("a", False)] == [("a", True), ("b", False), ("c", False)]

    run(scenario())


def test_a_blocking_sender_says_what_may_have_arrived(
    way: Way, under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = under_test.producer()
    producer.publish(outgoing("first"))
    way.silence()
    monkeypatch.setattr("umbel.brokers.amqp.handshake.REPLY_TIMEOUT_S", 0.1)
    with pytest.raises(MayHaveArrived):
        producer.publish(outgoing("a"))
    way.close()
    with pytest.raises(MayHaveArrived, match="cannot reach RabbitMQ"):  # as an earlier attempt left it
        producer.publish(outgoing("a"))
    with pytest.raises(BrokerUnavailable) as refused:
        producer.publish(outgoing("b"))
    assert not isinstance(refused.value, MayHaveArrived)


def test_what_a_redelivered_message_brings_is_redelivered(way: Way, under_test: BrokerUnderTest) -> None:
    """Its first claimer may have sent the same before it died."""

    async def scenario() -> None:
        async with under_test.open() as first:
            await first.publish(outgoing("one", "two", queue=PARENTS))
            assert len(await all_of(first, 2, PARENTS)) == 2
            way.cut()
            async with under_test.open() as second:
                one, two = await all_of(second, 2, PARENTS)
                delayed = outgoing("late", not_before=cluster_now() + 0.1)
                await second.settle(
                    [Ack(one.tag, follow_ups=outgoing("a")), Ack(two.tag, follow_ups=delayed)]
                )
                found = {
                    found.message.correlation_id: found.redelivered
                    for found in await all_of(second, 2, QUEUE)
                }
                assert found == {"a": True, "late": True}

    run(scenario())


@pytest.mark.parametrize(("since_s", "is_marked"), [(0.0, True), (-500.0, True), (-1000.0, False)])
def test_a_mark_that_was_inherited_ends_with_its_time(
    since_s: float, is_marked: bool, under_test: BrokerUnderTest
) -> None:
    """Else a task that retries itself for ever would have it for ever; each step knows when it began."""

    async def scenario() -> None:
        async with under_test.open() as broker:
            parent = outgoing("parent", queue=PARENTS)[0].message
            since = cluster_now() + since_s if since_s else 0.0
            queue = topology.task_queue(PARENTS)
            await session_of(broker).send(
                [Post(PARENTS, encode(parent, MessageState(0.0, True, since)), parent.body, queue)]
            )
            (delivery,) = await all_of(broker, 1, PARENTS)
            assert delivery.redelivered
            await broker.settle([Ack(delivery.tag, follow_ups=outgoing("step", queue="steps"))])
            (step,) = await all_of(broker, 1, "steps")
            assert step.redelivered == is_marked
            await broker.settle([Ack(step.tag, follow_ups=outgoing("next"))])
            (following,) = await all_of(broker, 1, QUEUE)
            assert following.redelivered == is_marked
            claimed = session_of(broker).claims.active[following.tag]
            assert not is_marked or claimed.since <= (since or cluster_now()), "the time is that of the first"

    run(scenario())


# -- at the consumer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_copy_that_comes_after_its_redelivered_original_counts_as_redelivered(
    has_ended: bool, way: Way, under_test: BrokerUnderTest
) -> None:
    """It was written on a connection that was lost, and nothing about it says so."""

    async def scenario() -> None:
        async with under_test.open() as first:
            await first.publish(outgoing("a"))
            await take_one(first)
            way.cut()
            async with under_test.open() as second:
                (again,) = await all_of(second, 1, QUEUE)
                assert again.redelivered
                await second.settle([Started(again.tag)])
                if has_ended:
                    await second.settle([Ack(again.tag)])
                await session_of(second).catch_up()  # an entry is confirmed a moment before it is read
                await second.publish(outgoing("a", "b"))
                found = await all_of(second, 2, QUEUE)
                assert [(*texts([copy]), copy.redelivered) for copy in found] == [("a", True), ("b", False)]

    run(scenario())


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("returned", [False, True])
def test_what_a_worker_parks_is_recognised_by_its_copy(
    returned: bool, dies: bool, under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may die between parking a message and acknowledging it.

    `returned`: before that, another worker has given the message back unstarted.
    """

    def die(consumer: Consumer, parked: object) -> None:
        consumer._link.abort("killed before it acknowledges")

    async def scenario() -> list[bool]:
        async with under_test.open() as first, under_test.open() as second:
            await first.publish(outgoing("first"))
            (opening,) = await all_of(first, 1, QUEUE)
            await first.settle([Ack(opening.tag)])
            (consumer,) = session_of(first).claims.consumers()
            if not returned:
                await first.forget_owner(OWNER)
            due = cluster_now() + 1.0
            await session_of(second).send([not_due(outgoing("m")[0].message, due)])

            async def is_fetched() -> bool:
                return bool(consumer.early)

            if returned:
                await eventually(is_fetched, what="the message to be fetched")
                await first.leave_queue(OWNER, QUEUE)
            if not dies:
                (delivery,) = await one_of(second)
                return [delivery.redelivered]
            with monkeypatch.context() as patched:
                patched.setattr(Consumer, "finish_early", die)
                with pytest.raises(BrokerUnavailable):
                    await all_of(second, 1, QUEUE)

            async def both_are_due() -> bool:
                waiting = await session_of(first).counts([QUEUE])
                return cluster_now() > due and waiting[QUEUE] == 2

            await eventually(both_are_due, what="the message and its copy to be due")
            flags = []
            for _ in range(2):
                (delivery,) = await one_of(first)
                flags.append(delivery.redelivered)
                await first.settle([Started(delivery.tag), Ack(delivery.tag)])
                await session_of(first).catch_up()
            return flags

    assert run(scenario()) == ([True, True] if dies else [False])


def test_a_message_that_may_be_parked_is_not_returned_when_its_time_has_come(
    under_test: BrokerUnderTest,
) -> None:
    """Its worker tries again after an alarm in which the server took the parked copy and did not say so."""

    async def scenario() -> str:
        async with under_test.open() as broker:
            await broker.publish(outgoing("m"))
            (delivery,) = await one_of(broker)
            session_of(broker).unanswered.add_accepted([publishing.parking(delivery.tag)])
            await broker.settle([Return(delivery.tag, not_before=cluster_now() - 1.0)])
            await broker.publish(outgoing("the next"))
            (following,) = await one_of(broker)
            return following.message.correlation_id

    assert run(scenario()) == "the next"  # the copy is not in this test


def not_due(message: Message, due: float) -> Post:
    """As it comes from a step of the delay ladder that is shorter than its delay."""
    return Post(QUEUE, encode(message, MessageState(due)), message.body, topology.task_queue(QUEUE))


async def one_of(broker: Broker) -> Sequence[Delivery]:
    async def claimed() -> Sequence[Delivery]:
        return (await take(broker, 1)).deliveries

    return await eventually(claimed, what="a message")


# -- what is known of it -----------------------------------------------------------------------------


@dataclass
class Account:
    """The account of one channel, whose messages nobody waits for, and the time."""

    now: float = 0.0

    def __post_init__(self) -> None:
        self.unanswered: Unanswered[str] = Unanswered(lambda: self.now)
        self.confirms = Unconfirmed()

    def give_up(self, *posts: Post) -> None:
        batch = self.confirms.add(len(posts), lambda: [post.sent for post in posts], object())
        self.unanswered.add(posts, batch, "the channel")

    def outcomes(self, *posts: Post) -> list[str]:
        """What is to be done with each of them now."""
        left = self.unanswered.plan(posts)
        return [
            "refused"
            if place in left.refused
            else "nothing"
            if place not in left.to_send
            else "send"
            if left.to_send[place] == post
            else "send as redelivered"
            for place, post in enumerate(posts)
        ]


def posts(*names: str, not_before: float = 0.0) -> list[Post]:
    return publishing.tasks(
        outgoing(*names, not_before=not_before), TaskQueues(BrokerSettings("amqp://")), 0.0
    )


def test_what_is_sent_again_follows_from_what_became_of_the_first() -> None:
    account, batch = Account(), posts("accepted", "refused", "returned", "lost")
    account.give_up(*batch)
    assert [way for _, way in account.unanswered.under_way(batch)] == ["the channel"]
    account.confirms.answer(1, multiple=False, accepted=True)
    account.confirms.answer(2, multiple=False, accepted=False)
    account.confirms.take_back(returned_by_server(batch[2]))
    account.confirms.answer(3, multiple=False, accepted=True)
    assert account.unanswered.may_have_arrived(batch[3:]) and account.unanswered.under_way(batch)
    account.confirms.fail(BrokerUnavailable("the connection was lost"))
    assert not account.unanswered.under_way(batch)
    assert account.outcomes(*batch, *posts("new")) == [
        "nothing",
        "refused",
        "send",
        "send as redelivered",
        "send",
    ]
    (lost,) = (account.unanswered.plan(batch[3:]).to_send).values()
    assert decode_properties(lost.properties).type == MessageState(ran=True).text()
    assert not account.unanswered.may_have_arrived(batch[1:3])
    account.unanswered.forget(batch)
    assert account.outcomes(*batch) == ["send"] * 4


def test_a_message_is_the_same_wherever_it_waits_and_whatever_marks_it_has() -> None:
    account, (later,) = Account(), posts("a", not_before=100.0)
    account.give_up(later)
    account.confirms.fail(BrokerUnavailable("the connection was lost"))
    (due,) = posts("a")
    assert later.key != due.key
    assert account.outcomes(due) == ["send as redelivered"]
    assert account.outcomes(later.as_redelivered()) == ["send"], "it says so already"
    assert account.outcomes(*posts("b")) == ["send"]


def test_what_ends_a_claim_is_known_by_the_claim() -> None:
    """The same message may be claimed twice, by itself and by its copy."""
    account, queues, parked = Account(), TaskQueues(BrokerSettings("amqp://")), outgoing("a")[0]
    account.give_up(publishing.parked(parked, queues, 0.0, 0.0, claim=1))
    account.confirms.answer(1, multiple=False, accepted=True)
    assert account.outcomes(publishing.parked(parked, queues, 0.0, 0.0, claim=1)) == ["nothing"]
    assert account.outcomes(publishing.parked(parked, queues, 0.0, 0.0, claim=2)) == ["send"]
    assert account.outcomes(*posts("a")) == ["send"]


def test_an_answer_is_remembered_for_a_while_after_it_came() -> None:
    account, batch = Account(), posts("a")
    account.give_up(*batch)
    account.now = 10 * SENT_REMEMBERED_S  # as long as an alarm may last
    account.confirms.answer(1, multiple=False, accepted=True)
    account.now += SENT_REMEMBERED_S - 1.0
    assert account.outcomes(*batch) == ["nothing"]
    account.now += 2.0
    assert account.outcomes(*batch) == ["send"]
    account.give_up(*posts("b"))
    assert len(account.unanswered.given_up) == 1, "what is old is dropped"


def test_so_many_messages_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirms, "REMEMBERED_MAX", 2)
    account, batch = Account(), posts("a", "b", "c")
    account.give_up(*batch)
    account.confirms.fail(BrokerUnavailable("the connection was lost"))
    assert account.outcomes(*batch) == ["send", "send as redelivered", "send as redelivered"]


def test_records_and_results_are_not_looked_up() -> None:
    account = Account()
    account.give_up(publishing.start_entry(QUEUE, "a", 1), publishing.result(result("a"), "inbox"))
    assert not account.unanswered.given_up


def returned_by_server(post: Post) -> Incoming:
    exchange, key, properties, body = post.sent
    return Incoming(1, Method.BASIC_RETURN, (312, "NO_ROUTE", exchange, key), properties, body)
