"""The benchmark runs from end to end; what grows, is for `make bench` to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._growth.decades import decades, slope
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


def test_the_exponent_of_a_line_is_one_and_of_a_square_two() -> None:
    sizes = (100, 1_000, 10_000, 100_000)
    line, square = ({size: 0.0003 * size**power for size in sizes} for power in (1, 2))
    assert slope(line) == pytest.approx(1)
    assert slope(square) == pytest.approx(2)
    bent = line | {100_000: 5 * line[100_000]}
    assert decades(bent) == pytest.approx([1, 1, 1.699], abs=0.001)
    assert slope(bent) > 1.1


@pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="workers start; UMBEL_SOAK=1 runs it")
@pytest.mark.timeout(400)
def test_the_decades_are_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--decades", "--json", "--most", "100"],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    rows = json.loads(done.stdout)
    assert len(rows) == 16  # six kinds on three brokers, without the two that RabbitMQ cannot do
    assert all(row["cpu_s"]["100"] > 0 for row in rows)
