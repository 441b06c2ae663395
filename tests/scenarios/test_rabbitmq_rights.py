"""RabbitMQ users with few rights: those of docs/brokers.md are enough, and with fewer a worker ends."""

import subprocess
from pathlib import Path

import pytest

from tests.brokers.test_amqp_rights import documented_rights
from tests.cluster import Cluster
from tests.servers.rabbitmq import shared_server
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
LONG_S = 60.0
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]
ALL = ".*"
REFUSED = {
    "nobox": ((ALL, ALL, r"^(?!.*pidbox).*"), "may not read from the exchange 'celery.pidbox'"),
    "mute": ((ALL, r"^(?!celeryev$).*", ALL), "may not write to the exchange 'celeryev'"),
    "deaf": ((ALL, ALL, r"^(?!celeryev).*"), "may not read from the exchange 'celeryev'"),
    "idle": ((ALL, ALL, r"^(?!celery$).*"), "may not read from the exchange 'celery'"),
}


def test_the_documented_rights_are_enough_and_less_ends_a_worker_at_once(tmp_path: Path) -> None:
    server = shared_server()
    hosts = {user: server.new_vhost() for user in ("few", *REFUSED)}
    rights = {"few": documented_rights()} | {user: rights for user, (rights, _) in REFUSED.items()}
    server.allow([(user, hosts[user], rights[user]) for user in hosts])
    urls = {user: server.url(hosts[user]).replace("guest:guest", f"{user}:word") for user in hosts}
    with Cluster(tmp_path, TASKS_FILE, broker=urls["few"]) as cluster:
        ending = {
            user: cluster.start_worker(user, "-c", "1", wait=False, broker=urls[user]) for user in REFUSED
        }
        cluster.start_worker("few", "-c", "1", "-E")
        add, breaks = cluster.app.tasks["chaos_tasks.add"], cluster.app.tasks["chaos_tasks.breaks"]
        later = add.apply_async((1, 2), countdown=0.2)
        assert add.delay(2, 3).get(timeout=LONG_S) == 5 and later.get(timeout=LONG_S) == 3
        failed = breaks.delay()
        wait_until(failed.ready, deadline_s=LONG_S, what="the task to fail")
        assert failed.id in cluster.umbel("task", "failed", "--json").stdout
        assert "few@" in cluster.umbel("inspect", "ping").stdout
        assert "few@" in cluster.umbel("members").stdout
        for user, process in ending.items():
            _ends_with(cluster, user, process, hosts[user])
        assert "refused" not in cluster.log("few"), cluster.log("few")


def _ends_with(cluster: Cluster, user: str, process: subprocess.Popen[bytes], vhost: str) -> None:
    assert process.wait(LONG_S) == 69
    line = cluster.log(user).splitlines()[-1]
    assert f"the user {user!r} {REFUSED[user][1]}" in line, cluster.log(user)
    assert f"rabbitmqctl set_permissions -p {vhost} {user} " in line
    assert "retrying" not in cluster.log(user)
