"""S6: a worker whose wall clock is wrong judges by the cluster's time: nothing expires or stalls."""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.servers.rabbitmq import amqp_url
from tests.servers.redis import redis_server, redis_url
from tests.waiting import wait_until

__all__ = ["amqp_url", "redis_server", "redis_url"]

HERE = Path(__file__).parent
SOAK = bool(os.environ.get("UMBEL_SOAK"))
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
TASKS = 20
# libfaketime also moves the instants until which a program sleeps on clocks that it leaves alone.
SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"
pytestmark = [
    pytest.mark.scenario,
    pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed: scripts/setup servers"),
]


def start_wrong(cluster: Cluster, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker, and its children, whose wall clock is wrong; the boot clock never is."""
    patch = cluster.home / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(SLEEP)
    with monkeypatch.context() as changed:
        changed.setenv("PYTHONPATH", os.pathsep.join([str(patch), os.environ.get("PYTHONPATH", "")]))
        changed.setenv("LD_PRELOAD", str(FAKETIME))
        changed.setenv("FAKETIME", wrong)
        changed.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        cluster.start_worker("wrong", "-c", "1", "-Q", "wrong")


@pytest.mark.parametrize(
    ("broker", "wrong"),
    [("redis_url", "+3650d"), ("amqp_url", "+1h"), ("", "+1h"), *([("amqp_url", "-1h")] if SOAK else [])],
)
def test_one_wrong_worker_among_three_true_ones(
    tmp_path: Path,
    broker: str,
    wrong: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = f"sqlite:///{tmp_path / 'results.db'}"
    url = request.getfixturevalue(broker) if broker else results
    with Cluster(tmp_path, HERE / "clock_tasks.py", broker=url, backend=results) as cluster:
        for name in ("t1", "t2", "t3"):
            cluster.start_worker(name, "-P", "solo", wait=False)
        for name in ("t1", "t2", "t3"):
            wait_until(partial(is_ready, cluster, name), what=f"{name} to be ready")
        start_wrong(cluster, wrong, monkeypatch)
        wait_until(
            lambda: "using the cluster's time" in cluster.log("wrong"),
            what="the worker to see that its clock is wrong",
        )
        app = cluster.app
        later = app.send_task("clock_tasks.who", queue="wrong", countdown=1800)
        ran = [app.send_task("clock_tasks.who", queue="wrong", expires=600) for _ in range(TASKS)]
        soon = app.send_task("clock_tasks.who", queue="wrong", countdown=0.2)
        again = app.send_task("clock_tasks.again", queue="wrong")
        assert [one.get(timeout=60) for one in ran] == ["wrong"] * TASKS
        assert soon.get(timeout=60) == "wrong"
        assert again.get(timeout=60) == 1
        assert (
            cluster.umbel("inspect", "ping", "-d", cluster_node(cluster), "--timeout", "20").returncode == 0
        )
        assert later.state == "PENDING"
        assert cluster.counters("wrong").get("revoked", 0) == 0
        assert cluster.counters("wrong")["received"] < 3 * TASKS  # what must wait is not tried over and over
        assert "trusting this machine's clock" not in cluster.log("wrong")


def is_ready(cluster: Cluster, name: str) -> bool:
    return "worker ready" in cluster.log(name)


def cluster_node(cluster: Cluster) -> str:
    state = cluster.state_of("wrong")
    assert state is not None
    return state.node
