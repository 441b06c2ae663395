"""D4: `umbel history` reads the published tables: filters, formats, refusals and exit codes."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.history.published import Story, publish
from umbel.cli import exits
from umbel.cli.main import main
from umbel.events.tables import TABLES

STORY = Story(tasks=120)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("lake"), STORY.rows)


class Reader:
    def __init__(
        self, lake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._lake, self._monkeypatch, self._capsys = lake, monkeypatch, capsys

    def __call__(self, *arguments: str, code: int = exits.OK) -> tuple[str, str]:
        self._monkeypatch.setattr(sys, "argv", ["umbel", "history", *arguments])
        self._monkeypatch.setenv("UMBEL_HISTORY_LAKE", str(self._lake))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert ended.value.code == code, err
        return out, err

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self(*arguments, "--json")[0])
        return rows


@pytest.fixture
def history(lake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Reader:
    return Reader(lake, monkeypatch, capsys)


def test_tables_are_listed_with_their_rows(history: Reader) -> None:
    listed = history.rows("tables")
    assert {one["name"]: one["rows"] for one in listed} == {name: len(STORY.rows[name]) for name in TABLES}
    assert all(column["doc"] for one in listed for column in one["columns"])
    out, _ = history("tables", "anomalies")
    assert all(name in out for name in TABLES["anomalies"].names)


@pytest.mark.parametrize("name", [name for name in TABLES if name != "timeline"])
def test_a_table_is_listed_newest_first_with_every_column_in_json(history: Reader, name: str) -> None:
    rows = history.rows(name, "--limit", "1000")
    assert len(rows) == len(STORY.rows[name])
    assert all(tuple(row) == TABLES[name].names for row in rows)
    out, err = history(name, "--limit", "1000")
    assert (len(out.splitlines()), err) == (len(rows) + 1, "" if rows else "- none -\n")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--state", "failure"), lambda row: row["state"] == "FAILURE"),
        (("--state", "FAILURE", "--state", "SUCCESS"), lambda row: True),
        (("--name", "shop.*"), lambda row: row["name"].startswith("shop.")),
        (("--worker", "w1@*"), lambda row: row["worker"] == "w1@shop"),
        (("--task", "0000001"), lambda row: row["task_id"].startswith("0000001")),
        (
            ("--since", "2026-11-15T09:30"),
            lambda row: row["state_at"].hour * 60 + row["state_at"].minute >= 570,
        ),
        (
            ("--until", "2026-11-15T10:30+01:00"),
            lambda row: (row["state_at"].hour, row["state_at"].minute) < (9, 30),
        ),
        (("--name", "x' or 1=1 --"), lambda row: False),
    ],
)
def test_filters_choose_tasks(history: Reader, arguments: tuple[str, ...], wanted: Any) -> None:
    chosen = {row["task_id"] for row in history.rows("tasks", "--limit", "1000", *arguments)}
    assert chosen == {row["task_id"] for row in STORY.rows["tasks"] if wanted(row)}


def test_times_can_be_told_from_now(history: Reader) -> None:
    assert history.rows("anomalies", "--until", "52000w") == []
    assert len(history.rows("anomalies", "--since", "2000w")) == len(STORY.rows["anomalies"])


def test_sql_prints_tables_json_and_csv(history: Reader) -> None:
    query = "select state, count(*) as n, max(state_at) last_at from tasks group by state order by state"
    rows = history.rows("sql", query)
    assert [row["n"] for row in rows] == [
        sum(row["state"] == state for row in STORY.rows["tasks"]) for state in ("FAILURE", "SUCCESS")
    ]
    assert rows[0]["last_at"].endswith("Z")
    printed = list(csv.DictReader(io.StringIO(history("sql", "--csv", query)[0])))
    assert printed == [{name: str(value) for name, value in row.items()} for row in rows]
    assert history("sql", query)[0].splitlines()[0].split() == ["state", "n", "last_at"]


def test_a_cut_answer_is_said_on_stderr(history: Reader) -> None:
    out, err = history("sql", "--limit", "2", "select task_id from tasks")
    assert len(out.splitlines()) == 3
    assert "only the first 2 rows" in err
    assert "only the first 5 rows" in history("tasks", "--limit", "5")[1]


SLOW = "select count(*) from range(10000000000) a, range(1000) b where a.range % 7 = b.range"


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("sql", "selec"), exits.FAILED, "line 1, column 1"),
        (("sql", "--timeout", "1e-9", SLOW), exits.FAILED, "1e-09 s; narrow it, or raise --timeout"),
        (("sql", "--csv", "--json", "select 1"), exits.USAGE, "one of --csv and --json"),
        (("tables", "taks"), exits.USAGE, "did you mean 'tasks'"),
        (("tasks", "--since", "tomorrow"), exits.USAGE, "'tomorrow' is not a time"),
        (("tasks", "--lake", "nowhere"), exits.NOT_FOUND, "umbel history build"),
        (("sql", "--lake", "nowhere", "select 1"), exits.NOT_FOUND, "umbel history build"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    history: Reader, arguments: tuple[str, ...], code: int, problem: str
) -> None:
    out, err = history(*arguments, code=code)
    assert (out, len(err.splitlines())) == ("", 1)
    assert problem in err
