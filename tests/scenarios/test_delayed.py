"""Any number of delayed tasks wait in the broker: the worker's memory stays flat, ready tasks start."""

import os
from itertools import islice
from pathlib import Path

import psutil
import pytest

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.waiting import wait_until

SOAK = bool(os.environ.get("UMBEL_SOAK"))
DELAYED = 1_000_000 if SOAK else 20_000
AT_ONCE = 10_000
GROWTH_MAX_BYTES = 40 * 1024 * 1024  # a million of them in memory would take far more than this
TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")


@pytest.mark.scenario
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("broker", ["sqlite", "redis"])
def test_delayed_tasks_do_not_fill_the_worker_nor_hold_ready_ones(broker: str, tmp_path: Path) -> None:
    with (
        place(broker, tmp_path) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
    ):
        add = cluster.app.tasks["chaos_tasks.add"]
        worker = psutil.Process(cluster.start_worker("w1", "-c", "2").pid)
        assert add.delay(1, 2).get(timeout=90) == 3
        before = worker.memory_info().rss
        calls = (add.s(n, n).set(countdown=36_000, ignore_result=True) for n in range(DELAYED))
        while some := list(islice(calls, AT_ONCE)):
            cluster.app.send_many(some)
        wait_until(
            lambda: cluster.umbel_json("queues", "ls")[0]["delayed"] == DELAYED,
            deadline_s=600,
            what="every delayed task to be set aside",
        )
        assert add.delay(3, 4).get(timeout=90) == 7
        grown = worker.memory_info().rss - before
        print(f"{broker}: {DELAYED} delayed, the worker grew by {grown / 1024 / 1024:.1f} MiB")
        assert grown < GROWTH_MAX_BYTES
        assert cluster.stop_worker("w1") == 0
