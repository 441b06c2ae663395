"""Cluster: real workers in processes of their own, on a broker file of their own, for one test.

Whatever happens, leaving the block ends every process that it started, by its id.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.commanding import run_beside, run_here
from tests.waiting import DEADLINE_S, wait_until
from umbel.app.app import App
from umbel.launch.loading import load_app
from umbel.worker.run_directory import NodeState, read_states


class Cluster:
    def __init__(self, home: Path, tasks_file: Path, **settings: object) -> None:
        self.home = home
        self.run_directory = Path(str(settings.get("run_dir", home / "run")))
        self._tasks_file = tasks_file
        embedded = f"sqlite:///{home / 'queue.db'}"
        # Most users have no uvloop; tests/scenarios/test_loops.py is about those who have.
        plain = {"worker_loop": "asyncio"}
        self._settings = {"broker": embedded, "run_dir": self.run_directory, **plain, **settings}
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.app = self._load_app()

    def _load_app(self) -> App:
        """The test's own view of the app: same module, same settings, never shared between tests."""
        saved = dict(os.environ)
        os.environ.update(self._environment())
        sys.modules.pop(self._tasks_file.stem, None)
        try:
            return load_app(self._tasks_file.stem, str(self._tasks_file.parent))
        finally:
            os.environ.clear()
            os.environ.update(saved)

    def _environment(self) -> dict[str, str]:
        return {f"UMBEL_{name.upper()}": str(value) for name, value in self._settings.items()}

    def start_worker(
        self,
        name: str,
        *flags: str,
        wait: bool = True,
        prefix: Sequence[str] = (),
        **settings: object,
    ) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self._environment()}
        environment |= {f"UMBEL_{key.upper()}": str(value) for key, value in settings.items()}
        command = [
            sys.executable,
            "-m",
            "umbel.cli.main",
            "worker",
            "-A",
            f"{self._tasks_file}:app",
            "-n",
            name,
        ]
        with self.log_file(name).open("ab") as log:
            process = subprocess.Popen(
                [*prefix, *command, *flags],
                cwd=self.home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
                process_group=0,  # so that a test can signal the whole group, as a terminal does
            )
        self.workers[name] = process
        if wait:
            self.wait_for(name)
        return process

    def wait_for(self, name: str) -> None:
        """Until a worker that was started takes tasks; workers that are started together start sooner."""
        process = self.workers[name]
        wait_until(
            lambda: process.poll() is not None or self._is_up(name, process.pid),
            deadline_s=120.0,
            what=f"worker {name} to be ready",
        )
        assert process.poll() is None, f"worker {name} ended: {self.log(name)}"

    def umbel(
        self, *arguments: str, check: bool = True, prefix: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user would, in the cluster's directory.

        It runs in this process, where Python has started already, unless it is run by another program.
        """
        environment = {**self._environment(), "UMBEL_APP": f"{self._tasks_file}:app"}
        if prefix:
            command = [*prefix, sys.executable, "-m", "umbel.cli.main", *arguments]
            done = run_beside(command, self.home, environment)
        else:
            done = run_here(arguments, self.home, environment, self._tasks_file.stem)
        assert not check or done.returncode == 0, f"{arguments} ended with {done.returncode}: {done.stderr}"
        return done

    def umbel_json(self, *arguments: str) -> Any:
        return json.loads(self.umbel(*arguments, "--json").stdout)

    def state_of(self, name: str) -> NodeState | None:
        """Of the run that is alive: one of that name on another broker may have left word too."""
        states = [one for one in read_states(self.run_directory) if one.node.partition("@")[0] == name]
        return max(states, key=lambda state: state.alive, default=None)

    def counters(self, name: str) -> Mapping[str, int]:
        state = self.state_of(name)
        return state.fields["counters"] if state else {}

    def children_of(self, name: str) -> list[int]:
        state = self.state_of(name)
        return list(state.fields["pool"]["processes"]) if state and state.healthy else []

    def stop_worker(self, name: str) -> int:
        process = self.workers.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(DEADLINE_S)

    def kill_worker(self, name: str) -> None:
        process = self.workers.pop(name)
        process.kill()
        process.wait()

    def log_file(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_file(name).read_text()

    def _is_up(self, name: str, pid: int) -> bool:
        state = self.state_of(name)
        return state is not None and state.healthy and state.fields["pid"] == pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.workers.values():  # all at once: each takes its time
            process.send_signal(signal.SIGTERM)
        for name, process in list(self.workers.items()):
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill_worker(name)
            if error is not None:
                print(f"--- log of {name}\n{self.log(name)[-4000:]}")
        self.app.close()
