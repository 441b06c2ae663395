"""Clients that hold connections open and send nothing: who has to go, and who is answered meanwhile."""

import asyncio
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tests.waiting import until, wait_until
from tests.web.serving import Served, serving
from umbel.app.app import App
from umbel.web import application, server
from umbel.web.settings import Role

HEAD = b"GET /healthcheck HTTP/1.1\r\nHost: x\r\n"
LOGIN = b"POST /session HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n"


@pytest.fixture
def many_files() -> Iterator[None]:
    """Server and clients are one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def served(tmp_path: Path, many_files: None) -> Iterator[Served]:
    app = App("crowded", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    with serving(app, tmp_path / "web.db") as found:
        yield found


@contextmanager
def opened(
    served: Served, count: int, *, sending: bytes = b"", source: str = "127.0.0.1"
) -> Iterator[list[socket.socket]]:
    host, port = served.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            raw = stack.enter_context(socket.create_connection((host, int(port)), 30, (source, 0)))
            raw.sendall(sending)
            found.append(raw)
        yield found


def all_is_answered(served: Served) -> None:
    with served.client(served.token(Role.VIEWER)) as client:
        answers = [client.get(path) for path in ("/healthcheck", "/metrics", "/api/v1/overview", "/login")]
    assert [one.status_code for one in answers] == [200] * 4


def is_closed(raw: socket.socket) -> bool:
    raw.setblocking(False)
    try:
        return raw.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def count_of_open(found: list[socket.socket]) -> int:
    return sum(not is_closed(raw) for raw in found)


@pytest.mark.parametrize(
    "sending",
    [b"", b"G", HEAD, LOGIN + b"Content-Length: 1000\r\n\r\ntoken="],
    ids=["none", "one", "head", "body"],
)
def test_half_open_connections_do_not_keep_others_from_being_answered(served: Served, sending: bytes) -> None:
    """1,700: more than there may be in all."""
    with opened(served, 1700, sending=sending) as found:
        all_is_answered(served)
        wait_until(lambda: count_of_open(found) <= server.WAITING_MAX, what="the first of them to be closed")
        assert count_of_open(found[-server.WAITING_MAX // 2 :]) == server.WAITING_MAX // 2


def test_many_that_come_at_once_are_all_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many_files: None
) -> None:
    """While the server is busy it reads nothing: they do not wait for their clients."""
    monkeypatch.setattr(uvicorn.Config, "get_loop_factory", lambda _: asyncio.new_event_loop)
    busy, go_on = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        go_on.wait(60)

    with serving(App("busy", broker=f"sqlite:///{tmp_path / 'queue.db'}"), tmp_path / "web.db") as served:
        served.server.servers[0].get_loop().call_soon_threadsafe(block)
        assert busy.wait(60)
        with opened(served, 3 * server.WAITING_MAX, sending=HEAD + b"\r\n") as found:
            go_on.set()
            for raw in found:
                assert raw.recv(15) == b"HTTP/1.1 200 OK"


class Queueing(asyncio.Transport):
    """A transport that sends at the end of a turn of the loop, as uvloop's does."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.1", 9)})
        self.queued = self.sent = b""
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.queued += bytes(data)
        asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        if not self.is_aborted:
            self.sent, self.queued = self.sent + self.queued, b""

    def get_write_buffer_size(self) -> int:
        return len(self.queued)

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    close = abort

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def test_an_answer_is_sent_before_its_connection_makes_room() -> None:
    async def answering(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})

    async def scenario() -> list[Queueing]:
        found = server.Connections(answering)
        config = uvicorn.Config(found, http=cast(Any, found.protocol), lifespan="off")
        config.load()
        transports = [Queueing() for _ in range(2 * server.WAITING_MAX)]
        made = []
        for transport in transports:
            connection = server.Connection(found, config=config, server_state=ServerState(), app_state={})
            connection.connection_made(transport)
            connection.data_received(HEAD + b"\r\n")
            made.append(connection)
        await until(lambda: sum(one.is_aborted for one in transports) >= server.WAITING_MAX, "room")
        for connection in made:
            connection.connection_lost(None)
        return transports

    assert all(b"fine" in one.sent for one in asyncio.run(scenario()))


