"""The async client beside real workers: every broker, asyncio and uvloop, several loops, frozen brokers."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from httpx import ASGITransport, AsyncClient

from tests.cluster import Cluster
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer, ask_redis
from tests.servers.way import Way
from tests.waiting import until, wait_until
from umbel import App, chain, chord, group
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.handshake import ChannelClosed, locations_from_url
from umbel.brokers.amqp.topology import SIGNATURES, passive
from umbel.errors import BrokerUnavailable, NotSupported, ResultTimeout, SendUnknown

TASKS_FILE = Path(__file__).with_name("awaited_tasks.py")
BROKERS = ("sqlite", "redis", "amqp")
SOON_S = 20.0
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


class Running:
    """One broker with one worker, for all tests of this file that need no other."""

    def __init__(self, broker: str, home: Path) -> None:
        self.broker = broker
        self.home = home
        self.redis: RedisServer | None = None
        self.ways: list[Way] = []
        url = backend = f"sqlite:///{home / 'queue.db'}"
        if broker == "redis":
            self.redis = RedisServer(home)
            self.redis.start()
            url = backend = self.redis.url
        elif broker == "amqp":
            server = shared_server()
            url = server.url(server.new_vhost())
        self.url, self.backend = url, backend
        self.cluster = Cluster(home, TASKS_FILE, broker=url, backend=backend)
        self.cluster.__enter__()
        self.cluster.start_worker("w1", "-c", "2", "-E")

    def client(self, url: str | None = None, **settings: Any) -> App:
        """An app as another process would have it; the worker's tasks by name."""
        return App(
            "awaited", broker=url or self.url, backend=settings.pop("backend", self.backend), **settings
        )

    def close(self) -> None:
        self.cluster.__exit__(None, None, None)
        self.cluster.app.close()
        if self.redis is not None:
            self.redis.stop()


_running: dict[str, Running] = {}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Running]]:
    def start(broker: str) -> Running:
        if broker not in _running:
            _running[broker] = Running(broker, tmp_path_factory.mktemp(broker))
        return _running[broker]

    yield start
    for one in _running.values():
        one.close()
    _running.clear()


@pytest.fixture(params=BROKERS)
def running(request: pytest.FixtureRequest, everything: Callable[[str], Running]) -> Running:
    return everything(request.param)


@pytest.fixture
def on_redis(everything: Callable[[str], Running]) -> Running:
    return everything("redis")


def sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return {one for one in found if one.startswith("socket:")}


async def nothing_is_left(app: App) -> None:
    """What was sent before has run: queues are served in order, and the worker has two children."""
    for _ in range(3):
        last = await app.asend_task("awaited_tasks.add", (1, 1))
        assert await last.aget(timeout=SOON_S) == 2


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


async def use_everything(app: App) -> list[Any]:
    """Every way to send and to wait, once."""
    add, total = app.tasks["awaited_tasks.add"], app.tasks["awaited_tasks.total"]
    one = await add.adelay(1, 2)
    with_options = await add.aapply_async((2, 3), priority=3)
    signed = await add.s(4).adelay(1)
    chained = await chain(add.s(1, 2), add.s(10)).adelay()
    grouped = await group(add.s(number, number) for number in range(3)).adelay()
    joined = await chord([add.s(number, 1) for number in range(3)], total.s()).adelay()
    many = await app.asend_many([add.s(number, 0) for number in range(4)])
    named = await app.asend_task("awaited_tasks.add", (5, 5))
    got = [await one, await with_options.aget(timeout=SOON_S), await signed, await chained, await grouped]
    got += [await joined, [await each for each in many], await named, await one.astate()]
    return got


EVERYTHING = [3, 5, 5, 13, [0, 2, 4], 6, [0, 1, 2, 3], 10, "SUCCESS"]


def test_everything_a_client_does_can_be_awaited(running: Running) -> None:
    """And the loop ends without a word to the app: nothing is left open, nothing warns."""
    app, before = running.cluster.app, sockets()
    assert asyncio.run(use_everything(app)) == EVERYTHING
    assert sockets() == before


