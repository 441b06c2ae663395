"""The brokers that contenders share: private servers on free ports, started when first needed.

Redis keeps nothing on disk here; RabbitMQ has its default settings. Every run of a contender finds
its broker empty: Redis is flushed, RabbitMQ gives it a virtual host that nobody has used.
"""

import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

import amqp  # type: ignore[import-untyped]

from benchmarks._harness.processes import family_cpu_s
from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer


class Server(ABC):
    name: str
    title: str

    @abstractmethod
    def empty_url(self) -> str:
        """Where nothing waits."""

    @abstractmethod
    def cpu_s(self) -> float:
        """What the server has used so far."""

    @abstractmethod
    def waiting(self, url: str, *, script: str, queue: str) -> int:
        """How many messages are not done with, as far as this server can be asked."""

    @abstractmethod
    def stop(self) -> None: ...

    shows_unacknowledged: bool  # whether `waiting` counts what a worker holds


class PrivateRedis(Server):
    """Asked by the contender's Lua script, which knows where it keeps its messages."""

    name, title = "redis", "Redis"
    shows_unacknowledged = True

    def empty_url(self) -> str:
        self._server.ask("FLUSHALL")
        return self._server.url

    def cpu_s(self) -> float:
        return family_cpu_s(self._server.pid)

    def waiting(self, url: str, *, script: str, queue: str) -> int:
        answer = self._server.ask("EVAL", script, 0)
        assert isinstance(answer, int)
        return answer

    def commands(self) -> int:
        """How many commands it has run so far, those inside of scripts among them."""
        answer = self._server.ask("INFO", "commandstats")
        assert isinstance(answer, bytes)
        return sum(int(calls) for calls in re.findall(rb":calls=([0-9]+)", answer))

    def stop(self) -> None:
        if "_server" in self.__dict__:
            self._server.stop()
            shutil.rmtree(self._server.directory, ignore_errors=True)

    @cached_property
    def _server(self) -> RedisServer:
        server = RedisServer(_directory())
        server.start()
        return server


class PrivateRabbit(Server):
    """Asked for the length of a queue; that leaves out what a consumer holds."""

    name, title = "rabbitmq", "RabbitMQ"
    shows_unacknowledged = False

    def empty_url(self) -> str:
        return self._server.url(self._server.new_vhost())

    def cpu_s(self) -> float:
        return family_cpu_s(self._server.pid)

    def waiting(self, url: str, *, script: str, queue: str) -> int:
        address = f"127.0.0.1:{self._server.port}"
        with amqp.Connection(address, virtual_host=url.rpartition("/")[2]) as connection:
            length: int = connection.channel().queue_declare(queue, passive=True).message_count
            return length

    def stop(self) -> None:
        if "_server" in self.__dict__:
            self._server.stop()
            shutil.rmtree(self._server.directory, ignore_errors=True)

    @cached_property
    def _server(self) -> RabbitServer:
        server = RabbitServer(_directory())
        try:
            server.start()
        except BaseException:
            server.stop()
            raise
        return server


REDIS, RABBITMQ = PrivateRedis(), PrivateRabbit()
SERVERS: tuple[Server, ...] = (REDIS, RABBITMQ)


def stop_servers() -> None:
    for server in SERVERS:
        server.stop()


def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="umbel-bench-"))
