"""S6: on RabbitMQ the queue of gossip drops what is older than a heartbeat."""

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.servers.rabbitmq import shared_server

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


def test_unread_news_live_as_long_as_a_heartbeat(tmp_path: Path) -> None:
    server = shared_server()
    vhost = server.new_vhost()
    with Cluster(
        tmp_path, TASKS_FILE, broker=server.url(vhost), backend="rpc://", heartbeat_interval_s=3.5
    ) as cluster:
        cluster.start_worker("w1", "-c", "1")
        listed = server.control("list_queues", "--vhost", vhost, "name", "arguments").splitlines()
        [gossip] = [line for line in listed if line.startswith("celeryev.")]
        assert '"x-message-ttl",3500' in gossip.replace(" ", "")
