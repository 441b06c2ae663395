"""The ledger of benchmarks/kills.py: which tasks had ended where something was killed, and ran again."""

from pathlib import Path

import pytest

from benchmarks._kills import body
from benchmarks._kills.ledger import count_of, ended, repeats


def test_a_task_is_repeated_if_it_ended_where_something_was_killed_and_later_once_more() -> None:
    killed = [[1, 2, 3, 4], [4, 5, 6], [3, 7]]
    assert repeats(killed, [6, 7, 8]) == [2, 1, 1]  # 3 and 4; 6; 7
    assert repeats([[1, 2]], [3]) == [0]
    assert repeats([], [1, 1]) == []


def test_each_process_notes_in_a_file_which_tasks_ended_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "LEDGER", tmp_path)
    monkeypatch.setattr(body, "_slots", None)
    (tmp_path / "1").touch()  # of a process that was killed before its first note
    for number in (7, 3, 7):
        body.run(number, 0.0)
    assert count_of(tmp_path) == 3
    assert sorted(ended(file) for file in tmp_path.iterdir()) == [[], [7, 3, 7]]
