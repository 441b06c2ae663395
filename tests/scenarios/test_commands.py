"""What commands do with workers and brokers that are there, not there yet, or somebody else's."""

import json
import os
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.cli.test_completion import offered_after
from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(240)]


def health(home: Path, run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As somebody asks who stands in that folder and has set nothing but the run directory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UMBEL_")}
    command = [sys.executable, "-m", "umbel.cli.main", "health", "--run-dir", str(run), *arguments]
    return subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_health_judges_the_workers_of_this_project_in_the_words_of_what_was_asked(tmp_path: Path) -> None:
    mine, theirs, run = tmp_path / "mine", tmp_path / "theirs", tmp_path / "run"
    mine.mkdir()
    theirs.mkdir()
    with (
        Cluster(mine, TASKS_FILE, run_dir=run) as cluster,
        Cluster(theirs, TASKS_FILE, run_dir=run) as other,
    ):
        worker = cluster.start_worker("w1", "-c", "1")
        other.start_worker("w2", "-c", "1")
        other.kill_worker("w2")
        assert (asked := health(mine, run)).returncode == 0 and "w1@" in asked.stdout
        assert "w2@" not in asked.stdout
        assert (asked := health(theirs, run)).returncode == 1 and "w2@" in asked.stdout
        assert health(mine, run, "-b", f"sqlite:///{theirs / 'queue.db'}").returncode == 1
        assert health(mine, run, "--all").returncode == 1
        nowhere = health(tmp_path / "run", run)
        assert nowhere.returncode == 3 and "2 of other projects" in nowhere.stderr
        assert "0 forgotten" in health(mine, run, "--forget").stderr
        cluster.app.send_task("chaos_tasks.work", [str(mine), 60])
        wait_until(lambda: journal_of(str(mine)).exists(), what="the task to start")
        worker.send_signal(signal.SIGTERM)
        wait_until(lambda: health(mine, run, "--ready").returncode == 1, what="it to drain")
        assert "w1@" in (ready := health(mine, run, "--ready").stdout) and "not ready: draining, 1" in ready
        assert ": live, draining" in health(mine, run, "--live").stdout
        worker.send_signal(signal.SIGQUIT)
        assert worker.wait(30) == 0


@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_a_worker_waits_for_a_broker_that_is_not_up_yet(broker: str, tmp_path: Path) -> None:
    home = tmp_path / "server"
    home.mkdir()
    server = RedisServer(home) if broker == "redis" else RabbitServer(home)
    url = server.url if isinstance(server, RedisServer) else server.url()
    try:
        with Cluster(
            tmp_path, TASKS_FILE, broker=url, backend=url if broker == "redis" else "rpc://"
        ) as cluster:
            cluster.start_worker("w1", "-c", "1", wait=False, broker_connection_wait_s=200)
            wait_until(
                lambda: "cannot connect to the broker; retrying" in cluster.log("w1"),
                what="the worker to say that it waits",
            )
            server.start()
            wait_until(lambda: "worker ready" in cluster.log("w1"), what="it to be ready")
            assert cluster.log("w1").count("retrying") == 1
            assert cluster.app.send_task("chaos_tasks.add", [1, 2]).get(timeout=90) == 3
    finally:
        server.stop()


def test_a_worker_waits_no_longer_than_it_was_told_and_stops_while_it_waits(tmp_path: Path) -> None:
    with socket.socket() as taken:  # a port at which nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        with Cluster(tmp_path, TASKS_FILE, broker=url) as cluster:
            soon = cluster.start_worker("soon", wait=False, broker_connection_wait_s=0)
            assert soon.wait(30) == 69
            patient = cluster.start_worker("patient", wait=False, broker_connection_wait_s=600)
            wait_until(lambda: "retrying" in cluster.log("patient"), what="it to wait")
            patient.send_signal(signal.SIGTERM)
            assert patient.wait(30) == 0


def test_main_process_and_children_log_to_files_of_their_own(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "2", "-f", "%n%I.log")
        cluster.app.send_task("chaos_tasks.talks", ["hello there"]).get(timeout=90)
        cluster.stop_worker("w1")
    assert "worker ready" in (tmp_path / "w1.log").read_text()
    talk = [(tmp_path / f"w1-{number}.log").read_text() for number in (1, 2)]
    assert sum("hello there" in text for text in talk) == 1


def test_a_worker_logs_as_the_environment_says_and_works_for_the_broker_that_is_named(tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path / 'other.db'}"
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1", "-b", other, log_format="json", log_level="INFO")
        for task, text in (("talks", "text=said"), ("prints", "text=printed"), ("breaks", "")):
            words = filter(None, ("call", f"chaos_tasks.{task}", text, "-b", other, "--wait", "20"))
            cluster.umbel(*words, check=task != "breaks")
        assert {name.partition("@")[0] for name in offered_after("ping", "-b", other, "-d", "w")} == {"w1"}
        cluster.stop_worker("w1")
        lines = [json.loads(line) for line in cluster.log("w1").splitlines()]
    told = {line["message"]: line for line in lines}
    assert "other.db" in told["worker ready"]["broker"]
    assert abs(datetime.fromisoformat(told["worker ready"]["time"]) - datetime.now(UTC)) < timedelta(days=1)
    for text, task in (("said", "talks"), ("printed", "prints")):
        assert (told[text]["level"], told[text]["task"], told[text]["attempt"]) == (
            "info",
            f"chaos_tasks.{task}",
            0,
        )
    failed = told["task failed"]
    assert "it broke here" in failed["traceback"] and failed["task_id"] and failed["attempt"] == 0


def test_a_pool_is_judged_by_the_queues_that_it_serves(tmp_path: Path) -> None:
    with Cluster(
        tmp_path, TASKS_FILE, task_routes='{"chaos_tasks.*": "cpu"}', task_time_limit_s=30
    ) as cluster:
        refused = cluster.start_worker("both", "-P", "asyncio", "-Q", "io,cpu", wait=False)
        assert refused.wait(30) == 2 and "cannot enforce the time limit" in cluster.log("both")
        cluster.start_worker("io", "-P", "asyncio", "-Q", "io")
        cluster.app.send_task("chaos_tasks.add", [1, 2], queue="io")  # it comes all the same
        letter = wait_until(lambda: cluster.umbel_json("dlq", "ls"), what="the dead letter")
        assert "cannot enforce the message's time limit" in letter[0]["reason"]
