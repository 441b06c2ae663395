"""What an AMQP worker claims, decided on deliveries as they come: shares, leases, questions, marks.

The server here is the least that a consumer can talk to; what RabbitMQ makes of it is in `test_amqp.py`.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from tests.brokers.under_test import eventually
from umbel.brokers.amqp import claims as claims_module
from umbel.brokers.amqp.claims import Claims
from umbel.brokers.amqp.consumer import Arrived, Consumer
from umbel.brokers.amqp.envelope import NO_MARK, Mark, encode
from umbel.brokers.amqp.frames import Incoming, Method
from umbel.brokers.amqp.link import Link
from umbel.brokers.amqp.refusals import ChannelClosed, QueueRefused
from umbel.errors import BrokerError, BrokerUnavailable
from umbel.wire.message import Message

ADA, BOB = "ada", "bob"
LEASE_S = 1000.0


class Channel:
    """Hands over what waits in its queue, up to the limit, whenever it is asked for something."""

    def __init__(self, server: "Server") -> None:
        self.number = 1
        self.error: BrokerError | None = None
        self.on_delivery: Any = None
        self.on_end: Any = None
        self.methods: list[Method] = []
        self._server = server
        self._queue = ""
        self._limit = self._handed = 0

    async def call(self, method: Method, *fields: Any) -> Incoming:
        return await self.ask(method, *fields)

    def ask(self, method: Method, *fields: Any) -> asyncio.Future[Incoming]:
        self.methods.append(method)
        answer: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        if (refused := self._server.refused.get(fields[1] if len(fields) > 1 else "")) is not None:
            answer.set_exception(refused)
            return answer
        answer.set_result(Incoming(1, method, self._do(method, fields)))
        return answer

    async def answer(self, future: asyncio.Future[Incoming]) -> Incoming:
        return await future

    def send(self, data: bytes) -> None:
        pass

    def end(self, error: BrokerError) -> None:
        self.error = error
        self.on_end(error)

    def _do(self, method: Method, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        if method is Method.BASIC_QOS:
            self._limit = fields[1]
        elif method is Method.BASIC_CONSUME:
            self._queue = fields[1]
            self._server.consumed[self._queue] = self
        elif method is Method.QUEUE_DECLARE:
            if self._server.silent_questions:
                self._server.silent_questions -= 1
            else:
                self.hand_over()
            return fields[1], len(self._server.queues[fields[1]]), 1
        return ()

    def hand_over(self) -> None:
        waiting = self._server.queues[self._queue]
        while waiting and self._handed < self._limit:
            self._handed += 1
            text, priority, redelivered, mark = waiting.popleft()
            properties = encode(Message(b"{}", b"", priority=priority, correlation_id=text), mark)
            fields = ("", self._handed, redelivered, "")
            self.on_delivery(Incoming(1, Method.BASIC_DELIVER, fields, properties, text.encode()))


class Server:
    def __init__(self) -> None:
        self.error: BrokerError | None = None
        self.channels: list[Channel] = []
        self.consumed: dict[str, Channel] = {}
        self.refused: dict[object, BrokerError] = {}
        self.silent_questions = 0  # so many are answered before anything is handed over
        self.queues: dict[str, deque[tuple[str, int, bool, Mark]]] = {}

    async def channel(self) -> Channel:
        self.channels.append(Channel(self))
        return self.channels[-1]

    def put(self, queue: str, *texts: str, priority: int = 0, mark: Mark = NO_MARK) -> None:
        waiting = self.queues.setdefault(queue, deque())
        waiting.extend((text, priority, False, mark) for text in texts)

    def questions(self) -> int:
        return sum(channel.methods.count(Method.QUEUE_DECLARE) for channel in self.channels)


class Worker:
    """Claims with a server, and what they told."""

    def __init__(self) -> None:
        self.server = Server()
        self.deleted: list[tuple[str, set[object]]] = []
        self.starts: dict[tuple[str, str], int] = {}
        self.claims = Claims(
            cast(Link, self.server),
            LEASE_S,
            starts_of=lambda queue, key: self.starts.get((queue, key), 0),
            needs_own_limit=lambda queue: False,
            on_deleted=lambda queue, tags: self.deleted.append((queue, set(tags))),
        )

    async def take(self, queues: str, limit: int, *, owner: str = ADA) -> list[str]:
        for queue in queues:
            self.server.put(queue)
        taken = await self.claims.claim(owner, list(queues), limit)
        return [one.message.body.decode() for one in self.claims.deliver(owner, taken)]

    def consumer(self, queue: str) -> Consumer:
        (found,) = (one for one in self.claims.consumers() if one.queue == queue)
        return found


class Loop(asyncio.SelectorEventLoop):
    """Its time can be moved on."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def run(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(scenario)


