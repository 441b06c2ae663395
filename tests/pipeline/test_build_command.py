"""D2, D3: `umbel history build` as people meet it, with lakes that are not as they should be."""

import fcntl
import json
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from tests.events.histories import attempt
from tests.pipeline.lakes import HOUR, damage, record, with_dictionaries
from umbel.cli.history.group import command
from umbel.events.tables import TABLES
from umbel.history.housekeeping import compact, expire
from umbel.history.lake import Lake
from umbel.history.query import read
from umbel.pipeline import UnreadFile, io
from umbel.pipeline.build import sound
from umbel.pipeline.io import Found, look_into

HISTORY = attempt(0, "sent", "received", "started", "succeeded")


def build(lake: Path, *options: str) -> Result:
    return CliRunner().invoke(command, ["build", "--lake", str(lake), *options], standalone_mode=False)


@pytest.fixture
def in_our_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in the session that is there: a second JVM would show nothing more."""
    from contextlib import nullcontext

    from umbel.pipeline import engines

    monkeypatch.setattr(engines, "spark_session", lambda *_args, **_named: nullcontext(spark))


@pytest.mark.usefixtures("in_our_spark")
def test_damaged_files_are_set_aside_and_named_and_the_rest_is_built(tmp_path: Path) -> None:
    """In a lake whose name, taken for a pattern, has its neighbour's files, and for a column hides one."""
    record(tmp_path / "name=x/lakes 1x", "whole", attempt(1, "received"))
    lake = tmp_path / "name=x/lake[s] {1,2}*?"
    with_dictionaries(record(lake, "whole", HISTORY))
    cut = record(lake, "cut", HISTORY)
    cut.write_bytes(cut.read_bytes()[:-20])
    torn = damage(record(lake, "torn", HISTORY))
    result = build(lake, "--json")
    assert result.return_value == 75
    told = json.loads(result.stdout)
    assert (told["events"], told["tasks"], told["quarantined"]) == (4, 1, [cut.name, torn.name])
    assert all(f"{path} cannot be read" in result.stderr for path in (cut, torn))
    assert not cut.exists() and sorted(path.name for path in (lake / "quarantine").iterdir()) == [
        f"{HOUR}/{path.name}".replace("/", "__") for path in (cut, torn)
    ]
    tasks = read(lake, lambda tables: tables.ask("select state, name from tasks"))
    assert tasks.rows == [("SUCCESS", None)]
    manifest = io.newest_manifest(lake)
    assert manifest is not None and set(manifest.tables) == set(TABLES)
    assert all((lake / "tables" / name).exists() for files in manifest.tables.values() for name in files)
    assert all(manifest.tables.values()), "also a table without rows has a file, with its schema"


@pytest.mark.usefixtures("in_our_spark")
def test_a_stream_has_what_was_compacted_before_it_began_and_forgets_what_expired(tmp_path: Path) -> None:
    """D2: and it goes on without a file whose data is damaged."""
    kept = Lake(tmp_path)
    compacted = attempt(0, "sent", "received", uuid="compacted")
    for name in ("1", "2"):
        record(tmp_path, name, compacted, day="2026-11-14")
    compact(kept)
    assert len(compact(kept, grace_s=0).removed) == 2
    record(tmp_path, "whole", HISTORY)
    torn = damage(record(tmp_path, "torn", HISTORY))
    told, result = followed(tmp_path)
    assert (result.return_value, told["quarantined"]) == (75, [torn.name])
    assert (told["events"], told["tasks"], told["files"]) == (8, 2, 2)
    assert f"{torn} cannot be read" in result.stderr

    noon = datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()
    assert expire(kept, 1, now=noon).dropped_days == ["2026-11-14"]
    record(tmp_path, "new", attempt(0, "sent", uuid="new"))
    told, _ = followed(tmp_path)
    assert (told["events"], told["tasks"], told["files"]) == (5, 2, 2)
    state = io.newest_state(tmp_path)
    assert state is not None and sum(one.rows for one in state.every()) == 5


def followed(lake: Path) -> tuple[dict[str, Any], Result]:
    result = build(lake, "--follow", "--until-caught-up", "--tables", "tasks", "--json")
    assert result.exception is None, result
    return json.loads(result.stdout), result


def test_damage_that_only_a_job_sees_ends_the_build() -> None:
    """Nothing is set aside that can be read."""
    tries = list[Found]()

    def work(found: Found) -> None:
        tries.append(found)
        raise UnreadFile("x cannot be read")

    with pytest.raises(UnreadFile):
        sound(Found(), lambda thorough: look_into("nowhere", [], thorough=thorough), work)
    assert len(tries) == 1


@pytest.mark.usefixtures("in_our_spark")
def test_old_builds_go_when_new_ones_come(tmp_path: Path) -> None:
    record(tmp_path, "1", HISTORY)
    (tmp_path / "tables/left-by-one-that-died").mkdir(parents=True)
    for _ in range(3):
        assert build(tmp_path, "--tables", "tasks", "--afresh").return_value == 0
    assert len(list((tmp_path / "tables").glob("2*"))) == io.BUILDS_KEPT
    assert not (tmp_path / "tables/left-by-one-that-died").exists()
    assert io.newest_number(tmp_path) == 3


def test_a_build_without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: and what only Spark has is refused beside it."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    record(tmp_path, "1", HISTORY)
    result = build(tmp_path, "--engine", "local", "--json")
    told = json.loads(result.stdout)
    assert (result.return_value, told["tasks"], told["timeline"]) == (0, 1, 4)
    assert not (tmp_path / ".work").exists()
    refused = build(tmp_path, "--engine", "local", "--master", "local[2]")
    assert "--engine local has no Spark" in str(refused.exception)


def test_an_empty_lake_is_said_to_be_empty(tmp_path: Path) -> None:
    result = build(tmp_path)
    assert result.return_value == 3 or getattr(result.exception, "exit_code", None) == 3
    assert f"no events in {tmp_path} yet" in result.stderr


def test_no_lake_at_all(tmp_path: Path) -> None:
    result = build(tmp_path / "nowhere")
    assert "there is no lake at" in result.stderr


def test_a_newer_lake_is_refused_with_its_version(tmp_path: Path) -> None:
    record(tmp_path, "new", HISTORY, version=9)
    result = build(tmp_path)
    assert "version 9" in str(result.exception) and "upgrade Umbel" in str(result.exception)
    assert not (tmp_path / "tables").exists()


def test_two_builds_at_once_are_refused(tmp_path: Path) -> None:
    record(tmp_path, "1", HISTORY)
    with (tmp_path / ".build.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("process 1 on h")
        held.flush()
        result = build(tmp_path)
    assert "process 1 on h is already building in" in str(result.exception)


def test_a_table_that_there_is_not(tmp_path: Path) -> None:
    assert "unknown table 'task'" in str(build(tmp_path, "--tables", "task").exception)


SHOWN = """
import os, click
from umbel.cli.history.build import _progress
with _progress() as progress:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as while Java starts
    progress.tell("tasks", 0, 7)
    with progress.aside():
        click.echo("the summary")
    progress.tell("waiting for events", 0, 1)
"""


def test_the_bar_is_on_the_terminal_and_data_on_stdout() -> None:
    """D2: `umbel history build --json > file` in a terminal has the data in the file."""
    ours, theirs = pty.openpty()
    try:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "90"}
        told = subprocess.run(
            [sys.executable, "-c", SHOWN],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment,
            timeout=60,
            check=True,
        )
        shown = os.read(ours, 65_536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert told.stdout == b"the summary\n"
    assert "tasks (1 of 7)" in shown and "waiting for events" in shown and "summary" not in shown
