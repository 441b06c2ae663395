"""The options of `celery worker`, typed after `umbel worker`."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from tests.waiting import wait_until
from umbel.app.settings import Settings, override
from umbel.cli.options import level_of
from umbel.cli.run import worker
from umbel.cli.run.worker import command
from umbel.errors import BadSetting
from umbel.launch.preparation import node_name
from umbel.logs import log_path
from umbel.worker import daemon

# Of `celery worker --help` (Celery 5.7): every option, with a value where it takes one.
CELERYS = """
-n w1@%h | -D | -S state.db | -l INFO | -O fair | --prefetch-multiplier 4 | --disable-prefetch |
-c auto | -P prefork | -E | --time-limit 9 | --soft-time-limit 8 | --max-tasks-per-child 7 |
--pool-start-method fork | --max-memory-per-child 9000 | --purge | -Q a | -X b | --without-gossip |
--without-mingle | --without-heartbeat | --heartbeat-interval 5 | --autoscale 10,3 | -B |
-s schedule.db | --scheduler a:B | -f w.log | --pidfile w.pid | --uid 0 | --gid 0 | --umask 022 |
--executable python | --logfile w.log | --hostname w1 | --detach | --statedb s | --loglevel FATAL |
--optimization default | --concurrency 3 | --pool solo | --task-events | --events | --discard |
--queues a | --exclude-queues b | --beat | --schedule-filename s | --schedule s
"""


@pytest.mark.parametrize("typed", [one.strip() for one in CELERYS.split("|")])
def test_each_option_of_celery_worker_is_known(typed: str) -> None:
    command.make_context("worker", typed.split(), resilient_parsing=False)


def test_modules_to_include_are_for_the_app_to_name() -> None:
    with pytest.raises(click.UsageError, match="include = "):
        command.make_context("worker", ["-I", "proj.tasks"])


def given(**options: Any) -> dict[str, Any]:
    return {**dict.fromkeys(worker.NOTES), **options}


def test_an_option_without_effect_says_why() -> None:
    options = given(optimization="fair", beat=True, worker_concurrency=3)
    assert worker.take_idle(options) == [
        "-B has no effect here: every worker can send the schedule, and the holder of a lease does",
        "-O has no effect here: messages always go to a free child process, as with -O fair",
    ]
    assert options == {"worker_concurrency": 3}


def test_excluded_queues_are_taken_from_those_that_would_be_consumed() -> None:
    several = override(Settings(), worker_queues=["a", "b", "c"])
    assert worker.without_queues(several, ["b", "z"]).worker_queues == ("a", "c")
    assert worker.without_queues(several, None) is several
    with pytest.raises(click.BadParameter, match="no queue remains to consume of celery"):
        worker.without_queues(Settings(), ["celery"])


@pytest.mark.parametrize(
    ("typed", "sizes"), [("10,3", (10, 3)), ("3,10", (10, 3)), ("10", (10, 1)), ("10,0", (10, 1))]
)
def test_the_limits_of_autoscale_may_be_in_either_order(typed: str, sizes: tuple[int, int]) -> None:
    context = click.Context(command)
    assert worker.sizes_of(context, command.params[0], typed) == sizes


@pytest.mark.parametrize(
    ("typed", "level"),
    [("WARN", "warning"), ("FATAL", "critical"), ("CRITICAL", "critical"), ("info", "info")],
)
def test_levels_have_celerys_names_too(typed: str, level: str) -> None:
    assert level_of(typed) == level


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("/log/%n%I.log", "/log/w1-2.log"),
        ("%h-%d-%i", "box.example.org-example.org-2"),
        ("%p.pid", "w1@box.example.org.pid"),
        ("100%%", "100%"),
    ],
)
def test_file_names_stand_for_the_node_as_in_celery(pattern: str, path: str) -> None:
    assert log_path(pattern, "w1@box.example.org", 2) == path


def test_a_nodes_name_may_hold_its_host_and_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box.example.org")
    assert node_name("w1@%h") == "w1@box.example.org"
    assert node_name("%n@%d") == "box@example.org"


# -- the process ---------------------------------------------------------------------------------------


def test_a_pid_file_holds_this_process_while_the_worker_runs(tmp_path: Path) -> None:
    file = tmp_path / "w.pid"
    with daemon.pid_file(str(file)):
        assert file.read_text() == f"{os.getpid()}\n"
    assert not file.exists()


def test_the_pid_file_of_a_process_that_lives_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.pid"
    file.write_text(f"{os.getppid()}\n")
    with (
        pytest.raises(BadSetting, match=f"process {os.getppid()} in it is running"),
        daemon.pid_file(str(file)),
    ):
        pass
    assert file.exists()


@pytest.mark.parametrize("content", ["", "no number\n", f"{2**22 + 17}\n"])
def test_the_pid_file_of_a_process_that_is_gone_is_replaced(tmp_path: Path, content: str) -> None:
    file = tmp_path / "w.pid"
    file.write_text(content)
    with daemon.pid_file(str(file)):
        assert file.read_text() == f"{os.getpid()}\n"


def test_a_pid_file_that_another_process_took_is_left_to_it(tmp_path: Path) -> None:
    file = tmp_path / "w.pid"
    with daemon.pid_file(str(file)):
        file.write_text("1\n")
    assert file.read_text() == "1\n"


def test_the_command_of_a_detached_process_does_not_detach_again() -> None:
    typed = [
        "worker",
        "-D",
        "-A",
        "proj",
        "--executable",
        "/usr/bin/python3",
        "--executable=x",
        "--detach",
        "-E",
    ]
    assert daemon.without_detaching(typed) == ["worker", "-A", "proj", "-E"]


@pytest.mark.parametrize(
    ("user", "group", "umask", "problem"),
    [
        ("nobody-of-that-name", None, None, "there is no such user"),
        (None, "no-group-of-that-name", None, "there is no such group"),
        (None, None, "eight", "write it in octal, as 022"),
    ],
)
def test_who_it_cannot_be_is_refused(
    user: str | None, group: str | None, umask: str | None, problem: str
) -> None:
    with pytest.raises(BadSetting, match=problem):
        daemon.switch_user(user, group, umask)


APP = """
from umbel import App
app = App("native")

@app.task
def add(a, b):
    return a + b
"""


def test_a_detached_worker_purges_and_leaves_its_pid_and_its_log(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("UMBEL_")}
    variables = kept | {"UMBEL_RUN_DIR": str(tmp_path / "run")}

    def run(*typed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "umbel", *typed],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert run("call", "tasks.add", "1", "2").returncode == 0
    flags = ("-c", "1", "-n", "w1", "-f", "%n%I.log", "--pidfile", "%n.pid", "--purge", "-S", "x.db", "-D")
    started = run("worker", *flags)
    assert (started.returncode, started.stdout, started.stderr) == (0, "", "")
    log, file = tmp_path / "w1.log", tmp_path / "w1.pid"
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"), what="its pid")
    pid = int(file.read_text())
    try:
        wait_until(lambda: "queue purged queue=celery removed=1" in log.read_text(), what="its log")
        assert "-S has no effect here: the broker stores revoked tasks" in log.read_text()
        assert os.getsid(pid) != os.getsid(0)
        again = run("worker", *flags)
        assert again.returncode == 2
        assert f"process {pid} in it is running" in again.stderr
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not file.exists(), what="the worker's end")
