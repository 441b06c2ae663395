"""The benchmark runs from end to end; how quick it is, is for `make bench` to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._harness.benchmark import ROOT

SCRIPT = ROOT / "benchmarks" / "recording.py"
ALWAYS = {"redis_drain", "redis_drain_cpu", "redis_server_cpu", "embedded_drain", "embedded_drain_cpu"}
LOGGED = {"redis_unlogged", "embedded_unlogged"}
BESIDE = {"redis_recorder_cpu", "embedded_recorder_cpu"}


@pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="many workers start; UMBEL_SOAK=1 runs it")
@pytest.mark.timeout(300)
def test_it_measures_every_way_to_record_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--tasks", "50", "--rounds", "3"],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    printed = json.loads(done.stdout)
    measured = {name: set(one["measures"]) for name, one in printed["contenders"].items()}
    assert measured == {
        "logged": ALWAYS | LOGGED,
        "events": ALWAYS,
        "beside": ALWAYS | LOGGED | BESIDE,
        "itself": ALWAYS | LOGGED,
    }
    assert printed["targets"]["redis_drain_vs_events"]["at_least"] == 0.75
