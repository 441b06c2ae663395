"""The broker's data is emptied, deleted or replaced by a backup under a running worker (N2).

What runs goes on and its result is kept; the log and `umbel health` say what happened and how many
messages only the worker knew of; new tasks run, revokes and remote control work again.
"""

import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.waiting import wait_until
from umbel.app.results import AsyncResult
from umbel.brokers.amqp import topology
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.handshake import locations_from_url
from umbel.errors import TaskRevoked

TASKS_FILE = Path(__file__).with_name("replaced_tasks.py")
ENOUGH_S = 30.0
FALSE_TEXT = "outcome dropped unless the message is redelivered"
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class Ground:
    """`prepare` is called while the worker is idle, `replace` while a task runs."""

    broker: str
    backend: str
    replace: Callable[[], object]
    prepare: Callable[[], None] = lambda: None


@contextmanager
def deleted_file(home: Path) -> Iterator[Ground]:
    path = home / "queue.db"

    def replace() -> None:
        for ending in ("", "-wal", "-shm", "-lock"):
            Path(f"{path}{ending}").unlink()

    yield Ground(f"sqlite:///{path}", f"sqlite:///{path}", replace)


@contextmanager
def restored_file(home: Path) -> Iterator[Ground]:
    path, backup = home / "queue.db", home / "backup.db"

    def prepare() -> None:
        with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(backup)) as copy:
            live.backup(copy)

    def replace() -> None:
        for ending in ("-wal", "-shm"):
            Path(f"{path}{ending}").unlink()
        backup.replace(path)

    yield Ground(f"sqlite:///{path}", f"sqlite:///{path}", replace, prepare)


@contextmanager
def flushed_redis(home: Path) -> Iterator[Ground]:
    server = RedisServer(home)
    server.start()
    try:
        yield Ground(server.url, server.url, lambda: server.ask("FLUSHALL"))
    finally:
        server.stop()


@contextmanager
def restored_redis(home: Path) -> Iterator[Ground]:
    server = RedisServer(home)

    def prepare() -> None:
        server.ask("SAVE")
        shutil.copy(home / "dump.rdb", home / "backup.rdb")

    def replace() -> None:
        server.stop(signal.SIGKILL)
        shutil.copy(home / "backup.rdb", home / "dump.rdb")
        server.start()

    server.start()
    try:
        yield Ground(server.url, server.url, replace, prepare)
    finally:
        server.stop()


@contextmanager
def deleted_queues(home: Path) -> Iterator[Ground]:
    server = shared_server()
    host = server.new_vhost()
    url = server.url(host)

    def replace() -> None:
        link = BlockingLink(locations_from_url(url)[0], timeout_s=10.0, name="a stranger")
        queues = ("celery", topology.REVOKES, topology.STARTS, topology.FACTS, topology.CLOCK)
        for queue in queues:
            link.call(Method.QUEUE_DELETE, 0, queue, False, False, False)
        link.close()
        exchanges = ",".join(
            f'<<"{name}">>' for name in ("celery", topology.EVENT_EXCHANGE, topology.CONTROL_EXCHANGE)
        )
        resource = f'rabbit_misc:r(<<"{host}">>, exchange, Name)'
        server.evaluate(f'[rabbit_exchange:delete({resource}, false, <<"test">>) || Name <- [{exchanges}]].')

    yield Ground(url, f"sqlite:///{home / 'results.db'}", replace)


@contextmanager
def reset_host(home: Path) -> Iterator[Ground]:
    server = shared_server()
    host = server.new_vhost()

    yield Ground(server.url(host), f"sqlite:///{home / 'results.db'}", lambda: server.replace_vhost(host))


GROUNDS = [deleted_file, restored_file, flushed_redis, restored_redis, deleted_queues, reset_host]


@pytest.fixture(params=GROUNDS, ids=lambda ground: ground.__name__)
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    with request.param(tmp_path) as made:
        yield made


@pytest.fixture
def cluster(ground: Ground, tmp_path: Path) -> Iterator[Cluster]:
    settings = {"lease_s": 4.0, "heartbeat_interval_s": 0.5, "mingle_wait_s": 0.3}
    with Cluster(tmp_path, TASKS_FILE, broker=ground.broker, backend=ground.backend, **settings) as made:
        yield made


