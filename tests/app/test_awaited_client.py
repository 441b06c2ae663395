"""The parts of the async client that need no worker: the gate, the warning, what ends with a loop."""

import asyncio
import gc
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.servers.redis import RedisServer
from tests.waiting import until, wait_until
from umbel import App, chain, chord, group
from umbel.app import waiting
from umbel.app.event_feed import EventFeed, EventSubscription
from umbel.app.request import Request, RequestScope
from umbel.app.sending import loop_client
from umbel.app.sending.loop_client import THREADS_MAX, InFlightLimit, SendTurns, SentEventSender
from umbel.brokers.interface import BATCH_MAX
from umbel.errors import AccessRefused, BrokerError, BrokerUnavailable, BufferFull, SendUnknown, TooLarge
from umbel.wire.message import Message, Outgoing
from umbel.wire.result import encode_state


def messages(count: int, size: int = 2) -> list[Outgoing]:
    return [Outgoing("celery", Message(b"", b"x" * size))] * count


# -- back-pressure ---------------------------------------------------------------------------------


def test_who_finds_no_room_waits_for_a_turn_in_order() -> None:
    async def scenario() -> list[int]:
        gate, order, release = InFlightLimit(messages_max=2), list[int](), asyncio.Event()

        async def send(number: int, count: int) -> None:
            async with gate.room(messages(count)):
                order.append(number)
                await release.wait()

        sends = [asyncio.create_task(send(number, count)) for number, count in enumerate([1, 1, 2, 1])]
        await until(lambda: len(gate._waiting) == 2, "two to wait")
        assert order == [0, 1]
        sends[2].cancel()
        await asyncio.wait([sends[2]])
        release.set()
        await asyncio.gather(*sends, return_exceptions=True)
        async with gate.room(messages(5)):  # nothing else is on its way
            pass
        return order

    assert asyncio.run(scenario()) == [0, 1, 3]


def test_bytes_count_as_well_and_so_many_may_wait() -> None:
    async def scenario() -> None:
        gate, entered = InFlightLimit(bytes_max=100, waiting_max=1), asyncio.Event()

        async def send() -> None:
            async with gate.room(messages(1, size=60)):
                entered.set()
                await asyncio.Event().wait()

        sends = [asyncio.create_task(send()) for _ in range(2)]
        await entered.wait()
        with pytest.raises(BufferFull, match=r"1 messages are on their way .* 1 sends wait"):
            async with gate.room(messages(1, size=60)):
                pass
        for one in sends:
            one.cancel()
        await asyncio.gather(*sends, return_exceptions=True)
        async with gate.room(messages(1, size=60)):
            pass

    asyncio.run(scenario())


def test_a_turn_that_comes_in_the_moment_of_a_cancellation_is_passed_on() -> None:
    async def scenario() -> None:
        gate = InFlightLimit(messages_max=1)

        async def send() -> None:
            async with gate.room(messages(1)):
                return

        async with gate.room(messages(1)):
            waiting = asyncio.create_task(send())
            await until(lambda: gate._waiting, "it to wait")
        waiting.cancel()  # its turn has come, and it does not know yet
        await asyncio.wait([waiting])
        async with asyncio.timeout(10):
            await send()

    asyncio.run(scenario())


def test_a_thousand_sends_at_once_leave_the_loop_to_others_in_between() -> None:
    async def scenario() -> list[int]:
        turns, begun, seen = SendTurns(begin_max=10), 0, list[int]()

        async def begin() -> None:
            nonlocal begun
            await turns.take()
            begun += 1

        def look() -> None:
            seen.append(begun)
            if begun < 34:
                asyncio.get_running_loop().call_soon(look)

        asyncio.get_running_loop().call_soon(look)
        sends = [asyncio.create_task(begin()) for _ in range(35)]
        sends[20].cancel()
        await asyncio.gather(*sends, return_exceptions=True)
        return seen

    seen = asyncio.run(scenario())
    assert seen[-1] == 34
    assert max(later - before for before, later in pairwise(seen)) <= 10


def test_a_batch_has_a_limit(app: App) -> None:
    add = app.signature("add", (1,))

    async def scenario() -> None:
        with pytest.raises(TooLarge, match="send smaller batches"):
            await app.asend_many([add] * (BATCH_MAX + 1))

    asyncio.run(scenario())


# -- the warning -----------------------------------------------------------------------------------


@pytest.fixture
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_warned", set())


