"""FastAPI: the client lives as long as the site, in each process of uvicorn, also when it reloads or ends."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from fastapi import FastAPI, WebSocket

from tests.servers.ports import free_port
from tests.servers.redis import redis_server, redis_url
from tests.waiting import wait_until
from umbel import App
from umbel.contrib.fastapi import FULL_RARER, Umbel, lifespan
from umbel.errors import ConfigurationError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the library under it
    from fastapi.testclient import TestClient

__all__ = ["redis_server", "redis_url"]

STORE = Path(__file__).resolve().parents[2] / "examples" / "fastapi_store"
LONG_S = 60.0
STARTED = "Application startup complete"
WRONG = re.compile("warning|error|exception|traceback|never awaited|unclosed", re.IGNORECASE)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with App("site", directory=tmp_path) as made:
        made.task(name="add")(_add)
        yield made


def _add(x: int, y: int) -> int:
    return x + y


def site_with(own: Any) -> FastAPI:
    site = FastAPI(lifespan=own)

    @site.get("/add")
    async def add(umbel: Umbel) -> dict[str, Any]:
        return {"sum": await (await umbel.asend_task("add", [2, 3]))}

    return site


def test_an_endpoint_asks_for_the_app(app: App) -> None:
    with app.eager(), TestClient(site_with(lifespan(app))) as client:
        assert client.get("/add").json() == {"sum": 5}


def test_what_is_loaded_is_left_out_of_collections_while_the_site_runs(app: App) -> None:
    before = gc.get_threshold()
    with app.eager(), TestClient(site_with(lifespan(app))):
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (before[0], before[1], before[2] * FULL_RARER)
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


def test_a_lifespan_of_the_users_own_runs_inside(app: App) -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def own(site: FastAPI) -> AsyncIterator[dict[str, str]]:
        seen.append(f"began {site.title}: {app.clients.are_open}")
        yield {"greeting": "hello"}
        seen.append(f"ends: {app.clients.are_open}")

    site = FastAPI(lifespan=lifespan(app, own))

    @site.websocket("/greet")
    async def greet(websocket: WebSocket, umbel: Umbel) -> None:
        await websocket.accept()
        await websocket.send_json([websocket.state.greeting, umbel.name])

    with TestClient(site) as client, client.websocket_connect("/greet") as socket:
        assert socket.receive_json() == ["hello", "site"]
    assert seen == ["began FastAPI: True", "ends: True"]
    assert not app.clients.are_open


def test_without_the_lifespan_an_endpoint_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"write FastAPI\(lifespan=lifespan\(app\)\)"):
        TestClient(site_with(None)).get("/add")


class Server:
    """uvicorn with the store of examples/, and customers who order as long as it runs."""

    def __init__(self, store: Path, env: dict[str, str], *flags: str) -> None:
        self.port, self.log, self.store = free_port(), store.parent / f"{flags[0].strip('-')}.log", store
        command = [
            sys.executable,
            "-X",
            "dev",
            "-m",
            "uvicorn",
            "store:site",
            "--port",
            str(self.port),
            *flags,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=store, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.sent: list[str] = []
        self._closed = threading.Event()
        self._customers = [threading.Thread(target=self._order, daemon=True) for _ in range(3)]

    def started(self, number: int) -> None:
        wait_until(
            lambda: self._count(STARTED) >= number, deadline_s=LONG_S, what=f"{number} starts of {self.log}"
        )

    def open(self) -> None:
        for one in self._customers:
            one.start()

    def sells(self, more: int) -> None:
        wanted = len(self.sent) + more
        wait_until(lambda: len(self.sent) >= wanted, deadline_s=LONG_S, what=f"{wanted} orders")

    def kill(self) -> None:
        """With its children, whatever is left of them."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LONG_S)

    def stop(self) -> None:
        """While customers are ordering."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(LONG_S) in (0, -signal.SIGTERM), self.log.read_text()
        self._closed.set()
        for one in self._customers:
            one.join(LONG_S)
        assert self._count("Application shutdown complete") == self._count(STARTED)
        said = [line for line in self.log.read_text().splitlines() if not self._is_uvicorns(line)]
        assert not [line for line in said if WRONG.search(line)], "\n".join(said)

    def _is_uvicorns(self, line: str) -> bool:
        """It says that it reloads. Its parent process leaves the socket open that its children listen on."""
        is_listening = "raddr" not in line and f"laddr=('127.0.0.1', {self.port})" in line
        return is_listening or "detected changes in" in line or "Enable tracemalloc" in line

    def _count(self, words: str) -> int:
        return self.log.read_text().count(words)

    def _order(self) -> None:
        while not self._closed.is_set():
            try:
                request = Request(f"http://127.0.0.1:{self.port}/orders/{len(self.sent)}", method="POST")
                with urlopen(request, timeout=LONG_S) as answer:
                    self.sent.append(json.load(answer)["task"])
            except (OSError, HTTPException):  # it reloads, or has ended: nothing was promised
                pass
            self._closed.wait(0.02)


@contextmanager
def worker(store: Path, env: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "umbel", "worker", "-c", "1", "-l", "error"], cwd=store, env=env
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0


@pytest.mark.timeout(300)
def test_what_a_site_has_promised_is_done_when_it_reloads_or_ends(tmp_path: Path, redis_url: str) -> None:
    store = shutil.copytree(STORE, tmp_path / "store")
    env = {**os.environ, "UMBEL_BROKER": redis_url, "UMBEL_RUN_DIR": str(tmp_path / "run")}
    with ExitStack() as ends:
        two, reloaded = Server(store, env, "--workers", "2"), Server(store, env, "--reload")
        for server, starts in ((two, 2), (reloaded, 1)):
            ends.callback(server.kill)
            server.started(starts)
            server.open()
        for server in (two, reloaded):
            server.sells(20)
        with (store / "store.py").open("a") as code:
            code.write("\n# changed\n")
        reloaded.started(2)
        reloaded.sells(20)
        for server in (two, reloaded):
            server.stop()
        ends.enter_context(worker(store, env))
        sent = [*two.sent, *reloaded.sent]
        with App("check", broker=redis_url, directory=tmp_path) as app:
            assert all(app.AsyncResult(one).get(timeout=LONG_S).startswith("packed order") for one in sent)
    assert len(sent) >= 60