def test_a_worker_outlives_the_replacement_of_its_brokers_data(
    ground: Ground, cluster: Cluster, tmp_path: Path
) -> None:
    """N2: said once, with how many are unknown; nothing that this worker alone knows of is dropped."""
    send = cluster.app.send_task
    cluster.start_worker("w1", "-c", "2")
    cluster.start_worker("w2", "-c", "1", "-Q", "elsewhere")
    assert [send("replaced_tasks.add", (n, 1)).get(timeout=ENOUGH_S) for n in range(3)] == [1, 2, 3]
    ground.prepare()
    running = long_task(cluster, tmp_path)
    ground.replace()

    cluster.umbel("call", "replaced_tasks.add", "3", "4", "--wait", "30", prefix=("env",))  # by a new process
    assert send("replaced_tasks.add", (3, 4)).get(timeout=ENOUGH_S) == 7  # by one that sent before
    said = wait_until(
        lambda: [line for line in cluster.log("w1").splitlines() if "data was replaced" in line],
        deadline_s=ENOUGH_S,
        what="the worker to say so",
    )
    assert "unknown=1" in "".join(said)
    (tmp_path / "gate").touch()
    assert running.get(timeout=ENOUGH_S) == "went on"
    noted = tmp_path / "noted"
    wait_until(lambda: noted.exists() and noted.read_text(), deadline_s=ENOUGH_S, what="what the task sent")
    assert noted.read_text() == "went on\n"
    assert FALSE_TEXT not in cluster.log("w1")
    assert all(process.poll() is None for process in cluster.workers.values())
    wait_until(
        lambda: cluster.counters("w1").get("unknown", 0) >= 1,
        deadline_s=ENOUGH_S,
        what="word of it for umbel health",
    )
    assert cluster.counters("w1")["conflicts"] == 0
    assert cluster.counters("w1")["store_replaced"] >= 1
    assert "the broker's data was replaced" in cluster.umbel("health", "-n", "w1").stdout
    what_the_cluster_shares_works_again(cluster)


@pytest.mark.parametrize("put", [Path.mkdir, lambda path: path.write_bytes(b"no database" * 1000)])
def test_a_worker_whose_file_became_unusable_says_so_and_goes_on_when_it_is_gone(
    put: Callable[[Path], object], tmp_path: Path
) -> None:
    """N2: one clear error; `umbel health` says why; the worker tries again until it can go on."""
    path = tmp_path / "queue.db"
    with Cluster(tmp_path, TASKS_FILE, lease_s=4.0) as cluster:
        cluster.start_worker("w1", "-c", "1")
        running = long_task(cluster, tmp_path)  # so the worker has no room, and claims nothing
        for ending in ("-wal", "-shm"):
            Path(f"{path}{ending}").unlink()
        path.unlink()
        put(path)
        wait_until(
            lambda: "queue.db" in unhealthy(cluster, "w1"),
            deadline_s=ENOUGH_S,
            what="the worker to be unwell",
        )
        assert cluster.umbel("health", "--live").returncode == 0
        path.rename(tmp_path / "moved away")
        wait_until(lambda: not unhealthy(cluster, "w1"), deadline_s=ENOUGH_S, what="the worker to be well")
        (tmp_path / "gate").touch()
        assert running.get(timeout=ENOUGH_S) == "went on"
        assert cluster.app.send_task("replaced_tasks.add", (3, 4)).get(timeout=ENOUGH_S) == 7


def unhealthy(cluster: Cluster, name: str) -> str:
    state = cluster.state_of(name)
    assert state is not None
    assert state.live
    return state.problem


def long_task(cluster: Cluster, home: Path) -> AsyncResult[str]:
    """Runs until `gate` is there, then `noted` is written by the task that it sends."""
    app, started = cluster.app, home / "started"
    first = app.signature("replaced_tasks.waits_for", (str(home / "gate"), str(started)))
    then = app.signature("replaced_tasks.note", (str(home / "noted"),))
    parent: AsyncResult[str] | None = (first | then).delay().parent
    wait_until(started.exists, deadline_s=ENOUGH_S, what="the task to run")
    assert parent is not None
    return parent


def what_the_cluster_shares_works_again(cluster: Cluster) -> None:
    control, task_id = cluster.app.control, "revoked-before-it-was-sent"
    wait_until(
        lambda: len(control.ping(timeout=2.0, limit=2) or ()) == 2,
        deadline_s=ENOUGH_S,
        what="both workers to answer",
    )
    control.revoke(task_id)
    if cluster.app.settings.broker.startswith("amqp"):  # there a revoke may come after what was sent later
        wait_until(
            lambda: task_id in str(control.ask("revoked", limit=2).replies), what="the worker to know of it"
        )
    revoked = cluster.app.send_task("replaced_tasks.add", (1, 1), task_id=task_id)
    with pytest.raises(TaskRevoked):
        revoked.get(timeout=ENOUGH_S)
    wait_until(lambda: set(states(cluster).values()) == {"alive"}, deadline_s=ENOUGH_S, what="both alive")
    wait_until(lambda: is_above_the_clocks(cluster), deadline_s=ENOUGH_S, what="a clock mark that is ahead")


def is_above_the_clocks(cluster: Cluster) -> bool:
    """Who starts now begins there."""
    found = cluster.umbel_json("clock", "--timeout", "20")
    return len(found["nodes"]) == 2 and found["mark"] >= max(found["nodes"].values())


def states(cluster: Cluster) -> dict[str, str]:
    return {row["node"]: row["state"] for row in cluster.umbel_json("members", "--timeout", "20")}
