"""Leases and elections on RabbitMQ: one holder, whatever happens to connections, channels and callers."""

import asyncio
import gc
import time
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.brokers.under_test import LONG_S, OWNER, PEER, BrokerUnderTest, eventually, run
from tests.servers.rabbitmq import amqp_url, shared_server
from tests.servers.way import Way
from tests.waiting import until
from umbel.brokers.amqp.handshake import locations_from_url
from umbel.brokers.amqp.locks import HEARTBEATS_S, Locks, heartbeat_for
from umbel.brokers.amqp.streams import ElectionFact, FactsView, LeaseFact, encode_record
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import Broker, BrokerSettings
from umbel.errors import BrokerUnavailable
from umbel.protocol.leadership.coordination import (
    RETENTION_S,
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Granted,
    LeaseReply,
    Policy,
)

__all__ = ["amqp_url"]

TTL_S = 2.0


@pytest.fixture
def under_test(amqp_url: str) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(amqp_url, connect_timeout_s=4.0), CAPABILITIES)
    yield under_test
    under_test.close()


async def acquired(broker: Broker, name: str, holder: str, *, ttl_s: float = LONG_S) -> LeaseReply:
    async def granted() -> LeaseReply | None:
        reply = await broker.coordination.acquire_lease(name, holder, ttl_s=ttl_s)
        return reply if reply.granted else None

    return await eventually(granted, what=f"the lease {name}")


def test_a_hold_ends_with_its_time_while_the_server_still_keeps_the_connection(amqp_url: str) -> None:
    ttl_s = 4.2  # the server drops a connection with heartbeats for that after 8 to 12 s of silence
    way = Way(shared_server().port)
    far = amqp_url.replace(str(shared_server().port), str(way.port))
    cut_off = BrokerUnderTest(BrokerSettings(far, connect_timeout_s=1.0), CAPABILITIES)
    settings = BrokerSettings(amqp_url, connect_timeout_s=1.0)

    async def scenario() -> None:
        async with cut_off.open() as one, BrokerUnderTest(settings, CAPABILITIES).open() as other:
            assert (await one.coordination.acquire_lease("beat", OWNER, ttl_s=ttl_s)).granted
            accepted = way.accepted
            way.silence()
            busy = await other.coordination.acquire_lease("beat", PEER, ttl_s=ttl_s)
            assert not busy.granted and busy.left_s < ttl_s / 10  # whoever follows asks again soon
            await acquired(other, "beat", PEER, ttl_s=ttl_s)
            way.resume()
            await acquired(one, "another", OWNER, ttl_s=ttl_s)
            assert way.accepted == accepted  # on the same connections
            way.close()

    run(scenario())
    way.end()


def test_a_holder_in_a_black_hole_has_given_up_before_another_can_take_its_lease(amqp_url: str) -> None:
    way = Way(shared_server().port)
    far = amqp_url.replace(str(shared_server().port), str(way.port))
    settings = BrokerSettings(amqp_url, connect_timeout_s=1.0)
    cut_off = BrokerUnderTest(BrokerSettings(far, connect_timeout_s=1.0), CAPABILITIES)
    last_yes = 0.0

    async def renewing(store: Broker, term: int) -> None:
        """Says yes to itself for as long as the store did, counted from when it asked."""
        nonlocal last_yes
        while True:
            asked_at = time.monotonic()
            if not await store.coordination.renew_lease("beat", OWNER, term, ttl_s=TTL_S):
                return
            last_yes = asked_at

    async def scenario() -> None:
        async with cut_off.open() as one, BrokerUnderTest(settings, CAPABILITIES).open() as other:
            won = await one.coordination.acquire_lease("beat", OWNER, ttl_s=TTL_S)
            assert won.granted
            renewal = asyncio.create_task(renewing(one, won.term))
            assert not (await other.coordination.acquire_lease("beat", PEER, ttl_s=TTL_S)).granted
            way.silence()
            await acquired(other, "beat", PEER)
            taken_at = time.monotonic()
            assert last_yes + TTL_S <= taken_at
            renewal.cancel()
            await asyncio.wait([renewal])
            way.close()

    run(scenario())
    way.end()


def test_a_hold_is_kept_for_as_long_as_its_holder_may_believe_in_it() -> None:
    """The server lets go two heartbeats after it last heard of a connection, or later."""
    for ttl_s in (0.1, 1.0, 2.0, 10.0, 15.0, 60.0, 120.0):
        assert 2 * heartbeat_for(ttl_s) >= ttl_s
    assert heartbeat_for(3600.0) == HEARTBEATS_S[-1]


