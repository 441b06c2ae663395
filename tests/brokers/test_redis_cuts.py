"""A connection that breaks at any script, or a worker that dies there, loses and repeats nothing (N1).

The call is cut before it is sent, or after the server has carried it out and before its reply is read.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.brokers.tokens import FAR, HOSTILE, outgoing_of, token_of, tokens_in
from tests.brokers.under_test import OWNER, QUEUE, BrokerUnderTest, result, run
from tests.servers.redis import RedisServer
from umbel.brokers.interface import Ack, Broker, Bury, Delivery, Permit, Return, Started, Verdict
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.scripts import Script
from umbel.errors import BrokerRefused, BrokerUnavailable
from umbel.protocol.delivery.limits import Concurrency
from umbel.wire.message import Outgoing

LEASE_S = 1000


class Scissors:
    """Cut the connection at one call of a script: before it is sent, or after it was carried out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, before: bool) -> None:
        self.calls: list[str] = []
        run_script = Link.run

        async def run_and_cut(link: Link, script: Script, *args: Any) -> Any:
            self.calls.append(script.name)
            is_now = len(self.calls) == at
            reply = None if is_now and before else await run_script(link, script, *args)
            if is_now:
                link.close()
                raise BrokerUnavailable("cut")
            return reply

        monkeypatch.setattr(Link, "run", run_and_cut)


async def a_short_life(broker: Broker, *, heals: bool) -> None:
    """Every step of a worker. One that heals tries a step again; one that does not is gone."""
    letters: list[int | str] = []
    held: list[Delivery] = []

    async def claim() -> None:
        held.extend((await broker.claim(OWNER, [QUEUE], 20)).deliveries)

    async def settle() -> None:
        ends: list[Callable[[Delivery], Verdict]] = [
            lambda one: Started(one.tag),
            lambda one: Ack(one.tag, [result("r")], follow_ups_of(one)),
            lambda one: Return(one.tag, charged=1, ran=True),
            lambda one: Return(one.tag, not_before=FAR),
            lambda one: Bury(one.tag, "why", follow_ups=follow_ups_of(one)),
        ]
        await broker.settle([ends[place % len(ends)](one) for place, one in enumerate(held)])

    async def look_for_letters() -> None:
        letters.extend(one.letter_id for one in await broker.dead_letters())

    async def requeue() -> None:
        with suppress(BrokerRefused):  # what went to the bad queue stays
            await broker.requeue_dead(letters)

    async def renew() -> None:
        await broker.renew(OWNER)

    async def reap() -> None:
        await broker.return_lost()

    async def forget() -> None:
        await broker.forget_owner(OWNER)

    for step in (claim, settle, renew, look_for_letters, requeue, reap, claim, forget):
        for _ in range(2 if heals else 1):
            try:
                await step()
                break
            except BrokerUnavailable:
                if not heals:
                    return


def follow_ups_of(one: Delivery) -> list[Outgoing]:
    """Three for each, one of them refused: their tokens say whose they are."""
    token = 1000 * token_of(one.message)
    return [outgoing_of(token + 1, "next"), outgoing_of(token + 2, "bad"), outgoing_of(token + 3, QUEUE, FAR)]


@pytest.mark.parametrize("heals", [True, False], ids=["heals", "dies"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_wherever_the_connection_is_cut_a_message_is_in_one_place_or_its_follow_ups_are(
    redis_server: RedisServer, on_redis: BrokerUnderTest, heals: bool, before: bool
) -> None:
    async def scenario(at: int) -> list[str]:
        redis_server.ask("FLUSHALL")
        redis_server.ask("SET", "bad", "not a list")
        async with on_redis.open(lease_s=LEASE_S) as broker:
            await broker.publish([outgoing_of(token) for token in range(1, 9)])
            await broker.publish([outgoing_of(9, QUEUE, FAR), outgoing_of(10, QUEUE, 1.0)])
            for token, text in enumerate(HOSTILE[:5], 11):
                redis_server.ask("LPUSH", QUEUE, text.replace("T", str(token)))
        with pytest.MonkeyPatch.context() as monkeypatch:
            scissors = Scissors(monkeypatch, at, before=before)
            async with on_redis.open(lease_s=LEASE_S) as broker:
                await a_short_life(broker, heals=heals)
        redis_server.ask("ZADD", "umbel.owners", "XX", "0", OWNER)
        redis_server.ask("DEL", "umbel.grace")
        async with on_redis.open(lease_s=LEASE_S) as other:
            await other.return_lost()
        assert redis_server.ask("EXISTS", f"umbel.inflight.{OWNER}", f"umbel.handed.{OWNER}") == 0
        found = tokens_in(redis_server)
        assert not {token: count for token, count in found.items() if count != 1}, scissors.calls
        for token in range(1, 16):
            sent = {one % 10 for one in found if one // 1000 == token}
            assert sent in (set(), {1, 2, 3}), f"half of the follow-ups of {token}: {scissors.calls}"
            assert token in found or sent, f"{token} is lost: {scissors.calls}"
        return scissors.calls

    whole = run(scenario(0))
    assert {"claim", "settle", "requeue", "owners"} <= set(whole)
    for at in range(1, len(whole) + 1):
        run(scenario(at))


def test_a_settle_stands_although_the_slots_of_its_limits_cannot_be_freed(
    on_redis: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with on_redis.open(lease_s=LEASE_S) as broker:
            await broker.publish([outgoing_of(token) for token in (1, 2)])
            held = (await broker.claim(OWNER, [QUEUE], 20)).deliveries
            terms = Concurrency(1).terms
            await broker.permit([Permit(one.tag, str(one.tag), "t:k", terms) for one in held])
            scissors = Scissors(monkeypatch, 2, before=True)
            settled = await broker.settle([Ack(held[0].tag)])
            assert (settled.applied, scissors.calls) == (1, ["settle", "limit"])
            assert (await broker.queues())[QUEUE].limited == 1
            await broker.return_lost()
            assert token_of((await broker.claim(OWNER, [QUEUE], 20)).deliveries[0].message) == 2

    run(scenario())