async def skip(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.skipped_s += seconds
    for _ in range(3):
        await asyncio.sleep(0)


# -- shares ------------------------------------------------------------------------------------------


def test_one_queue_is_taken_highest_priority_first_and_no_more_than_the_limit() -> None:
    async def scenario() -> None:
        worker = Worker()
        for priority in (0, 9, 5):
            worker.server.put("a", f"p{priority}", f"p{priority}x", priority=priority)
        assert len(await worker.take("a", 6)) == 6
        for priority in (0, 9, 5):
            worker.server.put("a", f"p{priority}", f"p{priority}x", priority=priority)
        await worker.consumer("a").want(20)
        worker.server.consumed["a"].hand_over()
        assert await worker.take("a", 3) == ["p9", "p9x", "p5"]
        assert await worker.take("a", 3) == ["p5x", "p0", "p0x"]

    run(scenario())


def test_several_queues_take_turns_by_priority_up_to_the_limit() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0", "a1", "a2")
        worker.server.put("b", "b0")
        worker.server.put("b", "b9", priority=9)
        assert await worker.take("ab", 4) == ["b9", "b0", "a0", "a1"]
        assert await worker.take("ab", 4) == ["a2"]
        worker.server.put("a", *(f"a{number}" for number in range(3)))
        worker.server.put("b", *(f"b{number}" for number in range(3)))
        assert len(await worker.take("ab", 3)) == 3
        assert sorted((await worker.take("ab", 3))[:2])[0][0] == "a"

    run(scenario())


def test_what_a_cancelled_claimer_had_taken_comes_again_in_order() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0", "a1", "a2")
        taken = await worker.claims.claim(ADA, ["a"], 2)
        worker.claims.put_back(taken)
        assert worker.consumer("a").claimed == 0
        assert await worker.take("a", 3) == ["a0", "a1", "a2"]

    run(scenario())


# -- questions ---------------------------------------------------------------------------------------


def test_the_server_is_asked_only_while_it_may_have_more() -> None:
    async def scenario() -> None:
        worker = Worker()
        server = worker.server
        server.put("a", "a0")
        assert await worker.take("a", 2) == ["a0"]
        assert server.questions() == 2  # nothing is left there
        server.put("a", "a1", "a2", "a3", "a4")
        server.consumed["a"].hand_over()
        assert (await worker.take("a", 1), server.questions()) == (["a1"], 2)  # it is here
        assert (await worker.take("a", 2), server.questions()) == (["a2", "a3"], 4)
        worker.consumer("a").finish([1, 2, 3, 4])
        server.consumed["a"]._handed = 0
        server.put("a", "a5")
        server.consumed["a"].hand_over()
        consumer = worker.consumer("a")
        assert (consumer.buffered, consumer.prefetch, consumer.claimed) == (2, 4, 0)
        assert (await worker.take("a", 4), server.questions()) == (["a4", "a5"], 4)  # more would have come
        assert (await worker.take("a", 4), server.questions()) == ([], 6)

    run(scenario())


def test_after_something_was_given_back_the_server_is_asked() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0", "a1")
        assert await worker.take("a", 1) == ["a0"]
        consumer = worker.consumer("a")
        await consumer.want(9)
        worker.server.consumed["a"].hand_over()
        before = worker.server.questions()
        consumer.give_back(1)
        assert await worker.take("a", 3) == ["a1"]
        assert worker.server.questions() == before + 2

    run(scenario())


def test_a_server_that_has_more_and_sends_none_is_asked_a_few_times() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0", "a1", "a2")
        worker.server.silent_questions = 2
        assert await worker.take("a", 2) == ["a0", "a1"]
        assert worker.server.questions() == 4
        worker.server.silent_questions = 100
        assert await worker.take("a", 2) == []
        assert worker.server.questions() == 4 + 8

    run(scenario())


def test_a_queue_that_is_refused_is_named() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.refused["b"] = ChannelClosed(ChannelClosed.LOCKED, "exclusive")
        with pytest.raises(QueueRefused, match="'b'") as caught:
            await worker.take("ab", 2)
        assert caught.value.queue == "b"

    run(scenario())


# -- leases ------------------------------------------------------------------------------------------


def test_a_silent_owner_loses_what_it_holds_and_others_do_not() -> None:
    async def scenario() -> None:
        worker = Worker()
        claims = worker.claims
        worker.server.put("a", "a0", "a1", "a2")
        assert claims.touch(ADA) is False
        await worker.take("a", 2)
        await worker.take("a", 1, owner=BOB)
        await skip(LEASE_S - 1)
        assert claims.touch(BOB) is True
        assert len(claims.standing) == 3
        await skip(2)
        assert (claims.lost, {one.owner for one in claims.standing.values()}) == (2, {BOB})
        assert Method.CHANNEL_CLOSE in worker.server.channels[0].methods
        assert claims.touch(ADA) is False
        await skip(LEASE_S + 1)
        assert (claims.lost, claims.standing) == (3, {})

    run(scenario())


def test_a_claim_is_a_sign_of_life() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0")
        await worker.take("a", 1)
        await skip(LEASE_S - 1)
        await worker.take("a", 1)
        await skip(LEASE_S - 1)
        assert len(worker.claims.standing) == 1

    run(scenario())


def test_a_new_life_of_an_owner_does_not_end_with_the_time_of_the_old_one() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.claims.touch(ADA)
        await skip(LEASE_S / 2)
        await worker.claims.forget(ADA)
        worker.server.put("a", "a0")
        await worker.take("a", 1)
        owner = worker.claims._owners[ADA]
        await skip(LEASE_S / 2 + 1)
        assert len(worker.claims.standing) == 1 and worker.claims._owners[ADA] is owner

    run(scenario())


def test_when_the_connection_has_ended_nobody_is_put_out() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0")
        await worker.take("a", 1)
        worker.server.error = BrokerUnavailable("gone")
        await skip(LEASE_S + 1)
        assert (worker.claims.lost, len(worker.claims.standing)) == (0, 1)

    run(scenario())


def test_forgetting_an_owner_ends_its_claims_and_its_channels() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0", "a1", "a2")
        await worker.take("ab", 2)
        await worker.take("a", 1, owner=BOB)
        assert await worker.claims.forget(ADA) == 2
        assert [one.owner for one in worker.claims.standing.values()] == [BOB]
        closed = [Method.CHANNEL_CLOSE in channel.methods for channel in worker.server.channels]
        assert closed == [True, True, False]
        assert await worker.claims.forget(ADA) == 0

    run(scenario())


def test_forgetting_waits_until_the_server_has_everything_back() -> None:
    async def scenario() -> None:
        worker = Worker()
        await worker.take("a", 1)
        ended: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        worker.server.channels[0].ask = lambda *_: ended  # type: ignore[method-assign]
        forgetting = asyncio.ensure_future(worker.claims.forget(ADA))
        await skip(0)
        assert not forgetting.done()
        ended.set_result(Incoming(1, Method.CHANNEL_CLOSE, ()))
        assert await forgetting == 0

    run(scenario())


# -- what is delivered -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_server", "ran", "starts", "unrun", "wanted"),
    [
        (False, False, 5, False, (0, False)),  # the first time: nobody is asked
        (True, False, 0, False, (0, True)),
        (True, False, 0, True, (0, False)),  # only its worker knows that it has not run
        (True, False, 2, True, (2, True)),
        (False, True, 0, True, (0, True)),
        (False, True, 3, False, (3, True)),
    ],
)
def test_a_delivery_says_whether_it_may_have_run(
    by_server: bool, ran: bool, starts: int, unrun: bool, wanted: tuple[int, bool]
) -> None:
    async def scenario() -> None:
        worker = Worker()
        await worker.take("a", 1)
        worker.starts["a", "id"] = starts
        if unrun:
            worker.claims.remember_unrun("id")
        arrived = Arrived(Message(b"{}", b"", correlation_id="id"), 7, by_server, Mark(ran=ran))
        (delivery,) = worker.claims.deliver(ADA, [(worker.consumer("a"), arrived)])
        assert (delivery.starts, delivery.redelivered, delivery.queue) == (*wanted, "a")
        claimed = worker.claims.standing[delivery.tag]
        assert (claimed.owner, claimed.delivery_tag, claimed.starts) == (ADA, 7, wanted[0])
        (again,) = worker.claims.deliver(ADA, [(worker.consumer("a"), arrived)])
        assert again.tag != delivery.tag
        assert again.redelivered == (by_server or ran)  # what was remembered holds for once

    run(scenario())


