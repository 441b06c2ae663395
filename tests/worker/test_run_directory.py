import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from umbel.clock import boot_time_s
from umbel.errors import DuplicateNode
from umbel.worker.run_directory import (
    FORGOTTEN_AFTER_S,
    STALE_AFTER_S,
    NodeState,
    default_run_directory,
    read_states,
    refuse_second,
    remove_state,
    state_file,
    write_state,
)

BROKER = "sqlite:////var/umbel.db"


def write(directory: Path, node: str = "w@host", broker: str = BROKER, **fields: Any) -> None:
    write_state(directory, node, broker, {"node": node, "pid": os.getpid()} | fields)


def only(directory: Path) -> NodeState:
    [state] = read_states(directory)
    return state


def write_raw(directory: Path, **fields: Any) -> None:
    state = {"node": "w@host", "pid": os.getpid(), "updated_boot_s": boot_time_s()} | fields
    (directory / "w@host.json").write_text(json.dumps(state))


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has ended and was reaped."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    return child.pid


def test_a_worker_that_just_wrote_is_well(tmp_path: Path) -> None:
    write(tmp_path, held=3)
    state = only(tmp_path)
    assert (state.node, state.alive, state.healthy, state.problem) == ("w@host", True, True, "")
    assert state.fields["held"] == 3


def test_a_worker_that_says_it_has_a_problem_is_not_well(tmp_path: Path) -> None:
    write(tmp_path, problem="no broker")
    assert (only(tmp_path).healthy, only(tmp_path).problem) == (False, "no broker")


def test_a_worker_that_has_not_written_for_long_is_not_well(tmp_path: Path) -> None:
    write_raw(tmp_path, updated_boot_s=boot_time_s() - STALE_AFTER_S - 30)
    state = only(tmp_path)
    assert not state.healthy
    assert f"process {os.getpid()} has not reported for" in state.problem


def test_word_from_before_the_machine_was_started_again_is_stale(tmp_path: Path) -> None:
    write_raw(tmp_path, updated_boot_s=boot_time_s() + 3600)
    assert not only(tmp_path).healthy


def test_a_worker_whose_process_is_gone_is_not_well(tmp_path: Path, dead_pid: int) -> None:
    write_raw(tmp_path, pid=dead_pid)
    state = only(tmp_path)
    assert (state.healthy, state.node) == (False, "w@host")
    assert f"process {dead_pid} is gone" in state.problem


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"node": "w@host"}',
        '{"pid": "x", "updated_boot_s": 1}',
        '{"pid": 1, "updated_boot_s": []}',
        "\N{SNOWMAN}",
    ],
)
def test_a_corrupt_file_is_a_worker_that_is_not_well(tmp_path: Path, text: str) -> None:
    (tmp_path / "w@host.json").write_text(text)
    state = only(tmp_path)
    assert (state.node, state.healthy) == ("w@host", False)
    assert "cannot be read" in state.problem


def test_bytes_that_are_no_text_are_corrupt_too(tmp_path: Path) -> None:
    (tmp_path / "w@host.json").write_bytes(b"\xff\xfe{}")
    assert not only(tmp_path).healthy


def test_no_directory_is_no_worker(tmp_path: Path) -> None:
    assert read_states(tmp_path / "none") == []


def test_several_workers_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b@host", "a@host"):
        write(tmp_path, name)
    assert [state.node for state in read_states(tmp_path)] == ["a@host", "b@host"]


def test_writing_again_replaces_and_leaves_no_draft(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "umbel"
    for held in (1, 2):
        write(directory, held=held)
    assert [path.suffix for path in directory.iterdir()] == [".json"]
    assert only(directory).fields["held"] == 2


def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    write(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert state_file(directory, "w@host", BROKER).stat().st_mode & 0o777 == 0o600


def test_a_worker_that_stops_takes_its_word_with_it(tmp_path: Path) -> None:
    write(tmp_path)
    remove_state(tmp_path, "w@host", BROKER)
    remove_state(tmp_path, "w@host", BROKER)
    assert read_states(tmp_path) == []


@pytest.mark.parametrize("node", ["../../etc/passwd", "a/b@host", "w@ho st\n"])
def test_no_name_leads_out_of_the_directory(tmp_path: Path, node: str) -> None:
    assert state_file(tmp_path, node, BROKER).parent == tmp_path


def test_nodes_of_one_name_in_different_clusters_do_not_overwrite_each_other(tmp_path: Path) -> None:
    write(tmp_path, broker="sqlite:////a.db", held=1)
    write(tmp_path, broker="sqlite:////b.db", held=2)
    assert sorted(state.fields["held"] for state in read_states(tmp_path)) == [1, 2]


# -- a second worker of the same name --------------------------------------------------------------


@pytest.fixture
def other_pid() -> Iterator[int]:
    """The id of a process that lives."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        yield child.pid


def test_a_second_worker_of_one_name_is_refused_while_the_first_lives(tmp_path: Path, other_pid: int) -> None:
    write(tmp_path, pid=other_pid)
    with pytest.raises(
        DuplicateNode, match=rf"w@host is already running here \(process {other_pid}\); .* with -n"
    ):
        refuse_second(tmp_path, "w@host", BROKER)
    refuse_second(tmp_path, "w2@host", BROKER)
    refuse_second(tmp_path, "w@host", "sqlite:////another.db")


def test_a_worker_may_take_the_name_of_one_that_is_gone(tmp_path: Path, dead_pid: int) -> None:
    write(tmp_path, pid=dead_pid)
    refuse_second(tmp_path, "w@host", BROKER)


def test_long_silence_means_that_the_number_went_to_another_process(tmp_path: Path, other_pid: int) -> None:
    silent = {"node": "w@host", "pid": other_pid, "updated_boot_s": boot_time_s() - FORGOTTEN_AFTER_S - 1}
    state_file(tmp_path, "w@host", BROKER).write_text(json.dumps(silent))
    refuse_second(tmp_path, "w@host", BROKER)


def test_a_corrupt_file_hinders_no_worker(tmp_path: Path) -> None:
    state_file(tmp_path, "w@host", BROKER).write_text("{")
    refuse_second(tmp_path, "w@host", BROKER)


def test_each_user_has_a_directory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_run_directory() == Path("/run/user/7/umbel")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_run_directory().name == f"umbel-{os.getuid()}"


def test_live_and_ready_are_told_apart(tmp_path: Path) -> None:
    """A worker that waits for its broker, or stops, is live; only one that takes tasks is ready."""
    for fields, live, ready in (
        ({"ready": True}, True, True),
        ({"ready": False}, True, False),  # it stops, or has no queue
        ({"ready": True, "problem": "no broker"}, True, False),
        ({}, True, False),  # of a version that did not say
        ({"ready": True, "updated_boot_s": boot_time_s() - STALE_AFTER_S - 1}, False, False),
    ):
        write_raw(tmp_path, **fields)
        assert (only(tmp_path).live, only(tmp_path).ready) == (live, ready), fields


def test_what_is_gone_is_neither_live_nor_ready(tmp_path: Path, dead_pid: int) -> None:
    write_raw(tmp_path, pid=dead_pid, ready=True)
    assert (only(tmp_path).live, only(tmp_path).ready) == (False, False)
