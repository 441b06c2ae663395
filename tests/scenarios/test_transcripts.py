"""The transcripts beside this file happen as they are written, line by line.

UMBEL_RECORD=1 writes what happens into the files instead: read the diff before you commit it.
"""

import os
from difflib import unified_diff
from functools import partial
from pathlib import Path

import pytest

from tests.scenarios.simulated_elections import SimulatedElections
from tests.scenarios.simulated_workers import SimulatedWorkers
from tests.scenarios.transcripts import Make, parse, play

FILES = sorted(Path(__file__).parent.glob("*.txt"))
RECORDING = os.environ.get("UMBEL_RECORD") == "1"


def played(text: str, home: Path) -> str:
    simulations: dict[str, Make] = {
        "elections": SimulatedElections,
        "workers": partial(SimulatedWorkers, home),
    }
    return str(play(parse(text), simulations))


def difference(written: str, happened: str, name: str) -> str:
    before, after = written.splitlines(keepends=True), happened.splitlines(keepends=True)
    return "".join(unified_diff(before, after, f"{name} as written", f"{name} as it happens"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_transcript_happens_as_it_is_written(path: Path, tmp_path: Path) -> None:
    written = path.read_text(encoding="utf-8")
    happened = played(written, tmp_path)
    if RECORDING:
        path.write_text(happened, encoding="utf-8")
    elif differs := difference(written, happened, path.name):
        pytest.fail(f"UMBEL_RECORD=1 records it again\n{differs}", pytrace=False)


def test_a_line_that_did_not_happen_is_shown_as_a_difference(tmp_path: Path) -> None:
    written = "simulation: workers w1\nat 1.0: client sends t1: add 1 2\n    1.00  nothing waits\n"
    differs = difference(written, played(written, tmp_path), "a.txt")
    assert "-    1.00  nothing waits\n+    1.00  1 message waits\n" in differs


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("at 1.0: client sends t1: add 1 2\n", "begins with 'simulation: '"),
        ("simulation: workers w1\nt1 is sent\n", "'t1 is sent' is neither a step"),
        ("simulation: workers w1\nat 1.0: w1 sleeps\n", "nobody understands 'w1 sleeps'; steps are: "),
    ],
)
def test_what_nobody_understands_is_named(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        played(text, tmp_path)