def test_only_what_was_never_redelivered_is_noted_as_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "UNRUN_MAX", 2)

    async def scenario() -> None:
        worker = Worker()
        await worker.take("a", 1)
        consumer, claims = worker.consumer("a"), worker.claims

        def deliver(text: str, *, redelivered: bool) -> object:
            arrived = Arrived(Message(b"{}", b"", correlation_id=text), 7, redelivered, NO_MARK)
            (delivery,) = claims.deliver(ADA, [(consumer, arrived)])
            return delivery.tag, delivery.redelivered

        for text, redelivered in (("new", False), ("old", True), ("", False)):
            tag, _ = cast(tuple[str, bool], deliver(text, redelivered=redelivered))
            claims.note_unrun(claims.standing[tag])
        assert [cast(Any, deliver(text, redelivered=True))[1] for text in ("new", "old", "")] == [
            False,
            True,
            True,
        ]
        for text in ("one", "two", "three"):
            claims.remember_unrun(text)
        assert [cast(Any, deliver(text, redelivered=True))[1] for text in ("one", "two", "three")] == [
            True,  # the oldest makes room
            False,
            False,
        ]

    run(scenario())


# -- consumers that end, pause and wait ------------------------------------------------------------------


def test_a_queue_that_was_deleted_is_told_with_the_claims_on_it() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0", "a1")
        worker.server.put("b", "b0")
        await worker.take("ab", 3)
        of_a = {tag for tag, one in worker.claims.standing.items() if one.consumer.queue == "a"}
        worker.server.consumed["a"].end(ChannelClosed(ChannelClosed.NOT_FOUND, "no queue"))
        assert worker.deleted == [("a", of_a)] and len(of_a) == 2
        assert len(worker.claims.standing) == 1

    run(scenario())


