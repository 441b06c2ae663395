"""The benchmark runs from end to end; how quick it is, is for `make bench` to say."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks._harness.benchmark import PEERS_PYTHON, ROOT
from tests.waiting import wait_until

SCRIPT = ROOT / "benchmarks" / "embedded.py"
MEASURES = {
    "enqueue",
    "drain",
    "drain_kept",
    "latency",
    "enqueue_cpu",
    "drain_cpu",
    "startup",
    "memory",
}


def start(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )


def run(temporary: Path, *arguments: str) -> dict[str, Any]:
    process = start(temporary, *arguments)
    output, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert list(temporary.iterdir()) == []
    printed: dict[str, Any] = json.loads(output)
    return printed


def test_it_measures_umbel_alone(tmp_path: Path) -> None:
    printed = run(tmp_path, "--json", "--tasks", "10", "--only", "umbel")
    assert set(printed["contenders"]["umbel"]["measures"]) == MEASURES
    assert printed["ratios"] == {}
    assert printed["targets"]["drain_vs_huey"]["met"] is None


@pytest.mark.skipif(not PEERS_PYTHON.exists(), reason="peers are not installed (scripts/setup bench)")
def test_it_yields_ratios_beside_its_peers(tmp_path: Path) -> None:
    printed = run(tmp_path, "--json", "--tasks", "10")
    assert printed["rounds"] == 3
    assert set(printed["contenders"]) == {"umbel", "huey", "huey_nosync"}
    assert set(printed["ratios"]) == {
        f"{measure}_vs_{peer}" for measure in MEASURES for peer in ("huey", "huey_nosync")
    }
    assert {key: target["at_least"] for key, target in printed["targets"].items()} == {
        "drain_vs_huey": 3.0,
        "enqueue_vs_huey": 1.0,
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "--tasks", "1000000", "--only", "umbel")
    wait_until(lambda: list(tmp_path.glob("*/queue.db")), what="the first round to begin")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
