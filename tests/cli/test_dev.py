"""`umbel dev`: the worker follows the code, and nothing is left when it ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import psutil

from tests.waiting import wait_until
from umbel.cli.run.dev import changes, files_in

TASKS = """
from umbel import App
app = App("shop")

@app.task
def answer() -> int:
    return {answer}
"""


def test_files_of_others_are_passed_over(tmp_path: Path) -> None:
    for name in (
        "tasks.py",
        "lib/a.py",
        ".venv/x.py",
        "env/pyvenv.cfg",
        "env/y.py",
        "__pycache__/z.py",
        "a.md",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    before = files_in(tmp_path)
    assert set(before) == {Path("tasks.py"), Path("lib/a.py")}
    (tmp_path / "lib/a.py").unlink()
    (tmp_path / "new.py").touch()
    os.utime(tmp_path / "tasks.py", ns=(1, 1))
    assert changes(before, files_in(tmp_path)) == [Path("lib/a.py"), Path("new.py"), Path("tasks.py")]


def test_a_change_is_loaded_and_a_mistake_is_waited_for(tmp_path: Path) -> None:
    tasks, log = tmp_path / "tasks.py", tmp_path / "dev.log"
    succeeded = re.compile(
        r"INFO +task succeeded task=tasks.answer task_id=\S+ attempt=0 runtime_s=\S+ result=1\n"
    )
    tasks.write_text(TASKS.format(answer=1))
    environment = {**os.environ, "UMBEL_RUN_DIR": str(tmp_path / "run")}

    def umbel(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "umbel.cli.main", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def answers(wanted: str) -> bool:
        return umbel("call", "tasks.answer", "--wait", "5").stdout.strip() == wanted

    with log.open("wb") as output:
        dev = subprocess.Popen(
            [sys.executable, "-m", "umbel.cli.main", "dev", "-c", "1", "--no-record", "--web-port", "0"],
            cwd=tmp_path,
            env=environment,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
    try:
        wait_until(lambda: answers("1"), what="the worker")
        first = wait_until(
            lambda: re.search(r"(?m)^umbel web: .*?(\S+)$", log.read_text()), what="the address"
        )
        assert urlopen(first[1].partition("/session")[0] + "/healthcheck", timeout=30).read() == b"OK"
        wait_until(lambda: succeeded.search(log.read_text()), what="the success in the log")
        tasks.write_text("def broken(:\n")
        wait_until(lambda: "starts at the next change" in log.read_text(), what="the mistake")
        assert "SyntaxError" in log.read_text()
        tasks.write_text(TASKS.format(answer=42))
        wait_until(lambda: answers("42"), what="the changed code")
        family = psutil.Process(dev.pid).children(recursive=True)
        assert family
        dev.send_signal(signal.SIGINT)
        assert dev.wait(timeout=30) == 0
        wait_until(lambda: not any(one.is_running() for one in family), what="all to end")
    finally:
        if dev.poll() is None:
            dev.send_signal(signal.SIGTERM)
            dev.wait(timeout=30)