@pytest.mark.usefixtures("_untold")
def test_the_blocking_client_on_a_loop_warns_once_with_the_remedy(app: App) -> None:
    async def scenario() -> list[warnings.WarningMessage]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            sent = app.send_task("anything")
            app.send_task("anything")
            assert sent.state == sent.state == "PENDING"
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    sent.get(timeout=0.01)
        return [one for one in told if one.category is RuntimeWarning]

    told = asyncio.run(scenario())
    texts = [str(one.message) for one in told]
    assert [text.partition(" blocks the event loop")[0] for text in texts] == [
        "sending a task",
        "reading the state of a result",
        "waiting for a result",
    ]
    for text, remedy in zip(texts, ("adelay", "astate", "aget"), strict=True):
        assert remedy in text
    assert {one.filename for one in told} == {__file__}, "it names the caller's line"


@pytest.mark.usefixtures("_untold")
def test_nobody_is_warned_off_a_loop_in_eager_mode_or_by_the_async_client(app: App) -> None:
    app.send_task("anything")  # no loop runs here
    task = app.task(name="double")(lambda number: 2 * number)

    async def scenario() -> None:
        with app.eager():
            assert task.delay(2).get() == 4
        await asyncio.to_thread(app.send_task, "anything")
        await app.asend_task("anything")

    asyncio.run(scenario())


# -- what was agreed with the blocking client ------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


def test_eager_mode_holds_for_those_who_await(app: App) -> None:
    double = app.task(name="double")(lambda number: 2 * number)

    @app.task(name="total")
    async def total(numbers: list[int]) -> int:
        await asyncio.wait_for(asyncio.to_thread(gc.isenabled), 10)
        return sum(numbers)

    async def scenario() -> None:
        with app.eager():
            assert await (await double.adelay(1)) == 2
            assert await (await chain(double.s(1), double.s()).adelay()) == 4
            assert await (await group(double.s(1), double.s(2)).adelay()) == [2, 4]
            sent = await chord([double.s(1), double.s(2)], total.s()).adelay()
        assert await sent == 6
        assert await sent.astate() == "SUCCESS"

    asyncio.run(scenario())


def test_arguments_and_options_are_checked_before_anything_is_sent(app: App) -> None:
    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    async def scenario() -> None:
        with pytest.raises(TypeError, match="missing a required argument"):
            await add.adelay(1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unknown option 'ques'"):
            await add.aapply_async((1, 2), ques="x")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="a group has no callbacks"):
            await group(add.s(1, 2)).aapply_async(link=add.s(1))
        assert await chain().adelay() is None

    asyncio.run(scenario())


def test_signals_and_events_tell_of_awaited_sends(redis: RedisServer) -> None:
    told: list[str] = []

    async def scenario() -> None:
        settings: dict[str, Any] = {"task_send_sent_event": True}
        async with App("told", broker=redis.url, backend=redis.url, **settings) as app:
            app.signals.before_task_publish.connect(lambda **_: told.append("before"))
            app.signals.after_task_publish.connect(lambda **_: told.append("after"))
            await app.asend_task("anything")

    asyncio.run(scenario())
    assert told == ["before", "after"]
    stats = redis.ask("INFO", "commandstats")
    assert isinstance(stats, bytes)
    assert b"cmdstat_publish:" in stats


def test_nobody_waits_for_the_events_of_sends_and_only_so_many_are_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_client, "WAITING_MESSAGES_MAX", 3)
    told, begun, release = list[list[tuple[int, float]]](), threading.Event(), threading.Event()

    def tell(sent: Any) -> None:
        begun.set()
        assert release.wait(30)
        told.append([(len(batch), at) for batch, at in sent])

    async def scenario() -> None:
        teller = SentEventSender(tell)
        teller.add(messages(5), 1.0)  # one alone may exceed the limit
        await asyncio.to_thread(begun.wait, 30)
        for at in (2.0, 3.0, 4.0, 5.0):
            teller.add(messages(1), at)
        asyncio.get_running_loop().call_soon(release.set)
        await teller.close(30)
        teller.add(messages(1), 6.0)

    asyncio.run(scenario())
    assert told == [[(5, 1.0)], [(1, 2.0), (1, 3.0), (1, 4.0)]]
    assert [record.__dict__["count"] for record in caplog.records] == [1]


