"""Real Flower against our workers, driven through its HTTP API (P3, L7)."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from tests.interop.conftest import ON_REDIS
from tests.interop.mixed_cluster import MixedCluster, Process, program_of
from tests.waiting import wait_until
from tests.web.serving import serving
from umbel.app.app import App
from umbel.launch.preparation import node_name

ADD = "shared_tasks.add"
pytestmark = ON_REDIS


class Flower(Process):
    def __init__(self, home: Path, **variables: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        flags = ["flower", f"--port={self.port}", "--address=127.0.0.1"]
        command = [str(program_of("celery", "celery")), "-A", "shared_tasks", *flags]
        super().__init__("flower", command, home, FLOWER_UNAUTHENTICATED_API="true", **variables)

    def get(self, path: str) -> Any:
        return self._ask(path, None)

    def post(self, path: str, fields: dict[str, Any] | None = None, **query: Any) -> Any:
        data = json.dumps(fields) if fields is not None and "args" in fields else urlencode(fields or {})
        return self._ask(f"{path}?{urlencode(query)}" if query else path, data.encode())

    def answers(self) -> bool:
        self.check()
        try:
            self.get("/api/workers")
        except (URLError, ConnectionError):
            return False
        return True

    def _ask(self, path: str, data: bytes | None) -> Any:
        try:
            with urlopen(Request(f"http://127.0.0.1:{self.port}{path}", data), timeout=30) as reply:
                return json.loads(reply.read())
        except HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read()[:300]!r}\n{self.log[-2000:]}") from None


@pytest.fixture(scope="module")
def flower(cluster: MixedCluster) -> Iterator[Flower]:
    variables = {"CELERY_BROKER_URL": cluster.broker, "CELERY_RESULT_BACKEND": cluster.backend}
    with Flower(cluster.home, **variables) as started:
        wait_until(started.answers, what="Flower to answer")
        yield started
        assert "Traceback" not in started.log


def test_flower_sees_a_worker_and_its_buttons_take_effect(cluster: MixedCluster, flower: Flower) -> None:
    node, queue = node_name("potted"), "potted"
    cluster.ours.start_worker("potted", "-c", "2", "-Q", queue)

    def seen() -> dict[str, Any]:
        found: dict[str, Any] = flower.get(f"/api/workers?refresh=1&workername={node}")[node]
        return found

    wait_until(lambda: flower.get("/api/workers?status=1").get(node) is True, what="Flower to see it online")
    shown = seen()
    assert [one["name"] for one in shown["active_queues"]] == [queue]
    assert ADD in shown["registered"]
    assert shown["stats"]["pool"]["max-concurrency"] == 2
    (row,) = [row for row in flower.get("/workers?json=1")["data"] if row["hostname"] == node]
    assert row["status"] is True and row["sw_ident"] == "umbel" and row["freq"] > 0
    assert {"active", "processed", "loadavg", "pid", "clock"} <= set(row)

    flower.post(f"/api/worker/pool/grow/{node}", n=1)
    wait_until(lambda: seen()["stats"]["pool"]["max-concurrency"] == 3, what="the pool to grow")
    flower.post(f"/api/worker/pool/shrink/{node}", n=1)
    wait_until(lambda: seen()["stats"]["pool"]["max-concurrency"] == 2, what="the pool to shrink")
    added = flower.post(f"/api/worker/queue/add-consumer/{node}", queue="more")
    assert added == {"message": "add consumer more"}
    assert [one["name"] for one in seen()["active_queues"]] == [queue, "more"]
    flower.post(f"/api/worker/queue/cancel-consumer/{node}", queue="more")
    assert [one["name"] for one in seen()["active_queues"]] == [queue]
    limited = flower.post(f"/api/task/rate-limit/{ADD}", {"workername": node, "ratelimit": "100/m"})
    assert limited == {"message": "new rate limit set successfully"}
    assert f"{ADD} [rate_limit=100/m]" in seen()["registered"]
    limited = flower.post(f"/api/task/timeout/{ADD}", {"workername": node, "soft": 30, "hard": 60})
    assert limited == {"message": "time limits set successfully"}
    inspect = cluster.ours.app.control.inspect([node], timeout=20.0)
    limits = inspect.registered("time_limit", "soft_time_limit")
    assert limits is not None and f"{ADD} [time_limit=60.0 soft_time_limit=30.0]" in limits[node]

    assert flower.post(f"/api/worker/shutdown/{node}") == {"message": "Shutting down!"}
    assert cluster.ours.workers.pop("potted").wait(30) == 0
    wait_until(lambda: flower.get("/api/workers?status=1").get(node) is False, what="Flower to see it go")


def test_flower_sees_tasks_through_their_states_and_revokes_them(
    cluster: MixedCluster, flower: Flower, tmp_path: Path
) -> None:
    client, gate = cluster.client("umbel"), tmp_path / "gate"
    done, running = str(uuid4()), str(uuid4())

    def seen(task_id: str) -> dict[str, Any]:
        found: dict[str, Any] = flower.get("/api/tasks").get(task_id, {})
        return found

    assert client("get(add.apply_async((1, 2), queue=on_umbel, task_id=task_id))", task_id=done) == 3
    wait_until(lambda: seen(done).get("state") == "SUCCESS", what="the task to be seen")
    shown = seen(done)
    assert (shown["name"], shown["worker"], shown["result"]) == (ADD, node_name("umbel"), "3")
    assert shown["received"] <= shown["started"] <= shown["succeeded"]
    sent = "waits_for.apply_async((gate,), queue=on_umbel, task_id=task_id).id"
    client(sent, gate=str(gate), task_id=running)
    wait_until(lambda: seen(running).get("state") == "STARTED", what="the next one to run")
    flower.post(f"/api/task/revoke/{running}", terminate="true")
    wait_until(lambda: seen(running).get("state") == "REVOKED", what="it to be revoked")
    assert client("app.AsyncResult(task_id).state", task_id=running) == "REVOKED"


def test_our_paths_answer_as_flowers_do(cluster: MixedCluster, flower: Flower, tmp_path: Path) -> None:
    beside = App("beside", broker=cluster.broker)
    with serving(beside, tmp_path / "web.db", login=False) as ours, ours.client() as client:
        wait_until(lambda: client.get("/api/v1/nodes").json(), what="nodes to be known")
        task_id = cluster.client("celery")("add.apply_async((2, 3), queue='on_celery').id")
        path = f"/api/task/info/{task_id}"

        def of_both() -> tuple[Any, Any] | None:
            mine = client.get(path)
            try:
                theirs = flower.get(path)
            except AssertionError:  # not heard of yet
                return None
            done = mine.status_code == 200 and mine.json()["state"] == theirs["state"] == "SUCCESS"
            return (theirs, mine.json()) if done else None

        theirs, mine = wait_until(of_both, what="both to know that the task ended")
        assert theirs.keys() <= mine.keys()
        same = (
            "uuid",
            "name",
            "args",
            "kwargs",
            "result",
            "worker",
            "runtime",
            "root_id",
            "exception",
            "traceback",
        )
        assert {name: theirs[name] for name in same} == {name: mine[name] for name in same}
        for name in ("received", "started", "succeeded", "timestamp"):
            assert abs(theirs[name] - mine[name]) < 1.0, name
        listed, shown = flower.get("/api/tasks?limit=1000"), client.get("/api/tasks?limit=1000").json()
        assert listed[task_id].keys() <= shown[task_id].keys()
        node = mine["worker"]
        workers = flower.get(f"/api/workers?refresh=1&workername={node}")[node]
        assert workers.keys() <= client.get(f"/api/workers?workername={node}").json()[node].keys()
        (queue, *_) = flower.get("/api/queues/length")["active_queues"]
        assert queue.keys() <= client.get("/api/queues/length").json()["active_queues"][0].keys()
