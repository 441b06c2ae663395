"""What the cluster knows from streams, when the server loses them: a disk that was not kept, a reset."""

import time
from itertools import count
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
    run,
    take,
)
from tests.servers.rabbitmq import amqp_url, shared_server
from tests.servers.way import Way
from umbel.brokers.amqp import topology
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.frames import Incoming, Method
from umbel.brokers.amqp.handshake import channel_refusal, locations_from_url
from umbel.brokers.amqp.streams import RevokeView, encode_record, read_stream
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import Broker, BrokerSettings
from umbel.errors import BrokerError
from umbel.wire.records import Revoke

__all__ = ["amqp_url"]


def lose_the_streams(url: str) -> None:
    link = BlockingLink(locations_from_url(url)[0], timeout_s=2.0, name="the end")
    for stream in (topology.REVOKES, topology.STARTS, topology.FACTS, topology.CLOCK):
        link.call(Method.QUEUE_DELETE, 0, stream, False, False, False)
    link.close()


def revoke(task_id: str) -> Revoke:
    return Revoke(task_id, time.time(), time.time() + LONG_S)


async def revoked(broker: Broker, after: int) -> list[str]:
    claim = await broker.claim(OWNER, [QUEUE], 1, revoked_after=after)
    return [one.task_id for one in claim.revokes]


@pytest.mark.parametrize("is_cut", [True, False], ids=["the link is lost too", "the link lives"])
def test_who_knew_the_lost_streams_agrees_with_who_comes_new(
    way: Way, amqp_url: str, *, is_cut: bool
) -> None:
    far = amqp_url.replace(str(shared_server().port), str(way.port))
    old = BrokerUnderTest(BrokerSettings(far, connect_timeout_s=1.0), CAPABILITIES)
    new = BrokerUnderTest(BrokerSettings(amqp_url, connect_timeout_s=1.0), CAPABILITIES)

    async def scenario() -> None:
        async with old.open() as survivor:
            await survivor.publish(outgoing("a"))
            held = await survivor.coordination.acquire_lease("beat", OWNER, ttl_s=LONG_S)
            for number in range(3):  # versions that nobody who comes new can know
                assert await survivor.coordination.update_lease("beat", OWNER, held.term, b"%d" % number)
            assert await survivor.coordination.release_lease("beat", OWNER, held.term)
            old.producer().revoke([revoke("old one"), revoke("old two")])
            claim = await survivor.claim(OWNER, [QUEUE], 1)
            assert [one.task_id for one in claim.revokes] == ["old one", "old two"]

            assert await survivor.coordination.raise_clock(1000) == 1000
            lose_the_streams(amqp_url)
            if is_cut:
                way.cut()
            async with new.open() as newcomer:
                won = await newcomer.coordination.acquire_lease("beat", PEER, ttl_s=LONG_S)
                assert won.granted
                new.producer().revoke([revoke("new")])

                async def agreed() -> bool:
                    try:
                        seen = await survivor.coordination.read_lease("beat")
                        return (seen.holder, seen.term) == (PEER, won.term)
                    except BrokerError:
                        return False

                await eventually(agreed, what="the survivor to see the new lease")

                async def learnt() -> bool:
                    return await revoked(survivor, claim.revoked_cursor) == ["new"]

                await eventually(learnt, what="the revoke that came after the loss")
                assert await newcomer.coordination.release_lease("beat", PEER, won.term)
                assert (await survivor.coordination.acquire_lease("beat", OWNER, ttl_s=LONG_S)).granted
                assert (await take(survivor)).revoked_cursor > claim.revoked_cursor
                assert await survivor.coordination.raise_clock(7) == 1000
                assert await newcomer.coordination.raise_clock(0) == 1000

    run(scenario())
    old.close()
    new.close()


def test_a_stream_that_is_still_there_is_not_read_again(way: Way, amqp_url: str) -> None:
    far = amqp_url.replace(str(shared_server().port), str(way.port))
    under_test = BrokerUnderTest(BrokerSettings(far, connect_timeout_s=1.0), CAPABILITIES)

    async def scenario() -> None:
        async with under_test.open() as broker:
            under_test.producer().revoke([revoke("one")])

            async def cursor_after(task_id: str) -> int:
                claim = await broker.claim(OWNER, [QUEUE], 1)
                return claim.revoked_cursor if task_id in [one.task_id for one in claim.revokes] else 0

            before = await eventually(lambda: cursor_after("one"), what="the revoke")
            way.cut()

            async def after() -> int:
                try:
                    return (await broker.claim(OWNER, [QUEUE], 1)).revoked_cursor
                except BrokerError:
                    return 0

            assert await eventually(after, what="a new link") == before

    run(scenario())
    under_test.close()


def test_a_client_waits_for_the_replica_of_a_stream_that_was_made_just_now(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a virtual host that nobody has used: the stream is declared before it can be read."""
    call, refusals = BlockingLink.call, list[BrokerError]()

    def refuse_once(link: BlockingLink, method: Method, *fields: Any) -> Incoming:
        if method is Method.BASIC_CONSUME and not refusals:
            call(link, Method.CHANNEL_CLOSE, 200, "", 0, 0)
            words = "PRECONDITION_FAILED - stream queue 'q' does not have a running replica on the local node"
            refusals.append(channel_refusal(link.location, 406, words))
            link._fail(refusals[0])
            raise refusals[0]
        return call(link, method, *fields)

    monkeypatch.setattr(BlockingLink, "call", refuse_once)
    under_test = BrokerUnderTest(BrokerSettings(amqp_url), CAPABILITIES)
    under_test.producer().revoke([revoke("a")])
    under_test.close()
    assert refusals

    async def scenario() -> None:
        async with under_test.open() as broker:
            assert await revoked(broker, 0) == ["a"]

    run(scenario())


def test_the_cursor_of_revokes_never_goes_back() -> None:
    view = RevokeView()
    for offset in range(5):
        view.apply(offset, encode_record(revoke(str(offset))))
    seen = view.cursor
    view.restart()
    view.apply(0, encode_record(revoke("fresh")))
    assert [one.task_id for one in view.after(seen, time.time())] == ["fresh"]
    assert len(view.after(0, time.time())) == 6


def test_an_event_log_whose_last_entry_comes_late_is_not_taken_for_an_empty_one(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder would begin again, for a log that the broker has lost."""
    reads = count()
    under_test = BrokerUnderTest(BrokerSettings(amqp_url), CAPABILITIES)

    async def reads_late(*arguments: Any) -> None:
        if next(reads) % 3 == 2:
            await read_stream(*arguments)

    async def scenario() -> tuple[int, int]:
        async with under_test.open() as broker:
            monkeypatch.setattr("umbel.brokers.amqp.event_log.read_stream", reads_late)
            registered = await broker.register_recorder("recorder")
            return registered, (await broker.event_log()).last_offset

    assert run(scenario()) == (1, 1)
