"""What a user sees of one worker: tasks run, limits hold, it stops in good order."""

import signal
from pathlib import Path
from time import time

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.waiting import wait_until
from umbel.errors import JoinWouldBlock, SoftTimeLimitExceeded, TaskRevoked, TimeLimitExceeded

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
LIMITS_FILE = Path(__file__).with_name("limit_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


def lines(directory: Path) -> list[str]:
    journal = journal_of(str(directory))
    return journal.read_text().splitlines() if journal.exists() else []


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_tasks_run_and_results_come_back(tmp_path: Path, pool: str) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-P", pool)
        add = cluster.app.tasks["chaos_tasks.add"]
        assert add.delay(2, 3).get(timeout=90) == 5
        assert (add.s(1, 2) | add.s(10) | add.s(100)).delay().get(timeout=90) == 113
        sent = cluster.app.send_task("chaos_tasks.sends_another").get(timeout=90)
        assert cluster.app.AsyncResult(sent).get(timeout=90) == 42
        assert cluster.stop_worker("w1") == 0


@pytest.mark.parametrize("pool", ["prefork", "asyncio"])
def test_a_worker_that_holds_all_it_may_goes_on_when_that_is_settled(tmp_path: Path, pool: str) -> None:
    """The last outcome makes no room: what it leaves is held until the broker has it."""
    with Cluster(tmp_path, TASKS_FILE, worker_prefetch_max=2) as cluster:
        add = cluster.app.tasks["chaos_tasks.add"]
        results = cluster.app.send_many(add.s(number, 1) for number in range(60))
        cluster.start_worker("w1", "-P", pool, "-c", "2")
        assert [result.get(timeout=90) for result in results] == list(range(1, 61))
        assert cluster.stop_worker("w1") == 0


def test_sigterm_finishes_what_runs_and_returns_the_rest(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        worker = cluster.start_worker("w1", "-c", "1")
        work = cluster.app.tasks["chaos_tasks.work"]
        results = cluster.app.send_many(work.s(str(tmp_path), 1.0) for _ in range(5))
        wait_until(lambda: lines(tmp_path), what="the first task to start")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
        started = lines(tmp_path)
        assert len(started) == 1
        states = {result.id: result.state for result in results}
        assert states[started[0].split()[0]] == "SUCCESS"
        (queue,) = cluster.umbel_json("queues", "ls")
        assert {name: queue[name] for name in ("ready", "delayed", "claimed")} == {
            "ready": 4,
            "delayed": 0,
            "claimed": 0,
        }
        cluster.start_worker("w2", "-c", "2")
        for result in results:
            result.get(timeout=90)
        assert len(lines(tmp_path)) == 5  # F7: nothing ran twice


def test_a_second_sigterm_returns_what_runs_too(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        worker = cluster.start_worker("w1", "-c", "1")
        cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 60])
        wait_until(lambda: lines(tmp_path), what="the task to start")
        worker.send_signal(signal.SIGTERM)
        wait_until(
            lambda: "waiting for running tasks to finish" in cluster.log("w1"), what="the worker to wait"
        )
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
        (queue,) = cluster.umbel_json("queues", "ls")
        assert queue["ready"] == 1


def test_time_limits_end_tasks(tmp_path: Path) -> None:
    with Cluster(tmp_path, LIMITS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "2")
        hard = cluster.app.send_task("limit_tasks.endless")
        soft = cluster.app.send_task("limit_tasks.interruptible")
        with pytest.raises(TimeLimitExceeded, match=r"limit of 0\.5 s"):
            hard.get(timeout=90)
        with pytest.raises(SoftTimeLimitExceeded):
            soft.get(timeout=90)
        assert cluster.umbel("health").returncode == 0


def test_an_async_task_over_its_soft_limit_does_not_go_on_behind_the_next(tmp_path: Path) -> None:
    with Cluster(tmp_path, LIMITS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1")
        lingering = cluster.app.send_task("limit_tasks.lingering", [str(tmp_path / "marker")])
        patient = cluster.app.send_task("limit_tasks.patient")
        with pytest.raises(SoftTimeLimitExceeded):
            lingering.get(timeout=90)
        assert patient.get(timeout=90) == "waited"
        assert not (tmp_path / "marker").exists()


def test_a_pool_that_cannot_enforce_a_limit_refuses_at_start(tmp_path: Path) -> None:
    with Cluster(tmp_path, LIMITS_FILE) as cluster:
        worker = cluster.start_worker("w1", "-P", "solo", wait=False)
        assert worker.wait(30) == 2
        assert "limit_tasks.endless" in cluster.log("w1")


def test_one_message_with_a_limit_does_not_harm_a_pool_that_cannot_enforce_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-P", "solo")
        limited = cluster.app.send_task("chaos_tasks.add", [1, 1], time_limit=5)
        assert cluster.app.send_task("chaos_tasks.add", [1, 2]).get(timeout=90) == 3
        wait_until(limited.failed, what="the limited task to be refused")
        assert len(cluster.umbel_json("dlq", "ls")) == 1


def test_stopping_a_worker_is_not_held_against_the_task_it_ran(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE, lease_s=0.5) as cluster:
        cluster.start_worker("w1", "-c", "1")
        cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 60.0])
        wait_until(lambda: len(lines(tmp_path)) == 1, what="the task to start")
        cluster.kill_worker("w1")  # from here on its starts are counted before it runs
        for run in range(2, 6):
            cluster.start_worker("w1", "-c", "1", "--grace", "0")
            wait_until(lambda: len(lines(tmp_path)) == run, what=f"run {run}")  # noqa: B023
            assert cluster.stop_worker("w1") == 0
        (message,) = cluster.umbel_json("queues", "peek", "celery")
        assert message["starts"] == 0


