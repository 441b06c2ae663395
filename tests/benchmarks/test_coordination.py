"""The benchmark runs from end to end; what it costs, is for `make bench` to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks._harness.benchmark import ROOT

SCRIPT = ROOT / "benchmarks" / "coordination.py"


def test_it_counts_what_one_node_publishes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    flags = ["--json", "--nodes", "1", "--peers-max", "0", "--elections", "2", "--idle", "0.5"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["library"], row["nodes"], row["workers_died"]) == ("umbel", 1, 0)
    assert row["publishes_per_election"] == 3.0  # the command, who is elected, how it ended
    assert row["store_calls_per_election"] >= 3.0
    assert list(tmp_path.iterdir()) == []
