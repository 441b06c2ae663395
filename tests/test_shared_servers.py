"""Servers that the processes of a run share outlive the process that started them, but not the run."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
SERVER = """
import subprocess, sys, time
from pathlib import Path
from tests.servers.shared import begin_run, end_run, ends_with_run, join_run, once

def start(folder):
    (folder / "deeper").mkdir()
    log = subprocess.DEVNULL  # else the pipe of its starter stays open
    server = subprocess.Popen(
        ["sleep", "600"], cwd=folder / "deeper", stdout=log, stderr=log, process_group=0
    )
    ends_with_run(server, folder, "TERM", f"touch '{sys.argv[1]}'")
    return {"pid": server.pid}
"""
CONTROLLER = f"{SERVER}\nprint(begin_run(), flush=True)\nsys.stdin.readline()\nend_run()\n"
MEMBER = f"{SERVER}\njoin_run(Path(sys.argv[2]))\nprint(once('sleep', start)['pid'], flush=True)\n"


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path / "ended")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("killed", [False, True])
def test_a_shared_server_ends_with_the_run_and_not_with_its_starter(
    controller: subprocess.Popen[str], killed: bool, tmp_path: Path
) -> None:
    assert controller.stdout is not None and controller.stdin is not None
    folder = controller.stdout.readline().strip()
    command = [sys.executable, "-c", MEMBER, str(tmp_path / "ended"), folder]
    first, second = (
        int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    assert first == second
    server = psutil.Process(first)
    assert server.is_running()
    if killed:
        os.kill(controller.pid, signal.SIGKILL)
    else:
        controller.stdin.write("\n")
        controller.stdin.flush()
    controller.wait(30)
    wait_until(lambda: not Path(folder).exists(), what="the folder of the run to be removed")
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    assert (tmp_path / "ended").exists()