def test_a_send_returns_before_its_event_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event waits for the loop, which could not go on if the send waited for the event."""
    release = threading.Event()
    app = App("told", broker=f"sqlite:///{tmp_path}/q.db", task_send_sent_event=True)
    monkeypatch.setattr(app.sent_events, "send", lambda *_sent: release.wait(5))

    async def scenario() -> None:
        for _ in range(3):
            await app.asend_task("anything")
        assert not release.is_set()
        release.set()

    with app:
        asyncio.run(asyncio.wait_for(scenario(), 4))


def test_a_running_task_keeps_what_it_cannot_send(tmp_path: Path) -> None:
    """As with `delay`: it goes out when the task ends, and only so much is kept."""
    away = RedisServer(tmp_path).url
    settings: dict[str, Any] = {"publish_timeout_s": 0.1, "publish_buffer_max": 2}
    app = App("task", broker=away, backend=away, **settings)
    request = Request(id="t", task="sends", called_directly=False)

    async def scenario() -> None:
        with RequestScope(request):
            sent = await asyncio.gather(*(app.asend_task("anything", (number,)) for number in range(2)))
            assert {one.message.correlation_id for one in request.unsent} == {one.id for one in sent}
            assert set(request.children) == {one.id for one in sent}
            with pytest.raises(BufferFull, match="publish_buffer_max"):
                await app.asend_task("anything")

    with app:
        asyncio.run(scenario())


def test_a_running_task_is_told_when_nobody_knows_whether_its_message_was_sent(tmp_path: Path) -> None:
    """Kept until the task ends it could run twice. What was kept before stays kept."""
    app = App("task", broker=f"sqlite:///{tmp_path}/q.db", publish_timeout_s=0.2, connect_timeout_s=0.2)
    request = Request(id="t", task="sends", called_directly=False)

    async def scenario() -> None:
        await app.asend_task("anything")
        with app.producer.database.write(), RequestScope(request):  # type: ignore[attr-defined]
            request.unsent[:] = kept = messages(1)
            with pytest.raises(SendUnknown) as caught:
                await app.asend_task("anything", task_id="a")
            assert caught.value.task_ids == ("a",)
            assert request.unsent == kept

    with app:
        asyncio.run(scenario())


def test_a_refused_subscription_gives_nobody_anothers_reply(redis: RedisServer) -> None:
    """It is answered by an error where it has no answer when it is done, on a connection that all share."""
    redis.ask("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "+@all", "resetchannels")
    url = redis.url.replace("redis://", "redis://deaf:pw@")
    with App("hears", broker=redis.url, backend=redis.url) as hears:
        hears.backend.store([encode_state("there", "SUCCESS", 7)])

    async def scenario() -> None:
        async with App("deaf", broker=url, backend=url) as app:
            await app.asend_task("anything")
            assert await app.AsyncResult("there").astate() == "SUCCESS"
            for _ in range(3):
                waiting = asyncio.create_task(app.AsyncResult("a").aget(timeout=5))
                reading = [asyncio.create_task(app.AsyncResult("there").astate()) for _ in range(3)]
                sending = [asyncio.create_task(app.asend_task("anything")) for _ in range(3)]
                with pytest.raises(BrokerError, match=r"channel|permission"):
                    await waiting
                assert await asyncio.gather(*reading) == ["SUCCESS"] * 3
                await asyncio.gather(*sending)

    asyncio.run(scenario())
    assert redis.ask("LLEN", "celery") == 10


def test_names_are_resolved_beside_the_loop(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes when the loop says so, which it could not if it were blocked."""
    release, resolve = threading.Event(), socket.getaddrinfo

    def slow(*args: Any, **options: Any) -> Any:
        assert release.wait(30), "the loop is blocked"
        return resolve(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def scenario() -> None:
        url = redis.url.replace("127.0.0.1", "localhost")
        async with App(
            "named", broker=url, backend=url, publish_timeout_s=30.0, connect_timeout_s=30.0
        ) as app:
            sending = asyncio.create_task(app.asend_task("anything"))
            asyncio.get_running_loop().call_later(0.05, release.set)
            await sending

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("scheme", "module"), [("rediss", "redis.address"), ("amqps", "amqp.handshake")], ids=["redis", "amqp"]
)
def test_certificates_are_read_beside_the_loop(
    scheme: str, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read_in: list[threading.Thread] = []

    def read(*_args: Any, **_options: Any) -> Any:
        read_in.append(threading.current_thread())
        raise AccessRefused("no such file")

    monkeypatch.setattr(f"umbel.brokers.{module}.tls_context", read)

    async def scenario() -> None:
        backend = f"sqlite:///{tmp_path}/results.db"
        broker = f"{scheme}://127.0.0.1:1"
        async with App("tls", broker=broker, backend=backend, publish_timeout_s=2.0) as app:
            with pytest.raises(AccessRefused, match="no such file"):
                await app.asend_task("anything")

    asyncio.run(scenario())
    assert read_in
    assert threading.current_thread() not in read_in


def test_a_listener_that_is_cancelled_while_it_subscribes_leaves_nobody_deaf(redis: RedisServer) -> None:
    async def listen(feed: EventFeed, hears: asyncio.Event) -> None:
        async with feed.listen("t"):
            hears.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        app = App("listens", broker=redis.url, backend=redis.url, connect_timeout_s=30.0)
        feed, hears = EventFeed(app.settings.for_broker), asyncio.Event()
        redis.pause()  # whoever subscribes waits
        first = asyncio.create_task(listen(feed, hears))
        await until(lambda: feed._receiving, "the first to subscribe")
        first.cancel()
        await asyncio.wait([first])
        assert feed._receiving is None, "nobody listens"
        second, third = (asyncio.create_task(listen(feed, hears)) for _ in range(2))
        await until(lambda: feed._receiving, "the second to subscribe")
        feed._listening["u"] = {EventSubscription()}  # somebody listens since before the connection was lost
        second.cancel()
        await asyncio.wait([second])
        await until(lambda: feed._listening.get("t"), "the third to come")
        assert not hears.is_set(), "it would miss what happens now"
        redis.resume()
        await hears.wait()
        third.cancel()
        await asyncio.wait([third])
        await feed.close()

    asyncio.run(scenario())


# -- what ends with a loop -------------------------------------------------------------------------


def connections(redis: RedisServer, flags: bytes = b"") -> int:
    listed = redis.ask("CLIENT", "LIST")
    assert isinstance(listed, bytes)
    return sum(b" name=umbel " in line and b" flags=" + flags in line for line in listed.splitlines())


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if "umbel client" in one.name or "database" in one.name}


