"""Celery's workers as members of the cluster, and ours as members of theirs (S2, S4)."""

import socket
from pathlib import Path
from uuid import uuid4

import pytest

from tests.interop.mixed_cluster import MixedCluster, Process, Raised, program_of
from tests.waiting import wait_until

HOST = socket.gethostname()


class LateWorker(Process):
    """A Celery worker that starts while a test runs, under a name of its own."""

    def __init__(self, name: str, cluster: MixedCluster) -> None:
        flags = ["-n", f"{name}@%h", "-Q", f"on_{name}", "-c", "1", "-l", "INFO"]
        command = [str(program_of("celery", "celery")), "-A", "shared_tasks", "worker", *flags]
        super().__init__(name, command, cluster.home, **cluster.variables_for_celery())
        self.node = f"{name}@{HOST}"

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            self.check()
            return " ready." in self.log

        wait_until(is_ready, what=f"{self.name} to be ready")


def states(cluster: MixedCluster) -> dict[str, tuple[str, str]]:
    rows = cluster.ours.umbel_json("members", "--timeout", "5")
    return {row["node"]: (row["state"], row["software"]) for row in rows}


def test_celerys_workers_are_members_like_ours(cluster: MixedCluster) -> None:
    expected = {f"{name}@{HOST}": ("alive", "celery") for name in cluster.workers}
    expected |= {f"umbel@{HOST}": ("alive", "umbel")}
    wait_until(lambda: expected.items() <= states(cluster).items(), what="all to be members")


def test_celery_sees_our_worker_and_its_clock(cluster: MixedCluster) -> None:
    asked = "app.control.inspect(timeout=5.0, limit=1, destination=[node]).clock()"
    (said,) = cluster.client("celery")(asked, node=f"umbel@{HOST}").values()
    assert said["clock"] > 0


def test_a_celery_worker_joins_learns_what_we_revoked_and_leaves(cluster: MixedCluster) -> None:
    ours = cluster.client("umbel")
    revoked = f"revoked-by-umbel-{uuid4()}"
    ours("app.AsyncResult(task_id).revoke()", task_id=revoked)
    asked = "app.control.inspect(timeout=5.0, limit=1, destination=[node]).revoked()"
    wait_until(lambda: revoked in cluster.revoked_at("umbel"), what="our worker to know the revoke")
    with LateWorker("late", cluster) as late:
        late.wait_until_ready()
        # A Celery worker says that it is ready before its mailbox is.
        said = wait_until(lambda: cluster.client("celery")(asked, node=late.node), what="it to answer")
        (ids,) = said.values()
        assert revoked in ids
        wait_until(lambda: states(cluster).get(late.node) == ("alive", "celery"), what="it to join")
    wait_until(lambda: states(cluster).get(late.node) == ("left", "celery"), what="it to leave")


@pytest.mark.parametrize("version", ["celery", "celery55"])
def test_our_worker_that_starts_learns_what_celery_knows_to_be_revoked(
    cluster: MixedCluster, version: str, tmp_path: Path
) -> None:
    """Only a Celery worker heard of it: Celery 5.7 tells a list, 5.5 its machine's uptimes."""
    if version not in cluster.workers:
        pytest.skip(f"no {version} on this broker")
    task_id = f"revoked-by-celery-{uuid4()}"
    revoke = "app.control.revoke(task_id, destination=[node], reply=True, timeout=5.0)"
    cluster.client("celery")(revoke, task_id=task_id, node=f"{version}@{HOST}")
    assert task_id not in cluster.revoked_at("umbel")
    send = "get(add.apply_async((2, 3), task_id=task_id, queue='on_newcomer'))"
    cluster.ours.start_worker("newcomer", "-c", "1", "-Q", "on_newcomer", "-l", "INFO")
    try:
        assert "received revoked task ids from other nodes" in cluster.ours.log("newcomer")
        with pytest.raises(Raised, match="revoked"):
            cluster.client("celery")(send, task_id=task_id)
        # What was learned is in the record now, for our workers that are down or did not hear.
        wait_until(lambda: task_id in cluster.revoked_at("umbel"), what="the record")
    finally:
        cluster.ours.stop_worker("newcomer")
