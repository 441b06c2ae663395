"""The prefork pool in a real worker: limits, memory, starts, logs, sizes (F1, F4, F5, F6, F8)."""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.pools.processes import is_gone, signals, title
from tests.servers.redis import RedisServer, redis_server
from tests.servers.way import Way
from tests.waiting import wait_until
from umbel.errors import WorkerLost
from umbel.launch.preparation import node_name

__all__ = ["redis_server"]  # a fixture
TASKS_FILE = Path(__file__).with_name("pool_tasks.py")
NODE = node_name("w1")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("POOL_TASKS_HOME", str(tmp_path))
    with Cluster(tmp_path, TASKS_FILE) as made:
        yield made


def ask(cluster: Cluster, command: str, **arguments: Any) -> Any:
    return cluster.app.control.ask(command, arguments, destination=[NODE], timeout=20.0).replies[NODE]


def pool_of(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = ask(cluster, "stats")["pool"]
    return found


def test_children_start_as_promised_and_what_they_print_is_in_the_log(cluster: Cluster) -> None:
    """F1, with a real app: title, signals, worker_process_init; log lines carry task and child."""
    cluster.start_worker("w1", "-c", "2")
    printed = cluster.app.tasks["pool_tasks.prints"].delay("good morning")
    printed.get(timeout=90)
    for pid in cluster.children_of("w1"):
        node, child = (cluster.home / f"init-{pid}").read_text().split()
        assert node == NODE
        assert title(pid) == f"umbel: {NODE} child {child}"
        reset = {signal.SIGTERM, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1}
        assert not reset & (signals(pid, "SigIgn") | signals(pid, "SigCgt"))
        assert signal.SIGINT in signals(pid, "SigIgn")
    assert cluster.stop_worker("w1") == 0
    for text in ("good morning", "good morning to stderr", "without an end"):
        (line,) = re.findall(rf".* INFO    {text} task=.*", cluster.log("w1"))
        assert f"task=pool_tasks.prints task_id={printed.id} attempt=0 child=" in line, line


def test_a_pool_grows_with_its_queue_and_shrinks_when_it_idles(cluster: Cluster, tmp_path: Path) -> None:
    """F4: the autoscaler; it retires idle children only."""
    cluster.start_worker("w1", "--autoscale", "4,1", worker_autoscale_cool_down_s=1)
    gate, longer = tmp_path / "gate", tmp_path / "longer"
    waits = cluster.app.tasks["pool_tasks.waits"]
    assert pool_of(cluster)["max-concurrency"] == 1
    last = waits.delay(str(longer))
    results = [waits.delay(str(gate)) for _ in range(8)]
    wait_until(lambda: len(list(tmp_path.glob("gate.*"))) == 3, what="four tasks at once")
    assert ask(cluster, "stats")["autoscaler"] == {"max": 4, "min": 1, "current": 4, "qty": 0}
    assert "Adjust autoscale range" in ask(cluster, "pool_grow", n=1)["error"]
    assert ask(cluster, "autoscale", max=5, min=2) == {"ok": "autoscale now max=5 min=2"}
    assert "ValueError" in ask(cluster, "autoscale", max=1, min=2)["error"]
    wait_until(lambda: len(list(tmp_path.glob("gate.*"))) == 4, what="five tasks at once")
    gate.touch()
    assert [result.get(timeout=90) for result in results] == ["released"] * 8
    wait_until(lambda: pool_of(cluster)["max-concurrency"] == 2, what="a small pool")
    longer.touch()
    assert last.get(timeout=90) == "released"
    assert cluster.counters("w1")["children_died"] == 0


def test_what_is_urgent_is_not_held_behind_what_was_sent_before_it(cluster: Cluster, tmp_path: Path) -> None:
    """Dispatch keeps priorities: while its one child is busy, it takes nothing that could be overtaken."""
    cluster.start_worker("w1", "-c", "1")
    gate, journal = tmp_path / "gate", tmp_path / "journal"
    first = cluster.app.tasks["pool_tasks.waits"].delay(str(gate))
    wait_until((tmp_path / f"gate.{first.id}").exists, what="the first task to run")
    notes = cluster.app.tasks["pool_tasks.notes"]
    sent = [notes.apply_async((str(journal), f"later {n}"), priority=9) for n in range(10)]
    sent += [notes.apply_async((str(journal), f"urgent {n}"), priority=0) for n in range(10)]
    gate.touch()
    for result in sent:
        result.get(timeout=90)
    expected = [f"urgent {n}" for n in range(10)] + [f"later {n}" for n in range(10)]
    assert journal.read_text().splitlines() == expected


def test_a_pool_is_restarted_by_remote_control(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_worker("w1", "-c", "2", worker_pool_restarts="true")
    before = pool_of(cluster)
    imported_in = cluster.app.tasks["pool_tasks.imported_in"]
    state = cluster.state_of("w1")
    assert state is not None  # of the main process, which its first fork server is a copy of
    assert imported_in.delay().get(timeout=90) == state.fields["pid"]
    waits = cluster.app.tasks["pool_tasks.waits"].delay(str(tmp_path / "gate"))
    wait_until((tmp_path / f"gate.{waits.id}").exists, what="the task to run")
    assert ask(cluster, "pool_restart", reload=True) == {"ok": "reload started"}
    wait_until(lambda: pool_of(cluster)["fork-server"] != before["fork-server"], what="another fork server")
    (tmp_path / "gate").touch()
    assert waits.get(timeout=90) == "released"
    wait_until(
        lambda: not set(pool_of(cluster)["processes"]) & set(before["processes"]),
        what="other children",
    )
    assert imported_in.delay().get(timeout=90) == pool_of(cluster)["fork-server"]
    assert cluster.counters("w1")["children_died"] == 0


@pytest.mark.scenario
def test_the_hard_limit_holds_although_the_broker_is_away(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6: a limit of 5 s, the broker cut after 2 s: the task ends at 5 s."""
    monkeypatch.setenv("POOL_TASKS_HOME", str(tmp_path))
    way = Way(redis_server.port)
    try:
        broker = f"redis://127.0.0.1:{way.port}/0"
        with Cluster(tmp_path, TASKS_FILE, broker=redis_server.url, lease_s=60) as cluster:
            cluster.start_worker("w1", "-c", "1", broker=broker)
            started = tmp_path / "started"
            result = cluster.app.tasks["pool_tasks.endless"].delay(str(started))
            wait_until(lambda: started.exists() and started.read_text(), what="the task to run")
            child = int(started.read_text())
            way.silence()
            wait_until(lambda: is_gone(child), what="the task to be ended")
            assert not result.ready()  # the verdict waits for the link; the limit did not
            way.close()
            way.open()
            wait_until(result.ready, what="the verdict")
            assert result.state == "FAILURE"
            assert "its time limit of 5 s" in str(result.result)
    finally:
        way.end()


def test_a_task_that_takes_all_the_memory_is_ended_with_a_verdict(cluster: Cluster) -> None:
    """F5, F8."""
    cluster.start_worker(
        "w1", "-c", "1", worker_max_memory_hard="200MiB", worker_max_memory_per_child="80MiB"
    )
    leaking = cluster.app.tasks["pool_tasks.leaks"].delay()
    with pytest.raises(WorkerLost, match="exceeds max_memory_hard of 200 MiB"):
        leaking.get(timeout=90)
    assert cluster.app.tasks["pool_tasks.pid"].delay().get(timeout=90)
    assert cluster.stop_worker("w1") == 0
    log = cluster.log("w1")
    (heavy,) = re.findall(r".* WARNING child heavy .*", log)
    assert f"task_id={leaking.id}" in heavy
    (died,) = re.findall(r".* WARNING child died .*", log)
    assert "how=killed" in died and "max_memory_hard" in died


def run_to_its_end(worker: subprocess.Popen[bytes]) -> int:
    return worker.wait(60)


def test_a_worker_whose_children_never_come_up_ends_with_the_reason(cluster: Cluster) -> None:
    (cluster.home / "broken").write_text("the database is not there")
    worker = cluster.start_worker("w1", "-c", "2", wait=False, worker_child_start="spawn")
    assert run_to_its_end(worker) == 1
    lines = cluster.log("w1").splitlines()
    assert "RuntimeError: the database is not there" in lines[-1]
    assert "3 attempts failed" in lines[-1]


def test_a_child_that_hangs_while_it_starts_ends_the_worker_with_the_reason(cluster: Cluster) -> None:
    (cluster.home / "stuck").touch()
    worker = cluster.start_worker("w1", "-c", "1", wait=False, worker_start_timeout_s=1)
    assert run_to_its_end(worker) == 1
    assert "not ready after 1 s (start_timeout_s)" in cluster.log("w1").splitlines()[-1]


def test_a_worker_whose_children_stop_coming_up_backs_off_and_then_ends(cluster: Cluster) -> None:
    """Not a kill loop: ever longer pauses, and an exit that a supervisor sees."""
    worker = cluster.start_worker("w1", "-c", "2", worker_child_start="spawn", worker_start_attempts=3)
    (cluster.home / "broken").write_text("out of licences")
    for pid in cluster.children_of("w1"):
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
    assert run_to_its_end(worker) == 1
    log = cluster.log("w1")
    last = log.splitlines()[-1]
    assert "3 attempts failed" in last and "RuntimeError: out of licences" in last
    assert log.count("child died") <= 2 + 2 * 3, "two children, three attempts each, and no more"


def test_what_a_task_does_to_its_process_harms_no_task_after_it(cluster: Cluster) -> None:
    """N1: a line without an end, limits that are lowered, and garbage where the worker listens."""
    cluster.start_worker("w1", "-c", "1")
    tasks = cluster.app.tasks
    shouted = tasks["pool_tasks.shouts"].delay(100_000_000)
    spoiled = tasks["pool_tasks.lowers"].delay()
    opened = [tasks["pool_tasks.opens"].delay(50) for _ in range(5)]
    assert spoiled.get(timeout=90) == shouted.get(timeout=20)
    assert {result.get(timeout=90) for result in opened}.isdisjoint({spoiled.get(timeout=20)})
    scribbled = tasks["pool_tasks.scribbles"].delay()
    assert tasks["pool_tasks.pid"].delay().get(timeout=90)
    with pytest.raises(WorkerLost, match="invalid data from the child process"):
        scribbled.get(timeout=90)
    wait_until(lambda: cluster.counters("w1")["buried"] == 1, what="the count of dead letters")
    assert cluster.counters("w1")["children_died"] == 3  # one for each start of the message
    assert cluster.stop_worker("w1") == 0
    assert "(99983616 characters left out)" in cluster.log("w1")
    assert "a task lowered its limits: RLIMIT_NOFILE" in cluster.log("w1")
