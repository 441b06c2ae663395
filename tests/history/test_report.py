"""D4: the report, as a browser shows it: its figures are those of the tables, and nothing else happens."""

import json
import re
import shutil
import struct
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from tests.history.browser import Shown, picture, show
from tests.history.published import BEGAN, Story, publish
from umbel.events.tables import TABLES
from umbel.history import figures as work_figures
from umbel.history.figures import LISTED_MAX, NAMES_MAX, STEPS_MAX, Figures, figures
from umbel.history.markup import count, duration, instant, percent, rate
from umbel.history.query import Tables, read
from umbel.history.report import main_figures, page
from umbel.history.tables import Wanted, percentiles

NASTY = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;'\""
)
STORY = Story(tasks=400)
CHROMIUM = "/usr/bin/chromium"
SERIOUS = {"serious", "critical"}


def with_nasty_names() -> Story:
    """The same story with names that would be markup if they could."""
    story = Story(tasks=400)
    for table, column in (("attempts", "name"), ("tasks", "name"), ("attempts", "exception")):
        for row in story.rows[table]:
            if row["name"] == "mail.send" or row["name"] == NASTY:
                row[column] = NASTY
    for row in story.rows["workers"]:
        row["hostname"] = row["hostname"].replace("w3@shop", NASTY)
    for row in (*story.rows["attempts"], *story.rows["tasks"]):
        row["queue"] = NASTY if row["name"] == NASTY else "celery"
    # Workflows: of five tasks each is sent by the one before it.
    for before, row in pairwise(story.rows["tasks"]):
        before["root_id"] = before.get("root_id", before["task_id"])
        if int(row["task_id"][:8], 16) % 5:
            row |= {"root_id": before["root_id"], "parent_id": before["task_id"]}
    for row in (*story.rows["elections"], *story.rows["anomalies"]):
        row |= {name: NASTY for name in ("topic", "winner", "detail", "subject") if name in row}
    return story


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def found(folder: Path) -> Figures:
    return read(publish(folder / "lake", with_nasty_names().rows), figures)


