"""The brokers a scenario runs on, each as good as private, and how one is restarted."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.servers.rabbitmq import RabbitServer, shared_server
from tests.servers.redis import RedisServer


@dataclass(frozen=True, slots=True)
class Place:
    """`restart` is None where there is no server of one's own to restart. In `alarm` it takes no messages."""

    broker: str
    backend: str
    restart: Callable[[], None] | None = None
    alarm: Callable[[], AbstractContextManager[None]] = nullcontext
    coordination_store: str = ""


@contextmanager
def place(name: str, directory: Path, *, durable: bool = True, restarts: bool = False) -> Iterator[Place]:
    """`durable`: whether Redis writes everything to disk before it answers. `restarts`: whether RabbitMQ
    is a node of one's own, which takes long to start."""
    redis = _redis if durable else _fleeting_redis
    amqp = _own_amqp if restarts else _amqp
    with {"sqlite": _sqlite, "redis": redis, "amqp": amqp}[name](directory) as made:
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
    server = shared_server()
    yield Place(server.url(server.new_vhost()), f"sqlite:///{directory / 'results.db'}")


@contextmanager
def _own_amqp(directory: Path) -> Iterator[Place]:
    home = directory / "rabbitmq"
    home.mkdir()
    server = RabbitServer(home)

    def restart() -> None:
        server.stop()
        server.start()

    @contextmanager
    def alarm() -> Iterator[None]:
        server.limit_memory(0.0)
        try:
            yield
        finally:
            server.limit_memory(0.4)

    try:
        server.start()
        yield Place(server.url(), f"sqlite:///{directory / 'results.db'}", restart, alarm)
    finally:
        server.stop()
