"""Django: sends that wait for a commit, connections in every pool, manage.py. On the store of examples/."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.servers.postgres import ask_postgres, postgres_url
from tests.waiting import wait_until

__all__ = ["postgres_url"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STORE = ROOT / "examples" / "django_store"
POOLS = ("prefork", "threads", "solo", "asyncio", "gevent")
MANAGE = ["manage.py", "umbel", "worker"]
LONG_S = 90.0


def environment(home: Path, url: str = "", **more: str) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("UMBEL_", "DJANGO_"))
    }
    return {**inherited, **libpq(url), "UMBEL_RUN_DIR": str(home / "run"), **more}


def libpq(url: str) -> dict[str, str]:
    if not url:
        return {}
    place = urlsplit(url)
    return {
        "PGHOST": place.hostname or "",
        "PGPORT": str(place.port),
        "PGUSER": place.username or "",
        "PGDATABASE": place.path.strip("/"),
    }


def manage(
    store: Path, env: Mapping[str, str], *words: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, store / "manage.py", *words],
        cwd=cwd or store,
        env=env,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return shutil.copytree(STORE, tmp_path / "django_store")


@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
def test_sends_wait_for_the_commit(vendor: str, store: Path, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("postgres_url") if vendor == "postgresql" else ""
    shutil.copy(HERE / "project_checks.py", store / "test_project.py")
    shutil.copy(HERE / "project_conftest.py", store / "conftest.py")
    (store / "pytest.ini").write_text(
        f"[pytest]\numbel_app = umbel.contrib.django:app\npythonpath = . {ROOT}\nfilterwarnings = error\n"
    )
    plugins = [
        word for name in ("asyncio", "anyio", "schemathesis", "xdist") for word in ("-p", f"no:{name}")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins],
        cwd=store,
        env=environment(store.parent, url, WANTED_VENDOR=vendor),
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Workers:
    """One for each pool, on a queue of that name; their database is PostgreSQL."""

    def __init__(self, store: Path, url: str, ends: ExitStack) -> None:
        self._store, self._url = store, url
        self._env = environment(store.parent, url, DJANGO_SETTINGS_MODULE="probe.settings")
        for pool in POOLS:
            ends.enter_context(self._worker(pool))

    @contextmanager
    def _worker(self, pool: str) -> Iterator[None]:
        # One is started by its own module, as whoever knows `-A` may do.
        command = ["-m", "umbel", "worker", "-A", "probe.worker"] if pool == "prefork" else MANAGE
        flags = ["-P", pool, "-Q", pool, "-n", f"{pool}@here", *(["-c", "2"] if pool != "solo" else [])]
        with self.log(pool).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command, *flags],
                cwd=self._store,
                # By this name PostgreSQL shows whose connection it is.
                env={**self._env, "PGAPPNAME": pool},
                stdout=log,
                stderr=log,
            )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONG_S) == 0, self.log(pool).read_text()

    def log(self, pool: str) -> Path:
        return self._store.parent / f"{pool}.log"

    def ready(self) -> None:
        for pool in POOLS:
            wait_until(partial(self._is_ready, pool), deadline_s=LONG_S, what=f"the worker of {pool}")

    def _is_ready(self, pool: str) -> bool:
        return "worker ready" in self.log(pool).read_text()

    def ask(self, calls: list[tuple[str, str]]) -> list[list[object]]:
        """The results of calls (task, queue), all sent at once by a process of the project."""
        script = (
            "import django, json, sys; django.setup()\n"
            "from umbel.contrib.django import app\n"
            "app.discovery.run()\n"
            "calls = [(app.tasks['probe.tasks.' + task], queue) for task, queue in json.load(sys.stdin)]\n"
            "sent = [task.apply_async(queue=queue) for task, queue in calls]\n"
            "print(json.dumps([result.get(timeout=60) for result in sent]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=json.dumps(calls),
            cwd=self._store,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr + "".join(self.log(pool).read_text() for pool in POOLS)
        found: list[list[object]] = json.loads(done.stdout)
        return found

    def connections(self) -> dict[str, set[int]]:
        """Those that each pool's processes hold."""
        rows = ask_postgres(
            self._url, "SELECT application_name, pid FROM pg_stat_activity WHERE datname = current_database()"
        )
        return {pool: {int(str(pid)) for name, pid in rows if name == pool} for pool in POOLS}

    def cut(self) -> None:
        ask_postgres(
            self._url,
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )


@pytest.mark.timeout(300)
def test_tasks_have_fresh_connections_of_their_own_in_every_pool(store: Path, postgres_url: str) -> None:
    shutil.copytree(HERE / "probe", store / "probe")
    with ExitStack() as ends:
        workers = Workers(store, postgres_url, ends)
        workers.ready()
        left = workers.connections()
        assert not any(left[pool] for pool in POOLS if pool != "prefork"), "what imports had opened"
        assert len(left["prefork"]) <= 1, "its module opened one where it is not closed, in the main process"
        plain = [("backend", pool) for pool in POOLS for _ in range(3)]
        awaited = [("awaited_backend", pool) for pool in POOLS if pool != "gevent"]
        for pid, inherited in workers.ask([*plain, *awaited]):
            assert pid not in inherited  # type: ignore[operator]
        kept_by_pool = workers.connections()
        assert all(kept_by_pool[pool] for pool in ("prefork", "threads", "solo")), "CONN_MAX_AGE is None"
        # A greenlet and the thread of a coroutine end with their task, and so do their connections.
        assert not kept_by_pool["gevent"]
        assert len(kept_by_pool["asyncio"]) <= 2, "those of the threads that run plain tasks"

        workers.cut()
        workers.ask([*plain, *awaited])

        one, other = workers.ask([("backend_of_two", "asyncio")] * 2)
        assert one[0] == one[1] != other[0] == other[1]


def test_manage_py_passes_words_on_and_exit_codes_back(store: Path) -> None:
    env = environment(store.parent)
    elsewhere = store.parent
    unknown = manage(store, env, "umbel", "call", "store.tasks.pakc", cwd=elsewhere)
    assert unknown.returncode == 2, unknown.stderr
    assert "store.tasks.pack" in unknown.stderr
    sent = manage(store, env, "umbel", "call", "store.tasks.pack", "7", "--settings", "store.settings")
    assert sent.returncode == 0, sent.stderr
    assert (store / "umbel.db").exists()
    listed = manage(store, env, "umbel", "queues", "ls", "--json", cwd=elsewhere)
    assert '"celery"' in listed.stdout, listed.stderr
    assert not (elsewhere / "umbel.db").exists(), "the project's directory holds it, wherever one calls from"
    assert "Usage: umbel" in manage(store, env, "umbel", "--help").stdout


def test_a_wrong_setting_is_refused_when_django_starts(store: Path) -> None:
    with (store / "store" / "settings.py").open("a") as settings:
        settings.write("\nUMBEL = {'BROKR': 'redis://localhost'}\n")
    refused = manage(store, environment(store.parent), "check")
    assert refused.returncode != 0
    assert "unknown setting 'BROKR' in UMBEL of Django's settings" in refused.stderr.splitlines()[-1]


def test_without_settings_a_worker_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "umbel", "worker", "-A", "umbel.contrib.django"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 2
    assert re.search(r"run `python manage.py umbel ...`, or set DJANGO_SETTINGS_MODULE", done.stderr)
