"""What every broker promises about what a cluster shares: broadcasts, events, revokes, leadership."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    PEER,
    QUEUE,
    SHORT_LEASE_S,
    BrokerUnderTest,
    eventually,
    needs,
    outgoing,
    run,
    take,
    texts,
)
from umbel import App
from umbel.brokers.interface import Broadcast, Broker
from umbel.errors import RevokesFull
from umbel.protocol.leadership.coordination import (
    Busy,
    Closed,
    ElectionRequest,
    ElectionState,
    Granted,
    LeaseReply,
    Policy,
)
from umbel.wire.records import Revoke

EXCHANGE = "celeryev"


def event(key: str, body: bytes = b"{}", exchange: str = EXCHANGE) -> Broadcast:
    return Broadcast(exchange, key, body, b'{"hostname": "ada"}')


async def first(count: int, heard: AsyncIterator[Broadcast]) -> list[Broadcast]:
    broadcasts: list[Broadcast] = []
    async with asyncio.timeout(LONG_S / 2):
        while len(broadcasts) < count:
            broadcasts.append(await anext(heard))
    return broadcasts


def request(name: str, policy: Policy = Policy.AT_MOST_ONCE) -> ElectionRequest:
    return ElectionRequest(name, "task", b"{}", policy, asked_at=time.time() + 1)


class FanoutContract:
    @needs("events")
    def test_a_broadcast_reaches_every_subscriber_in_order(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with (
                under_test.open() as broker,
                under_test.open() as other,
                broker.subscribe(EXCHANGE, ["#"]) as one,
                broker.subscribe(EXCHANGE, ["#"]) as two,
                other.subscribe(EXCHANGE, ["#"]) as three,
            ):
                sent = [event(f"worker.{number}", b"body %d" % number) for number in range(5)]
                await broker.broadcast(sent[:2], ttl_s=LONG_S)
                await asyncio.to_thread(lambda: under_test.producer().broadcast(sent[2:], ttl_s=LONG_S))
                for subscription in (one, two, three):
                    assert await first(5, aiter(subscription)) == sent

        run(scenario())

    @needs("events")
    def test_a_waiting_subscriber_is_woken(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, broker.subscribe(EXCHANGE, ["#"]) as subscription:
                heard = aiter(subscription)
                for number in range(10):
                    waiting = asyncio.create_task(first(1, heard))
                    await broker.broadcast([event(f"n.{number}")], ttl_s=LONG_S)
                    assert await waiting == [event(f"n.{number}")]

        run(scenario())

    @needs("events")
    @pytest.mark.parametrize(
        ("pattern", "heard"),
        [
            ("#", ["a", "a.b", "a.b.c", "b.c", "end"]),
            ("*", ["a", "end"]),
            ("a.#", ["a", "a.b", "a.b.c", "end"]),
            ("a.*", ["a.b", "end"]),
            ("#.c", ["a.b.c", "b.c", "end"]),
            ("a.b", ["a.b", "end"]),
            ("*.#.c", ["a.b.c", "b.c", "end"]),
        ],
    )
    def test_patterns_are_those_of_amqp(
        self, under_test: BrokerUnderTest, pattern: str, heard: list[str]
    ) -> None:
        async def scenario() -> None:
            async with (
                under_test.open() as broker,
                broker.subscribe(EXCHANGE, [pattern, "end"]) as subscription,
            ):
                keys = ["a", "a.b", "a.b.c", "b.c", "end"]
                await broker.broadcast([event(key) for key in keys], ttl_s=LONG_S)
                received = await first(len(heard), aiter(subscription))
                assert [broadcast.routing_key for broadcast in received] == heard

        run(scenario())

    @needs("events")
    def test_only_later_broadcasts_of_the_same_exchange_are_heard(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, broker.subscribe(EXCHANGE, ["#"]):
                await broker.broadcast([event("too.early")], ttl_s=LONG_S)
                async with broker.subscribe(EXCHANGE, ["#"]) as subscription:
                    await broker.broadcast(
                        [event("elsewhere", exchange="other"), event("here")], ttl_s=LONG_S
                    )
                    assert await first(1, aiter(subscription)) == [event("here")]

        run(scenario())

    @needs("events")
    def test_a_broadcast_is_not_heard_after_its_ttl(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, broker.subscribe(EXCHANGE, ["#"]) as subscription:
                await broker.broadcast([event("stale")], ttl_s=0.0)
                await broker.broadcast([event("fresh")], ttl_s=LONG_S)
                assert await first(1, aiter(subscription)) == [event("fresh")]

        run(scenario())

    @needs("events")
    def test_a_subscriber_that_is_busy_for_longer_than_a_lease_misses_nothing(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with (
                under_test.open(lease_s=SHORT_LEASE_S) as broker,
                broker.subscribe(EXCHANGE, ["#"]) as subscription,
            ):
                ends = time.monotonic() + 3 * SHORT_LEASE_S

                async def long_over() -> bool:
                    return time.monotonic() > ends

                await eventually(long_over, what="three leases")
                await broker.broadcast([event("late")], ttl_s=LONG_S)
                assert await first(1, aiter(subscription)) == [event("late")]

        run(scenario())


class EventLogContract:
    @needs("event_log")
    def test_events_are_kept_only_while_a_recorder_is_registered(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                assert await broker.log_events([("task.sent", b"unheard")]) == 0
                assert not await broker.recorders()
                start = await broker.register_recorder("lake")
                assert list(await broker.recorders()) == ["lake"]
                assert await broker.log_events([("task.sent", b"1")]) == 1
                assert under_test.producer().log_events([("task.started", b"2")]) == 1
                events = await broker.read_events("lake", 10)
                assert [(one.offset - start, one.routing_key, one.body) for one in events] == [
                    (1, "task.sent", b"1"),
                    (2, "task.started", b"2"),
                ]
                await broker.forget_recorder("lake")
                assert await broker.log_events([("task.sent", b"unheard")]) == 0

        run(scenario())

    @needs("event_log")
    def test_a_recorder_goes_on_after_what_it_acknowledged(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.register_recorder("lake")
                await broker.log_events([("k", b"%d" % number) for number in range(5)])
                page = await broker.read_events("lake", 3)
                assert [one.body for one in page] == [b"0", b"1", b"2"]
                assert await broker.read_events("lake", 3) == page  # reading alone moves nothing
                await broker.acknowledge_events("lake", page[1].offset)
            async with under_test.open() as broker:
                assert await broker.register_recorder("lake") == page[1].offset
                assert [one.body for one in await broker.read_events("lake", 10)] == [b"2", b"3", b"4"]

        run(scenario())

    @needs("event_log")
    def test_a_recorder_reads_ahead_of_what_it_acknowledged(self, under_test: BrokerUnderTest) -> None:
        """D1: what is read waits for its file; meanwhile the recorder reads on."""

        async def scenario() -> None:
            async with under_test.open() as broker:
                start = await broker.register_recorder("lake")
                await broker.log_events([("k", b"%d" % number) for number in range(5)])
                first = await broker.read_events("lake", 2)
                second = await broker.read_events("lake", 2, after=first[-1].offset)
                third = await broker.read_events("lake", 2, after=second[-1].offset)
                assert [one.body for one in [*first, *second, *third]] == [b"0", b"1", b"2", b"3", b"4"]
                assert not await broker.read_events("lake", 2, after=third[-1].offset)
                await broker.acknowledge_events("lake", first[-1].offset)
                state = await broker.event_log()
                assert (state.last_offset - start, state.lost) == (5, 0)
                assert state.acknowledged == {"lake": start + 2}

        run(scenario())

    def test_events_of_others_are_in_the_log_where_the_broker_says_so(
        self, under_test: BrokerUnderTest
    ) -> None:
        """D1: Celery's nodes broadcast and log nothing; what says that it is logged is not taken twice."""

        async def scenario() -> None:
            async with under_test.open() as broker:
                if broker.capabilities.events_of_others != "log":
                    return
                await broker.register_recorder("lake")
                told = [
                    Broadcast("celeryev", "task.multi", b"[1]", b'{"hostname":"w@x"}'),
                    Broadcast("celeryev", "task.multi", b"[2]", b'{"hostname":"w@x","logged":true}'),
                    Broadcast("celeryev", "worker.heartbeat", b"3", b"{}"),
                ]
                await broker.broadcast(told, ttl_s=5.0)

                async def heard() -> list[tuple[str, bytes]]:
                    found = await broker.read_events("lake", 10)
                    return [(one.routing_key, one.body) for one in found if len(found) == 2]

                found = await eventually(heard, what="both events in the log")
                assert found == [("task.multi", b"[1]"), ("worker.heartbeat", b"3")]
                await broker.forget_recorder("lake")
                await broker.broadcast(told, ttl_s=5.0)
                last = await broker.register_recorder("other")
                assert (await broker.event_log()).last_offset == last

        run(scenario())

    @needs("event_log")
    def test_the_log_is_bounded_and_counts_what_it_dropped(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(event_log_max=10) as broker:
                await broker.register_recorder("lake")
                await broker.log_events([("k", b"%d" % number) for number in range(8)])
                assert await broker.lost_events() == 0
                await broker.log_events([("k", b"%d" % number) for number in range(8, 15)])
                kept = await broker.read_events("lake", 100)
                assert [one.body for one in kept] == [b"%d" % number for number in range(5, 15)]
                assert await broker.lost_events() == 5

        run(scenario())

    @needs("event_log")
    def test_offsets_and_limits_count_the_events_of_a_list(self, under_test: BrokerUnderTest) -> None:
        """D1: an entry may hold several events, and each of them counts."""

        def entry(*numbers: int) -> tuple[str, bytes]:
            return "task.sent", f"[{','.join(map(str, numbers))}]".encode()

        async def scenario() -> None:
            async with under_test.open(event_log_max=10) as broker:

                async def at_most(count: int) -> list[int] | None:
                    found = await numbers_after(broker, 0)
                    return found if len(found) <= count else None

                start = await broker.register_recorder("lake")
                logged = await broker.log_events([entry(0, 1, 2), ("task.sent", b"3")], counts=[3, 1])
                assert logged == 2
                assert under_test.producer().log_events([entry(4, 5, 6)], counts=[3]) == 1
                assert await numbers_after(broker, 0) == [0, 1, 2, 3, 4, 5, 6]
                state = await broker.event_log()
                assert (state.last_offset - start, state.lost) == (7, 0)
                await broker.log_events([entry(*range(7, 12)), entry(12, 13)], counts=[5, 2])
                # Of 14 events four are too many; where a list is one entry, it goes whole or not at all.
                kept = await eventually(lambda: at_most(12), what="four events to make room")
                assert kept == list(range(14 - len(kept), 14)) and len(kept) >= 10
                assert await broker.lost_events() == 14 - len(kept)
                await broker.log_events([entry(*range(14, 19))], counts=[5])
                kept = await eventually(lambda: at_most(14), what="more events to make room")
                assert kept == list(range(19 - len(kept), 19)) and len(kept) >= 10
                assert await broker.lost_events() == 19 - len(kept)
                await broker.acknowledge_events("lake", start + 14)
                assert await numbers_after(broker, 0) == [14, 15, 16, 17, 18]

        async def numbers_after(broker: Broker, place: int) -> list[int]:
            """Two events at a time, or one entry if that has more."""
            found: list[int] = []
            while entries := await broker.read_events("lake", 2, after=place):
                sizes = [len(_numbers(one.body)) for one in entries]
                assert len(entries) == 1 or sum(sizes) <= 2
                found += [number for one in entries for number in _numbers(one.body)]
                place = entries[-1].offset
            return found

        run(scenario())

    @needs("event_log")
    def test_room_is_made_by_what_all_have_acknowledged_not_by_what_one_lacks(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open(event_log_max=10) as broker:
                await broker.register_recorder("lake")
                await broker.register_recorder("slow")
                await broker.log_events([("k", b"%d" % number) for number in range(8)])
                last = (await broker.read_events("lake", 10))[-1].offset
                await broker.acknowledge_events("lake", last)
                assert len(await broker.read_events("slow", 10)) == 8
                await broker.acknowledge_events("slow", last)
                await broker.log_events([("k", b"%d" % number) for number in range(8, 16)])
                assert [one.body for one in await broker.read_events("slow", 10)] == [
                    b"%d" % number for number in range(8, 16)
                ]
                assert await broker.lost_events() == 0

        run(scenario())

    @needs("event_log")
    def test_the_sweep_keeps_what_a_recorder_has_not_read(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(event_log_retention_s=0.0) as broker:
                await broker.register_recorder("lake")
                await broker.register_recorder("slow")
                await broker.log_events([("k", b"0"), ("k", b"1")])
                events = await broker.read_events("lake", 10)
                await broker.acknowledge_events("lake", events[1].offset)
                await broker.acknowledge_events("slow", events[0].offset)
                await broker.sweep()
                assert [one.body for one in await broker.read_events("slow", 10)] == [b"1"]
                assert await broker.lost_events() == 0

        run(scenario())


def _numbers(body: bytes) -> list[int]:
    found = json.loads(body)
    return found if isinstance(found, list) else [found]


class RevokesContract:
    @needs("revokes")
    def test_a_revoke_is_in_the_next_claim_of_everyone(self, under_test: BrokerUnderTest) -> None:
        now = time.time()
        one = Revoke("one", now, now + 3600)
        two = Revoke("", now, now + 3600, header="customer=7")

        async def scenario() -> None:
            async with under_test.open() as broker, under_test.open() as other:
                producer = under_test.producer()
                producer.publish(outgoing("a"))
                producer.revoke([one])
                claim = await take(broker)
                assert (texts(claim.deliveries), list(claim.revokes)) == (["a"], [one])
                producer.revoke([two])
                claim = await broker.claim(OWNER, [QUEUE], 10, revoked_after=claim.revoked_cursor)
                assert list(claim.revokes) == [two]
                claim = await broker.claim(OWNER, [QUEUE], 10, revoked_after=claim.revoked_cursor)
                assert list(claim.revokes) == []
                assert list((await take(other, owner=PEER)).revokes) == [one, two]

        run(scenario())

    @needs("revokes")
    def test_an_expired_revoke_is_not_handed_out_and_is_swept(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(revokes_max=2) as broker:
                producer = under_test.producer(revokes_max=2)
                past = time.time() - 10
                producer.revoke([Revoke("old", past, past + 1), Revoke("older", past, past + 1)])
                assert list((await take(broker)).revokes) == []
                await broker.sweep()
                producer.revoke([Revoke(name, time.time(), time.time() + 3600) for name in "ab"])
                assert [entry.task_id for entry in (await take(broker)).revokes] == ["a", "b"]

        run(scenario())

    @needs("revokes")
    def test_the_revoke_record_refuses_at_its_limit_and_names_it(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            producer = under_test.producer(revokes_max=3)
            entries = [Revoke(str(number), time.time(), time.time() + 3600) for number in range(5)]
            producer.revoke(entries[:3])
            producer.revoke(entries[:3])  # the same ones again need no room
            with pytest.raises(RevokesFull, match="revokes_max"):
                producer.revoke(entries[3:])
            async with under_test.open() as broker:
                assert [entry.task_id for entry in (await take(broker)).revokes] == ["0", "1", "2"]

        run(scenario())

    def test_an_app_sets_how_many_revokes_there_are_and_how_long_they_hold(
        self, under_test: BrokerUnderTest
    ) -> None:
        if not under_test.capabilities.revokes:
            return

        async def recorded() -> Sequence[Revoke]:
            async with under_test.open(revoke_retention_s=30.0) as broker:
                assert broker.revoke_retention_s == 30.0  # what a worker and a monitor go by
                return (await take(broker)).revokes

        of_broker = under_test.settings
        app = App(
            "shop",
            broker=of_broker.url,
            coordination_store=of_broker.coordination_store,
            revokes_max=2,
            revoke_retention_s=60.0,
        )
        try:
            app.control.revoke(["a", "b"])
            with pytest.raises(RevokesFull) as full:
                app.control.revoke("c")
        finally:
            app.close()
        assert "limit of 2 entries" in str(full.value)
        assert re.findall("`(.+?)`", str(full.value)) == ["revokes_max", "revoke_retention_s"]
        held = {entry.task_id: entry.expires_at - entry.recorded_at for entry in run(recorded())}
        assert held == {"a": pytest.approx(60.0), "b": pytest.approx(60.0)}


class LeadershipContract:
    @needs("leases")
    def test_a_lease_has_one_holder_and_growing_terms(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, under_test.open() as other:
                mine, theirs = broker.coordination, other.coordination
                won = await mine.acquire_lease("beat", OWNER, ttl_s=LONG_S)
                assert (won.granted, won.holder) == (True, OWNER)
                lost = await theirs.acquire_lease("beat", PEER, ttl_s=LONG_S)
                assert (lost.granted, lost.holder, lost.term) == (False, OWNER, won.term)
                assert 0 < lost.left_s <= LONG_S
                assert await mine.renew_lease("beat", OWNER, won.term, ttl_s=LONG_S)
                assert not await theirs.renew_lease("beat", PEER, won.term, ttl_s=LONG_S)
                assert not await theirs.release_lease("beat", OWNER, won.term + 1)
                assert await mine.release_lease("beat", OWNER, won.term)
                next_one = await theirs.acquire_lease("beat", PEER, ttl_s=LONG_S)
                assert next_one.granted and next_one.term > won.term

        run(scenario())

    @needs("leases")
    def test_a_lease_passes_on_with_its_data_when_its_holder_is_silent(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                store = broker.coordination

                async def kept() -> LeaseReply | None:
                    """So short a lease may end before its data is stored."""
                    won = await store.acquire_lease("beat", OWNER, ttl_s=SHORT_LEASE_S)
                    return won if await store.update_lease("beat", OWNER, won.term, b"state") else None

                won = await eventually(kept, what="a lease with data")

                async def passed_on() -> LeaseReply | None:
                    reply = await store.acquire_lease("beat", PEER, ttl_s=LONG_S)
                    return reply if reply.granted else None

                taken = await eventually(passed_on, what="the end of the lease")
                assert taken.term > won.term and taken.data == b"state"
                assert not await store.renew_lease("beat", OWNER, won.term, ttl_s=LONG_S)
                assert not await store.update_lease("beat", OWNER, won.term, b"stale")
                seen = await store.read_lease("beat")
                assert (seen.holder, seen.term, seen.data) == (PEER, taken.term, b"state")

        run(scenario())

    @needs("leases")
    def test_a_leader_without_its_lease_publishes_nothing(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                store = broker.coordination
                assert not await store.fenced_publish("beat", OWNER, 1, outgoing("nobody leads"))
                old = await store.acquire_lease("beat", OWNER, ttl_s=LONG_S)
                assert await store.fenced_publish("beat", OWNER, old.term, outgoing("led"))
                await store.release_lease("beat", OWNER, old.term)
                assert not await store.fenced_publish("beat", OWNER, old.term, outgoing("released"))
                new = await store.acquire_lease("beat", OWNER, ttl_s=LONG_S)
                assert not await store.fenced_publish("beat", OWNER, old.term, outgoing("stale term"))
                assert not await store.fenced_publish("beat", PEER, new.term, outgoing("stale holder"))
                assert texts((await take(broker)).deliveries) == ["led"]

        run(scenario())

    @needs("leases")
    def test_a_leader_publishes_and_leaves_word_of_it(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                store = broker.coordination
                old = await store.acquire_lease("beat", OWNER, ttl_s=LONG_S)
                assert await store.fenced_publish("beat", OWNER, old.term, outgoing("one"), data=b"after one")
                assert await store.fenced_publish("beat", OWNER, old.term, outgoing("two"))
                assert (await store.read_lease("beat")).data == b"after one"
                assert await store.fenced_publish("beat", OWNER, old.term, [], data=b"only word")
                await store.release_lease("beat", OWNER, old.term)
                new = await store.acquire_lease("beat", PEER, ttl_s=LONG_S)
                assert new.data == b"only word"
                assert not await store.fenced_publish("beat", OWNER, old.term, outgoing("x"), data=b"stale")
                assert (await store.read_lease("beat")).data == b"only word"
                assert texts((await take(broker)).deliveries) == ["one", "two"]

        run(scenario())

    @needs("leases")
    def test_an_election_runs_once_and_ends(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, under_test.open() as other:
                mine, theirs, asked = broker.coordination, other.coordination, request("e")
                opened = await mine.open_election("k", asked)
                assert (opened.state, opened.request.election_id) == (ElectionState.OPEN, "e")
                assert [key for key, _ in await mine.unfinished_elections(10)] == ["k"]
                granted = await mine.claim_election("k", OWNER, asked, ttl_s=LONG_S)
                assert isinstance(granted, Granted)
                assert await mine.claim_election("k", OWNER, asked, ttl_s=LONG_S) == granted
                busy = await theirs.claim_election("k", PEER, asked, ttl_s=LONG_S)
                assert isinstance(busy, Busy) and (busy.holder, busy.term) == (OWNER, granted.term)
                assert not await theirs.unfinished_elections(10)
                assert not await theirs.start_election("k", PEER, granted.term)
                assert await mine.start_election("k", OWNER, granted.term)
                assert await mine.renew_election("k", OWNER, granted.term)
                assert await mine.finish_election("k", OWNER, granted.term, "sent")
                over = await theirs.claim_election("k", PEER, asked, ttl_s=LONG_S)
                assert over == Closed(ElectionState.DONE, OWNER, granted.term, "sent", by_me=False)
                record = await theirs.read_election("k")
                assert record is not None and record.outcome == "sent"
                assert await theirs.read_election("unknown") is None

        run(scenario())

    @needs("leases")
    def test_an_election_whose_winner_died_after_start_fails_or_moves_on_by_policy(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                store = broker.coordination
                attempts = dict[Policy, int]()
                for policy in Policy:

                    async def started(policy: Policy = policy) -> bool:
                        """On a busy machine the short claim may end before the handler has started."""
                        asked = request(policy.value, policy)
                        won = await store.claim_election(policy.value, OWNER, asked, ttl_s=SHORT_LEASE_S)
                        if not isinstance(won, Granted):
                            return False
                        attempts[policy] = won.attempt
                        return await store.start_election(policy.value, OWNER, won.term)

                    await eventually(started, what=f"the start of {policy}")
                for policy in Policy:

                    async def answered(policy: Policy = policy) -> Granted | Closed | None:
                        asked = request(policy.value, policy)
                        reply = await store.claim_election(policy.value, PEER, asked, ttl_s=LONG_S)
                        return None if isinstance(reply, Busy) else reply

                    reply = await eventually(answered, what=f"the end of {policy}")
                    if policy is Policy.AT_MOST_ONCE:
                        assert isinstance(reply, Closed)
                        assert (reply.state, reply.by_me) == (ElectionState.FAILED, True)
                    else:
                        assert isinstance(reply, Granted) and reply.attempt == attempts[policy] + 1

        run(scenario())

    def test_the_clock_mark_only_rises_and_is_shared(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> Sequence[int]:
            async with under_test.open() as broker, under_test.open() as other:
                return [
                    await broker.coordination.raise_clock(0),
                    await broker.coordination.raise_clock(2**40),
                    await other.coordination.raise_clock(7),
                    await other.coordination.raise_clock(2**53 - 1),
                    await broker.coordination.raise_clock(0),
                ]

        risen = [0, 2**40, 2**40, 2**53 - 1, 2**53 - 1]
        alone = [0, 2**40, 7, 2**53 - 1, 0]  # without a mark, each is told its own
        assert run(scenario()) == (risen if under_test.capabilities.leases else alone)
