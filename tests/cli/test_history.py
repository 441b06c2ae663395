"""D4: `umbel history` reads the published tables: filters, formats, refusals and exit codes."""

import csv
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.history.published import Story, publish
from umbel.cli import exits
from umbel.cli.main import main
from umbel.events.tables import TABLES
from umbel.history.views import VIEWS

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
    counted = {one["name"]: one["rows"] for one in listed if one["rows"] is not None}
    assert counted == {name: len(STORY.rows[name]) for name in TABLES}
    assert [one["name"] for one in listed if one["rows"] is None] == list(VIEWS)
    assert all(column["doc"] for one in listed for column in one["columns"])
    out, _ = history("tables", "anomalies")
    assert all(name in out for name in TABLES["anomalies"].names)
    assert "critical path" in history("tables", "workflows")[0]


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
        (("sql", "--timeout", "0.5", SLOW), exits.FAILED, ", or raise --timeout"),
        (("sql", "--csv", "--json", "select 1"), exits.USAGE, "one of --csv and --json"),
        (("tables", "taks"), exits.USAGE, "did you mean 'tasks'"),
        (("tasks", "--since", "tomorrow"), exits.USAGE, "'tomorrow' is not a time"),
        (("slo", "p95 wait > 2s"), exits.USAGE, "'p95 wait > 2s': a duration has an upper limit; write <"),
        (("slo", "p95 wait < 2s", "--task", "none"), exits.NOT_FOUND, "could be judged (tasks none)"),
        (("slo", "--lake", "nowhere", "p95 wait < 2s"), exits.NOT_FOUND, "umbel history build"),
        (("compare",), exits.USAGE, "got 0 periods; give two periods, as in 2d..1d 1d.."),
        (("compare", "2d..1d", "1d"), exits.USAGE, "'1d' is not a period; write"),
        (("compare", "1d..2d", "1d.."), exits.USAGE, "'1d..2d' ends before it begins"),
        (("compare", "2d..1d", "1d..", "--mark", "1d"), exits.USAGE, "got 2 periods and a mark"),
        (("compare", "--mark", "1d", "--since", "1h"), exits.USAGE, "is not between --since and --until"),
        (("duckdb", "nowhere/file.db"), exits.FAILED, "cannot write 'nowhere/file.db'"),
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


@pytest.mark.parametrize("name", ["workflows", "queues", "lost_time", "unusual"])
def test_views_are_listed_as_tables_are(history: Reader, name: str) -> None:
    rows = history.rows(name.replace("_", "-"))
    assert all(tuple(row) == VIEWS[name].table.names for row in rows)
    out, _ = history(name.replace("_", "-"))
    assert len(out.splitlines()) == len(rows) + 1


def test_lost_time_is_that_of_the_queue_and_the_outcome_that_are_asked_for(history: Reader) -> None:
    failed = [row["task_id"] for row in STORY.rows["tasks"] if row["state"] == "FAILURE"]
    found = history.rows("lost-time", "--state", "failure", "--queue", "cel*")
    assert sorted(row["task_id"] for row in found) == sorted(failed)
    assert history.rows("lost-time", "--queue", "other") == []


def test_a_promise_that_was_kept_ends_with_0_and_one_that_was_not_with_1(history: Reader) -> None:
    out, _ = history("slo", "p95 wait < 1h", "--task", "shop.*")
    assert "kept       yes" in out
    out, _ = history("slo", "p95 wait < 1us", "--json", code=exits.FAILED)
    told = json.loads(out)
    waits = sorted(row["wait_s"] for row in STORY.rows["attempts"])
    assert (told["is_kept"], told["n"], told["n_bad"]) == (False, len(waits), len(waits))
    assert told["figure"] == waits[-(-95 * len(waits) // 100) - 1]
    assert told["burn_rate"] == pytest.approx(20)


def test_tasks_are_compared_before_and_after_a_mark_or_in_two_periods(history: Reader) -> None:
    middle, hour = "2026-11-15T09:30", "2026-11-15T09:00"
    marked = history.rows("compare", "--mark", middle)
    assert marked == history.rows("compare", f"{hour}..{middle}", f"{middle}..")
    for row in marked:
        ended = [one["ended_at"] for one in STORY.rows["attempts"] if one["name"] == row["name"]]
        assert row["n_before"] == sum((at.hour, at.minute) < (9, 30) for at in ended)
        assert row["n_before"] + row["n_after"] == len(ended)
    out, _ = history("compare", "--mark", middle, "--task", "shop.pay")
    assert len(out.splitlines()) == 2 and " → " in out


def test_other_tools_find_tables_and_views_in_a_database(history: Reader, tmp_path: Path) -> None:
    file = tmp_path / "history.duckdb"
    for _ in range(2):  # also over one that is there
        _, err = history("duckdb", str(file))
        assert err == f"umbel: wrote {file}, build 1\n"
    with duckdb.connect(str(file), read_only=True) as connection:
        assert connection.execute("select count(*) from tasks").fetchone() == (len(STORY.rows["tasks"]),)
        assert connection.execute("select count(*) from unusual(step_s := 3600)").fetchone() == (0,)
    assert sorted(tmp_path.iterdir()) == [file]


def test_a_database_is_not_written_through_a_link_that_somebody_put_beside_it(
    history: Reader, tmp_path: Path
) -> None:
    target, link = tmp_path / "target", tmp_path / f".history.duckdb.{os.getpid()}"
    link.symlink_to(target)  # where the draft was
    history("duckdb", str(tmp_path / "history.duckdb"))
    assert link.is_symlink() and not target.exists()
    assert not (tmp_path / "history.duckdb").is_symlink()
