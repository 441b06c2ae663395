"""Used signatures on RabbitMQ: what a reader of their stream knows, and what it does not know."""

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.brokers.contract_signatures import MARK, SIGNED
from tests.brokers.under_test import (
    OWNER,
    PEER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    outgoing,
    run,
    take,
    take_in_time,
    take_one,
)
from tests.servers.rabbitmq import amqp_url
from umbel.brokers.amqp import signature_view, topology
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.broker import AmqpBroker
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.handshake import locations_from_url
from umbel.brokers.amqp.signature_view import (
    BUCKET_S,
    ENDED,
    FREE,
    SKEW_S,
    ClusterView,
    SignatureUse,
    SignatureView,
    signatures_lost,
)
from umbel.brokers.amqp.streams import encode_record
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import Ack, Broker, BrokerSettings, Delivery, Spend
from umbel.clock import cluster_now
from umbel.errors import BrokerError
from umbel.protocol.delivery.trust import ClusterId, Doubt

__all__ = ["amqp_url"]

T0 = 1_000_000.0
A, B = "ada/1", "bob/2"
WHAT = ["use", "free", "end", "take"]
ODD = [b"", b"{", b"[]", b"[1]", b'["a",5]', b'["a","b","c"]', b"\xff", b"[" * 5000]


def mark_of(number: int) -> str:
    return f"{random.Random(number).getrandbits(128):032x}"


def view_of(entries: Iterable[SignatureUse | bytes], first: int = 0) -> SignatureView:
    view = SignatureView()
    for offset, one in enumerate(entries, first):
        view.apply(offset, one if isinstance(one, bytes) else encode_record(one))
    return view


def use(mark: str, user: str = A, *, born: float = T0, over: str = "") -> SignatureUse:
    return SignatureUse(mark, user, born + 100, born, born, over)


# -- what a reader knows -----------------------------------------------------------------------------


def test_the_first_has_it_until_it_is_freed_and_who_takes_over_names_whom() -> None:
    view = SignatureView()
    view.attempts = {A: {}, B: {}, "eve/3": {}}
    story = [
        (use(MARK, A), A),
        (use(MARK, B), A),
        (use(MARK, "eve/3", over=B), A),  # from somebody who has it no more, or never had it
        (use(MARK, B, over=A), B),
        (SignatureUse(MARK, FREE, born=T0, over=A), B),  # too late
        (SignatureUse(MARK, FREE, born=T0, over=B), None),
        (use(MARK, A), A),
        (SignatureUse(MARK, ENDED, T0 + 100, T0), ENDED),
        (use(MARK, B), ENDED),
        (use(MARK, B, over=A), ENDED),
        (SignatureUse(MARK, FREE, born=T0, over=A), ENDED),
    ]
    for offset, (entry, user) in enumerate(story):
        view.apply(offset, encode_record(entry))
        assert view.user(MARK, T0) == user, offset
    assert view.attempts == {A: {MARK: True}, B: {MARK: False}, "eve/3": {MARK: False}}


def test_what_has_ended_is_remembered_by_its_own_birth_whoever_took_it_over() -> None:
    """An entry of somebody who can write to the stream, with another birth, must not hide the end."""
    view = view_of(
        [
            encode_record(use(MARK, A)),
            encode_record(SignatureUse(MARK, "eve/1", 1.0, 1.0, over=A)),
            encode_record(SignatureUse(MARK, ENDED, T0 + 100, T0)),
        ]
    )
    assert view.user(MARK, T0) == ENDED


def test_entries_of_umbel_0_3_count_and_it_reads_ours() -> None:
    """It writes three fields, names users by a random id, and frees without saying whose."""
    theirs = b'["%s","0a1b-2c3d",1000100.0]' % MARK.encode()
    view = view_of([theirs, encode_record(use(MARK, B))])
    assert view.user(MARK, T0) == "0a1b-2c3d"
    assert signature_view.holder_of("0a1b-2c3d") == ""
    freed = view_of([theirs, b'["%s","free",0.0]' % MARK.encode()])
    assert freed.user(MARK, T0) is None
    ended = view_of([theirs, b'["%s","ended",0.0]' % MARK.encode(), theirs])
    assert ended.user(MARK, T0) == ENDED
    ended.sweep(T0 + 101)
    assert ended.user(MARK, T0) is None
    assert encode_record(use(MARK)).startswith(b'["%s","%s",1000100.0,' % (MARK.encode(), A.encode()))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from([A, B]), st.sampled_from(["use", "free", "end", "take"])
        ),
        max_size=40,
    )
)
def test_it_knows_what_a_plain_map_knows(story: list[tuple[int, str, str]]) -> None:
    view, plain = SignatureView(), dict[int, str]()
    for offset, (number, user, what) in enumerate(story):
        mark, known = mark_of(number), plain.get(number)
        match what:
            case "use":
                entry = use(mark, user, born=T0 + number)
                plain.setdefault(number, user)
            case "take":
                entry = use(mark, user, born=T0 + number, over=A)
                if known == A:
                    plain[number] = user
            case "free":
                entry = SignatureUse(mark, FREE, born=T0 + number, over=user)
                if known == user:
                    del plain[number]
            case _:
                entry = SignatureUse(mark, ENDED, T0 + 100, T0 + number)
                plain[number] = ENDED
        view.apply(offset, encode_record(entry))
        if offset % 7 == 0:
            view.sweep(T0 + 50)  # which packs what has ended
    assert {number: view.user(mark_of(number), T0 + number) for number in plain} == plain


