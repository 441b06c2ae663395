"""What the tests share: one mixed cluster per broker for the whole run, because Celery starts slowly."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.mixed_cluster import Client, MixedCluster
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer

BROKERS = ["redis", "rabbitmq"]
ON_REDIS = pytest.mark.parametrize("cluster", ["redis"], indirect=True)
CROSSINGS = {"we first": ("on_umbel", "on_celery"), "celery first": ("on_celery", "on_umbel")}
WAYS = {"celery to umbel": ("celery", "on_umbel"), "umbel to celery": ("umbel", "on_celery")}


@dataclass(frozen=True)
class Way:
    """A client of one kind and the queue of workers of the other kind."""

    client: Client
    queue: str

    @property
    def worker(self) -> str:
        return self.queue.removeprefix("on_")

    def __call__(self, expression: str, **names: Any) -> Any:
        __tracebackhide__ = True
        return self.client(expression, queue=self.queue, **names)


@dataclass(frozen=True)
class Crossing:
    """A client of either kind, and two queues: one of workers of each kind, in either order."""

    client: Client
    here: str
    there: str

    @property
    def first(self) -> str:
        """The library of the workers here."""
        return self.here.removeprefix("on_")

    @property
    def second(self) -> str:
        """The library of the workers there."""
        return self.there.removeprefix("on_")

    def __call__(self, expression: str, **names: Any) -> Any:
        __tracebackhide__ = True
        return self.client(expression, here=self.here, there=self.there, **names)


@pytest.fixture(scope="session")
def results_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session", params=BROKERS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, results_server: RedisServer
) -> Iterator[MixedCluster]:
    """Results are in Redis whatever the broker, because chords need them there."""
    home = tmp_path_factory.mktemp(f"interop-{request.param}")
    backend = f"{results_server.url.removesuffix('0')}{BROKERS.index(request.param)}"  # a database for each
    broker, versions = backend, ["celery", "celery55"]
    if request.param == "rabbitmq":
        server = shared_server()
        broker, versions = server.url(server.new_vhost()), ["celery"]
    made = MixedCluster(home, request.param, broker=broker, backend=backend, versions=versions)
    with shown_when_it_fails(request, made) as cluster:
        yield cluster


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, cluster: MixedCluster) -> Way:
    library, queue = WAYS[request.param]
    return Way(cluster.client(library), queue)


@pytest.fixture(params=["celery", "umbel"])
def client(request: pytest.FixtureRequest, cluster: MixedCluster) -> Client:
    return cluster.client(request.param)


@pytest.fixture(
    params=[("on_umbel", "on_celery"), ("on_celery", "on_umbel")], ids=["we first", "celery first"]
)
def crossing(request: pytest.FixtureRequest, client: Client) -> Crossing:
    return Crossing(client, *request.param)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file whose presence lets a waiting task go on."""
    return tmp_path / "gate"


@contextmanager
def shown_when_it_fails(request: pytest.FixtureRequest, cluster: MixedCluster) -> Iterator[MixedCluster]:
    """When tests have failed, the logs of all sides say why."""
    failed_before = request.session.testsfailed
    with cluster:
        yield cluster
        logs = [(log.stem, log.read_text(errors="replace")) for log in sorted(cluster.home.glob("*.log"))]
    if request.session.testsfailed > failed_before:
        for name, text in logs:
            print(f"--- log of {name}\n{text[-4000:]}")
