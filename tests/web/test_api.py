"""The API against a real worker: what it answers is what happened, and what it is told is done."""

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import Cluster
from tests.history import published
from tests.waiting import wait_until
from tests.web.serving import Served, serving
from umbel.app.app import App
from umbel.web.settings import Role

TASKS_FILE = Path(__file__).parent / "web_tasks.py"
FLOWERS_FIELDS = {  # of a task, as Flower 2.2 answers
    *("uuid", "name", "state", "received", "sent", "started", "rejected", "succeeded", "failed", "retried"),
    *("revoked", "args", "kwargs", "eta", "expires", "retries", "worker", "result", "exception", "timestamp"),
    *("runtime", "traceback", "exchange", "routing_key", "clock", "client", "root", "root_id", "parent"),
    *("parent_id", "children"),
}
READY = ("SUCCESS", "FAILURE", "REVOKED")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("api"), TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1", "-E")
        yield cluster


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[Served]:
    with serving(cluster.app, cluster.home / "web.db") as found:
        with found.client(found.token(Role.VIEWER)) as client:
            wait_until(lambda: client.get("/api/v1/nodes").json(), what="the node to be known")
        yield found


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    with served.browser() as client:
        yield client


def act(api: httpx.Client, action: str, **fields: Any) -> Any:
    answer = api.post("/api/v1/actions", json={"action": action, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(api: httpx.Client, task_id: str) -> Any:
    """The task as the API has it, once it has ended."""

    def look() -> Any:
        found = api.get(f"/api/v1/tasks/{task_id}")
        return found.json() if found.status_code == 200 and found.json()["task"]["state"] in READY else None

    return wait_until(look, what=f"task {task_id} to end")


def test_the_node_is_known_with_what_it_does(api: httpx.Client) -> None:
    (node,) = api.get("/api/v1/nodes").json()
    assert node["node"].startswith("w1@") and (node["state"], node["software"]) == ("alive", "umbel")
    worker = api.get(f"/api/v1/nodes/{node['node']}").json()
    assert not worker["silent"] and len(worker["children"]) == 1
    assert worker["queues"] == ["celery"] and any("pay" in one for one in worker["registered"])
    assert api.get("/api/v1/nodes/nobody@x").status_code == 404
    health = api.get("/api/v1/overview").json()["health"]
    assert health == {"level": "ok", "sentence": "The only worker answers."}


def test_a_task_is_told_from_its_sending_to_its_end(cluster: Cluster, api: httpx.Client) -> None:
    sent = cluster.app.tasks["web_tasks.add"].delay(2, 3)
    story = ended(api, sent.id)
    assert (story["task"]["state"], story["task"]["result"], story["task"]["args"]) == (
        "SUCCESS",
        "5",
        "(2, 3)",
    )
    types = [event["type"] for event in story["events"]]
    assert types == ["task-sent", "task-received", "task-started", "task-succeeded"]
    assert story["edges"] == [[0, 1], [1, 2], [2, 3]]
    assert story["events"][0]["process"].startswith("client ")
    (attempt,) = story["attempts"]
    assert attempt["state"] == "SUCCESS" and attempt["run_s"] is not None
    assert story["can_retry"] and story["as_call"] == "umbel call web_tasks.add --args '[2, 3]' -q celery"
    workflow = api.get(f"/api/v1/tasks/{sent.id}/workflow").json()
    assert workflow["critical"] == [sent.id]


def test_tasks_are_filtered_and_paged(cluster: Cluster, api: httpx.Client) -> None:
    ids = [cluster.app.tasks["web_tasks.add"].delay(n, 70_000).id for n in range(5)]
    for one in ids:
        ended(api, one)
    wanted: dict[str, Any] = {"name": "web_tasks.add", "state": "success", "text": "70000", "limit": 2}
    for order in ("clock", "time"):
        seen: list[str] = []
        cursor = ""
        while True:
            page = api.get("/api/v1/tasks", params={**wanted, "order": order, "cursor": cursor}).json()
            assert page["total"] == 5
            seen += [task["uuid"] for task in page["tasks"]]
            cursor = page["next"]
            if not cursor:
                break
        assert sorted(seen) == sorted(ids) and len(seen) == 5, order
    assert api.get("/api/v1/tasks/count", params={"worker": "nobody"}).json() == {"count": 0}
    assert api.get("/api/v1/tasks", params={"cursor": "§"}).status_code == 400
    assert api.get("/api/v1/tasks", params={"colour": "red"}).status_code == 400


def test_secrets_do_not_leave(cluster: Cluster, api: httpx.Client) -> None:
    failed = cluster.app.tasks["web_tasks.pay"].delay(7, password="hunter2222")
    hidden = cluster.app.tasks["web_tasks.secret"].delay("1234567")
    story = ended(api, failed.id)
    assert story["task"]["kwargs"] == "{'password': ***}" and "kwargs" in story["truncated"]
    assert "token=***" in story["task"]["exception"] and story["as_call"] == ""
    ended(api, hidden.id)
    whole = api.get("/api/v1/tasks", params={"limit": 1000}).text + api.get(f"/api/v1/tasks/{hidden.id}").text
    for secret in ("hunter2222", "s3cr3t", "1234567"):
        assert secret not in whole, secret
    assert api.get("/api/v1/tasks/count", params={"text": "hunter2222"}).json()["count"] == 0
    (failing, *_) = wait_until(
        lambda: api.get("/api/v1/overview").json()["failing"], what="the failing task in the overview"
    )
    assert failing["name"] == "web_tasks.pay" and "s3cr3t" not in failing["exception"]


def test_what_failed_is_sent_again_and_what_cannot_is_refused(cluster: Cluster, api: httpx.Client) -> None:
    failed = cluster.app.tasks["web_tasks.pay"].delay(8)
    hidden = cluster.app.tasks["web_tasks.secret"].delay("7654321")
    masked = cluster.app.tasks["web_tasks.secret"].delay("bad 55555")  # failed, so its message is kept
    ended(api, failed.id), ended(api, hidden.id)
    assert ended(api, masked.id)["can_retry"]
    result = act(api, "retry", ids=[failed.id, hidden.id, masked.id, "unknown"])  # answered in this order
    assert result["count"] == 2 and not result["done"]
    assert (
        "masked" in result["refused"][hidden.id]
        and "not in the dashboard's memory" in result["refused"]["unknown"]
    )
    told = [ended(api, one)["task"] for one in result["sent"]]
    assert [(one["args"], one["state"]) for one in told] == [("(8,)", "FAILURE"), ("(***,)", "FAILURE")]
    kept = {row["task_id"]: row for row in cluster.umbel_json("task", "failed")}
    assert [kept[one]["retry_of"] for one in result["sent"]] == [failed.id, masked.id]
    assert not {failed.id, masked.id} & kept.keys()


def test_a_failure_is_retried_once_whoever_did_it(cluster: Cluster, api: httpx.Client) -> None:
    kept = cluster.app.tasks["web_tasks.pay"].delay(9)
    elsewhere = cluster.app.tasks["web_tasks.pay"].delay(10)
    not_kept = cluster.app.tasks["web_tasks.loose"].delay(11)
    ids = [one.id for one in (kept, not_kept)]
    for one in (*ids, elsewhere.id):
        ended(api, one)
    first = act(api, "retry", ids=[*ids, *ids])
    assert first["count"] == 2 and first["done"]
    again = elsewhere.retry()
    ended(api, again.id)
    second = act(api, "retry", ids=[*ids, elsewhere.id])
    assert second["count"] == 0 and not second["sent"]
    told = dict(zip((*ids, elsewhere.id), (*first["sent"], again.id), strict=True))
    assert second["refused"] == {
        old: f"it was retried already, as {new}; if that failed too, retry that one"
        for old, new in told.items()
    }
    ended(api, told[kept.id])
    assert act(api, "retry", ids=[told[kept.id]])["count"] == 1, "a retry that failed is a failure of its own"


def test_a_running_task_is_terminated_and_waiting_ones_revoked_by_filter(
    cluster: Cluster, api: httpx.Client
) -> None:
    running = cluster.app.tasks["web_tasks.wait"].delay(600)

    def is_started() -> bool:
        found = api.get(f"/api/v1/tasks/{running.id}")
        return found.status_code == 200 and found.json()["task"]["state"] == "STARTED"

    wait_until(is_started, what="the task to run")
    waiting = [cluster.app.tasks["web_tasks.wait"].delay(601 + n) for n in range(3)]
    wanted = {"name": "web_tasks.wait", "text": "(60", "state": "PENDING,RECEIVED"}
    wait_until(
        lambda: api.get("/api/v1/tasks/count", params=wanted).json()["count"] == 3, what="three to wait"
    )
    assert (
        api.post("/api/v1/actions", json={"action": "revoke", "match": wanted, "expected": 2}).status_code
        == 409
    )
    revoked = act(api, "revoke", match=wanted, expected=3)
    assert revoked["count"] == 3 and revoked["done"]
    ended_by = act(api, "terminate", ids=[running.id])
    assert ended_by["done"] and next(iter(ended_by["replies"])).startswith("w1@")
    for one in (running, *waiting):
        assert ended(api, one.id)["task"]["state"] == "REVOKED"
    assert api.post("/api/v1/actions", json={"action": "revoke", "match": {}}).status_code == 422


def test_the_pool_queues_and_limits_of_a_node_are_changed(cluster: Cluster, api: httpx.Client) -> None:
    node = api.get("/api/v1/nodes").json()[0]["node"]
    assert act(api, "grow", nodes=[node], n=1)["replies"] == {node: {"ok": "pool will grow"}}
    wait_until(lambda: len(cluster.children_of("w1")) == 2, what="another child")
    assert act(api, "shrink", nodes=[node], n=1)["done"]
    assert act(api, "add_queue", nodes=[node], queue="extra")["done"]
    assert api.get(f"/api/v1/nodes/{node}").json()["queues"] == ["celery", "extra"]
    assert act(api, "cancel_queue", nodes=[node], queue="extra")["done"]
    assert act(api, "rate_limit", task="web_tasks.add", rate="1000/s")["done"]
    assert act(api, "time_limit", task="web_tasks.add", soft=30.0, hard=60.0)["done"]
    refused = act(api, "rate_limit", task="nothing", rate="1/s")
    assert not refused["done"] and node in refused["refused"]
    silent = act(api, "grow", nodes=["nobody@x"])
    assert not silent["done"] and silent["silent"] == ["nobody@x"]
    assert api.post("/api/v1/actions", json={"action": "stop"}).status_code == 422


def test_queues_are_shown_peeked_into_and_purged(cluster: Cluster, api: httpx.Client) -> None:
    for number in range(3):
        cluster.app.send_task("web_tasks.add", [number, 0], {"token": "abcdefg"}, queue="side/line")

    def side() -> Any:
        found = [one for one in api.get("/api/v1/queues").json() if one["queue"] == "side/line"]
        return found[0] if found and found[0]["ready"] == 3 else None

    found = wait_until(side, what="the queue to be seen")
    assert found["consumers"] == []
    waiting = api.get("/api/v1/queues/side%2Fline/messages").json()
    assert [one["args"] for one in waiting] == ["(0, 0)", "(1, 0)", "(2, 0)"]
    assert "abcdefg" not in json.dumps(waiting)
    assert act(api, "purge", queue="side/line")["count"] == 3


def test_queues_are_paused_resumed_and_moved(cluster: Cluster, served: Served, api: httpx.Client) -> None:
    assert act(api, "pause_queue", queue="celery")["done"]

    def shown() -> Any:
        return next(one for one in api.get("/api/v1/queues").json() if one["queue"] == "celery")

    waiting = [cluster.app.tasks["web_tasks.add"].delay(number, 1) for number in range(3)]
    wait_until(lambda: (now := shown())["paused"] and now["ready"] == 3, what="a paused queue")
    moved = act(api, "move_messages", queue="celery", target="parking", limit=2)
    assert moved["done"] and moved["count"] == 2
    assert act(api, "move_messages", queue="parking", target="celery")["count"] == 2
    same = act(api, "move_messages", queue="celery", target="celery")
    assert not same["done"] and "name another queue" in same["problem"]
    nodes = {"action": "pause_queue", "queue": "celery", "nodes": ["w1"]}
    assert api.post("/api/v1/actions", json=nodes).status_code == 422
    with served.browser(Role.VIEWER) as viewer:
        for action in ("pause_queue", "resume_queue", "move_messages"):
            body = {"action": action, "queue": "celery"} | ({"target": "x"} if "move" in action else {})
            assert viewer.post("/api/v1/actions", json=body).status_code == 403
    assert act(api, "resume_queue", queue="celery")["count"] == 1
    assert [ended(api, one.id)["task"]["result"] for one in waiting] == ["1", "2", "3"]
    done = [(one["action"], one["target"], one["status"]) for one in api.get("/api/v1/audit").json()]
    assert ("pause_queue", "celery", "done") in done and ("pause_queue", "celery", "refused") in done
    assert ("move_messages", "celery", "done") in done and ("resume_queue", "celery", "done") in done


def test_dead_letters_are_requeued_and_dropped(cluster: Cluster, api: httpx.Client) -> None:
    for number in range(3):
        cluster.app.send_task("no.such.task", [number], queue="celery")

    def letters() -> Any:
        found = api.get("/api/v1/dead-letters").json()
        return found if len(found) == 3 else None

    found = wait_until(letters, what="three dead letters")
    assert {one["task"] for one in found} == {"no.such.task"}
    dropped = act(api, "drop_dead", letters=[str(found[0]["id"]), "unknown"])
    assert dropped["count"] == 1 and dropped["refused"] == {"unknown": "there is no such dead letter"}
    assert act(api, "requeue_dead", letters=[found[1]["task_id"]])["count"] == 1
    wait_until(lambda: len(api.get("/api/v1/dead-letters").json()) == 2, what="it to be dead again")
    assert act(api, "drop_dead", every=True)["count"] == 2
    assert api.get("/api/v1/dead-letters").json() == []


def test_the_schedule_is_run_paused_and_resumed(api: httpx.Client) -> None:
    name = "web_tasks.hourly"
    schedule = api.get("/api/v1/schedule").json()
    assert schedule["leader"].startswith("w1@") and schedule["tasks"][0]["name"] == name
    sent = act(api, "run_periodic", name=name)["sent"][0]
    assert ended(api, sent)["task"]["state"] == "SUCCESS"
    act(api, "pause_periodic", name=name)
    assert api.get("/api/v1/schedule").json()["tasks"][0]["paused"]
    act(api, "resume_periodic", name=name)
    assert not api.get("/api/v1/schedule").json()["tasks"][0]["paused"]
    assert api.post("/api/v1/actions", json={"action": "run_periodic", "name": "x"}).status_code == 404
    leases = {one["name"]: one for one in api.get("/api/v1/leases").json()}
    assert leases["scheduler"]["holder"].startswith("w1@") and leases["scheduler"]["term"] > 0


def test_every_action_is_in_the_audit_with_its_replies_and_is_an_event(
    served: Served, cluster: Cluster, api: httpx.Client
) -> None:
    heard: list[bytes] = []
    noted = served.dashboard.feed.received

    def note(body: bytes, now: float) -> None:
        heard.append(body)
        noted(body, now)

    served.dashboard.feed.received = note
    node = api.get("/api/v1/nodes").json()[0]["node"]
    result = act(api, "rate_limit", task="web_tasks.add", rate="500/s", nodes=[node])
    (entry,) = api.get("/api/v1/audit", params={"limit": 1}).json()
    assert (entry["id"], entry["action"], entry["status"]) == (result["audit_id"], "rate_limit", "done")
    assert entry["target"] == "web_tasks.add" and list(entry["result"]["replies"]) == [node]
    assert entry["role"] == "admin" and entry["address"] == "127.0.0.1"

    def events() -> list[dict[str, Any]]:  # those of earlier tests may still arrive
        found = [json.loads(body) for body in heard if b"control-action" in body]
        return [event for event in found if event["action"] == "rate_limit"]

    (event,) = wait_until(events, what="the event")
    assert (event["who"], event["status"]) == (entry["who"], "done")
    served.dashboard.feed.received = noted


def test_a_mark_and_the_rates_are_in_the_charts(api: httpx.Client) -> None:
    act(api, "mark", text="v1.4 <script>")

    def marked() -> bool:
        marks = api.get("/api/v1/rates").json()["marks"]
        return "v1.4 <script>" in [one["text"] for one in marks]

    wait_until(marked, what="the mark")
    rates = api.get("/api/v1/rates", params={"last_s": 600}).json()
    assert sum(one or 0 for one in rates["done"]) > 5
    assert len(rates["at"]) == len(rates["done"]) == len(rates["wait_p95_s"])


def test_the_stream_tells_what_changed_and_resumes_where_it_broke(
    served: Served, cluster: Cluster, api: httpx.Client
) -> None:
    hub = served.dashboard.hub
    seen = hub.number
    sent = cluster.app.tasks["web_tasks.add"].delay(1, 1)
    ended(api, sent.id)
    wait_until(lambda: hub.number > seen, what="a push")
    with api.stream("GET", "/api/v1/stream?topics=tasks", headers={"last-event-id": str(seen)}) as stream:
        lines = stream.iter_lines()
        assert stream.headers["content-type"].startswith("text/event-stream")
        event = next(line for line in lines if line.startswith("event:"))
        number = next(line for line in lines if line.startswith("id:"))
        data = json.loads(next(line for line in lines if line.startswith("data:")).removeprefix("data:"))
    assert event == "event: tasks" and sent.id in data["ids"] and int(number.removeprefix("id:")) > seen
    with api.stream("GET", f"/api/v1/stream?topics=tasks&since={seen}") as stream:
        assert next(line for line in stream.iter_lines() if line.startswith("event:")) == "event: tasks"
    with api.stream("GET", "/api/v1/stream", headers={"last-event-id": "5"}) as stream:
        assert next(line for line in stream.iter_lines() if line.startswith("event:")) == "event: reset"
    assert api.get("/api/v1/stream?topics=weather").status_code == 400


def test_a_page_follows_from_where_it_was_rendered(
    served: Served, cluster: Cluster, api: httpx.Client
) -> None:
    """A browser connects some time after it has the page; what happens in between belongs on the page too."""
    with served.browser() as browser:
        page = browser.get("/tasks").text
        address = html.unescape(page.split('data-stream="', 1)[1].split('"', 1)[0])
        before = served.dashboard.hub.number
        sent = cluster.app.tasks["web_tasks.add"].delay(1, 1)
        ended(api, sent.id)
        wait_until(lambda: "tasks" in (served.dashboard.hub.since(before) or {}), what="a push")
        with browser.stream("GET", address) as stream:
            ids: list[str] = []  # of the stream's beginning, then of each event
            topic = ""
            for line in stream.iter_lines():
                topic = line.removeprefix("event: ") if line.startswith("event: ") else topic
                if line.startswith("id:"):
                    ids.append(line)
                    if topic == "tasks":
                        break
            assert len(set(ids[1:])) == 1, "it is in the first push"


def test_a_node_that_is_stopped_has_left_and_the_sentence_says_so(
    cluster: Cluster, api: httpx.Client
) -> None:
    cluster.start_worker("w2", "-c", "1")
    wait_until(
        lambda: len([one for one in api.get("/api/v1/nodes").json() if one["state"] == "alive"]) == 2,
        what="two nodes",
    )
    name = next(one["node"] for one in api.get("/api/v1/nodes").json() if one["node"].startswith("w2@"))
    act(api, "stop", nodes=[name])
    wait_until(
        lambda: {one["node"]: one["state"] for one in api.get("/api/v1/nodes").json()}[name] == "left",
        what="the node to leave",
    )
    kinds = [one["kind"] for one in api.get("/api/v1/happenings").json() if one["subject"] == name]
    assert kinds[0] == "joined" and kinds[-1] == "left"
    wait_until(
        lambda: (
            api.get("/api/v1/overview").json()["health"]["sentence"].startswith("The only worker answers")
        ),  # the sentence goes on where the tests above let more than half of the last tasks fail
        what="the sentence to say so",
    )


def test_flowers_paths_answer_in_flowers_shape(cluster: Cluster, api: httpx.Client) -> None:
    sent = cluster.app.tasks["web_tasks.add"].delay(4, 4)
    ended(api, sent.id)
    workers = api.get("/api/workers").json()
    node = next(one for one in workers if one.startswith("w1@"))
    assert {"stats", "active_queues", "registered", "conf", "timestamp"} <= workers[node].keys()
    assert api.get("/api/workers", params={"status": 1}).json()[node] is True
    assert "active" in api.get("/api/workers", params={"workername": node}).json()[node]
    assert api.get("/api/workers", params={"workername": "x"}).status_code == 404
    listed = api.get(
        "/api/tasks", params={"taskname": "web_tasks.add", "sort_by": "-received", "limit": 3}
    ).json()
    assert len(listed) == 3 and sent.id in listed
    info = api.get(f"/api/task/info/{sent.id}").json()
    assert info == listed[sent.id]
    assert (info["uuid"], info["state"], info["result"], info["worker"]) == (sent.id, "SUCCESS", "8", node)
    assert info.keys() >= FLOWERS_FIELDS
    assert api.get("/api/task/info/unknown").status_code == 404
    assert api.get("/api/tasks", params={"sort_by": "weight"}).status_code == 400
    queues = api.get("/api/queues/length").json()["active_queues"]
    assert {"name", "messages"} == queues[0].keys()
    assert api.get("/healthcheck").text == "OK"


def test_prometheus_reads_the_metrics(cluster: Cluster, api: httpx.Client) -> None:
    ended(api, cluster.app.tasks["web_tasks.add"].delay(5, 5).id)
    samples = {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(api.get("/metrics").text)
        for one in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[name, tuple(sorted(labels.items()))]

    assert value("umbel_tasks_total", task="web_tasks.add", end="succeeded") >= 1
    assert value("umbel_task_run_seconds_count", task="web_tasks.add") >= 1
    assert value("umbel_nodes", state="alive") == 1
    node = next(one["node"] for one in api.get("/api/v1/nodes").json() if one["state"] == "alive")
    assert value("umbel_leader", lease="scheduler", node=node) == 1
    assert value("umbel_node_children", node=node) >= 1 and value("flower_worker_online", worker=node) == 1
    assert value("flower_events_total", worker=node, type="task-succeeded", task="web_tasks.add") >= 1
    assert value("umbel_web_hears_cluster") == 1


def test_history_is_asked_as_the_page_asks_it(tmp_path: Path) -> None:
    app = App("past", broker=f"sqlite:///{tmp_path / 'queue.db'}", history_lake=str(tmp_path / "lake"))
    with serving(app, tmp_path / "web.db") as served, served.client(served.token(Role.OPERATOR)) as client:
        nothing = client.get("/api/v1/history")
        assert nothing.status_code == 422 and "no tables in the lake" in nothing.json()["detail"]
        assert client.get("/api/v1/history/happenings").status_code == 422
        published.publish(tmp_path / "lake", (story := published.Story()).rows)
        ended = [row for row in story.rows["attempts"] if row["ended_at"] is not None]
        found = client.get("/api/v1/history?by=worker").json()
        assert found["total"]["n"] == len(ended)
        assert {row["what"] for row in found["groups"]} == {row["worker"] for row in ended}
        rates = client.get("/api/v1/history/rates", params={"name": ended[0]["name"]}).json()
        assert sum(rates["done"]) == sum(
            row["name"] == ended[0]["name"] and row["outcome"] == "SUCCESS" for row in ended
        )

        def asked(sql: str) -> httpx.Response:
            return client.post("/api/v1/history/sql", json={"sql": sql, "limit": 1})

        began = published.BEGAN.timestamp()
        then = client.get("/api/v1/history/happenings", params={"since": began, "until": began + 3600}).json()
        assert [one["kind"] for one in then["happenings"] if one["subject"] == "w2@shop"] == [
            "joined",
            "lost",
            "returned",
        ]
        heard = client.get("/api/v1/happenings").json()
        assert heard == [] and not then["more"] and then["known_until"] == began + 3600
        assert client.get("/api/v1/history/happenings?since=9&until=9").status_code == 400

        first = asked("select task_id, 'password=hunter2' as told from attempts").json()
        assert (first["columns"], first["more"], len(first["rows"])) == (["task_id", "told"], True, 1)
        assert "hunter2" not in json.dumps(first)
        assert asked("drop table attempts").status_code == 422
        assert client.get("/history", params={"sql": "select 2 as two"}).status_code == 200
        csv = client.get("/history/download", params={"sql": "select 3 as three", "as": "csv"})
        assert csv.text == "three\n3\n"
        client.headers["authorization"] = f"Bearer {served.token(Role.VIEWER)}"
        assert asked("select 1").status_code == 403
        assert client.get("/history/download", params={"sql": "select 1"}).status_code == 403
        audited = [one for one in served.dashboard.journal.audit(limit=20) if one.action == "query"]
        assert [(one.status, one.role, one.arguments.get("sql", "")[:22]) for one in reversed(audited)] == [
            ("done", "operator", "select task_id, 'passw"),
            ("failed", "operator", "drop table attempts"),
            ("done", "operator", "select 2 as two"),
            ("done", "operator", "select 3 as three"),
            ("refused", "viewer", "select 1"),
            ("refused", "viewer", "select 1"),
        ]
        assert "hunter2" not in repr(audited) and audited[-1].result == {"rows": 1}
        assert "read-only" in (audited[-2].result or {})["problem"]
