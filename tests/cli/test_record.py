"""`umbel record` and what is below it, as a user types them (D1)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.history.recording import LogWriter, Teller, modes_below, paths_of, recording
from tests.waiting import DEADLINE_S, wait_until
from umbel.cli import exits
from umbel.cli.main import cli
from umbel.history.lake import Lake


def umbel(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(one) for one in arguments], standalone_mode=False)


def told_by(*arguments: object) -> Any:
    done = umbel(*arguments, "--json")
    assert done.exception is None, done.output
    return json.loads(done.stdout)


def test_status_says_how_far_it_is_and_forget_ends_it(tmp_path: Path) -> None:
    url, lake = f"sqlite:///{tmp_path / 'queue.db'}", tmp_path / "lake"
    assert umbel("record", "status", "--lake", lake).return_value == exits.NOT_FOUND
    with LogWriter(url) as log:
        log.register()
        log.log(Teller().tell(30))
        with recording(url, lake) as recorder:
            log.wait_until_recorded()
            assert "stop it first" in str(umbel("record", "forget", "--broker", url).exception)
            assert recorder.stop() == 0
        log.log(Teller(inc=2000).tell(7))
    told = told_by("record", "status", "--broker", url, "--lake", lake)
    (one,) = told["recorders"]
    assert (one["recorder"], one["registered"], one["lag"], one["events"]) == ("recorder", True, 7, 32)
    assert (one["gaps"], one["lost"], one["unreadable"], told["quarantined"]) == (0, 0, 0, 0)
    assert told["files"] == len(Lake(lake).event_files()) == one["files"]
    assert told["bytes"] == sum(path.stat().st_size for path in paths_of(Lake(lake)))
    shown = umbel("record", "status", "--broker", url, "--lake", lake).stdout
    assert str(lake) in shown
    heading, row = shown.splitlines()[1:]
    assert len(heading) <= 80 and row.split()[:4] == ["recorder", "7", "32", str(one["files"])]
    assert row.rstrip().endswith("ago")
    assert told_by("record", "compact", "--lake", lake)["written"] == []  # its hour has not passed
    assert told_by("record", "forget", "--broker", url) == {"recorder": "recorder", "forgotten": True}
    assert umbel("record", "forget", "--broker", url).return_value == exits.NOT_FOUND
    assert told_by("record", "status", "--broker", url, "--lake", lake)["recorders"][0]["registered"] is False
    assert umbel("record", "status", "--broker", url, "--lake", lake).stdout.split("\n")[2].split()[1] == "-"
    assert umbel("record", "status", "--lake", lake).stdout.split("\n")[2].split()[1] == "?"


def test_what_cannot_be_is_refused_with_the_remedy(tmp_path: Path) -> None:
    assert "`umbel record`, or name another" in str(
        umbel("record", "compact", "--lake", tmp_path / "none").exception
    )
    assert "letters, digits" in str(umbel("record", "--name", "a/b", "--broker", "x").exception)
    assert umbel("record", "--rotate", "0", "--broker", "x").exception is not None


def test_a_lake_is_its_owners_alone_unless_its_mode_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, lake = f"sqlite:///{tmp_path / 'queue.db'}", tmp_path / "lake"
    with LogWriter(url) as log:
        log.register()
        log.log(Teller().tell(30))
        with recording(url, lake) as recorder:
            log.wait_until_recorded()
            assert recorder.stop() == 0
        assert modes_below(lake) == {"d0700", "f0600"}
        monkeypatch.setenv("UMBEL_LAKE_MODE", "0750")
        opened = tmp_path / "opened"
        log.log(Teller(inc=2000).tell(7))
        with recording(url, opened) as recorder:
            log.wait_until_recorded()
            assert recorder.stop() == 0
        assert modes_below(opened) == {"d0750", "f0640"}


def test_beside_a_worker_a_busy_lake_is_waited_for_and_another_recorder_is_not(tmp_path: Path) -> None:
    """D1: a process that ended would be started again at once, for as long as the lake is busy."""
    lake, log = tmp_path / "lake", tmp_path / "beside.log"
    here, elsewhere = (f"sqlite:///{tmp_path / name}.db" for name in ("here", "elsewhere"))

    def beside(url: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "umbel.cli.main", "record", "--broker", url, "--lake", str(lake)]
        with log.open("wb") as stderr:
            return subprocess.Popen([*command, "--with-parent"], stdin=subprocess.PIPE, stderr=stderr)

    with recording(here, lake) as recorder:
        recorder.wait_for("history recording started")
        with beside(here) as second:
            assert second.wait(DEADLINE_S) == 0
            assert log.read_text() == "", "the worker beside it looks who records"
        with beside(elsewhere) as third:
            try:
                wait_until(lambda: "standing by: " in log.read_text(), what="it to say that the lake is busy")
                assert recorder.stop() == 0
                wait_until(lambda: "history recording started" in log.read_text(), what="its turn")
                assert log.read_text().count("standing by: ") == 1
                assert third.stdin is not None
                third.stdin.close()  # as it is when the worker is killed
                assert third.wait(DEADLINE_S) == 0
            finally:
                third.kill()