@pytest.mark.usefixtures("on_uvloop")
def test_the_same_on_uvloop(running: Running) -> None:
    app, before = running.cluster.app, sockets()
    assert asyncio.run(use_everything(app)) == EVERYTHING
    assert sockets() == before


def test_a_failure_is_raised_where_it_is_awaited_and_a_result_can_be_forgotten(running: Running) -> None:
    async def scenario() -> None:
        app = running.cluster.app
        failed = await app.tasks["awaited_tasks.fail"].adelay("gone")
        with pytest.raises(KeyError, match="gone"):
            await failed
        assert await failed.aready()
        assert repr(await app.AsyncResult(failed.id).ainfo()) == "KeyError('gone')"
        await failed.aforget()
        assert await app.AsyncResult(failed.id).astate() == "PENDING"
        with pytest.raises(ResultTimeout, match="PENDING"):
            await app.AsyncResult(failed.id).aget(timeout=0.5)
        parts = await group(app.tasks["awaited_tasks.fail"].s("part")).adelay()
        with pytest.raises(KeyError, match="part"):
            await parts.aget(timeout=SOON_S)
        assert await parts.aready()

    asyncio.run(scenario())


def test_two_loops_in_two_threads_each_have_their_own_connection(running: Running) -> None:
    app = running.client()
    failures: list[BaseException] = []
    both = threading.Barrier(2)

    async def scenario() -> None:
        for number in range(20):
            sent = await app.asend_task("awaited_tasks.add", (number, 1))
            assert await sent.aget(timeout=SOON_S) == number + 1
            if number == 0:
                await asyncio.to_thread(both.wait, SOON_S)  # both are connected

    def run() -> None:
        try:
            asyncio.run(scenario())
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    app.close()
    assert not failures


@pytest.mark.parametrize("broker", ["sqlite", "redis"])
def test_sent_again_under_its_id_a_task_runs_once(
    broker: str, everything: Callable[[str], Running], tmp_path: Path
) -> None:
    running = everything(broker)

    async def scenario() -> None:
        app, file = running.cluster.app, tmp_path / "runs.txt"
        note = app.tasks["awaited_tasks.note"]
        for _ in range(3):
            await note.aapply_async((str(file), "same"), task_id=f"same-{tmp_path}")
            await note.aapply_async((str(file), "late"), task_id=f"late-{tmp_path}", countdown=0.2)
        await note.adelay(str(file), "other")
        await until(lambda: "other" in lines(file), "the last one to run")
        same = [note.s(str(file), "many").set(task_id=f"many-{tmp_path}-{number}") for number in range(3)]
        await app.asend_many(same)
        await app.asend_many(same)
        await until(lambda: len(lines(file)) >= 6, "all to run")
        await nothing_is_left(app)
        assert sorted(lines(file)) == ["late", "many", "many", "many", "other", "same"]

    asyncio.run(scenario())


def test_unique_tasks_are_awaited_like_any_other(running: Running, tmp_path: Path) -> None:
    async def scenario() -> None:
        build = running.cluster.app.tasks["awaited_tasks.build"]
        gate = str(tmp_path / "gate")
        if running.broker == "amqp":
            with pytest.raises(NotSupported, match="cannot be unique"):
                await build.adelay(gate)
            return
        first = await build.adelay(gate)
        assert (await build.adelay(gate)).id == first.id
        assert (await build.s(gate).adelay()).id == first.id
        Path(gate).touch()  # noqa: ASYNC240 (a file in memory)
        assert await first.aget(timeout=SOON_S) == "built"

    asyncio.run(scenario())


def test_the_events_of_a_task_can_be_iterated_until_it_ends(running: Running, tmp_path: Path) -> None:
    async def scenario() -> tuple[list[str], list[str]]:
        app, gate = running.cluster.app, tmp_path / "gate"
        later = await app.asend_task("awaited_tasks.add", (1, 1), countdown=0.5)
        heard = [event async for event in later]
        assert {event["uuid"] for event in heard} == {later.id}
        ended = [event async for event in later]  # nobody tells of it any more, but its result does
        with pytest.raises(ResultTimeout, match="did not end"):
            async for _ in app.AsyncResult(f"never-{gate}").aevents(timeout=0.05):
                pass
        return [one["type"] for one in heard], [one["type"] for one in ended]

    heard, ended = asyncio.run(scenario())
    assert heard[-1] == "task-succeeded"
    assert "task-started" in heard
    assert ended == ["task-succeeded"]


