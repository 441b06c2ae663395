"""The real `celery inspect` and `celery control` against our workers and Celery's, command by command (P3).

Each command goes to a worker of ours and to one of Celery 5.7 at once, and what the program prints
is compared: word for word where the answer is fixed, by its form where it holds facts of the worker.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.mixed_cluster import MixedCluster, Process, program_of
from tests.interop.test_control import ADD, OURS, THEIRS, form
from tests.waiting import wait_until
from umbel.launch.preparation import node_name

TIMEOUT_S = "20"
SAME = [
    "inspect ping",
    "inspect active",
    "inspect reserved",
    "inspect query_task nobodys",
    "control revoke one",
    "control terminate SIGKILL nobodys",
    "control revoke_by_stamped_headers header=value",
    f"control rate_limit {ADD} 100/m",
    "control rate_limit no.such 1/s",
    f"control time_limit {ADD} 50 100",
    f"control time_limit {ADD}",
    "control disable_events",
    "control enable_events",
    "control heartbeat",
    "control add_consumer added",
    "control cancel_consumer added",
    "control pool_grow 1",
    "control pool_shrink 1",
    "control autoscale 3 1",
    "control pool_restart",
]
ALIKE = [
    "inspect clock",
    "inspect revoked",
    "inspect registered",
    "inspect registered rate_limit",
    "inspect active_queues",
    "inspect report",
    "inspect memdump",
    "inspect objgraph",
]


class CeleryProgram(Process):
    """`program("inspect ping")`: what it printed as JSON for both workers."""

    def __init__(self, cluster: MixedCluster) -> None:
        script = Path(__file__).with_name("celery_program.py")
        command = [str(program_of("celery", "python")), str(script)]
        super().__init__("celery-program-client", command, cluster.home, **cluster.variables_for_celery())

    def run(self, *words: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the program ended: {self.log}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __call__(self, words: str, *, nodes: str = f"{OURS},{THEIRS}") -> dict[str, Any]:
        kind, *rest = words.split()
        ended = self.run(kind, "-d", nodes, "-t", TIMEOUT_S, "--json", *rest)
        assert ended["status"] == 0, ended
        said = json.loads(ended["out"])  # `control` prints a list, with a map for each node
        found = {node: value for one in said for node, value in one.items()} if kind == "control" else said
        assert set(found) == set(nodes.split(","))
        return dict(found)


@pytest.fixture(scope="module")
def program(cluster: MixedCluster) -> Iterator[CeleryProgram]:
    with CeleryProgram(cluster) as started:
        yield started


def test_every_command_is_answered_as_celery_answers_it(program: CeleryProgram) -> None:
    for words in SAME:
        replies = program(words)
        assert replies[OURS] == replies[THEIRS], words
    for words in ALIKE:
        replies = program(words)
        assert form(replies[OURS]) == form(replies[THEIRS]), words


def test_statistics_and_settings_are_there(program: CeleryProgram) -> None:
    """Ours have more fields, and settings of other names."""
    stats = program("inspect stats")
    ours, theirs = form(stats[OURS]), form(stats[THEIRS])
    assert set(theirs) <= set(ours)
    assert set(theirs["pool"]) <= set(ours["pool"]) and set(theirs["broker"]) <= set(ours["broker"])
    assert ours["rusage"] == theirs["rusage"]
    # Other tests may have left Celery's worker something that is due in an hour: test_control compares it.
    assert all(isinstance(said, list) for said in program("inspect scheduled").values())
    conf = program("inspect conf")
    assert "broker" in conf[OURS] and "guest:guest" not in str(conf)
    assert program("inspect memsample", nodes=OURS)[OURS].endswith("MB")  # Celery's needs psutil for it


def test_for_people_it_prints_the_same(program: CeleryProgram) -> None:
    def printed(node: str, *words: str) -> str:
        ended = program.run(*words[:1], "-d", node, "-t", TIMEOUT_S, *words[1:])
        assert ended["status"] == 0, ended
        return str(ended["out"]).replace(node, "NODE")

    for words in (["inspect", "ping"], ["inspect", "reserved"], ["control", "rate_limit", ADD, "9/m"]):
        assert printed(OURS, *words) == printed(THEIRS, *words)
    # Celery says that a limit was set; ours says what is true: there is none any more.
    assert "rate limit disabled" in printed(OURS, "control", "rate_limit", ADD, "0")
    printed(THEIRS, "control", "rate_limit", ADD, "0")
    assert "2 nodes online" in program.run("status", "-d", f"{OURS},{THEIRS}", "-t", TIMEOUT_S)["out"]


def test_it_revokes_a_task_and_ends_a_worker(
    cluster: MixedCluster, program: CeleryProgram, tmp_path: Path
) -> None:
    node = node_name("steered")
    cluster.ours.start_worker("steered", "-c", "1", "-Q", "steered")
    client = cluster.client("celery")
    sent = "waits_for.apply_async((gate,), queue='steered').id"
    task_id = client(sent, gate=str(tmp_path / "never"))

    def runs() -> bool:
        return [one["id"] for one in program("inspect active", nodes=node)[node]] == [task_id]

    wait_until(runs, what="the task to run")
    told = program(f"control terminate SIGTERM {task_id}", nodes=node)
    assert told == {node: {"ok": f"terminate: {task_id}"}}
    state: Callable[[], Any] = lambda: client("app.AsyncResult(task_id).state", task_id=task_id)  # noqa: E731
    wait_until(lambda: state() == "REVOKED", what="it to be revoked")
    # Nobody answers this one, and the program says so by its status, for Celery's workers as for ours.
    program.run("control", "-d", node, "-t", "0.1", "shutdown")
    try:
        assert cluster.ours.workers.pop("steered").wait(30) == 0
    except subprocess.TimeoutExpired:
        raise AssertionError(cluster.ours.log("steered")[-2000:]) from None
