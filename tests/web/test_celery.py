"""The dashboard for a cluster of Celery workers that never heard of Umbel."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.interop.mixed_cluster import CeleryWorker
from tests.servers.redis import RedisServer
from tests.waiting import wait_until
from tests.web.serving import Served, serving
from umbel.app.app import App

ADD = "shared_tasks.add"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    home = tmp_path_factory.mktemp("celery")
    variables = {"CELERY_BROKER_URL": server.url, "CELERY_RESULT_BACKEND": server.url}
    with CeleryWorker("celery", home, queues=["celery"], **variables) as worker:
        worker.wait_until_ready()
        yield server.url
    server.stop()


@pytest.fixture(scope="module")
def served(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(App("elsewhere", broker=url), tmp_path_factory.mktemp("web") / "web.db") as found:
        yield found


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    with served.browser() as client:
        yield client


def found(api: httpx.Client, path: str) -> Any:
    answer = api.get(f"/api/v1/{path}")
    return answer.json() if answer.status_code == 200 else None


def test_nodes_tasks_queues_and_actions_of_celery_workers(served: Served, api: httpx.Client) -> None:
    (node,) = wait_until(lambda: found(api, "nodes"), deadline_s=90, what="the worker to be known")
    assert (node["state"], node["software"]) == ("alive", "celery")
    worker = found(api, f"nodes/{node['node']}")
    assert not worker["silent"] and worker["queues"] == ["celery"] and len(worker["children"]) == 1
    assert found(api, "overview")["health"]["sentence"] == "The only worker answers."
    assert found(api, "leases") == [] and found(api, "schedule")["tasks"] == []

    sent = served.dashboard.app.send_task(ADD, [2, 3])

    def ended(task_id: str) -> Any:
        story = found(api, f"tasks/{task_id}")
        return story if story and story["task"]["state"] in ("SUCCESS", "FAILURE", "REVOKED") else None

    story = wait_until(lambda: ended(sent.id), what="the task to end")
    assert (story["task"]["result"], story["task"]["worker"]) == ("5", node["node"])
    assert [one["type"] for one in story["events"]] == ["task-received", "task-started", "task-succeeded"]
    assert story["can_retry"], story["why_not"]
    again = api.post("/api/v1/actions", json={"action": "retry", "ids": [sent.id]}).json()
    assert wait_until(lambda: ended(again["sent"][0]), what="the retry")["task"]["result"] == "5"

    grown = api.post("/api/v1/actions", json={"action": "grow", "nodes": [node["node"]]}).json()
    assert grown["done"] and grown["replies"] == {node["node"]: {"ok": "pool will grow"}}
    revoked = api.post("/api/v1/actions", json={"action": "revoke", "ids": ["unknown"]}).json()
    assert revoked["done"] and list(revoked["replies"]) == [node["node"]]
    assert found(api, "audit?limit=1")[0]["action"] == "revoke"
    queues = {one["queue"]: one for one in found(api, "queues")}
    assert queues["celery"]["consumers"] == [node["node"]]
    assert f'umbel_tasks_total{{end="succeeded",task="{ADD}"}} 2.0' in api.get("/metrics").text


def test_a_celery_worker_is_told_of_a_pause_and_of_its_end(served: Served, api: httpx.Client) -> None:
    (node,) = wait_until(lambda: found(api, "nodes"), deadline_s=90, what="the worker to be known")
    pause = {"action": "pause_queue", "queue": "celery"}
    paused = api.post("/api/v1/actions", json=pause).json()
    assert paused["done"] and paused["replies"] == {node["node"]: {"ok": "no longer consuming celery"}}
    app = served.dashboard.app
    assert app.control.inspect([node["node"]]).active_queues() == {node["node"]: []}
    sent = app.send_task(ADD, [3, 4])
    again = app.control.pause_queue("celery")
    assert (again.changed, again.told) == (False, ())  # it does not consume it any more
    assert app.control.paused_queues()["celery"].told == (node["node"],)
    assert app.control.move_messages("celery", "aside") == 1
    assert app.control.move_messages("aside", "celery") == 1
    resumed = api.post("/api/v1/actions", json={"action": "resume_queue", "queue": "celery"}).json()
    assert resumed["done"] and resumed["replies"] == {node["node"]: {"ok": "consuming again celery"}}

    def ended() -> Any:
        story = found(api, f"tasks/{sent.id}")
        return story if story and story["task"]["state"] == "SUCCESS" else None

    assert wait_until(ended, what="the task to run")["task"]["result"] == "7"


def test_a_celery_worker_that_is_stopped_has_left(served: Served, api: httpx.Client) -> None:
    (node,) = wait_until(lambda: found(api, "nodes"), deadline_s=90, what="the worker to be known")
    stopped = api.post("/api/v1/actions", json={"action": "stop", "nodes": [node["node"]]})
    assert stopped.status_code == 200

    def has_left() -> bool:
        return bool(found(api, "nodes")[0]["state"] == "left")

    wait_until(has_left, what="the worker to leave")
    wait_until(
        lambda: found(api, "overview")["health"]["sentence"].startswith("No worker is known"),
        what="the sentence to say so",
    )