def test_a_lease_that_was_refused_does_not_hold_back_another_one(under_test: BrokerUnderTest) -> None:
    """RabbitMQ refuses by closing the channel; what was held before must still be given up."""

    async def scenario() -> None:
        async with under_test.open() as one, under_test.open() as other:
            assert (await other.coordination.acquire_lease("theirs", PEER, ttl_s=LONG_S)).granted
            assert (await one.coordination.acquire_lease("mine", OWNER, ttl_s=0.3)).granted
            assert not (await one.coordination.acquire_lease("theirs", OWNER, ttl_s=0.3)).granted
            await acquired(other, "mine", PEER)  # its holder does not renew

    run(scenario())


def test_of_many_who_want_it_at_once_one_gets_it(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as one, under_test.open() as other:
            for number in range(5):
                name = f"lease {number}"
                replies = await asyncio.gather(
                    *(
                        broker.coordination.acquire_lease(name, f"{place}.{count}", ttl_s=LONG_S)
                        for place, broker in (("one", one), ("other", other))
                        for count in range(4)
                    )
                )
                (winner,) = [reply for reply in replies if reply.granted]
                assert (await other.coordination.read_lease(name)).holder == winner.holder

    run(scenario())


def test_who_is_cancelled_while_it_acquires_leaves_nothing_held(under_test: BrokerUnderTest) -> None:
    chance = Random(7)

    async def scenario() -> None:
        async with under_test.open() as one, under_test.open() as other:
            await one.coordination.acquire_lease("first", OWNER, ttl_s=LONG_S)  # the link is open now
            for number in range(30):
                name = f"lease {number % 3}"
                acquiring = asyncio.ensure_future(one.coordination.acquire_lease(name, OWNER, ttl_s=LONG_S))
                await asyncio.wait([acquiring], timeout=chance.uniform(0.0, 0.02))
                if acquiring.done() and acquiring.result().granted:
                    term = acquiring.result().term
                    assert await one.coordination.release_lease(name, OWNER, term)
                acquiring.cancel()
                taken = await acquired(other, name, PEER)
                assert await other.coordination.release_lease(name, PEER, taken.term)

    run(scenario())


def test_an_election_started_at_most_once_starts_once_for_all_who_try(under_test: BrokerUnderTest) -> None:
    """KS1: claims and starts of several processes, with leases far too short for what they do."""
    chance = Random(11)

    async def scenario() -> None:
        async with under_test.open() as one, under_test.open() as other, under_test.open() as third:
            brokers = {"one": one, "other": other, "third": third}
            for number in range(6):
                asked = ElectionRequest(f"e{number}", "t", b"{}", Policy.AT_MOST_ONCE, time.time())
                starts: set[tuple[str, int]] = set()

                async def candidate(name: str, key: str = f"k{number}") -> None:
                    store = brokers[name].coordination
                    for _ in range(4):
                        reply = await store.claim_election(key, name, asked, ttl_s=0.02)  # noqa: B023
                        if isinstance(reply, Granted):
                            await asyncio.wait([asyncio.Future()], timeout=chance.uniform(0.0, 0.04))
                            if await store.start_election(key, name, reply.term):
                                starts.add((name, reply.term))  # noqa: B023

                await asyncio.gather(*map(candidate, brokers))
                assert len(starts) <= 1

    run(scenario())


def test_what_had_ended_and_is_anothers_is_given_up_without_an_error(amqp_url: str) -> None:
    (location,) = locations_from_url(amqp_url)

    async def scenario() -> None:
        one, other = Locks(4.0, 1, "one"), Locks(4.0, 1, "other")
        try:
            assert await one.take("y", LONG_S, location) is not None
            assert await one.take("x", 0.02, location) is not None
            await eventually(lambda: other.take("x", LONG_S, location), what="its time to be over")
            await one.drop_now("x")
            await one.drop_now("y")
            assert await other.take("y", LONG_S, location) is not None, "the refusal kept it"
            assert await one.take("x", LONG_S, location) is None
        finally:
            await one.close()
            await other.close()

    run(scenario())


def test_a_lock_that_cannot_be_taken_any_more_is_not_reported_when_its_taker_was_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that is cut off gives up asking first; that its connection ends is known already."""
    (location,) = locations_from_url("amqp://guest:guest@localhost/")
    reported: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        locks, ends = Locks(4.0, 1, "one"), asyncio.Event()

        async def open_late(*_: object) -> None:
            await ends.wait()
            raise BrokerUnavailable("the connection ended")

        monkeypatch.setattr(locks, "_open", open_late)
        taking = asyncio.ensure_future(locks.take("x", LONG_S, location))
        await until(lambda: locks._taking, "it to be asked for")
        taking.cancel()
        await asyncio.wait([taking])
        ends.set()
        await until(lambda: not locks._taking, "it to fail")
        gc.collect()

    run(scenario())
    assert not reported


# -- the log that all read in one order ----------------------------------------------------------------


def lease(holder: str, term: int, version: int) -> LeaseFact:
    return LeaseFact("beat", holder, term, 15.0, b"", version)


def election(state: ElectionState, version: int, changed_at: float = 0.0) -> ElectionFact:
    asked = ElectionRequest("e", "t", b"{}", Policy.AT_MOST_ONCE, 0.0)
    return ElectionFact("k", ElectionRecord(state, asked, changed_at=changed_at), version)


def heard(*facts: LeaseFact | ElectionFact) -> FactsView:
    view = FactsView()
    for offset, fact in enumerate(facts):
        view.apply(offset, encode_record(fact))
    return view


def test_of_two_that_knew_the_same_the_first_counts() -> None:
    view = heard(lease("a", 1, 1), lease("b", 9, 2), lease("c", 99, 2))
    assert view.leases["beat"].holder == "b"
    assert view.next_version("lease", "beat") == 3


def test_what_an_old_holder_writes_late_does_not_count_however_high_its_term() -> None:
    view = heard(lease("old", 10, 1), lease("new", 11, 2), lease("old", 12, 2))
    assert view.leases["beat"].holder == "new"


def test_a_writer_learns_whether_its_entry_counted() -> None:
    view = heard(lease("a", 1, 1))
    mine, theirs = lease("me", 2, 2), lease("them", 3, 2)
    with view.attempt(mine) as counted:
        view.apply(1, encode_record(theirs))
        view.apply(2, encode_record(mine))
        assert not counted()
    again = lease("me", 4, 3)
    with view.attempt(again) as counted:
        view.apply(3, encode_record(again))
        view.apply(4, encode_record(lease("them", 5, 4)))  # at once after it: it counted all the same
        assert counted()


def test_who_joins_late_takes_the_first_that_is_left_and_agrees_from_there() -> None:
    assert heard(lease("b", 7, 6), lease("c", 8, 7)).leases["beat"].holder == "c"


def test_an_election_that_one_reader_has_swept_and_another_has_not_begins_anew_for_both() -> None:
    old, fresh = election(ElectionState.DONE, 4), election(ElectionState.OPEN, 1, changed_at=RETENTION_S)
    not_swept, swept = heard(election(ElectionState.OPEN, 1), old), heard()
    for view in (not_swept, swept):
        view.apply(9, encode_record(fresh))
        assert view.elections["k"].state is ElectionState.OPEN
        assert view.next_version("election", "k") == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 3)), min_size=1, max_size=40))
def test_at_most_one_start_counts_however_claims_and_starts_cross(
    steps: list[tuple[str, bool, int]],
) -> None:
    """KS1: each of three writes by what it knew some entries ago, as one does whose link is slow."""
    log: list[ElectionFact] = [election(ElectionState.OPEN, 1)]
    starts: set[int] = set()
    for name, is_start, lag in steps:
        known = heard(*log[: max(1, len(log) - lag)])
        record, version = known.elections["k"], known.next_version("election", "k")
        asked = record.request
        if is_start:
            if record.state is not ElectionState.HELD or record.holder != name:
                continue
            record = ElectionRecord(ElectionState.HELD, asked, 0.0, name, record.term, started=True)
        elif record.started:
            continue  # the policy: nobody claims what has started
        else:
            record = ElectionRecord(ElectionState.HELD, asked, 0.0, name, known.last_term + 1)
        fact = ElectionFact("k", record, version)
        before = heard(*log)
        with before.attempt(fact) as counted:
            before.apply(len(log), encode_record(fact))
            if counted() and record.started:
                starts.add(record.term)
        log.append(fact)
    assert len(starts) <= 1