def test_one_connection_for_a_loop_closed_with_the_apps_context(on_redis: Running) -> None:
    """Also one that is in another thread, when the app is closed for good."""

    def named() -> int:
        """Connections of clients: those of the worker have its name."""
        listed = ask_redis(on_redis.url, "CLIENT", "LIST")
        assert isinstance(listed, bytes)
        return sum(b" name=umbel " in line and b"resp=3" in line for line in listed.splitlines())

    async def scenario() -> None:
        before = named()
        app = on_redis.client()
        assert named() == before, "opened lazily"
        async with app:
            results = [await app.asend_task("awaited_tasks.add", (number, 1)) for number in range(10)]
            waiting = [asyncio.create_task(result.aget(timeout=SOON_S)) for result in results]
            await asyncio.gather(*waiting, *(result.astate() for result in results))
            assert named() == before + 1
        await until(lambda: named() == before, "the connection to end")
        assert await (await app.asend_task("awaited_tasks.add", (1, 1))) == 2, "it opens again"
        app.close()  # from sync code: as soon as the loop comes to it
        await until(lambda: named() == before, "the connection to end")

    asyncio.run(scenario())


class Ticks:
    """How often the loop came by, hundredths of a second apart."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> "Ticks":
        self._next = self._loop.call_later(0.01, self._tick)
        return self

    def __exit__(self, *_error: object) -> None:
        self._next.cancel()

    def _tick(self) -> None:
        self.count += 1
        self._next = self._loop.call_later(0.01, self._tick)


def site_of(app: App, file: Path) -> FastAPI:
    """A site that sends a task for each request."""
    site = FastAPI()

    @site.post("/notes/{name}")
    async def note(name: str) -> Any:
        try:
            await app.asend_task("awaited_tasks.note", (str(file), name), task_id=name)
        except BrokerUnavailable as error:
            return JSONResponse(type(error).__name__, status_code=503)
        return "sent"

    return site


def test_a_frozen_redis_blocks_no_site_and_what_was_sent_runs_once(on_redis: Running, tmp_path: Path) -> None:
    """Requests are answered in time; what was answered by `SendUnknown` is sent again, under its id."""
    server, file, timeout_s = on_redis.redis, tmp_path / "runs.txt", 1.0
    assert server is not None
    names = [f"{tmp_path.name}-{number}" for number in range(50)]

    async def ask_for(site: FastAPI) -> list[str]:
        async with AsyncClient(transport=ASGITransport(app=site), base_url="http://site") as client:
            answers = await asyncio.gather(*(client.post(f"/notes/{name}") for name in names))
        return [answer.json() for answer in answers]

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with on_redis.client(publish_timeout_s=timeout_s) as app:
            assert await (await app.asend_task("awaited_tasks.add", (1, 1))) == 2
            with Ticks() as ticks:
                server.pause()
                began = loop.time()
                waiting = asyncio.create_task(app.AsyncResult("nobody").aget(timeout=timeout_s))
                answers = await ask_for(site_of(app, file))
                with pytest.raises((BrokerUnavailable, ResultTimeout)):
                    await waiting
                assert loop.time() - began < SOON_S  # they end although the freeze does not
                server.resume()
            assert ticks.count > 10, "somebody blocked the loop"
            assert set(answers) <= {"SendUnknown", "BrokerUnavailable"}
            assert "SendUnknown" in answers, "they were written, and nobody answered"
            patient = on_redis.cluster.app
            assert set(await ask_for(site_of(patient, file))) == {"sent"}
            await until(lambda: len(lines(file)) >= len(names), "all to run")
            await nothing_is_left(patient)
        assert sorted(lines(file)) == sorted(names)

    try:
        asyncio.run(scenario())
    finally:
        server.resume()


@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_a_send_that_is_cut_off_says_so(
    broker: str, everything: Callable[[str], Running], tmp_path: Path
) -> None:
    """Redis knows what it was sent, and it runs once; over RabbitMQ it may run twice: the caller decides."""
    running, file = everything(broker), tmp_path / "runs.txt"
    way = Way(running.redis.port if running.redis else shared_server().port)
    port = running.redis.port if running.redis else shared_server().port

    async def scenario() -> None:
        url = running.url.replace(f":{port}", f":{way.port}")
        settings: dict[str, Any] = {
            "publish_timeout_s": 2.0,
            "connect_timeout_s": 2.0,
            "backend": running.backend,
        }
        async with running.client(url, **settings) as app:
            assert await (await app.asend_task("awaited_tasks.add", (1, 1))) == 2
            way.silence()  # what is sent now waits on its way, and arrives when the way is free
            name, args, task_id = "awaited_tasks.note", (str(file), "cut"), f"cut-{tmp_path}"
            with pytest.raises(
                SendUnknown, match=r"embedded broker it runs once.*on RabbitMQ it may"
            ) as caught:
                await app.asend_task(name, args, task_id=task_id)
            assert caught.value.task_ids == (task_id,)
            way.resume()
            await app.asend_task(name, args, task_id=task_id)
            await until(lambda: lines(file), "it to run")
            await nothing_is_left(app)
        if broker == "amqp":
            assert set(lines(file)) == {"cut"}
        else:
            assert lines(file) == ["cut"]

    try:
        asyncio.run(scenario())
    finally:
        way.close()


def test_workers_without_keys_keep_no_stream_of_signatures(everything: Callable[[str], Running]) -> None:
    """It is kept for days and read whole by each worker that starts."""
    (location,) = locations_from_url(everything("amqp").url)
    link, (method, fields) = BlockingLink(location, timeout_s=SOON_S, name="stranger"), passive(SIGNATURES)
    try:
        with pytest.raises(ChannelClosed, match=r"no queue 'umbel\.signatures'"):
            link.call(method, *fields)
    finally:
        link.close()


def test_who_is_cancelled_while_sending_or_waiting_leaves_the_rest_in_order(running: Running) -> None:
    async def scenario() -> None:
        app = running.cluster.app
        waiting = asyncio.create_task(app.AsyncResult("never").aget())
        sending = asyncio.create_task(app.asend_task("awaited_tasks.add", (1, 1)))
        began = asyncio.Event()
        asyncio.get_running_loop().call_soon(began.set)
        await began.wait()
        for one in (waiting, sending):
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await app.AsyncResult("never")
        assert await (await app.asend_task("awaited_tasks.add", (2, 2))) == 4

    asyncio.run(scenario())


def test_results_over_rpc_are_awaited_too(everything: Callable[[str], Running]) -> None:
    running, before = everything("amqp"), sockets()
    running.cluster.start_worker("w2", "-c", "1", "-Q", "rpc", backend="rpc://")

    async def scenario() -> None:
        async with running.client(backend="rpc://") as app:
            results = await app.asend_many(
                app.signature("awaited_tasks.add", (number, 1), queue="rpc") for number in range(5)
            )
            assert [await result.aget(timeout=SOON_S) for result in results] == [1, 2, 3, 4, 5]
            assert await results[0].astate() == "SUCCESS"

    asyncio.run(scenario())
    wait_until(lambda: sockets() <= before, what="its connections to end")


Asked = Callable[[App], Awaitable[object]]


@pytest.mark.parametrize(
    "ask",
    [
        lambda app: app.asend_task("awaited_tasks.add", (1, 1)),
        lambda app: app.signature("awaited_tasks.add", (1, 1), unique_for=5.0).adelay(),
        lambda app: chord([app.signature("a")], app.signature("b")).adelay(),
        lambda app: app.AsyncResult("any").astate(),
    ],
    ids=["send", "unique", "chord", "state"],
)
def test_a_redis_that_is_not_there_is_one_clear_error_in_time(ask: Asked, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)  # not started

    async def scenario() -> None:
        settings: dict[str, Any] = {"publish_timeout_s": 0.2, "connect_timeout_s": 0.5}
        async with App("away", broker=server.url, backend=server.url, **settings) as app:
            with pytest.raises(BrokerUnavailable) as caught:
                await ask(app)
            assert not isinstance(caught.value, SendUnknown)

    asyncio.run(scenario())