def test_loops_that_end_leave_nothing_behind(redis: RedisServer) -> None:
    app = App("ended", broker=redis.url, backend=redis.url)

    async def send() -> None:
        sent = await app.asend_task("anything")
        with pytest.raises((TimeoutError, BrokerUnavailable)):
            await sent.aget(timeout=0.01)

    for _ in range(3):
        asyncio.run(send())
        assert not app.clients._clients
    gc.collect()  # what was left open would warn now, which is an error here
    listed = redis.ask("CLIENT", "LIST")
    assert isinstance(listed, bytes)
    assert b" name=umbel " not in listed
    for thread in threads():
        thread.join(10)
    assert not threads()
    app.close()


def test_a_loop_that_closes_the_app_leaves_other_loops_their_client(app: App) -> None:
    """Also the result backend, which all of them share; the last one closes it."""

    async def close() -> None:
        await app.asend_task("anything")
        await app.aclose()

    async def scenario() -> None:
        async with app:
            sent, client, backend = await app.asend_task("anything"), app.clients.here(), app.backend
            await asyncio.to_thread(asyncio.run, close())
            assert await sent.astate() == "PENDING"
            assert (app.clients.here(), app.backend) == (client, backend)
            assert not client.is_closed
        assert app._backend is None

    asyncio.run(scenario())


def test_what_is_sent_while_the_client_closes_ends_in_order_and_leaves_no_connection(
    redis: RedisServer,
) -> None:
    async def scenario() -> None:
        app = App("closing", broker=redis.url, backend=redis.url, publish_timeout_s=30.0)
        await app.asend_task("anything")
        redis.ask("CLIENT", "PAUSE", 30_000, "WRITE")
        sending = asyncio.create_task(app.asend_task("anything"))
        await until(lambda: connections(redis, b"b"), "the server to hold it back")
        await app.aclose()
        redis.ask("CLIENT", "UNPAUSE")
        await sending
        await until(lambda: not connections(redis), "the connection to be closed")

    asyncio.run(scenario())
    assert redis.ask("LLEN", "celery") == 2


def test_a_client_that_was_closed_refuses_and_the_app_makes_another_one(app: App) -> None:
    async def scenario() -> None:
        await app.asend_task("anything")
        client = app.clients.here()
        await app.aclose()
        for use in (client.load, client.backend, lambda: client.in_thread(print)):
            with pytest.raises(BrokerUnavailable, match="client for this event loop was closed"):
                await use()
        await app.asend_task("anything")

    asyncio.run(scenario())


def test_a_send_that_waits_for_the_broker_ends_with_its_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        away = RedisServer(tmp_path).url
        app = App("away", broker=away, backend=away, publish_timeout_s=60.0)
        client = app.clients.here()
        sending = asyncio.create_task(app.asend_task("anything"))
        await until(lambda: client._log_outage_at, "an attempt to fail")
        await app.aclose()
        with pytest.raises(BrokerUnavailable, match="client for this event loop was closed"):
            await sending

    asyncio.run(scenario())


