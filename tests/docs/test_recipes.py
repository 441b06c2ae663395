"""The recipes for the history are run as they are printed; that of dbt by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, blocks_of
from tests.docs.terminal import BIN, Terminal
from tests.history.published import Story, publish

PAGE = DOCS / "history-recipes.md"
STORY = Story(tasks=200)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    publish(tmp_path / "umbel-lake", STORY.rows)
    return tmp_path


def test_duckdb_reads_tables_and_views_from_the_file_that_is_written(home: Path) -> None:
    written, code = blocks_of(PAGE)[:2]
    with Terminal(home) as terminal:
        terminal.type(written)
    assert code.language == "python"
    done = subprocess.run(
        [sys.executable, "-c", code.text], cwd=home, capture_output=True, text=True, timeout=60, check=True
    )
    assert "shop.pack" in done.stdout and "deepest" in done.stdout and "lost_s" in done.stdout


def test_the_lines_for_cron_do_what_they_say(home: Path) -> None:
    """All but the build, which needs Spark."""
    [table] = [block.text for block in blocks_of(PAGE) if block.text.startswith("MAILTO")]
    lines = [line.split(maxsplit=5)[5] for line in table.splitlines() if " * * * " in line]
    build, report, promise = (
        line.replace("/tmp/", f"{home}/").replace("/srv/", f"{home}/") for line in lines
    )
    (home / "umbel").mkdir()
    variables = {"UMBEL_HISTORY_LAKE": str(home / "umbel-lake"), "PATH": f"{BIN}:{os.environ['PATH']}"}

    def run(line: str) -> str:
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    assert build.startswith("umbel history build --json") and " && " in build
    assert run(build.partition(" && ")[2]) == ""
    assert (home / "umbel/history.duckdb").is_file()
    assert run(report) == ""
    assert (home / "umbel/report.html").is_file()
    kept = promise.replace("--since 1d", "").replace("2s", "1h")
    assert run(kept) == ""
    assert "kept       no" in run(kept.replace("1h", "1ms"))
    assert "nothing ended that could be judged" in run(promise)
