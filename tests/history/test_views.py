"""What is computed from the tables: workflows, queues, lost time, unusual times, two periods."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.history.published import Rows, publish
from tests.history.told import Told, Try, at, seconds
from umbel.history.query import read
from umbel.history.tables import Wanted
from umbel.history.views import PATH_MAX, VIEWS

PARTS = ("queue_s", "run_s", "retry_s", "follow_s")


def ask(lake: Path, rows: Rows, sql: str, wanted: Wanted | None = None) -> list[dict[str, Any]]:
    publish(lake, rows)
    return read(lake, lambda tables: tables.rows(sql), wanted=wanted)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_the_columns_that_are_described(tmp_path: Path, name: str) -> None:
    view = VIEWS[name]
    instants = ", ".join(["timestamptz '2026-11-15'"] * len(view.parameters))
    source = view.source if name != "compared" else f"compared({instants})"
    publish(tmp_path, {})
    answer = read(tmp_path, lambda tables: tables.ask(f"select * from {source}"))
    kinds = {"VARCHAR": {"text", "json"}, "BIGINT": {"int"}, "DOUBLE": {"float"}}
    kinds |= {"TIMESTAMP WITH TIME ZONE": {"instant"}}
    assert answer.columns == view.table.names
    assert set(view.table.key) <= set(view.table.names)
    for column, kind in zip(view.table.columns, answer.types, strict=True):
        assert column.kind in kinds[kind], column.name


def test_the_critical_path_of_a_chord_runs_through_its_slowest_part(tmp_path: Path) -> None:
    """Sent at 0; the parts at 3; the body by the part that ended last."""
    told = Told()
    told.task("split", Try(0, (1,), 3.25))
    told.task("quick", Try(3, (3.5,), 4), root="split", parent="split")
    told.task("slow", Try(3, (5,), 11, "RETRY"), Try(11, (14,), 20), root="split", parent="split")
    told.task("body", Try(21, (24,), 26), root="split", parent="slow", eta=23)
    told.task("alone", Try(0, (1,), 100))
    [flow] = ask(tmp_path, told.rows, "select * from workflows")
    assert (flow["root_id"], flow["name"], flow["n_tasks"], flow["n_retried"]) == ("split", "split", 4, 1)
    assert json.loads(flow["path"]) == ["split", "slow", "body"]
    assert flow["path_names"] == "split → slow → body"
    assert flow["duration_s"] == 26
    # split waited 1 and ran 2 until it had sent the parts; slow waited 2, was in vain for 9, ran 6; the body
    # was sent a second after that, due 2 later, waited 1 and ran 2.
    assert [flow[part] for part in PARTS] == pytest.approx([1 + 2 + 1, 2 + 6 + 2, 9, 1 + 2])
    assert sum(flow[part] for part in PARTS) == pytest.approx(flow["duration_s"])


def test_a_task_whose_sending_was_not_recorded_waits_from_the_end_of_its_parent_on(tmp_path: Path) -> None:
    """A worker takes a message when it has room, so what is known first of a follow-up may come late."""
    told = Told()
    told.task("first", Try(0, (1,), 3))
    told.task("next", Try(None, (9,), 10, received=8), root="first", parent="first")
    told.task("early", Try(0, (1,), 5))
    told.task("within", Try(None, (7,), 8, received=4), root="early", parent="early")
    within, after = ask(tmp_path, told.rows, "select * from workflows order by root_id")
    assert [after[part] for part in PARTS] == pytest.approx([1 + 6, 2 + 1, 0, 0])
    assert [within[part] for part in PARTS] == pytest.approx([1 + 3, 3 + 1, 0, 0])


def test_a_task_that_runs_on_after_what_it_sent_is_the_end_of_the_path(tmp_path: Path) -> None:
    told = Told()
    told.task("parent", Try(0, (0,), 50))
    told.task("child", Try(10, (10,), 20), root="parent", parent="parent")
    [flow] = ask(tmp_path, told.rows, "select * from workflows")
    assert (json.loads(flow["path"]), flow["run_s"]) == (["parent"], 50)


def test_a_workflow_that_has_not_ended_says_so_and_one_of_nothing_ended_has_no_path(tmp_path: Path) -> None:
    told = Told()
    told.task("a", Try(0, (1,), 2))
    told.task("b", Try(2), root="a", parent="a")
    told.task("c", Try(0, (1,)))
    told.task("d", Try(2), root="c", parent="c")
    first, second = ask(tmp_path, told.rows, "select * from workflows order by root_id")
    assert (first["n_open"], json.loads(first["path"]), first["duration_s"]) == (1, ["a"], 2)
    assert (second["n_open"], second["path"], second["duration_s"]) == (2, None, None)


def test_parents_in_a_circle_and_very_long_chains_come_to_an_end(tmp_path: Path) -> None:
    told = Told()
    told.task("root", Try(0, (0,), 1), parent="root")  # as a retry names it
    told.task("x", Try(1, (1,), 2), root="root", parent="y")
    told.task("y", Try(2, (2,), 3), root="root", parent="x")
    for number in range(PATH_MAX + 20):
        before = f"long{number - 1}" if number else None
        told.task(f"long{number}", Try(number, (number,), number + 1), root="long0", parent=before)
    flows = {row["root_id"]: row for row in ask(tmp_path, told.rows, "select * from workflows")}
    assert sorted(json.loads(flows["root"]["path"])) == ["x", "y"]
    assert flows["long0"]["n_path"] == PATH_MAX
    assert flows["long0"]["n_tasks"] == PATH_MAX + 20


def test_a_workflow_is_whole_although_only_a_part_of_it_is_wanted(tmp_path: Path) -> None:
    told = Told()
    told.task("a", Try(0, (1,), 2), name="shop.a")
    told.task("b", Try(2, (100,), 110), name="shop.b", root="a", parent="a")
    told.task("c", Try(0, (1,), 2), name="other.c")
    told.task("d", Try(2, (3,), 4), name="other.d", root="c", parent="c")
    wanted = Wanted(since=at(60), task="shop.*")
    [flow] = ask(tmp_path, told.rows, "select * from workflows", wanted)
    assert (flow["name"], flow["n_tasks"], flow["duration_s"]) == ("shop.a", 2, 110)


def test_a_queue_is_as_deep_as_what_was_sent_and_had_not_started(tmp_path: Path) -> None:
    told = Told()
    for number in range(10):  # all sent at 5; one starts every ten seconds, and runs for ten
        told.task(f"t{number}", Try(5, (10.0 + 10 * number,), 20.0 + 10 * number), name="t")
    told.task("never", Try(70), name="t")
    told.task("other", Try(5, (6,), 7), queue=None, name="t")
    rows = ask(tmp_path, told.rows, "select * from queues order by queue nulls last, minute")
    first, second, other = rows
    assert (first["queue"], seconds(first["minute"]), seconds(second["minute"])) == ("q", 0, 60)
    assert (first["n_sent"], first["n_started"], first["n_ended"]) == (10, 5, 4)
    assert (first["depth"], first["depth_max"], first["running"]) == (5, 10, 1)
    assert (first["wait_p50_s"], first["wait_max_s"]) == (25, 45)
    assert first["backlog_s"] == 5 * 60 / 5
    assert (second["depth"], second["depth_max"], second["running_max"]) == (1, 5, 1)
    assert (other["queue"], other["depth"], other["n_ended"]) == (None, 0, 1)


def test_an_attempt_whose_start_was_not_recorded_waits_only_while_its_task_does(tmp_path: Path) -> None:
    """Of Celery's earlier attempts only the receipts are known."""
    told = Told()
    told.task("t", Try(None, received=1), Try(None, (31,), 32, received=30))
    told.task("due", Try(0, (50,), 51, waited=2.0))
    [row] = ask(tmp_path, told.rows, "select * from queues")
    assert (row["depth"], row["running"]) == (0, 0)
    assert (
        row["depth_max"] == 1
    )  # the one that came at 1 left at once; that of a countdown came when it was due


