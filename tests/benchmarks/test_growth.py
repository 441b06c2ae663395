"""The benchmark runs from end to end; what grows, is for `make bench` to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._growth.sections import SECTIONS, measures
from benchmarks._harness.benchmark import ROOT

SCRIPT = ROOT / "benchmarks" / "growth.py"


@pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="many workers start; UMBEL_SOAK=1 runs it")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_measures_umbel_and_leaves_nothing_behind(section: str, tmp_path: Path) -> None:
    few = ["--tasks", "20", "--rounds", "3", "--only", "umbel", "--only", section]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", *few],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    (ours,) = json.loads(done.stdout)["contenders"].values()
    assert ours["measures"]
    if section in ("payload", "trickle", "idle"):
        assert set(ours["measures"]) == {one.name for one in measures() if one.name.startswith(section)}


def test_measures_have_names_of_their_own() -> None:
    names = [one.name for one in measures()]
    assert len(names) == len(set(names))