def test_of_all_connections_the_one_that_has_waited_longest_makes_room(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WAITING_MAX", 10_000)
    sources = [f"127.0.1.{number}" for number in range(1, 18)]
    with ExitStack() as stack:
        found = [raw for source in sources for raw in stack.enter_context(opened(served, 100, source=source))]
        all_is_answered(served)
        wait_until(lambda: count_of_open(found) < server.CONNECTIONS_MAX, what="some to be closed")
        assert count_of_open(found[:200]) == 0 and count_of_open(found[-1000:]) == 1000


def test_a_request_that_is_being_answered_makes_no_room(served: Served) -> None:
    token = served.token(Role.VIEWER)
    with ExitStack() as stack:
        streams = [stack.enter_context(served.stream(token)) for _ in range(40)]
        for raw in streams:
            assert raw.recv(12).endswith(b"200")
        stack.enter_context(opened(served, 1700))
        all_is_answered(served)
        assert served.dashboard.hub.clients == 40


def test_a_head_that_does_not_come_is_waited_for_so_long(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    with opened(served, 1, sending=HEAD) as [before], opened(served, 1, sending=HEAD + b"\r\n") as [after]:
        assert after.recv(15) == b"HTTP/1.1 200 OK"
        after.sendall(b"G")  # of the next request
        while after.recv(65_536):
            pass
        wait_until(lambda: is_closed(before), what="the other to be closed")


def test_a_body_that_does_not_come_is_waited_for_so_long(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "BODY_S", 0.2)
    with opened(served, 1, sending=LOGIN + b"Content-Length: 9\r\n\r\ntoken") as [raw]:
        answer = b""
        while b"to arrive" not in answer:
            answer += (part := raw.recv(65_536))
            assert part, answer
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout") and b"took longer than 0.2 s" in answer


class Draining(asyncio.Transport):
    """A transport whose client reads so much between two looks."""

    def __init__(self, *unsent: int) -> None:
        super().__init__({"peername": ("10.0.0.1", 9)})
        self.unsent = list(unsent)
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent[0] if len(self.unsent) == 1 else self.unsent.pop(0)

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    close = abort


@pytest.mark.parametrize(
    ("unsent", "looks"), [([0], 1), ([900], 1), ([900, 600, 600, 300, 300, 300], 3), ([900, 600, 600, 0], 2)]
)
def test_a_client_that_still_reads_its_answer_is_not_closed(unsent: list[int], looks: int) -> None:
    async def scenario() -> int:
        found = server.Connections(_nothing)
        connection = server.Connection(
            found, config=uvicorn.Config(_nothing), server_state=ServerState(), app_state={}
        )
        transport = Draining(*unsent)
        connection.connection_made(transport)
        count = 0
        while not transport.is_aborted:
            connection._expire()
            count += 1
        connection.connection_lost(None)
        return count

    assert asyncio.run(scenario()) == looks


async def _nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    pass


def test_the_log_says_once_that_connections_were_closed(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(served, 300):
        wait_until(lambda: caplog.records, what="a line")
    said = [one for one in caplog.records if "clients sent or read nothing" in one.getMessage()]
    assert len(said) == 1 and said[0].__dict__["address"] == "127.0.0.1"


def test_a_connection_that_is_used_again_waits_behind_the_others(served: Served) -> None:
    """Browsers and scrapers keep theirs open between requests."""
    with served.client() as client:
        for _ in range(3):
            assert client.get("/healthcheck").status_code == 200
            with opened(served, server.WAITING_MAX - 1):
                assert client.get("/healthcheck").status_code == 200
