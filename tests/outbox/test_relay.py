"""The relay publishes what was committed, in order, at least once under one id, and keeps the table small."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack
from msgspec.structs import replace

from tests.app.test_sent_events import told
from tests.outbox.places import Place
from tests.waiting import DEADLINE_S
from umbel import App
from umbel.brokers.interface import Attempt
from umbel.brokers.registry import open_async_producer, open_broker
from umbel.errors import BrokerError, BrokerRefused, BrokerUnavailable, OutboxUnavailable
from umbel.outbox.database import OutboxDatabase
from umbel.outbox.relay import Relay
from umbel.outbox.table import Problem, StoredRow
from umbel.wire.message import Outgoing


@dataclass
class Told:
    """A `relay.Listener` that remembers."""

    leads: bool = True
    published_count: int = 0
    set_aside: int = 0
    errors: list[str] = field(default_factory=list)
    has_published: asyncio.Event = field(default_factory=asyncio.Event, compare=False)

    def still_mine(self) -> bool:
        return self.leads

    def database_answered(self, error: OutboxUnavailable | None) -> None:
        self._note(error)

    def broker_answered(self, error: BrokerError | None) -> None:
        self._note(error)

    def published(self, count: int, set_aside: int) -> None:
        self.published_count += count
        self.set_aside += set_aside
        self.has_published.set()

    def _note(self, error: Exception | None) -> None:
        if error is not None:
            self.errors.append(str(error))


class Between:
    """The broker's producer, with what a test does before and after each publish."""

    repeats = True

    def __init__(self, app: App) -> None:
        self._producer = open_async_producer(app.settings.for_broker())
        self.before: Callable[[Sequence[Outgoing]], None] = lambda _: None
        self.after: Callable[[Sequence[Outgoing]], None] = lambda _: None
        self.batches: list[int] = []

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        self.before(batch)
        await self._producer.publish(batch, attempt)
        self.batches.append(len(batch))
        self.after(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)


@asynccontextmanager
async def relaying(
    app: App, place: Place, told: Told, open_database: Callable[[], Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Relay, Between]]:
    producer = Between(app)
    opened = []

    def open_one() -> Any:
        opened.append((open_database or place.database)())
        return opened[-1]

    relay = Relay(open_one, producer, told, poll_s=0.05, **options)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield relay, producer
    finally:
        for one in opened:
            one.close()
        await producer.close()


def send(app: App, place: Place, count: int) -> list[str]:
    with place.connection() as connection:
        with app.outbox(connection):
            sent = [app.tasks["shop.pay"].delay(number).id for number in range(count)]
        connection.commit()
    return sent


def in_queue(app: App) -> list[str]:
    """The ids of what a worker takes, in its order; they are taken."""

    async def ask() -> list[str]:
        broker = open_broker(app.settings.for_broker())
        await broker.open()
        try:
            claim = await broker.claim("tests", ["celery"], 1000)
            return [one.message.correlation_id for one in claim.deliveries]
        finally:
            await broker.close()

    return asyncio.run(ask())


def test_rows_are_published_in_order_and_deleted(app: App, place: Place) -> None:
    sent, listener = send(app, place, 5) + send(app, place, 3), Told()

    async def scenario() -> None:
        async with relaying(app, place, listener) as (relay, _):
            assert [await relay.round(), await relay.round()] == [8, 0]

    asyncio.run(scenario())
    assert in_queue(app) == sent
    assert (place.ids(), listener) == ([], Told(published_count=8))


def test_a_transaction_that_commits_late_is_published_all_the_same(app: App, place: Place) -> None:
    if place.is_sqlite:
        pytest.skip("SQLite has one writer at a time")

    async def scenario() -> list[str]:
        async with relaying(app, place, Told()) as (relay, _):
            with place.connection() as late:
                with app.outbox(late):
                    first = app.tasks["shop.pay"].delay(1).id
                second = send(app, place, 1)[0]
                assert await relay.round() == 1
                late.commit()
            assert await relay.round() == 1
            return [second, first]

    sent = asyncio.run(scenario())
    assert in_queue(app) == sent


def test_a_round_is_bounded_by_rows_and_bytes(app: App, place: Place) -> None:
    sent = send(app, place, 5)

    class Small(OutboxDatabase):
        def fetch(self, rows_max: int = 3, bytes_max: int = 700) -> list[StoredRow]:
            return super().fetch(rows_max, bytes_max)

    def small() -> OutboxDatabase:
        database = place.database()
        database.__class__ = Small
        return database

    async def scenario() -> list[int]:
        async with relaying(app, place, Told(), small) as (relay, producer):
            while await relay.round():
                pass
            return producer.batches

    assert asyncio.run(scenario()) == [2, 2, 1]  # a row has some 450 bytes, and one may exceed the limit
    assert in_queue(app) == sent


