"""The README's twelve lines, run as printed, give the printed output."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

README = Path(__file__).parent.parent / "README.md"
BIN = Path(sys.executable).parent


def block(language: str, holding: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = [text for text in blocks if holding in text]
    return str(found)


@pytest.mark.timeout(120)
def test_the_twelve_lines_print_what_the_readme_says(tmp_path: Path) -> None:
    code = block("python", "App(")
    assert len(code.strip().splitlines()) == 12
    (tmp_path / "tasks.py").write_text(code)
    session = block("console", "python tasks.py").splitlines()
    commands = [line.removeprefix("$ ") for line in session if line.startswith("$ ")]
    printed = [line for line in session if not line.startswith("$ ")]
    path, background, foreground = commands
    assert path == 'export PATH="$PWD/.venv/bin:$PATH"'  # as set below, wherever the tests' own lies
    assert background.endswith("&")
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "UMBEL_RUN_DIR": str(tmp_path / "run"),
    }
    worker = subprocess.Popen(background.removesuffix("&").split(), cwd=tmp_path, env=environment)
    try:
        done = subprocess.run(
            foreground.split(),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.splitlines() == printed
    finally:
        worker.send_signal(signal.SIGTERM)
        wait_until(lambda: worker.poll() is not None, what="the worker to stop")
    assert worker.returncode == 0
