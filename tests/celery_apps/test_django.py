"""A Django project with django-celery-results and -beat runs under `umbel worker` as it is (A4)."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.celery_apps.programs import PYTHON, ROOT, START_S, end
from tests.servers.redis import redis_server, redis_url
from tests.waiting import wait_until

__all__ = ["redis_server", "redis_url"]

SITE = Path(__file__).with_name("site")
LONG_S = 60.0
TICK_MS = 300


class Site:
    """The project with its database, workers by name, and somebody who uses it."""

    def __init__(self, directory: Path, broker: str, ends: ExitStack) -> None:
        self._directory = directory
        self._ends = ends
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("UMBEL_", "CELERY_"))
            },
            "PYTHONPATH": f"{ROOT / 'src'}:{SITE}",
            "SHOP_DATABASE": str(directory / "shop.sqlite3"),
            "SHOP_BROKER": broker,
            "UMBEL_RUN_DIR": str(directory / "run"),
            "UMBEL_LEASE_S": "2",
            "UMBEL_SCHEDULER_LEASE_S": "2",
        }
        self._call(str(SITE / "manage.py"), "migrate", "--verbosity", "0")
        self._client = subprocess.Popen(
            [PYTHON, SITE / "client.py"],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ends.callback(self._end, self._client)

    def start_worker(self, name: str) -> None:
        with self._log(name).open("wb") as log:
            worker = subprocess.Popen(
                [PYTHON, "-m", "umbel", "worker", "-A", "shop", "-n", f"{name}@here", "-c", "1"],
                env=self._environment,
                cwd=self._directory,
                stdout=log,
                stderr=log,
            )
        self._workers[name] = worker
        self._ends.callback(self._end, worker)

    def ready(self) -> None:
        for name, worker in self._workers.items():

            def is_ready(name: str = name, worker: Any = worker) -> bool:
                assert worker.poll() is None, self.log(name)
                return "worker ready" in self.log(name)

            wait_until(is_ready, deadline_s=START_S, what=f"{name} to be ready")

    def kill(self, name: str) -> None:
        self._workers[name].kill()
        self._workers[name].wait()

    def leader(self) -> str:
        """The worker that sent a periodic task last."""
        leading = [name for name in self._workers if "periodic task sent" in self.log(name)]
        assert len(leading) == 1, leading
        return leading[0]

    def log(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")

    def ask(self, *words: Any) -> Any:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps(words) + "\n")
        self._client.stdin.flush()
        return json.loads(self._client.stdout.readline())

    def ran(self, name: str) -> int:
        number: int = self.ask("ticks")[0].get(name, 0)
        return number

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _call(self, *command: str) -> None:
        subprocess.run([PYTHON, *command], env=self._environment, check=True, timeout=START_S)

    @staticmethod
    def _end(process: subprocess.Popen[Any]) -> None:
        end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def site_of(directory: Path, broker: str) -> Iterator[Site]:
    with ExitStack() as ends:
        yield Site(directory, broker, ends)


@pytest.mark.scenario
@pytest.mark.timeout(600)
def test_a_django_project_runs_as_it_is(tmp_path: Path, redis_url: str) -> None:
    with site_of(tmp_path, redis_url) as site:
        site.start_worker("w1")
        site.start_worker("w2")
        site.ready()
        requests_become_tasks(site)
        assert site.ask("fail", "no such hat") == "FAILURE ValueError: no such hat"
        assert site.ask("squares", 4) == 14
        assert site.ask("inherited_connections", 6) == 0
        what_is_edited_takes_effect(site)
        a_killed_leader_loses_and_doubles_nothing(site)


def requests_become_tasks(site: Site) -> None:
    number = site.ask("order", "hat")
    wait_until(lambda: site.ask("results", "pack"), deadline_s=LONG_S, what="the row of the result")
    assert site.ask("results", "pack") == [["SUCCESS", '"hat"']]
    assert site.ask("order_state", number) == "packed"


def what_is_edited_takes_effect(site: Site) -> None:
    site.ask("tick_every", TICK_MS, "first")
    wait_until(lambda: site.ran("first") >= 2, deadline_s=LONG_S, what="the periodic task")
    site.ask("tick_every", TICK_MS, "second")
    wait_until(lambda: site.ran("second") >= 2, deadline_s=LONG_S, what="the edited periodic task")


def a_killed_leader_loses_and_doubles_nothing(site: Site) -> None:
    site.kill(site.leader())
    before = site.ran("second")
    wait_until(lambda: site.ran("second") >= before + 3, deadline_s=LONG_S, what="the next leader")
    site.ask("stop_ticks")

    def all_ran() -> bool:
        ran, sent = site.ask("ticks")
        return bool(sum(ran.values()) == sent)

    wait_until(all_ran, deadline_s=LONG_S, what="every tick that was sent to run, and no other")
