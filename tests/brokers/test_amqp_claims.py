"""What an AMQP worker claims, decided on deliveries as they come: shares, questions, leases."""

import asyncio

import pytest

from tests.brokers.amqp_worker import ADA, BOB, LEASE_S, Worker, run, skip
from umbel.brokers.amqp.frames import Incoming, Method
from umbel.brokers.amqp.handshake import ChannelClosed, QueueRefused
from umbel.errors import BrokerUnavailable

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
        assert await worker.take("ab", 4) == ["b9", "a0", "b0", "a1"]
        assert await worker.take("ab", 4) == ["a2"]

    run(scenario())


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_claims_on_queues_that_were_all_handed_over_go_round(limit: int) -> None:
    async def scenario() -> None:
        worker = Worker()
        assert await worker.take("abc", 9) == []
        for queue in "abc":
            worker.server.put(queue, *(f"{queue}{number}" for number in range(4)))
            worker.server.consumed[queue].hand_over()
        taken = [text for _ in range(12 // limit) for text in await worker.take("abc", limit)]
        assert taken == [f"{queue}{number}" for number in range(4) for queue in "abc"]

    run(scenario())


def test_a_queue_that_had_nothing_does_not_cost_another_its_turn() -> None:
    async def scenario() -> None:
        worker = Worker()
        assert await worker.take("abc", 9) == []
        worker.server.put("a", "a0", "a1", "a2")
        worker.server.put("c", "c0", "c1", "c2")
        for queue in "ac":
            worker.server.consumed[queue].hand_over()
        taken = [text for _ in range(6) for text in await worker.take("abc", 1)]
        assert taken == ["a0", "c0", "a1", "c1", "a2", "c2"]

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
        assert claims.renew(ADA) is False
        await worker.take("a", 2)
        await worker.take("a", 1, owner=BOB)
        await skip(LEASE_S - 1)
        assert claims.renew(BOB) is False  # its claim began it, and says so once
        assert claims.renew(BOB) is True
        assert len(claims.active) == 3
        await skip(2)
        assert (claims.lost, {one.owner for one in claims.active.values()}) == (2, {BOB})
        assert Method.CHANNEL_CLOSE in worker.server.channels[0].methods
        assert claims.renew(ADA) is False
        await skip(LEASE_S + 1)
        assert (claims.lost, claims.active) == (3, {})

    run(scenario())


def test_a_claim_is_a_sign_of_life() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0")
        await worker.take("a", 1)
        await skip(LEASE_S - 1)
        await worker.take("a", 1)
        await skip(LEASE_S - 1)
        assert len(worker.claims.active) == 1

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
        assert len(worker.claims.active) == 1 and worker.claims._owners[ADA] is owner

    run(scenario())


def test_when_the_connection_has_ended_nobody_is_put_out() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0")
        await worker.take("a", 1)
        worker.server.error = BrokerUnavailable("gone")
        await skip(LEASE_S + 1)
        assert (worker.claims.lost, len(worker.claims.active)) == (0, 1)

    run(scenario())


def test_forgetting_an_owner_ends_its_claims_and_its_channels() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0", "a1", "a2")
        await worker.take("ab", 2)
        await worker.take("a", 1, owner=BOB)
        assert await worker.claims.forget(ADA) == 2
        assert [one.owner for one in worker.claims.active.values()] == [BOB]
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


# -- what need not be asked --------------------------------------------------------------------------


async def served(worker: Worker) -> None:
    """Its owner waits between claims, and the last one found something."""
    await worker.take("ab", 9)
    worker.claims.note_waiting(ADA)
    worker.server.put("a", "x")
    worker.server.consumed["a"].hand_over()
    assert await worker.take("ab", 4) == ["x"]


def test_an_owner_that_waits_need_not_ask_once_after_a_claim_that_found_something() -> None:
    async def scenario() -> None:
        worker = Worker()
        await served(worker)
        assert worker.claims.will_be_woken(ADA, "ab", 8)
        assert not worker.claims.will_be_woken(ADA, "ab", 8), "once"
        assert await worker.take("ab", 4) == []
        assert not worker.claims.will_be_woken(ADA, "ab", 8), "it found nothing"

    run(scenario())


def test_who_does_not_wait_between_claims_always_asks() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.claims.note_waiting(ADA)  # nobody yet
        worker.server.put("a", "x")
        assert await worker.take("a", 4) == ["x"]
        assert not worker.claims.will_be_woken(ADA, "a", 1)
        assert not worker.claims.will_be_woken(BOB, "a", 1)

    run(scenario())


def test_a_claim_of_nothing_asks_for_what_was_revoked() -> None:
    async def scenario() -> None:
        worker = Worker()
        await served(worker)
        assert not worker.claims.will_be_woken(ADA, "ab", 0)
        assert worker.claims.will_be_woken(ADA, "ab", 1)

    run(scenario())


def test_more_than_the_server_may_send_is_asked_for() -> None:
    async def scenario() -> None:
        worker = Worker()
        await served(worker)
        assert not worker.claims.will_be_woken(ADA, "ab", 9), "one is claimed, and nine may come"
        await served(worker)
        assert not worker.claims.will_be_woken(ADA, "abc", 1), "that queue is new"

    run(scenario())


def test_what_is_here_or_was_given_back_is_claimed_with_certainty() -> None:
    async def scenario() -> None:
        worker = Worker()
        await served(worker)
        worker.server.put("b", "y")
        worker.server.consumed["b"].hand_over()
        assert not worker.claims.will_be_woken(ADA, "ab", 4)
        assert await worker.take("ab", 4) == ["y"]
        worker.consumer("a").give_back(1)
        assert not worker.claims.will_be_woken(ADA, "ab", 4)

    run(scenario())


def test_a_consumer_that_has_ended_wakes_nobody() -> None:
    async def scenario() -> None:
        worker = Worker()
        await served(worker)
        worker.server.consumed["b"].end(ChannelClosed(406, "late acknowledgement"))
        assert not worker.claims.will_be_woken(ADA, "ab", 4)

    run(scenario())
