"""The benchmark runs from end to end; how quick it is, is for `make bench` to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks._harness.benchmark import ROOT
from benchmarks._throughput import tally
from benchmarks._throughput.tally import Ran, Tally

SCRIPT = ROOT / "benchmarks" / "throughput.py"
MEASURES = {
    "drain",
    "enqueue",
    "bulk",
    "latency",
    "startup",
    "memory",
    "drain_cpu",
    "server_cpu",
    "enqueue_cpu",
    "bulk_cpu",
}


def test_it_measures_umbel_alone_on_both_brokers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--tasks", "40", "--only", "umbel"],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    printed = json.loads(done.stdout)
    assert set(printed["contenders"]["umbel"]["measures"]) == {
        f"{broker}_{measure}" for broker in ("redis", "rabbitmq") for measure in MEASURES
    }
    assert printed["ratios"] == {}
    assert printed["targets"]["redis_drain_vs_best_peer"] == {"at_least": 3.0, "measured": None, "met": None}


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
