"""Tasks sent in transactions run if, and only if, the transaction commits, whoever is killed meanwhile."""

import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from tests.cluster import Cluster
from tests.scenarios.outbox_tasks import TASKS, connect
from tests.scenarios.places import place
from tests.servers.postgres import shared_postgres
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("outbox_tasks.py")
SOAK = os.environ.get("UMBEL_SOAK") == "1"
ROUNDS = 20 if SOAK else 2
TRANSACTIONS = 300 if SOAK else 60  # of a round
LEASE_S = 2.0
WAYS = ("killed", "paused", "stopped")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(1800 if SOAK else 240)]

WHERE = [("postgresql", "redis"), ("sqlite", "sqlite"), ("postgresql", "amqp"), ("sqlite", "redis")]


class Shop:
    """The ledger of what was committed, and the file of what ran."""

    def __init__(self, cluster: Cluster, url: str, file: Path) -> None:
        self._cluster = cluster
        self._url = url
        self._file = file
        self._next = 0

    def start_writer(self, count: int) -> subprocess.Popen[bytes]:
        first, self._next = self._next, self._next + count
        words = [sys.executable, str(TASKS_FILE), str(self._file), str(first), str(self._next)]
        environment = {**os.environ, **self._cluster._environment()}
        return subprocess.Popen(words, env=environment, cwd=self._cluster.home)

    def committed(self) -> list[str]:
        connection = connect(self._url)
        rows = connection.execute("SELECT number, task_id FROM ledger").fetchall()
        connection.close()
        assert all(count == TASKS for count in Counter(number for number, _ in rows).values())
        return [task_id for _, task_id in rows]

    def ran(self) -> list[str]:
        return [task_id for task_id, _ in self.runs()]

    def has_run_more_than(self, count: int) -> bool:
        return len(self.ran()) > count

    def runs(self) -> list[tuple[str, str]]:
        """(task id, "first" or "again"): again if a worker died with it."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return [(task_id, again) for task_id, _, again in (line.partition(" ") for line in lines)]

    def status(self) -> dict[str, object]:
        (row,) = self._cluster.umbel_json("outbox", "status")
        assert isinstance(row, dict)
        return row


@pytest.mark.skipif(
    not SOAK, reason="hand-overs take half a minute; tests/outbox/test_kills.py has the steps"
)
@pytest.mark.parametrize(("database", "broker"), WHERE)
def test_tasks_run_if_and_only_if_their_transaction_commits(
    database: str, broker: str, tmp_path: Path
) -> None:
    chance, began = Random(7), monotonic()
    # A process that stands still in a transaction of SQLite holds its file, and with it everybody else.
    ways = [one for one in WAYS if one != "paused" or "sqlite" not in (database, broker)]
    url = f"sqlite:///{tmp_path}/shop.db" if database == "sqlite" else shared_postgres().new_database()
    connection = connect(url)
    connection.execute("CREATE TABLE ledger (number int, task_id text)")
    connection.commit()
    connection.close()
    with (
        place(broker, tmp_path, restarts=True) as where,
        Cluster(
            tmp_path,
            TASKS_FILE,
            broker=where.broker,
            backend=where.backend,
            outbox=url,
            lease_s=LEASE_S,
            task_ignore_result=True,
        ) as cluster,
    ):
        assert "outbox ready" in cluster.umbel("outbox", "create").stdout
        shop = Shop(cluster, url, tmp_path / "runs.txt")
        for name in ("w1", "w2"):
            cluster.start_worker(name, "-c", "1", wait=False)
        cluster.wait_for("w1")
        cluster.wait_for("w2")
        for number in range(ROUNDS):
            before = len(shop.ran())
            writer = shop.start_writer(TRANSACTIONS)
            wait_until(partial(shop.has_run_more_than, before), what="tasks of this round to run")
            _disturb(cluster, shop, ways[number % len(ways)])
            if number % 2 and where.restart is not None:
                where.restart()
            if chance.random() < 0.5:
                writer.kill()
            writer.wait(120)
        committed = set(shop.committed())
        wait_until(
            lambda: committed <= set(shop.ran()), deadline_s=120.0, what="all that was committed to run"
        )
        wait_until(lambda: shop.status()["waiting"] == 0, what="the outbox to be empty")
        ran = shop.ran()
        status = shop.status()
        assert set(ran) == committed and status["set_aside"] == 0
        assert str(status["relay"]).startswith(("w1@", "w2@"))
        twice = len(ran) - len(committed)
        firsts = Counter(task_id for task_id, again in shop.runs() if again == "first")
        sent_twice = sum(count - 1 for count in firsts.values())
        assert broker == "amqp" or not sent_twice  # the others take an id once
        took_s = monotonic() - began
        print(f"{database}, {broker}: {len(committed)} tasks committed and run, {twice} of them again "
              f"({sent_twice} published twice), {ROUNDS} hand-overs, {took_s:.0f} s")  # fmt: skip


def _disturb(cluster: Cluster, shop: Shop, way: str) -> None:
    """End the worker whose relay leads, or let it stand still for longer than its lease."""
    leader = str(wait_until(lambda: shop.status()["relay"], what="a relay that leads"))
    name = leader.partition("@")[0]
    process = cluster.workers[name]
    if way == "killed":
        cluster.kill_worker(name)
    elif way == "stopped":
        cluster.stop_worker(name)
    else:
        process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: shop.status()["relay"] not in (None, leader), what="the other to take over")
    finally:
        process.send_signal(signal.SIGCONT)
    if way != "paused":
        cluster.start_worker(name, "-c", "1")