def test_what_cannot_be_published_is_set_aside_and_holds_nothing_up(app: App, place: Place) -> None:
    first = send(app, place, 1)
    place.run("INSERT INTO umbel_outbox (task_id, message) VALUES ('x', ?)", b"\x93\x01nonsense")
    place.run("INSERT INTO umbel_outbox (task_id, message) VALUES ('y', ?)", b"")
    refused = send(app, place, 1)[0]
    last, listener = send(app, place, 1), Told()

    def refuse(batch: Sequence[Outgoing]) -> None:
        if any(one.message.correlation_id == refused for one in batch):
            raise BrokerRefused("the queue is full")

    async def scenario() -> None:
        async with relaying(app, place, listener) as (relay, producer):
            producer.before = refuse
            assert [await relay.round(), await relay.round()] == [5, 0]
            database = place.database()
            assert database.counts()[::2] == (0, 3)
            whys = [one.problem for one in database.problems()]
            assert whys[0].startswith("not a valid outbox row") and whys[2] == "the queue is full"
            producer.before = lambda _: None
            assert database.retry() == 3
            database.close()
            assert await relay.round() == 3

    asyncio.run(scenario())
    assert in_queue(app) == [*first, *last, refused]
    assert listener == Told(published_count=3, set_aside=5)


@pytest.mark.parametrize("part", ["headers", "properties"])
def test_what_is_nested_too_deep_for_some_broker_is_set_aside(app: App, part: str, tmp_path: Path) -> None:
    place = Place(f"sqlite:///{tmp_path}/shop.db")
    place.create()
    sent, listener = send(app, place, 1), Told()
    (good,) = place.written()
    deep = b'{"deep":' + b"[" * 500 + b"]" * 500
    whole = deep + b"," + good.message.headers[1:] if part == "headers" else deep + b"}"
    bad = replace(good, message=replace(good.message, **{part: whole}))
    place.run("INSERT INTO umbel_outbox (task_id, message) VALUES ('x', ?)", msgpack.encode(bad))

    async def scenario() -> None:
        async with relaying(app, place, listener) as (relay, _):
            await relay.round()
        database = place.database()
        (problem,) = database.problems()
        assert problem.problem == f"the map of {part} is nested deeper than the limit of 64 levels"
        database.close()

    asyncio.run(scenario())
    assert in_queue(app) == sent and listener == Told(published_count=1, set_aside=1)


def test_a_row_that_the_brokers_client_fails_at_is_set_aside(app: App, place: Place) -> None:
    sent, listener = send(app, place, 3), Told()

    def fail(batch: Sequence[Outgoing]) -> None:
        if any(one.message.correlation_id == sent[1] for one in batch):
            raise RecursionError("maximum recursion depth exceeded")

    async def scenario() -> None:
        async with relaying(app, place, listener) as (relay, producer):
            producer.before = fail
            assert await relay.round() == 3
        database = place.database()
        assert [one.problem for one in database.problems()] == [
            "RecursionError: maximum recursion depth exceeded"
        ]
        database.close()

    asyncio.run(scenario())
    assert in_queue(app) == [sent[0], sent[2]] and listener == Told(published_count=2, set_aside=1)


def test_text_that_is_no_unicode_holds_nothing_up(app: App, tmp_path: Path) -> None:
    place = Place(f"sqlite:///{tmp_path}/shop.db")
    place.create()
    place.run(
        "INSERT INTO umbel_outbox (task_id, message) "
        "VALUES (CAST(x'ff' AS text), CAST(x'ff' AS text)), ('y', 5)"
    )
    sent, listener = send(app, place, 1), Told()

    async def scenario() -> None:
        async with relaying(app, place, listener) as (relay, _):
            assert await relay.round() == 3
        database = place.database()
        assert [one.task_id for one in database.problems()] == ["\ufffd", "y"]
        database.close()

    asyncio.run(scenario())
    assert in_queue(app) == sent and listener == Told(published_count=1, set_aside=2)


