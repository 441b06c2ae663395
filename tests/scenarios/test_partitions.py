"""Workers, broker and client in network namespaces, cut off from one another without being told."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

from tests.cluster import Cluster
from tests.servers.network import Network, missing, network
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.servers.way import Way
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("partition_tasks.py")
LEASE_S = 10.0
WORKERS = ("w1", "w2", "w3")
CLIENT = "client"
FLAGS = ("-c", "1", "-P", "solo", "-l", "INFO")
BEGAN, ENDED = "broker unavailable; retrying", "broker available again"
GRAVITY = ["alive", "suspect", "lost"]
_WHY_NOT = missing() if os.environ.get("UMBEL_SOAK") else "a soak: it waits for leases and time-outs"
pytestmark = [
    pytest.mark.scenario,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT),
]


@dataclass
class Field:
    cluster: Cluster
    net: Network

    def leader(self) -> str:
        shown = self.cluster.umbel_json("schedule", "ls")
        return str(shown["leader"] or "").partition("@")[0]

    def states(self) -> dict[str, str]:
        rows = self.cluster.umbel_json("members", "--timeout", "2")
        return {row["node"].partition("@")[0]: row["state"] for row in rows}

    def lines(self, name: str, text: str) -> int:
        return self.cluster.log(name).count(text)

    def namespace(self, name: str) -> str:
        return os.readlink(f"/proc/{self.cluster.workers[name].pid}/ns/net")

    @contextmanager
    def cut(self, place: str) -> Iterator[None]:
        self.net.cut(place)
        try:
            yield
        finally:
            self.net.heal(place)

    def work(self, journal: Path, count: int) -> set[str]:
        task = self.cluster.app.tasks["partition_tasks.work"]
        return {str(task.delay(str(journal), number).id and number) for number in range(count)}


@pytest.fixture(params=["redis", "amqp"])
def field(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Field]:
    with network(*WORKERS, CLIENT) as net, _server(request.param, tmp_path) as (port, url):
        way = Way(port, net.here)
        settings = {"broker": url(net.here, way.port), "backend": f"sqlite:///{tmp_path / 'results.db'}"}
        with Cluster(tmp_path, TASKS_FILE, scheduler_lease_s=LEASE_S, **settings) as cluster:
            for name in WORKERS:
                cluster.start_worker(name, *FLAGS, prefix=net.inside(name))
            made = Field(cluster, net)
            wait_until(made.leader, what="a leader")
            wait_until(
                lambda: set(made.states().values()) == {"alive"} and len(made.states()) == len(WORKERS),
                what="three members",
            )
            yield made
        way.close()
        way.end()


def test_a_cut_leader_is_followed_in_time_and_all_say_the_same_of_it(field: Field, tmp_path: Path) -> None:
    cut_off = field.leader()
    node = f"{cut_off}@{socket.gethostname()}"
    journal = tmp_path / "journal"
    sent = field.work(journal, 50)
    with field.cut(cut_off):
        cut_at = monotonic()
        wait_until(lambda: field.leader() not in ("", cut_off), what="another leader")
        took_s = monotonic() - cut_at
        assert took_s <= LEASE_S * 1.1 + 1.5, took_s  # asking who leads takes its time, too
        seen = _watch(lambda: field.states().get(cut_off, "missing"), "lost", times=8)
        assert [GRAVITY.index(one) for one in seen] == sorted(GRAVITY.index(one) for one in seen), seen
        pinged = field.cluster.umbel("ping", "--timeout", "2", check=False)
        assert f"{node} silent for" in pinged.stderr and "(lost)" in pinged.stderr
        wait_until(lambda: field.lines(cut_off, BEGAN) == 1, what="the cut to be noticed")
    wait_until(lambda: field.lines(cut_off, ENDED) == 1, what="its end to be noticed")
    wait_until(lambda: field.states().get(cut_off) == "alive", what="its return")
    loud = _loud_lines(field.cluster.log(cut_off))
    assert len(loud) == 1 and BEGAN in loud[0], "\n".join(loud)
    wait_until(lambda: sent == set(journal.read_text().split()), what="every task to have run")


def test_an_election_whose_handler_was_cut_off_is_run_again(field: Field, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    action = {"journal": str(journal)}
    field.cluster.app.control.election("cut off", "cut", action, timeout=0)
    wait_until(lambda: journal.exists() and journal.read_text(), what="the first run")
    (place,) = (name for name in WORKERS if field.namespace(name) == journal.read_text().split()[-1])
    with field.cut(place):
        wait_until(lambda: "1 ended" in journal.read_text(), what="it to stop")
        wait_until(lambda: "2 ended" in journal.read_text(), deadline_s=90, what="another run")
    outcome = field.cluster.app.control.election("cut off", "cut", action, timeout=60)
    assert (outcome.state, outcome.attempt, outcome.outcome) == ("done", 2, "ok: attempt 2")


@pytest.mark.parametrize("timeout_s", [1.0, 10.0])
def test_a_client_that_is_cut_off_keeps_its_deadlines(field: Field, timeout_s: float) -> None:
    for command in ("ping", "members", "status"):
        start_s = min(_took_s(field, command, 0.001) for _ in range(2))  # what Python takes to begin
        with field.cut(CLIENT):
            took_s = min(_took_s(field, command, timeout_s) for _ in range(2))  # others use this machine
        assert timeout_s <= took_s <= start_s + timeout_s * 1.1 + 0.1, (command, took_s, start_s)


def _took_s(field: Field, command: str, timeout_s: float) -> float:
    began = monotonic()
    words = (command, "--timeout", f"{timeout_s:g}")
    field.cluster.umbel(*words, check=False, prefix=field.net.inside(CLIENT))
    return monotonic() - began


def _watch(look: Callable[[], str], until: str, *, times: int) -> list[str]:
    """What is seen from poll to poll, until this was seen so often."""
    seen: list[str] = []

    def is_seen() -> bool:
        seen.append(look())
        return seen.count(until) >= times

    wait_until(is_seen, deadline_s=90, what=f"{until} {times} times")
    return seen


def _loud_lines(log: str) -> list[str]:
    """But for those that tell of something else: who is silent, and what became of a task."""
    others = (
        "node missed its heartbeats",
        "node lost",
        "after its claim had expired",
        "worker lease expired",
        "most nodes went silent",
    )
    return [
        line
        for line in log.splitlines()
        if re.search(r" (WARNING|ERROR) ", line) and not any(text in line for text in others)
    ]


@contextmanager
def _server(broker: str, directory: Path) -> Iterator[tuple[int, Callable[[str, int], str]]]:
    if broker == "amqp":
        server, vhost = shared_server(), shared_server().new_vhost()
        yield server.port, lambda host, port: f"amqp://guest:guest@{host}:{port}/{vhost}"
        return
    redis = RedisServer(directory)
    redis.start()
    try:
        yield redis.port, lambda host, port: f"redis://{host}:{port}/0"
    finally:
        redis.stop()
