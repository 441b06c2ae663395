"""A private Redis server: on a free port of the loopback, in a directory of its own.

`redis_server` is one server for all tests of a file, emptied before each test by `redis_url`.
Tests that stop, restart or fill a server start one of their own with `RedisServer`.
"""

import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hiredis
import pytest

from tests.servers.ports import free_port
from tests.servers.shared import ends_with_run
from tests.waiting import wait_until


@dataclass
class RedisServer:
    """Start with `start()`. `options` are those of redis-server, without their dashes."""

    directory: Path
    port: int = field(default_factory=free_port)
    options: dict[str, str] = field(default_factory=dict)
    program: str = "redis-server"
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server runs"
        return self._process.pid

    def start(self) -> None:
        program = shutil.which(self.program)
        assert program, f"{self.program} is missing: apt-get install redis-server"
        given = {"save": "", "appendonly": "no", "dir": str(self.directory), **self.options}
        settings = [part for name, value in given.items() for part in (f"--{name}", value)]
        command = [program, "--port", str(self.port), "--bind", "127.0.0.1", *settings]
        with (self.directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.directory, stdout=log, stderr=log, process_group=0
            )
        ends_with_run(self._process, self.directory, "TERM")
        wait_until(self._answers, what=f"redis-server on port {self.port}")

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(sign)
            self._process.wait(10)
            self._process = None

    def pause(self) -> None:
        """Let the server stand still: connections stay open and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def ask(self, *command: str | bytes | int, database: int = 0) -> object:
        """One command, by a client that is not ours."""
        return _ask(self.port, database, command)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, "redis-server ended"
        try:
            return not str(exchange(self.port, [("PING",)])[0]).startswith("LOADING")
        except OSError:
            return False


def ask_redis(url: str, *command: str | bytes | int) -> object:
    """The same where only the address is known."""
    place = urlsplit(url)
    assert place.port is not None
    return _ask(place.port, int(place.path.strip("/") or 0), command)


def _ask(port: int, database: int, command: tuple[str | bytes | int, ...]) -> object:
    answer = exchange(port, [("SELECT", database), command])[1]
    if isinstance(answer, hiredis.ReplyError):
        raise answer
    return answer


def exchange(port: int, commands: list[tuple[Any, ...]]) -> list[object]:
    reader = hiredis.Reader(notEnoughData=_NOTHING)
    answers: list[object] = []
    with socket.create_connection(("127.0.0.1", port), 10) as link:
        link.sendall(b"".join(hiredis.pack_command(command) for command in commands))
        while len(answers) < len(commands):
            answer = reader.gets()
            if answer is not _NOTHING:
                answers.append(answer)
            elif data := link.recv(65536):
                reader.feed(data)
            else:
                raise ConnectionResetError("the server closed the connection")
    return answers


def calls(server: RedisServer, command: str) -> int:
    """How often the server was asked this, as "evalsha" or "client|unblock", since it was started."""
    stats = server.ask("INFO", "commandstats")
    assert isinstance(stats, bytes)
    found = re.search(rf"cmdstat_{re.escape(command)}:calls=(\d+)", stats.decode())
    return int(found[1]) if found else 0


_NOTHING = object()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    redis_server.ask("FLUSHALL")
    return redis_server.url