@pytest.fixture(scope="module")
def file(folder: Path, found: Figures) -> Path:
    path = folder / "report.html"
    path.write_text(page(found, title=f"History {NASTY}"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shown(folder: Path, file: Path) -> Shown:
    assert shutil.which("chromium"), "chromium is not installed: scripts/setup browser"
    return show(file, folder / "profile")


def test_the_page_is_whole_and_quiet(shown: Shown) -> None:
    assert shown.console == []
    assert list(shown.sections) == [
        *("throughput", "waiting-time", "run-time", "by-task", "by-queue", "by-worker", "workflows"),
        *("lost-time", "unusual-times", "worker-sessions", "elections", "clock-skew", "anomalies"),
    ]
    assert shown.elements.count("h1") == 1
    assert shown.elements.count("figcaption") == shown.elements.count("figure") == 7


def test_names_are_text_whatever_is_in_them(shown: Shown, file: Path) -> None:
    assert "script" not in shown.elements
    assert "img" not in shown.elements
    assert "owned" not in re.findall(r"<title>(.*?)</title>", shown.html)
    assert any(row[0] == NASTY for row in shown.tables["by-task-table"])
    assert "http" not in file.read_text().replace("http-equiv", "")


def test_the_main_figures_are_those_of_the_tables(shown: Shown, found: Figures) -> None:
    tasks, attempts = STORY.rows["tasks"], STORY.rows["attempts"]
    states = [row["state"] for row in tasks]
    assert shown.figures == main_figures(found)
    assert shown.figures["tasks"] == count(len(tasks))
    assert shown.figures["SUCCESS"] == count(states.count("SUCCESS"))
    assert shown.figures["FAILURE"] == count(states.count("FAILURE"))
    assert shown.figures["tried again"] == count(sum(row["retries"] > 0 for row in tasks))
    assert shown.figures["attempts"] == count(len(attempts))
    assert shown.figures["events"] == count(len(STORY.rows["timeline"]))
    waits = sorted(row["wait_s"] for row in attempts)
    middle = (waits[(len(waits) - 1) // 2] + waits[len(waits) // 2]) / 2
    assert shown.figures["wait p50"] == duration(middle)


@pytest.mark.parametrize(("table", "column"), [("by-task-table", "name"), ("by-worker-table", "worker")])
def test_the_rows_by_task_and_by_worker_are_those_of_the_tables(
    shown: Shown, table: str, column: str
) -> None:
    attempts = with_nasty_names().rows["attempts"]
    headings, *rows = shown.tables[table]
    assert headings[2:7] == ["attempts", "succeeded", "failed", "retried", "failure rate"]
    assert {row[0] for row in rows} == {one[column] for one in attempts}
    for row in rows:
        outcomes = [one["outcome"] for one in attempts if one[column] == row[0]]
        numbers = [outcomes.count(name) for name in ("SUCCESS", "FAILURE", "RETRY")]
        assert row[2:6] == [count(len(outcomes)), *map(count, numbers)]
        assert row[6] == percent(numbers[1] / (numbers[0] + numbers[1]))


def test_the_steps_add_up_to_the_totals(found: Figures) -> None:
    assert 0 < len(found.steps) <= STEPS_MAX + 1
    for name in ("n_attempts", "n_succeeded", "n_failed", "n_retried"):
        inside = sum(row.get(name, 0) for row in found.steps)
        assert inside + (found.totals["n_outside"] if name == "n_attempts" else 0) == found.totals[name]


def test_sessions_elections_skew_and_anomalies_are_listed(shown: Shown) -> None:
    endings = [row[4] for row in shown.tables["sessions-table"][1:]]
    assert sorted(endings) == sorted(row["ending"] for row in STORY.rows["workers"])
    assert len(shown.tables["elections-table"]) == 1 + len(STORY.rows["elections"])
    [skewed] = [row for row in shown.tables["skew-table"] if row[0] == "w2@shop"]
    assert skewed[3] == "+295 ms"
    assert shown.tables["anomaly-kinds-table"][1][:2] == ["time_skew", "1"]
    assert shown.tables["anomalies-table"][1][:3] == ["time_skew", instant(BEGAN.timestamp()), NASTY]


def test_it_is_drawn(folder: Path, file: Path) -> None:
    drawn = picture(file, folder / "profile", folder / "report.png")
    assert drawn.startswith(b"\x89PNG")
    assert struct.unpack(">II", drawn[16:24]) == (1100, 3600)


@pytest.mark.parametrize("width", [390, 1100])
def test_the_page_is_as_wide_as_the_screen_and_as_dark_as_the_reader_wants(file: Path, width: int) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        grounds = set()
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            page.goto(file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            low = [one for one in Axe().run(page).response["violations"] if one["impact"] in SERIOUS]
            assert [(one["id"], len(one["nodes"])) for one in low] == []
        browser.close()
    assert len(grounds) == 2


def test_workflows_and_queues_are_shown_with_their_names_as_text(shown: Shown, found: Figures) -> None:
    headings, *kinds = shown.tables["workflows-table"]
    assert headings[:4] == ["first task", "", "workflows", "tasks"]
    assert sum(int(row[2]) for row in kinds) == 80  # of 400 tasks, five each
    assert sum(int(row[3]) for row in kinds) == 400
    assert len(shown.tables["slowest-table"]) == 11
    assert NASTY in {row[0] for row in shown.tables["depths-table"]}
    assert any(NASTY in row[0] for row in shown.tables["lost-table"])
    assert found.work.depths is not None
    peaks = {row["queue"]: row["peak"] for row in found.work.depths.queues}
    assert {row[0]: int(row[1]) for row in shown.tables["depths-table"][1:]} == peaks


def test_workflows_that_are_read_in_parts_are_the_same(
    folder: Path, found: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten million tasks do not fit into the memory that a query may use."""
    shares = percentiles("duration_s", "p{}_s", (50, 95))
    sql = f"select name, count(*) as n, {shares}, sum(queue_s) as queue_s from workflows group by name"
    wanted = {row["name"]: row for row in read(folder / "lake", lambda tables: tables.rows(sql))}
    monkeypatch.setattr(work_figures, "TASKS_AT_ONCE", 50)
    parts = read(folder / "lake", figures).work
    for kinds in (found.work.workflow_kinds, parts.workflow_kinds):
        assert len(kinds) > 1
        for row in kinds:
            assert [row[key] for key in ("n", "p50_s", "p95_s", "queue_s")] == pytest.approx(
                [wanted[row["name"]][key] for key in ("n", "p50_s", "p95_s", "queue_s")]
            )
    assert [row["name"] for row in parts.workflow_kinds] == [row["name"] for row in found.work.workflow_kinds]
    assert parts.slowest == found.work.slowest


@pytest.mark.usefixtures("found")
def test_as_many_parts_are_read_as_whole_workflows_need(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only one task of each is wanted."""
    monkeypatch.setattr(work_figures, "TASKS_AT_ONCE", 50)
    asked: list[Any] = []
    rows = Tables.rows

    def spied(tables: Tables, sql: str, *given: Any, **options: Any) -> list[dict[str, Any]]:
        asked.extend(given)
        return rows(tables, sql, *given, **options)

    monkeypatch.setattr(Tables, "rows", spied)
    few = read(folder / "lake", figures, wanted=Wanted(task=NASTY.replace("[", "[[]")))
    in_trees = sum(row["n_tasks"] for row in few.work.workflow_kinds)
    assert few.totals["tasks"] * 2 < in_trees
    parts = in_trees // 50 + 1
    assert [one for one in asked if "part" in one] == [{"part": n, "parts": parts} for n in range(parts)]


def test_only_what_is_wanted_is_in_the_report(tmp_path: Path) -> None:
    since = BEGAN + timedelta(minutes=30)
    publish(tmp_path, STORY.rows)
    found = read(tmp_path, figures, wanted=Wanted(since=since, task="shop.*"))
    wanted = [
        row for row in STORY.rows["attempts"] if row["ended_at"] >= since and row["name"].startswith("shop.")
    ]
    assert found.totals["n_attempts"] == len(wanted)
    assert {row["key"] for row in found.tasks} == {"shop.pack", "shop.pay"}
    assert found.period is not None and found.period.start >= since.timestamp()
    assert "Only tasks shop.*, since 2026-11-15 09:30:00." in page(found)


def test_what_fits_nothing_says_what_was_asked_and_what_there_is(tmp_path: Path) -> None:
    publish(tmp_path, STORY.rows)
    text = page(read(tmp_path, figures, wanted=Wanted(since=BEGAN + timedelta(days=1))))
    assert "No attempt fits: since 2026-11-16 09:00:00. The history goes from 2026-11-15 09:00:00 to" in text


def test_one_of_a_kind_is_said_in_the_singular(tmp_path: Path) -> None:
    story = Story(tasks=0)
    story.rows["workers"], story.rows["elections"] = story.rows["workers"][:1], story.rows["elections"][:1]
    story.rows["timeline"].append(STORY.rows["timeline"][0])
    text = page(read(publish(tmp_path, story.rows), figures))
    assert "1 session of 1 node" in text and "1 election;" in text


def test_an_empty_history_says_so_in_every_section(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    path.write_text(page(read(publish(tmp_path / "lake", {}), figures)), encoding="utf-8")
    empty = show(path, folder / "profile")
    assert empty.console == []
    assert "svg" not in empty.elements
    for section, said in {
        "throughput": "No task is known: no worker's events were recorded",
        "waiting-time": "Nothing was measured. No task is known",
        "by-task": "No tasks are known",
        "by-queue": "No queues are known",
        "workflows": "No task led to another one",
        "lost-time": "None: no attempt failed",
        "unusual-times": "None: no task's rate",
        "worker-sessions": "No worker sent events",
        "elections": "There were no elections",
        "clock-skew": "No event has",
        "anomalies": "None",
    }.items():
        assert said in empty.sections[section]


def test_a_table_that_was_not_built_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    publish(tmp_path, STORY.rows)
    manifest = tmp_path / "tables/_manifest/000001.json"
    told = json.loads(manifest.read_text())
    for name in ("anomalies", "timeline"):
        del told["tables"][name]
    manifest.write_text(json.dumps(told))
    found = read(tmp_path, figures)
    assert main_figures(found)["anomalies"] == main_figures(found)["events"] == "–"
    assert "this build does not contain the table anomalies" in page(found)
    assert "There were no elections" not in page(found)


def test_what_is_too_much_is_put_together_and_counted(tmp_path: Path) -> None:
    story = Story(tasks=0)
    for number in range(NAMES_MAX + 5):
        story.rows["attempts"].append(
            STORY.rows["attempts"][0]
            | {"task_id": f"t{number}", "name": f"n{number:02d}", "outcome": "SUCCESS", "ended_at": BEGAN}
        )
    story.rows["anomalies"] *= LISTED_MAX + 1
    found = read(publish(tmp_path, story.rows), figures)
    assert [row["keys"] for row in found.tasks] == [1] * NAMES_MAX + [5]
    assert found.tasks[-1]["n_attempts"] == 5
    text = page(found)
    assert "5 other tasks" in text
    assert f"The last {LISTED_MAX} of {LISTED_MAX + 1}" in text


def test_a_node_with_an_absurd_clock_does_not_stretch_the_time_shown(tmp_path: Path) -> None:
    story = Story(tasks=50)
    story.rows["attempts"][0]["ended_at"] = BEGAN.replace(year=9999)
    found = read(publish(tmp_path, story.rows), figures)
    assert found.period is not None
    assert found.period.end - found.period.start < 3700
    assert found.totals["n_outside"] == 1
    assert "1 attempt ended at times outside" in page(found)


def test_attempts_that_all_ended_outside_the_period_are_said_and_not_denied(tmp_path: Path) -> None:
    """It said that nothing had ended, beside their number."""
    story = Story(tasks=50)
    for row in story.rows["attempts"]:
        row["ended_at"] = row["ended_at"].replace(year=2031)
    found = read(publish(tmp_path, story.rows), figures)
    ended, text, main = len(story.rows["attempts"]), page(found), main_figures(found)
    assert "No attempt of a task has ended" not in text and "Nothing was measured" not in text
    assert f"Drawn is none: {ended} attempts ended, at times outside the period shown" in text
    p50 = duration(found.totals["run_p50_s"])
    assert text.count("Not drawn: no attempt that was measured ended in the period shown") == 2
    assert f"p50 {p50}" in text
    assert main["mean throughput"] == main["peak throughput"] == "–"


def test_throughput_is_named_as_a_mean_with_the_peak_beside_it(tmp_path: Path) -> None:
    """Idle times are in the mean: a minute of work in a day is not a slow day."""
    story = Story(tasks=600)
    story.rows["timeline"].append(
        story.rows["timeline"][0] | {"rank": 99, "recorded_at": BEGAN + timedelta(hours=100)}
    )
    found = read(publish(tmp_path, story.rows), figures)
    main, steps = main_figures(found), [row.get("n_attempts", 0) for row in found.steps]
    assert found.period is not None and sum(steps) == len(story.rows["attempts"])
    assert main["mean throughput"] == rate(sum(steps) / (found.period.end - found.period.start))
    assert main["peak throughput"] == rate(max(steps) / found.period.step_s) != main["mean throughput"]
    assert f"Mean over the whole period, idle times included: {main['mean throughput']}" in page(found)


def test_errors_that_differ_in_a_number_are_one(tmp_path: Path) -> None:
    story = Story(tasks=200)
    failed = [row for row in story.rows["attempts"] if row["outcome"] == "FAILURE"]
    for number, row in enumerate(failed):
        row["exception"] = f"ValueError('order {number}')"
    errors = read(publish(tmp_path, story.rows), figures).errors
    assert ("ValueError('order #')", len(failed)) in {(row["exception"], row["n"]) for row in errors}


def test_every_figure_comes_from_one_build(tmp_path: Path) -> None:
    """Two builds cannot be mixed on one page: all is read in one go, or read again."""
    publish(tmp_path, STORY.rows)
    builds: list[int] = []

    def work(tables: Tables) -> Figures:
        builds.append(tables.build.number)
        if len(builds) == 1:
            publish(tmp_path, dict.fromkeys(TABLES, ()), number=2)
            shutil.rmtree(tmp_path / "tables/b1")
        return figures(tables)

    assert read(tmp_path, work).totals["tasks"] == 0
    assert builds == [1, 2]
