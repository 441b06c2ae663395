"""S6: a worker runs on the event loop that `umbel[uvloop]` brings, on every broker, and may leave it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.servers.rabbitmq import amqp_url
from tests.servers.redis import redis_server, redis_url
from umbel.launch.preparation import node_name

__all__ = ["amqp_url", "redis_server", "redis_url"]

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.scenario,
    pytest.mark.skipif(find_spec("uvloop") is None, reason="uvloop is not installed"),
]


@pytest.mark.parametrize("broker", ["redis_url", "amqp_url", ""])
def test_a_worker_runs_tasks_on_uvloop(tmp_path: Path, broker: str, request: pytest.FixtureRequest) -> None:
    results = f"sqlite:///{tmp_path / 'results.db'}"
    url = request.getfixturevalue(broker) if broker else results
    with Cluster(tmp_path, HERE / "green_tasks.py", broker=url, backend=results) as cluster:
        cluster.start_worker("w1", "-P", "asyncio", worker_loop="uvloop")
        loop = cluster.app.send_task("green_tasks.loop_module").get(timeout=90)
        assert str(loop).startswith("uvloop")
        assert "pong" in cluster.umbel("ping", "-d", node_name("w1"), "--timeout", "20").stdout
        assert cluster.stop_worker("w1") == 0
