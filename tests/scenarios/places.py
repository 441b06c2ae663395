"""The brokers a scenario runs on, each private, and how each is restarted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer


@dataclass(frozen=True, slots=True)
class Place:
    """`restart` is None where there is no server to restart."""

    broker: str
    backend: str
    restart: Callable[[], None] | None = None


@contextmanager
def place(name: str, directory: Path, *, durable: bool = True) -> Iterator[Place]:
    """`durable`: whether Redis writes everything to disk before it answers."""
    redis = _redis if durable else _fleeting_redis
    with {"sqlite": _sqlite, "redis": redis, "amqp": _amqp}[name](directory) as made:
        yield made


@contextmanager
def _sqlite(directory: Path) -> Iterator[Place]:
    url = f"sqlite:///{directory / 'queue.db'}"
    yield Place(url, url)


@contextmanager
def _redis(directory: Path) -> Iterator[Place]:
    home = directory / "redis"
    home.mkdir()
    server = RedisServer(home, options={"appendonly": "yes", "appendfsync": "always"})

    def restart() -> None:
        server.stop()
        server.start()

    try:
        server.start()
        yield Place(server.url, server.url, restart)
    finally:
        server.stop()


@contextmanager
def _fleeting_redis(directory: Path) -> Iterator[Place]:
    server = RedisServer(directory)
    try:
        server.start()
        yield Place(server.url, server.url)
    finally:
        server.stop()


@contextmanager
def _amqp(directory: Path) -> Iterator[Place]:
    """Results go to a file: AMQP itself keeps none for others than the sender."""
    home = directory / "rabbitmq"
    home.mkdir()
    server = RabbitServer(home, vhosts=0)

    def restart() -> None:
        server.stop()
        server.start()

    try:
        server.start()
        yield Place(server.url(), f"sqlite:///{directory / 'results.db'}", restart)
    finally:
        server.stop()