def test_a_consumer_that_ended_is_begun_anew_and_its_claims_are_forgotten() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0")
        worker.server.put("b", "b0")
        await worker.take("ab", 2)
        worker.server.consumed["a"].end(ChannelClosed(ChannelClosed.PRECONDITION, "acknowledgement"))
        assert [one.queue for one in worker.claims.consumers()] == ["b"]
        assert len(worker.claims.standing) == 2
        worker.server.put("a", "a1")
        assert await worker.take("ab", 2) == ["a1"]
        assert sorted(one.delivery.message.body for one in worker.claims.standing.values()) == [b"a1", b"b0"]
        assert len(worker.server.channels) == 3  # that of b stays

    run(scenario())


def test_who_leaves_a_queue_is_handed_nothing_more() -> None:
    async def scenario() -> None:
        worker = Worker()
        await worker.take("ab", 2)
        await worker.claims.leave(ADA, "a")
        cancelled = [Method.BASIC_CANCEL in channel.methods for channel in worker.server.channels]
        assert cancelled == [True, False]
        await worker.claims.leave(ADA, "nowhere")
        await worker.claims.leave(BOB, "a")
        worker.server.consumed["b"].end(BrokerUnavailable("gone"))
        await worker.claims.leave(ADA, "b")
        assert Method.BASIC_CANCEL not in worker.server.channels[1].methods

    run(scenario())