def test_a_broker_that_takes_part_of_a_batch_names_the_rest(app: App, place: Place) -> None:
    sent, listener = send(app, place, 3), Told()

    async def scenario() -> None:
        async with relaying(app, place, listener) as (relay, producer):

            def after(batch: Sequence[Outgoing]) -> None:
                raise BrokerRefused("not this one", places=[1])

            producer.after = after
            await relay.round()

    asyncio.run(scenario())
    assert place.ids() == [sent[1]] and listener.set_aside == 1


def test_an_unavailable_broker_is_waited_for(app: App, place: Place) -> None:
    sent, listener = send(app, place, 2), Told()
    failures = iter([BrokerUnavailable("no answer")])

    def fail(_: Sequence[Outgoing]) -> None:
        for error in failures:
            raise error

    async def scenario() -> None:
        async with relaying(app, place, listener) as (relay, producer):
            producer.before = fail
            running = asyncio.create_task(relay.run())
            await listener.has_published.wait()
            running.cancel()

    asyncio.run(scenario())
    assert (in_queue(app), listener.errors) == (sent, ["no answer"])


def test_what_was_published_is_deleted_later_if_the_database_goes_away(app: App, place: Place) -> None:
    sent, failing = send(app, place, 2), [True]

    class Failing(OutboxDatabase):
        def settle(self, published: Sequence[int], problems: Sequence[Problem] = ()) -> None:
            if failing.pop() if failing else False:
                raise OutboxUnavailable("connection lost")
            super().settle(published, problems)

    def opened() -> OutboxDatabase:
        database = place.database()
        database.__class__ = Failing
        return database

    async def scenario() -> list[int]:
        async with relaying(app, place, Told(), opened) as (relay, producer):
            with pytest.raises(OutboxUnavailable):
                await relay.round()
            assert place.ids() == sent
            assert await relay.round() == 0
            return producer.batches

    assert asyncio.run(scenario()) == [2]
    assert (in_queue(app), place.ids()) == (sent, [])


def test_a_relay_that_leads_no_more_publishes_nothing(app: App, place: Place) -> None:
    sent = send(app, place, 1)

    async def scenario() -> None:
        async with relaying(app, place, Told(leads=False)) as (relay, _):
            assert await relay.round() == 0

    asyncio.run(scenario())
    assert (in_queue(app), place.ids()) == ([], sent)


def test_two_relays_at_once_publish_a_row_once_for_those_who_run_it(app: App, place: Place) -> None:
    """The first stands still before it publishes; the second has done all by then."""
    sent = send(app, place, 3)

    async def scenario() -> None:
        async with relaying(app, place, Told()) as (first, slow), relaying(app, place, Told()) as (second, _):
            rows = await first._call(first._database.fetch)  # as far as it had come
            assert len(rows) == 3 and await second.round() == 3
            assert place.ids() == []
            first._database.fetch = lambda *_: rows  # type: ignore[method-assign]
            assert await first.round() == 3
            assert slow.batches == [3]

    asyncio.run(scenario())
    assert in_queue(app) == sent


def test_a_missing_table_or_file_is_told_and_waited_for(app: App, place: Place, tmp_path: Path) -> None:
    place.run("DROP TABLE umbel_outbox")
    listener = Told()

    async def scenario() -> None:
        async with relaying(app, place, listener) as (relay, _):
            with pytest.raises(OutboxUnavailable, match="umbel outbox create"):
                await relay.round()
            place.create()
            assert await relay.round() == 0
        nowhere = Place(f"sqlite:///{tmp_path}/nowhere.db")
        async with relaying(app, nowhere, listener) as (relay, _):
            with pytest.raises(OutboxUnavailable, match=r"the file does not exist.*umbel outbox create"):
                await relay.round()
        assert not (tmp_path / "nowhere.db").exists()

    asyncio.run(scenario())
    assert len(listener.errors) == 2


def test_events_of_sending_are_told_when_the_relay_publishes(tmp_path: Path) -> None:
    place = Place(f"sqlite:///{tmp_path}/shop.db")
    place.create()
    app = App("shop", broker=f"sqlite:///{tmp_path}/umbel.db", task_send_sent_event=True)
    told(app, register=True)
    with place.connection() as connection:
        with app.outbox(connection):
            sent = app.send_task("t").id
        connection.commit()
    assert told(app) == []

    async def scenario() -> None:
        async with relaying(app, place, Told(), tell_sent=app.sent_events.send) as (relay, _):
            await relay.round()

    asyncio.run(scenario())
    app.close()
    assert [(one["type"], one["uuid"]) for one in told(app)] == [("task-sent", sent)]
