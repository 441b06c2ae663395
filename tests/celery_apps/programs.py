"""Programs in the environment that has Celery: `umbel` and `celery` as a project's people would call them."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-celery" / "bin" / "python"
SHOP = "tests.celery_apps.shop"
START_S, END_S = 120.0, 30.0


def end(process: subprocess.Popen[Any]) -> None:
    """As a service manager does it; one that has ended already is only waited for."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Home:
    """A directory to call programs in, with the variables of a project."""

    directory: Path
    variables: dict[str, str]

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(PYTHON), "-m", *command],
            env=self._environment() | more,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def data(self, *command: str, **more: str) -> Any:
        """What a program prints as JSON."""
        ran = self.run(*command, **more)
        assert ran.stdout, f"{' '.join(command)} ended with {ran.returncode}: {ran.stderr}"
        return json.loads(ran.stdout)

    @contextmanager
    def worker(self, *options: str) -> Iterator[Path]:
        """`umbel worker` of the shop, from when it is ready; its log."""
        log = self.directory / "worker.log"
        command = [str(PYTHON), "-m", "umbel", "worker", "-A", SHOP, *options]
        with log.open("ab") as file:
            process = subprocess.Popen(
                command, env=self._environment(), cwd=self.directory, stdout=file, stderr=file
            )
        try:

            def is_ready() -> bool:
                assert process.poll() is None, f"the worker ended: {log.read_text()}"
                return any(line.startswith("ready ") for line in self.journal())

            wait_until(is_ready, deadline_s=START_S, what="the worker to be ready")
            yield log
        finally:
            end(process)

    def journal(self) -> list[str]:
        """What the shop's signal handlers wrote."""
        path = Path(self.variables["SHOP_JOURNAL"])
        return path.read_text().splitlines() if path.exists() else []

    def _environment(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("UMBEL_", "CELERY_", "SHOP_"))
        }
        return {
            **kept,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "UMBEL_RUN_DIR": str(self.directory / "run"),
            **self.variables,
        }


def home(directory: Path, **variables: str) -> Home:
    return Home(directory, {"SHOP_JOURNAL": str(directory / "journal"), **variables})
