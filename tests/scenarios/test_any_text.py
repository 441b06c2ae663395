"""Text is any text: no task, message or name harms a process, a neighbour or the reader's terminal (N1)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.waiting import wait_until
from umbel.wire.message import Message, Outgoing

TASKS_FILE = Path(__file__).with_name("text_tasks.py")
HOSTILE_NAME = "a\x1b[2J\nFORGED LINE\u202eb"
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("text"), TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1", "-E")
        yield cluster


@pytest.fixture
def unharmed(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster; afterwards the same child still runs tasks, and no process has died."""
    before = cluster.app.send_task("text_tasks.pid").get(timeout=90)
    yield cluster
    assert cluster.app.send_task("text_tasks.pid").get(timeout=90) == before
    assert cluster.counters("w1")["children_died"] == 0
    assert cluster.workers["w1"].poll() is None


@pytest.mark.parametrize(
    ("how", "name", "text"),
    [
        ("no unicode", "ValueError", "no such file: caf\\udcff"),
        ("says no unicode", "SaysNoUnicode", "caf\\udcff"),
        ("cannot be shown", "Unshowable", "5"),
        ("raises when looked at", "ValueError", "has no repr"),
        ("odd syntax error", "SyntaxError", "odd"),
        ("module of no unicode", "Strange", "here"),
    ],
)
def test_a_task_fails_with_its_own_error_whatever_its_text(
    unharmed: Cluster, how: str, name: str, text: str
) -> None:
    sent = unharmed.app.send_task("text_tasks.fail", [how])
    wait_until(sent.ready, what="the task to end")
    assert sent.status == "FAILURE"
    stored = json.loads(unharmed.app.backend.read([sent.id])[sent.id].payload)
    assert stored["result"]["exc_type"] == name
    assert text in " ".join(map(str, stored["result"]["exc_message"]))
    assert name in stored["traceback"]


def test_a_task_that_returns_what_json_cannot_carry_fails_and_says_so(unharmed: Cluster) -> None:
    sent = unharmed.app.send_task("text_tasks.give_back")
    wait_until(sent.ready, what="the task to end")
    assert "is not Unicode" in str(sent.result)


def test_a_task_may_print_and_log_what_is_no_unicode(unharmed: Cluster) -> None:
    assert unharmed.app.send_task("text_tasks.say").get(timeout=90) == "said"
    log = unharmed.log("w1")
    assert "found caf\\udcff" in log
    assert "\x1b" not in log
    assert not any(line.startswith("FORGED") for line in log.splitlines())


def test_a_rejection_of_any_text_is_among_the_dead_letters(unharmed: Cluster) -> None:
    sent = unharmed.app.send_task("text_tasks.fail", ["rejected"])
    wait_until(lambda: reason_of(unharmed, sent.id) == "caf\\udcff", what="the dead letter")


def reason_of(cluster: Cluster, task_id: str) -> str:
    letters = {one["task_id"]: one["reason"] for one in cluster.umbel_json("dlq", "ls")}
    return str(letters.get(task_id))


def test_what_a_peer_wrote_neither_moves_the_cursor_nor_forges_a_line(unharmed: Cluster) -> None:
    headers = json.dumps({"task": HOSTILE_NAME, "id": f"hostile {HOSTILE_NAME}"}).encode()
    unharmed.app.producer.publish([Outgoing("celery", Message(headers, b"[[], {}, null]"))])
    wait_until(lambda: "hostile" in unharmed.umbel("dlq", "ls").stdout, what="the dead letter")
    for shown in (unharmed.umbel("dlq", "ls").stdout, unharmed.log("w1")):
        assert "a\\x1b[2J\\nFORGED LINE\\u202eb" in shown
        assert all(line.isprintable() for line in shown.splitlines())
        assert not any(line.startswith("FORGED") for line in shown.splitlines())


def test_an_id_that_the_store_cannot_hold_is_refused_by_client_and_worker(unharmed: Cluster) -> None:
    with pytest.raises(ValueError, match=r"option 'task_id'.*'a\\x00b'.*without NUL"):
        unharmed.app.send_task("text_tasks.pid", task_id="a\0b")
    headers = json.dumps({"task": "text_tasks.pid", "id": "a\0b"}).encode()
    unharmed.app.producer.publish([Outgoing("celery", Message(headers, b"[[], {}, null]"))])
    wait_until(
        lambda: any("no NUL" in one["reason"] for one in unharmed.umbel_json("dlq", "ls")),
        what="the dead letter with its reason",
    )
