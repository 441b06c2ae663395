"""The demo's workers, recorder and dashboard: separate processes, which are stopped when the demo ends."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from umbel.errors import UmbelError

STOP_S = 20.0
CHILDREN = 2
RESULTS_KEPT_S = 7200  # longer than the longest demo, but short enough that --stay does not fill the disk
WEB_LOG = "web.log"


class Processes:
    """Starts and stops the demo's processes. As a context manager, it stops all of them at the end."""

    def __init__(self, home: Path) -> None:
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._home = home
        self._beside: list[subprocess.Popen[bytes]] = []  # recorder and dashboard

    def record(self, lake: Path, name: str) -> None:
        """Start the recorder."""
        arguments = ["record", "-A", "umbel.demo.tasks:app", "--name", name]
        self._beside.append(self._spawn([*arguments, "--lake", str(lake), "--rotate", "5"]))

    def show(self) -> None:
        """Start the dashboard, which writes its address to its log when it is ready."""
        (self._home / WEB_LOG).unlink(missing_ok=True)
        arguments = ["web", "-A", "umbel.demo.tasks:app", "--port", "0", "--badge", "demo"]
        self._beside.append(self._spawn([*arguments, "--state", str(self._home / "web.db")], WEB_LOG))

    def address(self) -> str:
        """Return the address of the dashboard; empty until it is known."""
        log = self._home / WEB_LOG
        words = log.read_text().split() if log.exists() else []
        return next((word for word in words if word.startswith("http")), "")

    def start(self, name: str) -> None:
        """Start a worker of the demo's app."""
        self._start(name, "-A", "umbel.demo.tasks:app", "-c", str(CHILDREN))

    def start_celery(self, name: str, queue: str) -> None:
        """Start a worker of the Celery app, in the same cluster."""
        self._start(name, "-A", "umbel.demo.celery_shop:app", "-c", "1", "-Q", queue)

    def _start(self, name: str, *app: str) -> None:
        """Start a worker with its own log file."""
        log = str(self._home / f"{name}.log")
        self.workers[name] = self._spawn(["worker", *app, "-n", name, "-E", "-l", "info", "-f", log])

    def check(self) -> None:
        """Raise UmbelError if a worker has exited unexpectedly."""
        for name, process in self.workers.items():
            if process.poll() is not None:
                log = self._home / f"{name}.log"
                raise UmbelError(f"worker {name} exited with status {process.returncode}; see {log}")

    def kill(self, name: str) -> None:
        """Kill a worker with SIGKILL."""
        process = self.workers.pop(name)
        process.kill()
        process.wait()

    def stop_workers(self) -> None:
        """Shut down all workers."""
        _end(list(self.workers.values()))
        self.workers.clear()

    def stop(self) -> None:
        """Shut down all processes."""
        _end([*self.workers.values(), *self._beside])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, arguments: Sequence[str], log_name: str = "demo.log") -> subprocess.Popen[bytes]:
        """Start an `umbel` command with its stderr in a log file."""
        # In a separate process group, Ctrl-C reaches only the demo, which then shuts its workers down.
        with (self._home / log_name).open("ab") as log:
            return subprocess.Popen(
                command(*arguments), stdin=subprocess.DEVNULL, stderr=log, process_group=0
            )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop processes with SIGTERM; with SIGKILL after STOP_S, or when waiting is interrupted."""
    deadline = time.monotonic() + STOP_S
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()  # no effect if it has ended
            process.wait()


def command(*arguments: str) -> list[str]:
    """Return the command line of an `umbel` command for this Python interpreter."""
    return [sys.executable, "-m", "umbel.cli.main", *arguments]


def environment(broker: str, backend: str, home: Path, run: str) -> dict[str, str]:
    """Return the environment variables with the app's settings, for the demo and its workers."""
    return {
        "DEMO_RUN": run,
        "UMBEL_TASK_DEFAULT_QUEUE": run,
        "UMBEL_BROKER": broker,
        "UMBEL_BACKEND": backend,
        "UMBEL_RUN_DIR": str(home / "run"),
        "UMBEL_RESULT_EXPIRES_S": str(RESULTS_KEPT_S),
        "UMBEL_LEASE_S": "5",
        "UMBEL_SCHEDULER_LEASE_S": "5",
        "DEMO_LEDGER": str(home / "ledger"),
        "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
    }
