"""`umbel worker --web`: the dashboard is a process beside the worker, restarted and ended with it."""

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import Cluster
from tests.waiting import wait_until
from umbel.launch.preparation import node_name

TASKS_FILE = Path(__file__).parent / "web_tasks.py"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_dashboard_is_restarted_when_it_dies_and_ends_with_a_killed_worker(
    tmp_path: Path, loop: str
) -> None:
    with Cluster(tmp_path, TASKS_FILE, worker_loop=loop) as cluster:
        worker = cluster.start_worker("w1", "-c", "1", "--web", "0")

        def dashboard() -> psutil.Process | None:
            found = [one for one in psutil.Process(worker.pid).children() if "web" in one.cmdline()]
            return found[0] if found else None

        def urls() -> list[str]:
            return [
                line.split()[-1] for line in cluster.log("w1").splitlines() if line.startswith("umbel web:")
            ]

        first = wait_until(dashboard, what="the dashboard's process")
        (url,) = wait_until(urls, what="its address")
        assert url.startswith("http://127.0.0.1:")
        with httpx.Client() as client:
            assert client.get(url).status_code == 303
            assert client.get(f"{url.partition('/session')[0]}/api/v1/me").json()["role"] == "admin"
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: len(urls()) == 2, what="another dashboard")
        second = dashboard()
        assert second is not None and second.pid != first.pid
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: not second.is_running() or second.status() == "zombie", what="its end")


def test_tokens_are_made_listed_and_removed(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        made = cluster.umbel("web", "token", "add", "ci", "--role", "operator").stdout.strip()
        assert made.startswith("umbel_")
        assert made not in (tmp_path / "umbel-web.db").read_bytes().decode("latin-1")
        (listed,) = cluster.umbel_json("web", "token", "ls")
        assert (listed["name"], listed["role"]) == ("ci", "operator")
        assert cluster.umbel("web", "token", "rm", "ci").returncode == 0
        assert cluster.umbel("web", "token", "rm", "ci", check=False).returncode == 3
        assert cluster.umbel("mark", "v1.4").returncode == 0
        assert cluster.umbel("mark", "x" * 300, check=False).returncode == 2
        refused = cluster.umbel("web", "--host", "0.0.0.0", check=False)
        assert refused.returncode == 2 and "umbel web token add" in refused.stderr


def test_a_worker_serves_what_it_counts_without_a_dashboard(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1", "--metrics", "0")
        (served, *_) = wait_until(
            lambda: [line for line in cluster.log("w1").splitlines() if "metrics served" in line],
            what="the metrics to be served",
        )
        url = f"http://{served.rpartition('address=')[2]}/metrics"
        cluster.app.tasks["web_tasks.add"].delay(1, 2).get(timeout=60)
        cluster.app.tasks["web_tasks.pay"].delay(1).get(timeout=60, propagate=False)

        def counted() -> dict[tuple[str, tuple[str, ...]], float] | None:
            text = httpx.get(url, timeout=30).text
            found = {
                (one.name, tuple(value for _, value in sorted(one.labels.items()))): one.value
                for family in text_string_to_metric_families(text)
                for one in family.samples
            }
            return found if ("umbel_tasks_total", ("failed", "web_tasks.pay")) in found else None

        found = wait_until(counted, what="both tasks to be counted")
        node = node_name("w1")
        assert found["umbel_tasks_total", ("succeeded", "web_tasks.add")] == 1
        assert found["umbel_task_run_seconds_count", ("web_tasks.add",)] == 1
        assert found["umbel_task_wait_seconds_count", ("web_tasks.add",)] == 1
        assert found["umbel_node_children", (node,)] == 1 and found["umbel_node_received_total", (node,)] == 2
        refused = cluster.umbel("worker", "--metrics", "here", check=False)
        assert refused.returncode == 2 and "HOST:PORT" in refused.stderr