@pytest.mark.parametrize("body", ODD)
def test_what_is_no_entry_is_passed_over(body: bytes) -> None:
    assert view_of([body, use(MARK)]).user(MARK, T0) == A


def test_what_has_ended_takes_a_few_bytes_for_as_long_as_it_must_be_known() -> None:
    view = view_of([])
    for number in range(3 * signature_view.FRESH_MAX):
        view.apply(number, encode_record(SignatureUse(mark_of(number), ENDED, T0 + 5 * BUCKET_S, T0)))
    view.sweep(T0 + 2 * BUCKET_S)
    (bucket,) = view._ended._buckets.values()
    assert (len(bucket.packed) * bucket.packed.itemsize, len(bucket.fresh)) == (
        3 * 8 * signature_view.FRESH_MAX,
        0,
    )
    assert all(view.user(mark_of(number), T0) == ENDED for number in range(0, 60_000, 997))
    assert view.user(mark_of(10**9), T0) is None
    view.sweep(T0 + 5 * BUCKET_S)
    assert view._ended._buckets == {}


# -- what it knows that it does not know --------------------------------------------------------------


def test_what_is_forgotten_is_the_oldest_and_is_not_taken_for_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By when it was made, not by when it was used: what waited long goes first."""
    monkeypatch.setattr(signature_view, "USED_MAX", 100)
    view, day = SignatureView(), 300 * BUCKET_S
    assert view.reaches(T0)
    order = list(range(150))
    random.Random(1).shuffle(order)
    for offset, number in enumerate(order):
        born = day + number * BUCKET_S
        view.apply(offset, encode_record(SignatureUse(mark_of(number), ENDED, born + 1e6, born)))
    assert view.horizon == day + 50 * BUCKET_S
    for number in range(150):
        born = day + number * BUCKET_S
        assert (view.reaches(born), view.user(mark_of(number), born)) == (
            (True, ENDED) if number >= 50 else (False, None)
        )


def test_a_stream_whose_beginning_is_gone_says_since_when_it_tells() -> None:
    cut = view_of([SignatureUse(MARK, ENDED, T0 + 100, T0), use(mark_of(1), born=T0 + 50)], first=7)
    assert (cut.horizon, cut.user(MARK, T0)) == (T0 + 50 + SKEW_S, ENDED)
    assert view_of([use(MARK)]).horizon == 0.0
    assert view_of([signatures_lost(T0)]).horizon == T0 + SKEW_S
    assert view_of([signatures_lost(0.0)]).horizon == 0.0  # the record of a new cluster
    assert view_of([use(MARK), signatures_lost(T0)]).horizon == 0.0  # who has read before knows more


# -- on a server -----------------------------------------------------------------------------------------


@pytest.fixture
def rabbit(amqp_url: str) -> BrokerUnderTest:
    return BrokerUnderTest(BrokerSettings(amqp_url, lease_s=600.0), CAPABILITIES)


def delete_streams(url: str, *streams: str) -> None:
    link = BlockingLink(locations_from_url(url)[0], timeout_s=10.0, name="the end")
    for stream in streams:
        link.call(Method.QUEUE_DELETE, 0, stream, False, False, False)
    link.close()


async def spend(broker: Broker, delivery: Delivery, *, mark: str = MARK, born: float) -> Any:
    async def answer() -> tuple[Any] | None:
        try:
            found = await broker.spend([Spend(delivery.tag, mark, born + 600, born)])
        except BrokerError:  # the stream was deleted this moment
            return None
        return (found.get(delivery.tag),)

    return (await eventually(answer, what="whether a signature was used"))[0]


def test_the_record_of_used_signatures_is_lost_and_what_is_older_is_not_used(
    rabbit: BrokerUnderTest,
) -> None:
    """By whoever reads it from then on; a worker that has read it goes on knowing what was used."""

    async def scenario() -> None:
        now = cluster_now()
        async with rabbit.open(**SIGNED) as knows:
            await knows.publish(outgoing("a", "b"))
            first, second = (await take(knows, 2)).deliveries
            assert await spend(knows, first, born=now) is None
            await knows.settle([Ack(first.tag)])
            delete_streams(rabbit.settings.url, topology.SIGNATURES)
            assert await spend(knows, second, born=now) is Doubt.REPLAYED
            assert await spend(knows, second, mark=mark_of(1), born=now) is None
            await knows.leave_queue(OWNER, QUEUE)
            async with rabbit.open(**SIGNED) as new:
                await knows.publish(outgoing("e", "f"))
                copy, later = await take_in_time(new, 2, what="the messages", owner=PEER)
                assert await spend(new, copy, born=now) is Doubt.STALE
                assert await spend(new, later, mark=mark_of(2), born=now + SKEW_S + 60) is None
                assert await spend(new, copy, mark=mark_of(1), born=now) is not None  # it is in use
        delete_streams(rabbit.settings.url, topology.SIGNATURES)
        async with rabbit.open(**SIGNED) as alone:  # nobody was there when it was lost
            await alone.publish(outgoing("g"))
            assert await spend(alone, (await take(alone, 9)).deliveries[0], born=now) is Doubt.STALE

    run(scenario())


def test_the_record_of_a_new_cluster_knows_everything(rabbit: BrokerUnderTest) -> None:
    """What clients sent before the first worker started is no older than the record."""

    async def scenario() -> None:
        async with rabbit.open(**SIGNED) as first:
            await first.publish(outgoing("a"))
            assert await spend(first, await take_one(first), born=cluster_now() - 3600) is None
        async with rabbit.open() as client:
            made = await client.cluster_id()
            assert made is not None and made.id == "here"

    run(scenario())


def test_a_restored_id_has_a_past_that_is_not_known(rabbit: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with rabbit.open() as client:
            assert await client.keep_cluster_id(ClusterId("here")) == ClusterId("here")
        async with rabbit.open(**SIGNED) as worker:
            await worker.publish(outgoing("a"))
            delivery = await take_one(worker)
            assert await spend(worker, delivery, born=cluster_now() - 3600) is Doubt.STALE
            assert await spend(worker, delivery, born=cluster_now() + 3600) is None

    run(scenario())


def test_of_all_copies_of_a_message_whose_connection_broke_one_takes_its_place(
    rabbit: BrokerUnderTest,
) -> None:
    """RabbitMQ says of all of them that they are redelivered: they were fetched by who died."""

    async def scenario() -> None:
        born = cluster_now()
        async with (
            rabbit.open(**SIGNED) as one,
            rabbit.open(**SIGNED) as other,
            rabbit.open(**SIGNED) as dies,
        ):
            assert isinstance(dies, AmqpBroker)
            await dies.publish(outgoing("a", "a", "a"))
            held = (await take(dies, 3)).deliveries
            assert await spend(dies, held[0], born=born) is None
            session = dies._sessions.alive
            assert session is not None
            session.link.abort("the end")
            again: list[tuple[Broker, Delivery]] = []

            async def all_again() -> bool:
                for broker, owner in ((one, OWNER), (other, PEER)):
                    claim = await take(broker, 1 if broker is one else 2, owner=owner)
                    again.extend((broker, delivery) for delivery in claim.deliveries)
                return len(again) == 3

            await eventually(all_again, what="the three to come again")
            answers = await asyncio.gather(*(spend(*each, born=born) for each in again))
        assert (answers.count(None), answers.count(Doubt.REPLAYED)) == (1, 2)

    run(scenario())


def test_a_record_that_does_not_reach_back_is_told_once_an_hour(
    rabbit: BrokerUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with rabbit.open(**SIGNED) as broker:
            assert isinstance(broker, AmqpBroker)
            await broker.sweep()
            view, now = broker._sessions.views.signatures, cluster_now()
            for horizon in (now - 600, now - 500):
                view.horizon = horizon
                await broker.sweep()

    run(scenario())
    (told,) = [one for one in caplog.records if "record of used signatures is full" in one.message]
    assert 595 < vars(told)["reaches_back_s"] < 900


def test_the_first_entry_names_the_cluster() -> None:
    view = ClusterView()
    for offset, body in enumerate([b"odd", b'{"id":"here","since":5.5}', b'{"id":"there"}']):
        view.apply(offset, body)
    assert view.found == ClusterId("here", 5.5)
