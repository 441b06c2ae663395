"""A worker whose links to RabbitMQ are cut misses nothing that Celery's nodes revoked meanwhile (S2)."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from tests.cluster import Cluster
from tests.interop.mixed_cluster import TASKS_FILE, CeleryWorker, Client, program_of
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.servers.way import Way
from tests.waiting import wait_until

CUTS = 20 if os.environ.get("UMBEL_SOAK") else 2
CONNECT_S = {"shorter": 20.0, "longer": 0.5}  # the connect time-out, which a cut is shorter or longer than
pytestmark = pytest.mark.timeout(600)
BEGAN, ENDED = "broker unavailable; retrying", "broker available again"


@dataclass
class Cut:
    """One of our workers behind a way that can be cut, and one of Celery's beside it."""

    ours: Cluster
    client: Client
    way: Way

    def lines(self, text: str) -> int:
        return self.ours.log("cut").count(text)

    def links(self, *command: str) -> dict[str, int]:
        """How often each link of our worker was restored, as a command shows it."""
        replies = self.ours.umbel_json(*command, "-d", f"cut@{socket.gethostname()}", "--timeout", "20")[
            "replies"
        ]
        (stats,) = replies.values()
        found: dict[str, int] = stats["umbel"]["links"]
        return found

    def revoke(self, task_id: str) -> None:
        """By a Celery client; our worker cannot hear it, Celery's can."""
        asked = "app.control.inspect(timeout=10.0, limit=1).revoked()"
        self.client("app.control.revoke(task_id)", task_id=task_id)
        wait_until(
            lambda: any(task_id in ids for ids in (self.client(asked) or {}).values()),
            what="Celery's worker to know the revoke",
        )

    def note(self, journal: Path, line: str, task_id: str) -> None:
        sent = "note.apply_async((journal, line), queue='on_cut', task_id=task_id).id"
        self.client(sent, journal=str(journal), line=line, task_id=task_id)

    def state(self, task_id: str) -> str:
        found: str = self.client("app.AsyncResult(task_id).state", task_id=task_id)
        return found


@dataclass
class Beside:
    """Celery's side: a worker and a client, which no cut reaches."""

    vhost: str
    backend: str
    client: Client


@pytest.fixture(scope="module")
def celery(tmp_path_factory: pytest.TempPathFactory, results_server: RedisServer) -> Iterator[Beside]:
    home, server = tmp_path_factory.mktemp("celery"), shared_server()
    vhost, backend = server.new_vhost(), f"{results_server.url.removesuffix('0')}5"
    variables = {"CELERY_BROKER_URL": server.url(vhost), "CELERY_RESULT_BACKEND": backend}
    with (
        CeleryWorker("celery", home, queues=["on_celery"], **variables) as worker,
        Client("celery", program_of("celery", "python"), home, **variables) as client,
    ):
        worker.wait_until_ready()
        yield Beside(vhost, backend, client)
        for process in (worker, client):
            process.tell_to_stop()


@pytest.fixture
def cut(request: pytest.FixtureRequest, tmp_path: Path, celery: Beside) -> Iterator[Cut]:
    way = Way(shared_server().port)
    url = f"amqp://guest:guest@127.0.0.1:{way.port}/{celery.vhost}"
    with Cluster(tmp_path, TASKS_FILE, broker=url, backend=celery.backend) as ours:
        ours.start_worker("cut", "-c", "2", "-Q", "on_cut", connect_timeout_s=CONNECT_S[request.param])
        made = Cut(ours, celery.client, way)
        wait_until(lambda: made.lines("node joined"), what="our worker to hear the other")
        yield made
        way.resume()
        assert ours.stop_worker("cut") == 0
    way.end()


@pytest.mark.parametrize("cut", CONNECT_S, indirect=True)
def test_what_celery_revoked_during_a_cut_never_runs(
    cut: Cut, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    journal = tmp_path / "journal"
    is_longer = "longer" in request.node.name
    for number in range(1, CUTS + 1):
        revoked, runs = f"revoked-{uuid4()}", f"runs-{uuid4()}"
        cut.way.hold()
        cut.revoke(revoked)
        cut.note(journal, revoked, revoked)
        cut.note(journal, runs, runs)
        if is_longer:
            # Each try of a new connection takes as long as the time-out, and ends it.
            tried = cut.way.accepted
            wait_until(lambda: cut.way.accepted >= tried + 3, what="three tries to fail")  # noqa: B023
        cut.way.resume()
        wait_until(lambda: cut.state(runs) == "SUCCESS", what="the other task to run")  # noqa: B023
        wait_until(lambda: cut.state(revoked) == "REVOKED", what="the revoked task to end")  # noqa: B023
        wait_until(lambda: cut.lines(ENDED) == number, what="the end to be logged")  # noqa: B023
        assert cut.lines(BEGAN) == number
    assert "revoked-" not in journal.read_text()
    links = cut.links("inspect", "stats")
    assert all(links.get(name, 0) >= CUTS for name in ("main", "mailbox", "events")), links
    assert cut.links("status") == links


@pytest.mark.parametrize("cut", ["shorter"], indirect=True)  # a new connection is made at once
def test_a_message_that_is_redelivered_to_who_runs_it_is_adopted(cut: Cut, tmp_path: Path) -> None:
    """It is not run beside itself, its outcome is applied, and no warning says otherwise."""
    gate, task_id = tmp_path / "gate", f"long-{uuid4()}"
    sent = "waits_for.apply_async((gate,), queue='on_cut', task_id=task_id).id"
    cut.client(sent, gate=str(gate), task_id=task_id)
    wait_until(lambda: cut.state(task_id) == "STARTED", what="the task to run")
    cut.way.cut()
    wait_until(lambda: cut.ours.counters("cut").get("adopted") == 1, what="its adoption")
    gate.touch()
    wait_until(lambda: cut.state(task_id) == "SUCCESS", what="its end")
    wait_until(lambda: cut.ours.counters("cut").get("succeeded") == 1, what="it to be counted")
    counters = cut.ours.counters("cut")
    assert (counters["received"], counters["conflicts"]) == (1, 0)
    assert "outcome dropped" not in cut.ours.log("cut")
