"""The embedded broker's own rules: shares, patterns, verdicts, bounds and wake-ups."""

import asyncio
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.brokers.contract_messages import MessagesContract
from tests.brokers.contract_sharing import FanoutContract
from tests.brokers.under_test import (
    OWNER,
    PEER,
    QUEUE,
    SHORT_LEASE_S,
    BrokerUnderTest,
    eventually,
    message,
    outgoing,
    run,
    take,
    texts,
)
from tests.waiting import wait_until
from umbel.brokers.interface import (
    Ack,
    Broadcast,
    BrokerSettings,
    Bury,
    Delivery,
    Depth,
    Pause,
    Refused,
    Return,
    Spend,
    Started,
)
from umbel.brokers.rules import Heap, share, sort_verdicts
from umbel.brokers.sqlite import claims, messages, store, verdicts, wakeup
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.files import path_from_url
from umbel.brokers.sqlite.messages import DUE_MAX
from umbel.brokers.sqlite.store import CAPABILITIES, Store
from umbel.protocol.delivery.trust import Doubt
from umbel.wire.message import Message, Outgoing, matches
from umbel.wire.records import Revoke


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "umbel.db"


@pytest.fixture
def under_test(path: Path) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(f"sqlite:///{path}"), CAPABILITIES)
    yield under_test
    under_test.close()


def counted(heaps: list[Heap]) -> dict[tuple[str, int], int]:
    return {(heap.queue, heap.priority): len(heap.ids) for heap in heaps}


# ---- shares ----------------------------------------------------------------------------------------


def test_queues_of_one_priority_share_evenly_and_what_one_leaves_goes_to_the_others() -> None:
    heaps = [Heap("a", 0, range(100)), Heap("b", 0, range(2)), Heap("c", 0, range(100))]
    assert counted(share(heaps, 12, ["a", "b", "c"])) == {("a", 0): 5, ("b", 0): 2, ("c", 0): 5}


def test_a_better_priority_is_emptied_before_the_next_is_touched() -> None:
    heaps = [Heap("a", 3, range(5)), Heap("b", 0, range(4)), Heap("b", 3, range(5))]
    assert counted(share(heaps, 6, ["a", "b"])) == {("b", 0): 4, ("a", 3): 1, ("b", 3): 1}


def test_single_claims_take_turns() -> None:
    queues, served = ["a", "b", "c"], []
    for _ in range(6):
        (heap,) = share([Heap("a", 0, [1]), Heap("c", 0, [1])], 1, queues)
        served.append(heap.queue)
        turn = queues.index(heap.queue) + 1
        queues = queues[turn:] + queues[:turn]
    assert served == ["a", "c"] * 3


@given(
    st.dictionaries(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), st.integers(1, 20), min_size=1),
    st.integers(1, 60),
)
def test_a_share_takes_all_it_may_and_no_queue_gets_less_than_an_equal_part(
    waiting: dict[tuple[str, int], int], limit: int
) -> None:
    heaps = [Heap(queue, priority, range(count)) for (queue, priority), count in waiting.items()]
    taken = counted(share(heaps, limit, list("abcd")))
    assert sum(taken.values()) == min(limit, sum(waiting.values()))
    for (queue, priority), count in waiting.items():
        got = taken.get((queue, priority), 0)
        if got < count:
            peers = [taken.get((other, priority), 0) for other in "abcd" if (other, priority) in waiting]
            assert got >= max(peers) - 1, queue
            assert not any(place[1] > priority for place in taken)


# ---- patterns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        ("#", "", True),
        ("#", "a.b.c", True),
        ("*", "a", True),
        ("*", "a.b", False),
        ("*.*", "a.b", True),
        ("a.#", "a", True),
        ("a.#.d", "a.d", True),
        ("a.#.d", "a.b.c.d", True),
        ("a.#.d", "a.b.c", False),
        ("#.#", "a", True),
        ("#.a.#", "b.a.c", True),
        ("#.a.#", "b.c", False),
        ("*.a", "a", False),
        ("worker.*", "workers.x", False),
        ("w#", "wa", False),
    ],
)
def test_patterns(pattern: str, key: str, fits: bool) -> None:
    assert matches(pattern.split("."), key.split(".")) is fits