def test_time_is_lost_to_attempts_in_vain_and_to_repeats(tmp_path: Path) -> None:
    told = Told()
    told.task("good", Try(0, (1,), 2))
    told.task("retried", Try(0, (1,), 4, "RETRY"), Try(4, (10,), 12), name="pay")
    told.task("failed", Try(0, (1,), 6, "FAILURE"), name="pay")
    told.task("repeated", Try(0, (1, 21), 30), name="pack")
    rows = ask(tmp_path, told.rows, "select * from lost_time order by task_id")
    found = {
        row["task_id"]: [row[f"{what}_s"] for what in ("failed", "again", "repeated", "lost")] for row in rows
    }
    assert found == {"failed": [5, 0, 0, 5], "repeated": [0, 0, 20, 20], "retried": [3, 6, 0, 9]}
    assert [row["n_repeats"] for row in rows] == [0, 1, 0]


def test_a_step_far_from_the_usual_is_named_with_what_is_usual(tmp_path: Path) -> None:
    told = Told()
    number = 0
    for step in range(20):
        many = {7: 0, 11: 90}.get(step, 20 + step % 3)
        for place in range(many):
            start, ran = step * 600 + place, 30.0 if step == 15 else 2.0
            told.task(f"t{number}", Try(start - 1, (start,), start + ran), name="shop.pay")
            number += 1
    rows = ask(tmp_path, told.rows, "select * from unusual() order by step_at, what")
    assert [(seconds(row["step_at"]) / 600, row["what"]) for row in rows] == [
        (7, "rate"),
        (11, "rate"),
        (15, "run"),
    ]
    none, lots, slow = rows
    assert none["detail"] == "shop.pay: 0 attempts ended in the 10 min from 2026-11-15 10:10, usually 21"
    assert (lots["n"], lots["value"], lots["usual"]) == (90, 90, 21)
    assert slow["detail"].endswith("ran longer than 30 s, usually 2 s")
    assert all(abs(row["score"]) > 5 for row in rows)