def test_a_claim_would_be_served_from_here_when_something_arrived_and_nothing_is_early() -> None:
    async def scenario() -> None:
        worker = Worker()
        arrived = worker.claims.has_arrived
        assert not arrived(ADA, ["a"])
        await worker.take("ab", 1)
        assert not arrived(ADA, ["a", "b"])
        await worker.consumer("a").want(5)
        worker.server.put("a", "a0")
        worker.server.consumed["a"].hand_over()
        assert arrived(ADA, ["a", "b"]) and arrived(ADA, ["a"])
        assert not arrived(ADA, ["b"])
        assert not arrived(ADA, ["a", "never consumed"])
        assert not arrived(BOB, ["a"])
        await worker.consumer("b").want(5)
        worker.server.put("b", "later", mark=Mark(due=4e9))
        worker.server.consumed["b"].hand_over()
        assert not arrived(ADA, ["a", "b"]) and arrived(ADA, ["a"])
        worker.server.consumed["a"].end(BrokerUnavailable("gone"))
        assert not arrived(ADA, ["a"])

    run(scenario())


def test_arrivals_are_noticed_in_the_queues_that_are_consumed() -> None:
    async def scenario() -> None:
        worker = Worker()
        assert not worker.claims.watches(["a"])
        await worker.take("ab", 1)
        assert worker.claims.watches(["a"]) and worker.claims.watches(["a", "b"])
        assert not worker.claims.watches(["a", "c"])
        worker.server.consumed["a"].end(BrokerUnavailable("gone"))
        assert not worker.claims.watches(["a"])

    run(scenario())


@pytest.mark.parametrize("news", ["message", "early", "end", "link"])
def test_who_waits_is_woken_by_news_of_its_queues(news: str) -> None:
    async def scenario() -> None:
        worker = Worker()
        server = worker.server
        await worker.take("ab", 1)
        await worker.consumer("a").want(5)
        await worker.consumer("b").want(5)
        waiting = asyncio.ensure_future(worker.claims.wait(["a", "never consumed"], LEASE_S))
        server.put("b", "b0")
        server.consumed["b"].hand_over()
        await skip(0)
        assert not waiting.done()
        match news:
            case "message" | "early":
                server.put("a", "a0", mark=Mark(due=4e9) if news == "early" else NO_MARK)
                server.consumed["a"].hand_over()
            case "end":
                server.consumed["a"].end(BrokerUnavailable("gone"))
            case "link":
                server.error = BrokerUnavailable("gone")
                server.consumed["b"].on_end(server.error)

        async def is_woken() -> bool:
            return waiting.done()

        await eventually(is_woken, what="the end of the wait")
        await worker.claims.wait(["a"], LEASE_S)  # what is here does not wait

    run(scenario())


def test_a_wait_ends_with_its_time() -> None:
    async def scenario() -> None:
        worker = Worker()
        await worker.take("a", 1)
        waiting = asyncio.ensure_future(worker.claims.wait(["a"], 50.0))
        await skip(49.0)
        assert not waiting.done()
        await skip(2.0)
        await waiting

    run(scenario())
