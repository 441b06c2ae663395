"""The demo as a user runs it: it ends well, its figures agree with the ledger, and nothing is left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.scenarios.places import place
from tests.waiting import wait_until

SOAK = bool(os.environ.get("UMBEL_SOAK"))
TIMES = 20 if SOAK else 1
SECONDS = "30" if SOAK else "6"
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(20_000 if SOAK else 400)]


# The embedded one is the one with history, below.
@pytest.fixture(params=["redis", "amqp"] if SOAK else ["amqp"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with place(request.param, tmp_path) as made:
        yield made.broker


def test_it_ends_well_on_every_server_and_stays_with_a_page_until_it_is_interrupted(
    broker: str, tmp_path: Path
) -> None:
    for _ in range(2 if SOAK else 1):  # the second meets what the first left there
        process = _demo(tmp_path, "-b", broker, "--seconds", "5", "--no-history", "--json", "--stay")
        with httpx.Client(follow_redirects=True, timeout=60) as browser:
            _look_at_its_pages(process, browser)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        _check(json.loads(output), tmp_path / "umbel-demo")
        _nothing_left(tmp_path)


def _look_at_its_pages(process: subprocess.Popen[str], browser: httpx.Client) -> None:
    assert process.stderr is not None
    addresses, told = list[str](), list[str]()
    for line in process.stderr:
        told.append(line)
        addresses += [word for word in line.split() if word.startswith("http")]
        if "press Ctrl-C" in line:
            break
    assert len(addresses) == 2, "".join(told)  # while it goes on, and afterwards
    assert "overview" in browser.get(addresses[-1]).text.lower()
    members = addresses[-1].partition("/session")[0] + "/api/v1/nodes"
    for name in ("demo1", "celery1"):
        wait_until(lambda: name in browser.get(members).text, what=f"{name} to be shown")  # noqa: B023
    if SOAK:  # half a minute later
        killed = next(line for line in process.stderr if "while it ran task" in line)
        next(line for line in process.stderr if line.startswith("started "))
        diagram = killed.split()[-1]
        wait_until(lambda: "was lost" in browser.get(diagram).text, what="the cause of a redelivery")


def test_it_ends_with_history_that_agrees(tmp_path: Path) -> None:
    for time_number in range(1, TIMES + 1):
        process = _demo(tmp_path, "--seconds", SECONDS, "--json")
        output, errors = process.communicate(timeout=1800)
        assert process.returncode == 0, errors
        told = json.loads(output)
        _check(told, tmp_path / "umbel-demo")
        assert int(told["history"]["tasks"].replace(",", "")) == told["sent"] + told["periodic"]
        repeated = told["repeated"]["because their worker was killed"]
        print(
            f"\ndemo {time_number}: {told['sent']} sent, {told['runs']} runs, {repeated} tasks of the killed "
            f"worker run again, {told['periodic']} slots, {told['history']['events']} events",
            flush=True,
        )
        assert Path(told["html"]).read_text().startswith("<!doctype html>")
        _nothing_left(tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_or_a_closed_terminal_leaves_no_process(tmp_path: Path, signum: signal.Signals) -> None:
    process = _demo(tmp_path, "--seconds", "60", "--no-history", "--no-web", "--no-celery")
    ledger = tmp_path / "umbel-demo" / "ledger"
    wait_until(lambda: ledger.exists() and ledger.stat().st_size > 0, what="tasks to run")
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == 1
    _nothing_left(tmp_path)


def test_a_folder_that_is_not_a_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "umbel-demo").mkdir()
    (tmp_path / "umbel-demo" / "mine").touch()
    process = _demo(tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "--directory" in errors
    assert (tmp_path / "umbel-demo" / "mine").exists()


def _demo(home: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UMBEL_")}
    environment["JDK_JAVA_OPTIONS"] = (
        "-XX:TieredStopAtLevel=1"  # Spark's Java runs too briefly to compile well
    )
    return subprocess.Popen(
        [sys.executable, "-m", "umbel.cli.main", "demo", *arguments],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _check(told: dict[str, Any], home: Path) -> None:
    """Count the ledger anew and compare: the demo must not be its own only witness."""
    assert told["problems"] == [] and told["ok"]
    lines = [line.split() for line in (home / "ledger").read_text().splitlines()]
    attempts: dict[tuple[str, str, str], list[str]] = {}
    came_again = set()
    for task_id, kind, attempt, node, delivered in lines:
        attempts.setdefault((task_id, kind, attempt), []).append(node.partition("@")[0])
        came_again |= {(task_id, attempt)} if delivered == "again" else set()
    repeated = [run for run, nodes in attempts.items() if len(nodes) > 1 and run[1] != "crashing"]
    recovered = {task_id for task_id, _, _ in repeated}  # the demo judges that each has a cause
    assert all(
        told["killed"] in attempts[task_id, kind, attempt][:-1]
        or (task_id, attempt) in came_again
        or (task_id, kind, str(int(attempt) - 1)) in repeated
        for task_id, kind, attempt in repeated
    )
    assert told["runs"] == len(lines)
    assert told["repeated"]["runs"] == sum(len(nodes) - 1 for nodes in attempts.values())
    assert told["repeated"]["because their worker was killed"] == len(recovered)
    assert len(recovered) >= told["running_at_the_kill"] >= 1
    assert told["periodic"] == len({task_id for task_id, kind, *_ in lines if kind == "tick"})
    assert told["sent"] == sum(kind["sent"] for kind in told["kinds"].values())
    ended = sum(kind["succeeded"] + kind["failed"] + kind["revoked"] for kind in told["kinds"].values())
    assert told["sent"] == ended
    assert told["kinds"]["never"] == {"sent": 1, "succeeded": 0, "failed": 0, "revoked": 1, "runs": 0}
    assert told["kinds"]["order"]["runs"] == told["kinds"]["order"]["sent"] * 3 // 2  # one of two is retried
    assert any(
        node == "celery1" for (_, kind, _), nodes in attempts.items() if kind == "ship" for node in nodes
    )
    assert told["kinds"]["crashing"]["runs"] == 2 * told["kinds"]["crashing"]["sent"]
    first, second = told["led"]
    assert first == told["killed"] != second
    assert told["elected"] in ("demo1", "demo2", "demo3")


def _nothing_left(home: Path) -> None:
    """Every process of the demo has its folder in its environment."""

    def left() -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and str(home) in process.environ().get("UMBEL_RUN_DIR", ""):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    wait_until(lambda: not left(), what="all processes of the demo to be gone")