def test_what_has_no_usual_is_not_judged(tmp_path: Path) -> None:
    """Idle in most steps; too few steps; ordinary variation; a clock in another millennium."""
    told = Told()
    for step in range(0, 100, 5):
        told.task(f"seldom{step}", Try(step * 600, (step * 600,), step * 600 + 1), name="seldom")
    for number in range(60):
        told.task(f"short{number}", Try(number, (number,), number + 1.0 + number % 7), name="short")
    for number in range(300):
        start = number * 60
        told.task(f"even{number}", Try(start, (start,), start + 1 + number % 5 * 0.3), name="even")
    told.attempts[0]["ended_at"] = told.attempts[0]["ended_at"].replace(year=9000)
    assert ask(tmp_path, told.rows, "select * from unusual()") == []


def test_two_periods_are_compared_task_by_task(tmp_path: Path) -> None:
    told = Told()
    for number in range(10):
        told.task(f"b{number}", Try(number, (number + 1,), number + 3), name="pay")
    for number in range(20):
        outcome = "FAILURE" if number % 4 == 0 else "SUCCESS"
        told.task(f"a{number}", Try(100 + number, (104 + number,), 106 + number, outcome), name="pay")
    told.task("new", Try(100, (101,), 102), name="new")
    new, pay = ask(
        tmp_path,
        told.rows,
        "select * from compared(timestamptz '2026-11-15 09:00', timestamptz '2026-11-15 09:01',"
        " timestamptz '2026-11-15 09:01', timestamptz '2026-11-15 10:00') order by name",
    )
    assert (pay["n_before"], pay["n_after"], pay["n_change"]) == (10, 20, 1)
    assert (pay["wait_p50_s_before"], pay["wait_p95_s_after"], pay["wait_p50_s_change"]) == (1, 4, 3)
    assert pay["run_p95_s_change"] == 0
    assert (pay["failure_rate_before"], pay["failure_rate_after"]) == (0, 0.25)
    assert pay["failure_rate_change"] == 0.25
    assert (new["n_before"], new["n_change"], new["wait_p50_s_before"]) == (0, None, None)