def test_what_a_task_logs_and_why_it_failed_stand_in_the_workers_log(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1")
        cluster.app.send_task("chaos_tasks.talks", ["hello from a task"], task_id="talker").get(timeout=90)
        cluster.app.send_task("chaos_tasks.breaks").get(timeout=90, propagate=False)
        wait_until(lambda: "it broke here" in cluster.log("w1"), what="the failure in the log")
        assert cluster.stop_worker("w1") == 0
        log = cluster.log("w1")
    (line,) = [line for line in log.splitlines() if "hello from a task" in line]
    assert "INFO" in line
    assert "task_id=talker" in line
    assert 'raise ValueError("it broke here")' in log
    assert " died" not in log  # children that end as they were asked to do not "die"


def test_a_task_that_waits_for_another_is_refused(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:  # F9
        cluster.start_worker("w1", "-c", "1")
        with pytest.raises(JoinWouldBlock):
            cluster.app.send_task("chaos_tasks.waits_for_another").get(timeout=90)


def test_a_task_revoked_while_no_worker_is_up_never_runs(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:  # S3
        revoked = cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 0])
        revoked.revoke()
        kept = cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 0])
        cluster.start_worker("w1", "-c", "1")
        kept.get(timeout=90)
        with pytest.raises(TaskRevoked):
            revoked.get(timeout=90)
        assert [line.split()[0] for line in lines(tmp_path)] == [kept.id]


def test_delayed_and_expired_tasks(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        expired = cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 0], expires=time_ago())
        later = cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 0], countdown=1.5)
        (queue,) = cluster.umbel_json("queues", "ls")
        assert (queue["ready"], queue["delayed"]) == (1, 1)
        cluster.start_worker("w1", "-c", "1")
        with pytest.raises(TaskRevoked, match="expired"):
            expired.get(timeout=90)
        due = time() + 1.5
        later.get(timeout=90)
        assert [line.split()[0] for line in lines(tmp_path)] == [later.id]
        assert time() < due + 15


def time_ago() -> str:
    return "2020-01-01T00:00:00+00:00"


def test_a_rate_limit_parks_what_exceeds_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "2")
        limited = cluster.app.tasks["chaos_tasks.limited"]
        for result in cluster.app.send_many(limited.s(str(tmp_path)) for _ in range(60)):
            result.get(timeout=90)
        assert lines(tmp_path) == ["limited"] * 60
        wait_until(lambda: cluster.counters("w1").get("succeeded") == 60, what="the counters")
        # A burst of 20, then each of the others waits once for the token set aside for it.
        assert 20 <= cluster.counters("w1")["parked"] <= 60


def test_health_tells_well_dead_and_absent_workers_apart(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        assert cluster.umbel("health", check=False).returncode == 3
        cluster.start_worker("w1", "-c", "1")
        (row,) = cluster.umbel_json("health")
        assert row["healthy"]
        assert row["node"].startswith("w1@")
        cluster.kill_worker("w1")
        dead = cluster.umbel("health", check=False)
        assert dead.returncode == 1
        assert "gone" in dead.stdout
        cluster.start_worker("w1", "-c", "1")
        assert cluster.umbel("health", "-n", "w1").returncode == 0
        cluster.stop_worker("w1")
        assert cluster.umbel("health", check=False).returncode == 3
