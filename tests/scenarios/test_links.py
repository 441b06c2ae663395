"""A worker whose way to the broker breaks in every way: it goes on by itself, and nothing is lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.servers.way import Way
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
BACK_S = 10.0  # consuming resumes within so long of the broker's return
FLAPS = 5


@contextmanager
def _server(broker: str, directory: Path) -> Iterator[tuple[int, Callable[[int], str], str]]:
    """Its port, its address behind another port, and where results are kept."""
    if broker == "amqp":
        server, vhost = shared_server(), shared_server().new_vhost()
        path = f"sqlite:///{directory / 'results.db'}"
        yield server.port, lambda port: f"amqp://guest:guest@127.0.0.1:{port}/{vhost}", path
        return
    redis = RedisServer(directory)
    redis.start()
    try:
        yield redis.port, lambda port: f"redis://127.0.0.1:{port}/0", redis.url
    finally:
        redis.stop()


@pytest.mark.scenario
@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_a_worker_survives_flaps_fail_over_and_a_black_hole(broker: str, tmp_path: Path) -> None:
    with _server(broker, tmp_path) as (port, url, backend):
        first, second = Way(port), Way(port)
        both = f"{url(first.port)};{url(second.port)}"
        with Cluster(tmp_path, TASKS_FILE, broker=url(port), backend=backend, lease_s=2.0) as cluster:
            cluster.start_worker("w", "-c", "2", broker=both, connect_timeout_s=2.0)
            work = cluster.app.tasks["chaos_tasks.work"]
            sent: list[str] = []

            def all_run(what: str) -> None:
                results = [work.delay(str(tmp_path), 0.01) for _ in range(20)]
                sent.extend(one.id for one in results)
                wait_until(lambda: all(one.ready() for one in results), deadline_s=BACK_S, what=what)

            all_run("tasks to run")
            for _ in range(FLAPS):
                accepted = first.accepted + second.accepted
                first.cut()
                second.cut()
                wait_until(
                    lambda: first.accepted + second.accepted > accepted,  # noqa: B023
                    deadline_s=BACK_S,
                    what="a new connection",
                )
            all_run("tasks to run after five flaps")

            first.close()
            all_run("tasks to run by the second address")

            second.silence()  # nobody is told that this connection is dead
            first.open()
            all_run("tasks to run after a black hole")
            second.close()

            wait_until(lambda: not any(_waiting(cluster)), deadline_s=BACK_S, what="an empty queue")
            assert cluster.stop_worker("w") == 0
        first.end()
        second.end()
    assert set(sent) == {line.split()[0] for line in journal_of(str(tmp_path)).read_text().splitlines()}


def _waiting(cluster: Cluster) -> list[int]:
    return [
        row[name] for row in cluster.umbel_json("queues", "ls") for name in ("ready", "delayed", "claimed")
    ]
