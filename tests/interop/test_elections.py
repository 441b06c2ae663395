"""Elections among two Celery workers and four of ours: run once, and nobody dies of it (E5)."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.interop.mixed_cluster import TASKS_FILE, CeleryWorker, Client, program_of
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.waiting import wait_until

SOAK = bool(os.environ.get("UMBEL_SOAK"))
BROKERS = ["redis", "rabbitmq"] if SOAK else ["redis"]
ELECTIONS = 40 if SOAK else 8
OURS = ("u1", "u2", "u3", "u4")
THEIRS = ("c1", "c2")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]


@dataclass
class Mixed:
    """With V of N workers Celery's, V² = 4 < N-1 = 5: no Celery worker can decide without us."""

    home: Path
    ours: Cluster
    theirs: list[CeleryWorker]
    celery: Client

    def runs(self) -> Counter[str]:
        journal = self.home / "journal"
        return Counter(journal.read_text().splitlines() if journal.exists() else ())

    def call(self, name: str) -> dict[str, object]:
        """A task of ours that leaves this name in the journal."""
        note = self.ours.app.tasks["shared_tasks.note"]
        return dict(note.s(str(self.home / "journal"), name).set(queue="on_umbel").to_map())

    def check_alive(self) -> None:
        for worker in self.theirs:
            worker.check()
            assert "Traceback" not in worker.log, worker.log
        for name, process in self.ours.workers.items():
            assert process.poll() is None, self.ours.log(name)

    def counted(self, counter: str) -> int:
        return sum(self.ours.counters(name).get(counter, 0) for name in self.ours.workers)


@pytest.fixture(scope="module", params=BROKERS)
def mixed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, results_server: RedisServer
) -> Iterator[Mixed]:
    home = tmp_path_factory.mktemp(f"elections-{request.param}")
    backend = f"{results_server.url.removesuffix('0')}{8 + BROKERS.index(request.param)}"
    server = shared_server() if request.param == "rabbitmq" else None
    broker = server.url(server.new_vhost()) if server else backend
    for_celery = {"CELERY_BROKER_URL": broker, "CELERY_RESULT_BACKEND": backend}
    with ExitStack() as ends:
        theirs = [
            ends.enter_context(
                CeleryWorker("celery", home, queues=["on_celery"], name=name, level="DEBUG", **for_celery)
            )
            for name in THEIRS
        ]
        ours = ends.enter_context(Cluster(home, TASKS_FILE, broker=broker, backend=backend))
        for name in OURS:
            flags = ("-c", "1", "-P", "solo", "-Q", "on_umbel", "-l", "INFO")
            ours.start_worker(name, *flags, wait=False)
        for worker in theirs:
            worker.wait_until_ready()
        client = ends.enter_context(Client("celery", program_of("celery", "python"), home, **for_celery))
        made = Mixed(home, ours, theirs, client)
        wait_until_acquainted(made)
        yield made
        for worker in theirs:
            worker.tell_to_stop()


def wait_until_acquainted(mixed: Mixed) -> None:
    """What is promised beside Celery's workers rests on everybody knowing everybody."""
    logs = {name: partial(mixed.ours.log, name) for name in OURS}
    for name, log in logs.items():
        wait_until_it_says(name, log, "node joined")
    for worker in mixed.theirs:
        wait_until_it_says(worker.name, partial(getattr, worker, "log"), "joined the party")


def wait_until_it_says(name: str, log: Callable[[], str], words: str) -> None:
    others = len(OURS) + len(THEIRS) - 1
    wait_until(lambda: log().count(words) >= others, what=f"{name} to know {others} others")


def test_an_election_of_ours_runs_once_and_leaves_celerys_workers_alone(mixed: Mixed) -> None:
    names = [f"ours {number}" for number in range(ELECTIONS)]
    for name in names:
        assert mixed.ours.app.control.election(name, "task", mixed.call(name), timeout=30).state == "done"
    wait_until(lambda: set(names) <= set(mixed.runs()), what="the tasks to run")
    assert {mixed.runs()[name] for name in names} == {1}
    mixed.check_alive()


def test_an_election_of_a_celery_client_runs_once(mixed: Mixed) -> None:
    names = [f"theirs {number}" for number in range(ELECTIONS)]
    for name in names:
        mixed.celery("app.control.election(id, 'task', call)", id=name, call=mixed.call(name))
    wait_until(lambda: set(names) <= set(mixed.runs()), what="the tasks to run")
    wait_until(lambda: mixed.counted("elections_done") >= 2 * ELECTIONS, what="both to be counted")
    assert {mixed.runs()[name] for name in names} == {1}
    mixed.check_alive()
    assert mixed.counted("elections_unfenced") == 0


def test_where_a_celery_worker_may_run_it_too_that_is_reported(mixed: Mixed) -> None:
    """Two of ours beside two of Celery's: V² = 4 >= N-1 = 3."""
    for name in OURS[2:]:
        assert mixed.ours.stop_worker(name) == 0
    for name in OURS[:2]:
        wait_until_two_left(mixed, name)
    names = [f"unfenced {number}" for number in range(ELECTIONS)]
    for name in names:
        mixed.celery("app.control.election(id, 'task', call)", id=name, call=mixed.call(name))
    wait_until(lambda: set(names) <= set(mixed.runs()), what="the tasks to run")
    wait_until(lambda: mixed.counted("elections_unfenced") == 2 * ELECTIONS, what="the reports")
    assert {mixed.runs()[name] for name in names} <= {1, 2}
    print(f"{sum(mixed.runs()[name] == 2 for name in names)} of {ELECTIONS} ran twice")
    mixed.check_alive()


def wait_until_two_left(mixed: Mixed, name: str) -> None:
    wait_until(lambda: mixed.ours.log(name).count("node left") == 2, what=f"{name} to know who left")
