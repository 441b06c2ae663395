"""The benchmark runs from end to end; how quick it is, is for `make bench` to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._harness.benchmark import ROOT
from benchmarks._throughput import tally
from benchmarks._throughput.tally import Ran, Tally

SCRIPT = ROOT / "benchmarks" / "throughput.py"
MEASURES = {
    "drain",
    "enqueue",
    "bulk",
    "threads",
    "awaited",
    "latency",
    "latency_client",
    "latency_worker",
    "startup",
    "memory",
    "drain_cpu",
    "server_cpu",
    "enqueue_cpu",
    "bulk_cpu",
}
MEASURED = {f"{broker}_{measure}" for broker in ("redis", "rabbitmq") for measure in MEASURES}


pytestmark = [
    pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="many workers start; UMBEL_SOAK=1 runs it"),
    pytest.mark.timeout(300),
]


def test_it_measures_umbel_beside_itself_on_both_brokers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = measure(tmp_path, "--against", "HEAD")
    if "git" in done.stderr:
        pytest.skip("this checkout has no history")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    printed = json.loads(done.stdout)
    ours, former = printed["contenders"].values()
    assert set(ours["measures"]) == set(former["measures"]) == set(printed["changes"]) == MEASURED
    for name, change in printed["changes"].items():
        assert (change["met"] is None) == (not name.endswith("_cpu"))
        assert change["noise"] == (change["low"] <= 1 <= change["high"]) or 1 in (
            change["low"],
            change["high"],
        )
    assert printed["targets"]["redis_drain_vs_best_peer"] == {"at_least": 3.0, "measured": None, "met": None}


def test_it_measures_umbel_on_both_brokers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = measure(tmp_path, "--only", "umbel")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    (ours,) = json.loads(done.stdout)["contenders"].values()
    assert set(ours["measures"]) == MEASURED


def measure(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--json", "--tasks", "20", "--rounds", "3", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(directory)},
        timeout=280,
        check=False,
    )


def test_a_tally_counts_what_forked_processes_ran(tmp_path: Path) -> None:
    directory = tmp_path / "tally"
    assert tally.read(directory) == Ran(0, 0, 0, 0)
    ours = Tally(directory)
    ours.note()
    if (child := os.fork()) == 0:
        ours.note()
        ours.note()
        os._exit(0)
    os.waitpid(child, 0)
    ran = tally.read(directory)
    assert (ran.tasks, ran.processes) == (3, 2)
    assert 0 < ran.first_ns < ran.last_ns
