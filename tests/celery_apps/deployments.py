"""Deployment: one Celery project, its worker (Celery's or ours) and its client, as processes.

Both kinds of worker run at the same time, each with a broker and results of its own, so a comparison
takes as long as the slower of them.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers.redis import RedisServer
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = ROOT / ".venv-celery" / "bin"
PROJECT = "tests.celery_apps.project"
KINDS = ("celery", "umbel")
START_S, CASES_S, STOP_S = 120.0, 900.0, 30.0
FLAGS = ("-n", "judge@%h", "-P", "prefork", "-c", "2", "-l", "info")


@dataclass
class Deployment:
    """Run once: `outcomes("quick")` starts the worker, has the client run these cases, ends the worker."""

    kind: str
    setup: str
    home: Path
    broker: str
    redis: RedisServer
    _ends: ExitStack = field(default_factory=ExitStack)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.setup}"

    def outcomes(self, names: str) -> dict[str, Any]:
        with self._ends:
            variables = self._variables()
            worker = self._start_worker(variables)
            self._ends.callback(self._stop, worker)
            client = [str(PROGRAMS / "python"), "-m", "tests.celery_apps.client", names]
            self._wait_until_ready(worker)
            with self._log("client").open("ab") as log:
                done = subprocess.run(
                    client,
                    env=variables,
                    cwd=self.home,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    timeout=CASES_S,
                    check=True,
                )
            (self.home / f"{self.name}.json").write_bytes(done.stdout)
            outcomes: dict[str, Any] = json.loads(done.stdout)
        return outcomes | {"signals_when_it_ends": self._journal("worker")[-2:]}

    def log(self) -> str:
        return self._log("worker").read_text(errors="replace")

    def _start_worker(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if self.kind == "celery":
            command = [str(PROGRAMS / "celery"), "-A", PROJECT, "worker", *FLAGS]
        else:
            command = [str(PROGRAMS / "python"), "-m", "umbel", "worker", "-A", PROJECT, *FLAGS]
        with self._log("worker").open("ab") as log:
            return subprocess.Popen(command, env=variables, cwd=self.home, stdout=log, stderr=log)

    def _wait_until_ready(self, worker: subprocess.Popen[bytes]) -> None:
        def is_ready() -> bool:
            assert worker.poll() is None, f"the worker ended: {self.log()}"
            return any("worker_ready" in line for line in self._journal("worker"))

        wait_until(is_ready, deadline_s=START_S, what=f"{self.name} to be ready")

    def _stop(self, worker: subprocess.Popen[bytes]) -> None:
        worker.send_signal(signal.SIGTERM)
        try:
            worker.wait(STOP_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()

    def _journal(self, name: str) -> list[Any]:
        found = self.redis.ask("LRANGE", f"journal:{name}-{self.name}", 0, -1, database=self._database + 1)
        assert isinstance(found, list)
        return [json.loads(line) for line in found]

    @property
    def _database(self) -> int:
        """Two of Redis for each kind: messages and results in one, the journal in the other."""
        return 2 * KINDS.index(self.kind)

    def _log(self, who: str) -> Path:
        return self.home / f"{self.name}-{who}.log"

    def _variables(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("UMBEL_", "CELERY_"))}
        server = self.redis.url.removesuffix("0")
        return {
            **kept,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "C_FORCE_ROOT": "1",  # a worker of the superuser's accepts pickle only with this
            "SETUP": self.setup,
            "RUN": self.name,
            "JOURNAL_URL": f"{server}{self._database + 1}",
            "CELERY_BROKER_URL": self.broker or f"{server}{self._database}",
            "UMBEL_RUN_DIR": str(self.home / "run"),
            **self._results(f"{server}{self._database}"),
        }

    def _results(self, redis_url: str) -> dict[str, str]:
        place = self.home / f"{self.name}-results"
        match self.setup:
            case "database":
                return {"CELERY_RESULT_BACKEND": f"db+sqlite:///{place}.db?timeout=60"}
            case "files":
                place.mkdir(exist_ok=True)
                return {"CELERY_RESULT_BACKEND": f"file://{place}"}
            case "cache":
                return {"DJANGO_CACHE": str(place)}
            case "django":
                self._make_tables(place)
                return {"DJANGO_DATABASE": f"{place}.db"}
            case "rpc":
                return {}
            case _:
                return {"CELERY_RESULT_BACKEND": redis_url}

    def _make_tables(self, place: Path) -> None:
        settings = {
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": f"{PROJECT}.django_settings",
            "DJANGO_DATABASE": f"{place}.db",
        }
        command = [str(PROGRAMS / "python"), "-m", "django", "migrate", "--verbosity", "0"]
        subprocess.run(
            command, env={**os.environ, **settings}, cwd=self.home, check=True, capture_output=True
        )


def compare(
    setup: str, home: Path, names: str, redis: RedisServer, brokers: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """What the cases gave under each kind of worker."""
    redis.ask("FLUSHALL")
    both = [Deployment(kind, setup, home, brokers.get(kind, ""), redis) for kind in KINDS]
    with ThreadPoolExecutor(len(both)) as pool:
        found = pool.map(lambda deployment: deployment.outcomes(names), both)
        return dict(zip(KINDS, found, strict=True))