def test_a_pattern_of_many_hashes_is_matched_quickly() -> None:
    assert not matches(["#", "a"] * 100, ["a"] * 99 + ["b"])


# ---- verdicts --------------------------------------------------------------------------------------


def test_verdicts_are_judged_in_order_and_only_the_first_one_ends_a_claim() -> None:
    judged = sort_verdicts(
        [
            Started("70:1"),
            Ack("70:1", follow_ups=outgoing("next")),
            Ack("70:1"),
            Started("70:1"),
            Return("71:2"),
            Bury("70:3", "why"),
            Ack("70:4"),
        ],
        {"70:1": 1, "70:2": 2, "70:3": 3},
    )
    assert judged.conflicts == {"70:1", "71:2", "70:4"}
    assert (judged.applied, judged.started, judged.finished) == (3, [1], [1])
    assert [number for number, _ in judged.buried] == [3]
    assert judged.follow_ups == outgoing("next")


# ---- bounds, with a database -----------------------------------------------------------------------


def test_dead_letters_are_bounded_and_the_oldest_goes(
    under_test: BrokerUnderTest, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "DEAD_LETTERS_MAX", 3)

    async def scenario() -> list[bytes]:
        async with under_test.open() as broker:
            for text in "abcde":
                await broker.publish(outgoing(text))
                (delivery,) = (await take(broker)).deliveries
                await broker.settle([Bury(delivery.tag, "why")])
            return [letter.message.body for letter in await broker.dead_letters()]

    assert run(scenario()) == [b"e", b"d", b"c"]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT value FROM meta WHERE name = 'dead_letters_dropped'").fetchone() == (2,)


def test_refused_messages_are_dead_letters_within_the_same_limit(
    under_test: BrokerUnderTest, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "DEAD_LETTERS_MAX", 3)

    async def scenario() -> list[bytes]:
        async with under_test.open() as broker:
            await broker.bury([Refused(one, "no queue takes it") for one in outgoing(*"abcd")])
            await broker.bury([Refused(one, "no queue takes it") for one in outgoing("e")])
            return [letter.message.body for letter in await broker.dead_letters()]

    assert run(scenario()) == [b"e", b"d", b"c"]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT value FROM meta WHERE name = 'dead_letters_dropped'").fetchone() == (2,)


def test_burying_takes_no_longer_when_there_are_many_dead_letters(
    under_test: BrokerUnderTest, path: Path
) -> None:
    async def make_file() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))

    run(make_file())
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    def steps_of_burying(db: sqlite3.Connection) -> int:
        before = steps
        verdicts.bury_claimed(db, {1: "why"}, 0.0)
        return steps - before

    with closing(sqlite3.connect(path)) as db:
        db.set_progress_handler(count, 1)
        with_none = steps_of_burying(db)
        columns = "queue, priority, starts, reason, buried_at, message"
        copied = f"INSERT INTO dead_letters ({columns}) SELECT {columns} FROM dead_letters, json_each(?)"
        db.execute(copied, (str([0] * 5000),))
        assert steps_of_burying(db) < 2 * with_none


