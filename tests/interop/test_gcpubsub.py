"""One cluster on Google Pub/Sub's emulator: clients and workers of both kinds, as Celery 5.7 lays it out."""

import os
import socket
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.interop.conftest import Way, shown_when_it_fails
from tests.interop.mixed_cluster import MixedCluster, Raised
from tests.interop.test_membership import LateWorker
from tests.servers.pubsub import shared_emulator
from tests.servers.redis import RedisServer
from tests.waiting import wait_until
from umbel.brokers.gcpubsub.http import EMULATOR_VARIABLE

HOST = socket.gethostname()
OURS, THEIRS = f"umbel@{HOST}", f"celery@{HOST}"
DATABASE = 7


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, results_server: RedisServer
) -> Iterator[MixedCluster]:
    before = os.environ.get(EMULATOR_VARIABLE)
    os.environ[EMULATOR_VARIABLE] = shared_emulator()
    made = MixedCluster(
        tmp_path_factory.mktemp("interop-gcpubsub"),
        "gcpubsub",
        broker=f"gcpubsub://projects/t{uuid4().hex[:12]}",
        backend=f"{results_server.url.removesuffix('0')}{DATABASE}",
        versions=["celery"],
        events=False,  # Celery's exchange of events is none that its own transport can have
    )
    try:
        with shown_when_it_fails(request, made) as cluster:
            yield cluster
    finally:
        os.environ.pop(EMULATOR_VARIABLE)
        if before is not None:
            os.environ[EMULATOR_VARIABLE] = before


def replies(
    cluster: MixedCluster, library: str, command: str, *nodes: str, **arguments: Any
) -> dict[str, Any]:
    """What these nodes answer. Celery counts replies of earlier questions too, so it is asked to wait."""
    asked = "app.control.broadcast(command, arguments, reply=True, timeout=2)"

    def all_of_them() -> dict[str, Any] | None:
        found = cluster.client(library)(asked, command=command, arguments=arguments) or []
        answers = {node: said for one in found for node, said in one.items()}
        return answers if answers.keys() >= set(nodes) else None

    return wait_until(all_of_them, what=f"the answers of {nodes} to {command}")


def revoked_at(cluster: MixedCluster, node: str) -> list[str]:
    """What a worker tells one that starts."""
    found: list[str] = replies(cluster, "umbel", "hello", node, from_node="a@b", revoked=[])[node]["revoked"]
    return found


def test_tasks_run_there_and_their_results_come_back(way: Way) -> None:
    assert way("get(where.apply_async(queue=queue))") == way.worker
    assert way("get(add.apply_async((2,), {'y': 3}, queue=queue))") == 5
    expression = "[get(one) for one in [add.apply_async((n, n), queue=queue) for n in range(20)]]"
    assert way(expression) == [2 * n for n in range(20)]


def test_a_chain_has_steps_on_both_kinds_of_worker(cluster: MixedCluster) -> None:
    steps = "trail.s([]).set(queue=on_umbel), trail.s().set(queue=on_celery), trail.s().set(queue=on_umbel)"
    for library in ("celery", "umbel"):
        found = cluster.client(library)(f"get(chain({steps}).apply_async())")
        assert found == ["umbel", "celery", "umbel"]


def test_a_countdown_and_a_retry_are_kept(way: Way) -> None:
    early, ran = way(
        "(lambda due, sent: [due, get(sent)])(now(), now.apply_async(queue=queue, countdown=0.6))"
    )
    assert early + 0.6 <= ran
    assert way("get(flaky.apply_async((2,), queue=queue))") == [way.worker, 2, True]


def test_clients_of_either_kind_ask_workers_of_both(cluster: MixedCluster) -> None:
    for library in ("celery", "umbel"):
        pong = {"ok": "pong"}
        assert replies(cluster, library, "ping", OURS, THEIRS) == {OURS: pong, THEIRS: pong}


@pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="one more Celery worker, which starts slowly")
def test_a_celery_worker_that_starts_learns_what_we_revoked(cluster: MixedCluster) -> None:
    revoked = f"revoked-by-umbel-{uuid4()}"
    cluster.client("umbel")("app.AsyncResult(task_id).revoke()", task_id=revoked)
    wait_until(lambda: revoked in revoked_at(cluster, OURS), what="our worker to know the revoke")
    with LateWorker("late", cluster) as late:
        late.wait_until_ready()
        assert revoked in replies(cluster, "celery", "revoked", late.node)[late.node]


def test_our_worker_that_starts_learns_what_celery_knows_to_be_revoked(cluster: MixedCluster) -> None:
    task_id = f"revoked-by-celery-{uuid4()}"
    revoke = "app.control.revoke(task_id, destination=[node])"
    cluster.client("celery")(revoke, task_id=task_id, node=THEIRS)
    wait_until(lambda: task_id in revoked_at(cluster, THEIRS), what="Celery's worker to know the revoke")
    assert task_id not in revoked_at(cluster, OURS)
    cluster.ours.start_worker("newcomer", "-c", "1", "-Q", "on_newcomer", mingle_wait_s=10.0)
    try:
        assert task_id in revoked_at(cluster, f"newcomer@{HOST}")
        send = "get(add.apply_async((2, 3), task_id=task_id, queue='on_newcomer'))"
        with pytest.raises(Raised, match="revoked"):
            cluster.client("celery")(send, task_id=task_id)
    finally:
        cluster.ours.stop_worker("newcomer")


def test_status_says_what_is_off_and_why(cluster: MixedCluster) -> None:
    found = cluster.ours.umbel_json("status", "--timeout", "10")
    supports = found["broker"]["supports"]
    assert supports["mingle"] is True and supports["remote control"] is True
    assert "topic exchanges" in supports["gossip"]
    assert "coordination_store" in supports["elections"]