def test_a_loop_that_was_closed_by_hand_is_forgotten_with_the_next(app: App) -> None:
    for _ in range(2):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(app.asend_task("anything"))
        loop.close()
        assert list(app.clients._clients) == [loop]
    app.close()
    assert not app.clients._clients


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_loop_that_was_closed_by_hand_takes_its_connection_with_it(redis: RedisServer) -> None:
    app = App("by hand", broker=redis.url, backend=redis.url)
    loop = asyncio.new_event_loop()
    sent = loop.run_until_complete(app.asend_task("anything"))
    assert loop.run_until_complete(sent.astate()) == "PENDING"
    backend = app.backend  # it outlives the loop, as it does where others wait on it
    loop.close()
    app.clients.close()
    gone = weakref.ref(loop)
    del loop
    # a thread that resolved a name may still be on its way out, with the loop in its hands
    wait_until(lambda: gc.collect() >= 0 and gone() is None, what="the loop to be freed")
    wait_until(lambda: not connections(redis), what="the socket to be closed")
    assert app.backend is backend
    app.close()


def test_threads_beside_a_loop_are_few(app: App) -> None:
    running, most, together = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with together:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with together:
            running -= 1

    async def scenario() -> None:
        await asyncio.gather(*(app.clients.here().in_thread(work) for _ in range(5 * THREADS_MAX)))

    asyncio.run(scenario())
    assert most <= THREADS_MAX


def test_a_sqlite_file_that_is_locked_is_an_error_in_time(tmp_path: Path) -> None:
    """What had begun may still be done: it is not known, and says so."""
    app = App("locked", broker=f"sqlite:///{tmp_path}/q.db", publish_timeout_s=0.3, connect_timeout_s=10.0)

    async def scenario() -> None:
        await app.asend_task("anything")
        store: Any = app.producer
        with store.database.write(), pytest.raises(BrokerUnavailable) as caught:
            await app.asend_task("anything", task_id="a")
        assert isinstance(caught.value, SendUnknown)
        assert caught.value.task_ids == ("a",)
        await app.asend_task("anything", task_id="a")

    with app:
        asyncio.run(scenario())
        assert store_messages(app) == 2


def test_all_steps_of_a_send_share_its_time(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the broker in reach, each of them would succeed if it had a time of its own."""
    add = app.signature("add", (1,))
    unique: dict[str, Any] = {"unique_key": "k", "unique_for": 60}
    sends: list[Callable[[], Any]] = [
        lambda: app.asend_task("add"),
        lambda: app.asend_many([add]),
        lambda: app.asend_task("add", **unique),
        group(add, add).adelay,
        chord([add, add], add).adelay,
    ]

    async def scenario() -> None:
        await app.asend_task("add")
        monkeypatch.setattr(app, "send_deadline", lambda: 0.0)
        for send in sends:
            with pytest.raises(
                BrokerUnavailable, match="nothing was sent: 'publish_timeout_s' ran out first"
            ):
                await send()

    asyncio.run(scenario())
    assert store_messages(app) == 1


def test_a_result_in_a_file_is_not_read_on_the_loop(tmp_path: Path) -> None:
    """Who has the file lets go of it when the loop says so, which it could not if it were blocked."""
    app = App("read", broker=f"sqlite:///{tmp_path}/q.db", connect_timeout_s=5.0)
    app.backend.store([encode_state("a", "SUCCESS", 7)])
    store = app.backend._store  # type: ignore[attr-defined]
    holds, release = threading.Event(), threading.Event()

    def hold() -> None:
        with store.database.write():
            holds.set()
            release.wait(60)

    async def scenario() -> None:
        reading = [asyncio.create_task(app.AsyncResult("a").aget(timeout=30)) for _ in range(2)]
        asking = asyncio.create_task(app.AsyncResult("a").astate())
        asyncio.get_running_loop().call_later(0.05, release.set)
        assert await asyncio.gather(*reading, asking) == [7, 7, "SUCCESS"]

    holder = threading.Thread(target=hold)
    holder.start()
    holds.wait(60)
    try:
        with app:
            asyncio.run(scenario())
    finally:
        release.set()
        holder.join()


def store_messages(app: App) -> int:
    with app.producer.database.read() as db:  # type: ignore[attr-defined]
        return int(db.execute("SELECT count(*) FROM messages").fetchone()[0])