def test_purging_goes_in_portions(under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PURGE_ROWS_MAX", 3)

    async def scenario() -> None:
        async with under_test.open() as broker:
            later = time.time() + 3600
            for number in range(10):
                await broker.publish(outgoing(str(number), priority=number % 4))
                await broker.publish(outgoing(str(number), not_before=later) + outgoing("x", queue="other"))
            assert await broker.purge(QUEUE) == 20
            assert list(await broker.queues()) == ["other"]
            assert len(await broker.peek("other", 100)) == 10

    run(scenario())


def test_who_asks_for_some_queues_gets_what_is_ready_in_these(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a", "b") + outgoing("c", queue="other"))
            await broker.publish(outgoing("later", not_before=time.time() + 3600))
            await take(broker, 1)
            await broker.publish(outgoing("unfiled"))
            await broker.pause("other", Pause(0.0))
            assert await broker.queues([QUEUE, "empty"]) == {QUEUE: Depth(2, 0, 0)}
            assert await broker.queues(["other"]) == {"other": Depth(1, 0, 0, paused=True)}
            assert await broker.queues([]) == {}
            assert await broker.queues() == {
                QUEUE: Depth(2, 1, 1),
                "other": Depth(1, 0, 0, paused=True),
            }

    run(scenario())


def test_more_due_messages_than_one_claim_releases_all_come(under_test: BrokerUnderTest) -> None:
    count = 2 * DUE_MAX + 10

    async def scenario() -> list[str]:
        async with under_test.open() as broker:
            due = time.time() + 0.3
            await broker.publish(outgoing(*map(str, range(count)), not_before=due))
            taken: list[str] = []
            while len(taken) < count:
                await broker.wait_ready([QUEUE], 30.0)
                taken += texts((await take(broker, 700)).deliveries)
            return taken

    assert run(scenario()) == [str(number) for number in range(count)]


def test_a_claim_hands_out_no_message_before_all_revokes(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PAGE_MAX", 4)

    async def scenario() -> None:
        async with under_test.open() as broker:
            now = time.time()
            producer = under_test.producer()
            producer.revoke([Revoke(str(number), now, now + 3600) for number in range(10)])
            producer.publish(outgoing("a"))
            known: list[str] = []
            cursor = 0
            while True:
                claim = await broker.claim(OWNER, [QUEUE], 10, revoked_after=cursor)
                known += [entry.task_id for entry in claim.revokes]
                cursor = claim.revoked_cursor
                if claim.deliveries:
                    break
                await broker.wait_ready([QUEUE], 30.0)
            assert known == [str(number) for number in range(10)]

    run(scenario())


def test_broadcasts_are_not_written_while_nobody_listens(under_test: BrokerUnderTest, path: Path) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            async with broker.subscribe("elsewhere", ["#"]):
                await broker.broadcast([Broadcast("celeryev", "a", b"{}")], ttl_s=60.0)
            await broker.broadcast([Broadcast("elsewhere", "a", b"{}")], ttl_s=60.0)

    run(scenario())
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM broadcasts").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM subscriptions").fetchone() == (0,)


def test_where_sockets_have_no_abstract_names_waiting_works_all_the_same(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "_SUPPORTED", False)

    async def scenario() -> None:
        async with under_test.open() as broker, broker.subscribe("x", ["#"]) as subscription:
            waiting = asyncio.create_task(broker.wait_ready([QUEUE], 30.0))
            await broker.publish([Outgoing(QUEUE, message("a"))])
            async with asyncio.timeout(10.0):
                await waiting
                await broker.broadcast([Broadcast("x", "a", b"{}")], ttl_s=60.0)
                assert await anext(aiter(subscription)) == Broadcast("x", "a", b"{}")

    run(scenario())


def test_every_wake_up_arrives_by_itself(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same promises without the look that every wait takes once a second, just in case."""
    monkeypatch.setattr(wakeup, "RECHECK_S", 3600.0)
    MessagesContract().test_waiting_again_and_again_loses_no_wake_up(under_test)
    FanoutContract().test_a_waiting_subscriber_is_woken(under_test=under_test)


def test_a_waiter_is_woken_by_every_way_a_message_comes_back(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "RECHECK_S", 3600.0)

    async def scenario() -> None:
        async with under_test.open() as waiter, under_test.open(lease_s=SHORT_LEASE_S) as other:
            await other.publish(outgoing("a"))
            (held,) = (await take(other, owner=PEER)).deliveries

            async def woken_by(cause: Callable[[], Awaitable[object]]) -> Delivery:
                waiting = asyncio.create_task(waiter.wait_ready([QUEUE], 3600.0))
                await eventually(registered, what="the waiter in its place")
                assert not waiting.done()
                await cause()
                async with asyncio.timeout(10.0):
                    await waiting
                (delivery,) = (await take(other, owner=PEER)).deliveries
                return delivery

            async def registered() -> bool:
                with closing(sqlite3.connect(path_from_url(under_test.settings.url))) as db:
                    return bool(db.execute("SELECT count(*) FROM waiters").fetchone()[0])

            held = await woken_by(lambda: other.settle([Return(held.tag)]))
            held = await woken_by(lambda: other.forget_owner(PEER))
            held = await woken_by(lambda: other.settle([Return(held.tag, not_before=time.time() + 0.1)]))
            held = await woken_by(lambda: eventually(other.return_lost, what="the end of its lease"))
            await other.settle([Bury(held.tag, "why")])
            (letter,) = await other.dead_letters()
            held = await woken_by(lambda: other.requeue_dead([letter.letter_id]))
            held = await woken_by(lambda: other.settle([Ack(held.tag, follow_ups=outgoing("b"))]))
            lease = await other.coordination.acquire_lease("beat", PEER, ttl_s=3600.0)
            await woken_by(lambda: other.coordination.fenced_publish("beat", PEER, lease.term, outgoing("c")))

    run(scenario())


def test_publishing_reaches_the_disk_before_it_returns_and_claims_need_not(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    flush = os.fdatasync

    def record(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}").rsplit("-", 1)[1])
        flush(descriptor)

    monkeypatch.setattr(os, "fdatasync", record)
    producer = under_test.producer()
    producer.publish(outgoing("a"))
    assert flushed == ["wal"]
    producer.revoke([Revoke("a", time.time(), time.time() + 60)])
    assert flushed == ["wal"] * 2

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("b"))
            assert flushed == ["wal"] * 3
            await broker.settle([Ack(delivery.tag) for delivery in (await take(broker)).deliveries])
            assert flushed == ["wal"] * 3

    run(scenario())


def test_a_dead_waiter_is_forgotten_by_who_pokes_it(under_test: BrokerUnderTest, path: Path) -> None:
    under_test.producer().publish(outgoing("a"))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO waiters VALUES ('queue:celery', ?)", (b"\0umbel-gone",))
    under_test.producer().publish(outgoing("b"))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM waiters").fetchone() == (0,)


def test_a_message_that_comes_between_looking_and_registering_is_seen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter, other = Store(BrokerSettings(f"sqlite:///{path}")), Store(BrokerSettings(f"sqlite:///{path}"))
    assert waiter.watch_queues(["other"], b"\0nobody") is None
    write = waiter.database.write

    def publish_first() -> object:
        monkeypatch.undo()
        other.publish(outgoing("a"))
        return write()

    monkeypatch.setattr(waiter.database, "write", publish_first)
    assert waiter.watch_queues(["celery"], b"\0nobody") == 0.0
    waiter.close()
    other.close()


def test_a_broadcast_past_its_ttl_is_not_read_even_before_it_is_swept(path: Path) -> None:
    cluster = ClusterStore(BrokerSettings(f"sqlite:///{path}"))
    _, offset, _ = cluster.subscribe("x", None)
    cluster.broadcast([Broadcast("x", "stale", b"{}")], ttl_s=0.05)
    wait_until(
        lambda: cluster.broadcasts_after("x", offset, 10) == ([], offset + 1), what="the end of its TTL"
    )
    cluster.close()


@pytest.mark.parametrize("size", [0, 2, 255, 256, 65_535, 65_536, 100_000])
def test_headers_are_read_from_the_beginning_of_a_message(size: int) -> None:
    headers = b"h" * size
    stored = msgspec.msgpack.encode(Message(headers, b"b" * 1000))
    assert messages.headers_of(stored) == messages.headers_of(stored[: size + 16]) == headers


@pytest.mark.parametrize("odd", [None, 1, "text", b"", b"\x9b", b"\x9b\xc4", b"\x00" * 20])
def test_what_is_no_message_has_no_headers(odd: object) -> None:
    assert messages.headers_of(odd) == b""


def test_a_message_of_the_number_that_stands_for_nobody_uses_no_signature_that_has_ended() -> None:
    """Numbers begin at 1; who writes to the file may choose another."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE signatures (mark TEXT PRIMARY KEY, message_id INTEGER, expires_at REAL)")
        first, odd = (Spend(messages.tag(1, number), "m", 2e9, 1.0) for number in (7, claims.NO_MESSAGE))
        assert claims.use_signatures(db, [first, first]) == {}
        claims.end_signatures(db, ["m"])
        assert claims.use_signatures(db, [odd]) == {odd.tag: Doubt.REPLAYED}
