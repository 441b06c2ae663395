"""A time-out covers connecting, sending and waiting, also where the broker is a black hole."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest

from tests.servers.ports import free_ports
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.servers.way import Way
from umbel.app.app import App
from umbel.errors import BrokerUnavailable, ResultTimeout

SOAK = bool(os.environ.get("UMBEL_SOAK"))
# On a busy machine only "about": the connect time-out would be far off on either side.
SHORTER, LONGER = (20.0, 0.5), (0.1, 0.5)  # connect time-out, time-out of the question
SOON_S = 8.0
COMMAND_S = 6.0 if SOAK else 2.0
ASKING = ("ping", "status", "members", "inspect stats")
COMMANDS = [(broker, one) for broker in ("redis", "amqp") for one in ASKING]
if not SOAK:
    COMMANDS = [("redis", "ping"), ("amqp", "members")]


@contextmanager
def black_hole() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        taken: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    taken.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in taken:
            one.close()


def check(took_s: float, timeout_s: float) -> None:
    assert took_s >= 0.95 * timeout_s
    assert took_s <= (timeout_s * 1.1 + 0.1 if SOAK else SOON_S)


def ends_in_time(ask: Callable[[], object], timeout_s: float) -> None:
    began = monotonic()
    with pytest.raises((BrokerUnavailable, ResultTimeout)):
        ask()
    check(monotonic() - began, timeout_s)


ASKED: dict[str, Callable[[App, float], object]] = {
    "ping": lambda app, timeout_s: app.control.ping(timeout=timeout_s),
    "inspect": lambda app, timeout_s: app.control.inspect(timeout=timeout_s).stats(),
    "election": lambda app, timeout_s: app.control.election("e", "task", {}, timeout=timeout_s),
    "get": lambda app, timeout_s: app.AsyncResult("t").get(timeout=timeout_s),
    "aget": lambda app, timeout_s: asyncio.run(app.AsyncResult("t").aget(timeout=timeout_s)),
}


@pytest.mark.parametrize(("connect_s", "timeout_s"), [SHORTER, LONGER], ids=["shorter", "longer"])
@pytest.mark.parametrize("results", ["redis", "redis-rpc", "amqp-rpc"])
def test_a_black_hole_costs_the_time_out_and_no_more(
    results: str, connect_s: float, timeout_s: float
) -> None:
    broker, _, is_rpc = results.partition("-")
    with black_hole() as port:
        url = url_of(broker, port)
        app = App("t", broker=url, backend="rpc://" if is_rpc else url, connect_timeout_s=connect_s)
        for name, ask in ASKED.items():
            print(name)
            ends_in_time(lambda: ask(app, timeout_s), timeout_s)  # noqa: B023


@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_a_connection_that_falls_silent_costs_no_more_either(broker: str, tmp_path: Path) -> None:
    with _server(broker, tmp_path) as (port, path):
        way = Way(port)
        url = url_of(broker, way.port, path)
        app = App("t", broker=url, backend="rpc://" if broker == "amqp" else url, connect_timeout_s=20.0)
        assert app.control.ping(timeout=2.0) == []  # nobody is there, but the broker is
        with pytest.raises(ResultTimeout):
            app.AsyncResult("t").get(timeout=1.0)
        way.silence()
        for name, ask in ASKED.items():
            if not (broker == "amqp" and name.startswith("get")):  # sent to us: no answer is expected
                print(name)
                ends_in_time(lambda: ask(app, 0.5), 0.5)  # noqa: B023
        way.close()
        app.close()
        way.end()


@pytest.mark.parametrize(("broker", "command"), COMMANDS, ids=str)
def test_a_command_ends_at_its_time_out(broker: str, command: str, tmp_path: Path) -> None:
    began_s = _run(tmp_path, url_of(broker, free_ports(1)[0]), *command.split())  # refused: it ends at once
    with black_hole() as port:
        took_s = _run(tmp_path, url_of(broker, port), *command.split(), "--timeout", f"{COMMAND_S}")
    assert took_s >= COMMAND_S
    assert took_s - began_s <= (COMMAND_S * 1.1 + 0.1 if SOAK else COMMAND_S + SOON_S)


def url_of(broker: str, port: int, path: str = "") -> str:
    return (
        f"redis://127.0.0.1:{port}/0" if broker == "redis" else f"amqp://guest:guest@127.0.0.1:{port}/{path}"
    )


def _run(home: Path, url: str, *arguments: str) -> float:
    began = monotonic()
    command = [sys.executable, "-m", "umbel.cli.main", *arguments, "--broker", url]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 69 or "no answer" in done.stderr or "refused" in done.stderr, done
    return monotonic() - began


@contextmanager
def _server(broker: str, directory: Path) -> Iterator[tuple[int, str]]:
    if broker == "amqp":
        yield shared_server().port, shared_server().new_vhost()
        return
    redis = RedisServer(directory)
    redis.start()
    try:
        yield redis.port, ""
    finally:
        redis.stop()
