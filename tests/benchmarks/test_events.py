"""The benchmark runs from end to end; what it finds is for `make bench` to say."""

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks._events.history import History, failures
from benchmarks._harness.benchmark import PEERS_PYTHON, ROOT
from benchmarks.events import CELERY
from umbel.events.state import ClusterState

SCRIPT = ROOT / "benchmarks" / "events.py"


def run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--tasks", "400", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_it_yields_ratios_beside_fewer_tasks() -> None:
    printed = run("--only", "umbel", "--only", "umbel_10k")
    assert set(printed["contenders"]["umbel"]["measures"]) == {"apply", "memory", "cost"}
    assert set(printed["ratios"]) == {"cost_vs_umbel_10k"}
    assert set(printed["targets"]) == {"apply_vs_celery", "memory_vs_celery", "cost_vs_umbel_10k"}


@pytest.mark.skipif(not PEERS_PYTHON.exists(), reason="peers are not installed (scripts/setup bench)")
def test_celery_can_be_asked_the_same() -> None:
    assert CELERY.ask(ROOT, "hold", 100)["bytes_per_task"] > 0


def test_its_history_is_one_that_a_cluster_could_tell() -> None:
    state = ClusterState()
    events = list(History().events(300))
    state.apply(events)
    assert state.counts == {"SUCCESS": 300 - failures(300), "FAILURE": failures(300)}
    assert [event["clock"] for event in events] == list(range(1, len(events) + 1))
    assert all(record.name and record.n_deliveries == record.retries + 1 for record in state.tasks())
