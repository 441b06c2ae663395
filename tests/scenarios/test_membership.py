"""Workers that know one another, as real processes on every broker (S2-S7; must-show 3 and 4)."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.scenarios.membership_tasks import JOURNAL
from tests.scenarios.places import place
from tests.waiting import DEADLINE_S, wait_until

TASKS_FILE = Path(__file__).with_name("membership_tasks.py")
SOAK = bool(os.environ.get("UMBEL_SOAK"))
BROKERS = ["sqlite", "redis", "amqp"]
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


@contextmanager
def cluster_on(broker: str, home: Path, **settings: object) -> Iterator[Cluster]:
    with (
        place(broker, home) as where,
        Cluster(home, TASKS_FILE, broker=where.broker, backend=where.backend, **settings) as cluster,
    ):
        yield cluster


class Watcher:
    """`umbel members --watch --json`, with nothing but the broker's address."""

    def __init__(self, cluster: Cluster) -> None:
        self._file = cluster.home / "watch.jsonl"
        command = [sys.executable, "-m", "umbel.cli.main", "members", "--watch", "--json"]
        with self._file.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "-b", cluster.app.settings.broker],
                cwd=cluster.home,
                stdin=subprocess.DEVNULL,
                stdout=out,
            )

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(20)

    def changes(self, node: str) -> list[str]:
        found = [json.loads(line) for line in self._file.read_text().splitlines()]
        return [row["change"] for row in found if row["node"].startswith(f"{node}@")]

    def wait_for(self, node: str, *changes: str, deadline_s: float = DEADLINE_S) -> None:
        wait_until(
            lambda: self.changes(node) == list(changes),
            deadline_s=deadline_s,
            what=f"{node}: {changes}, in {self._file.read_text()}",
        )


def states(cluster: Cluster) -> dict[str, str]:
    """Empty while nobody answers: on a busy machine that may be so."""
    told = cluster.umbel("members", "--timeout", "5", "--json", check=False).stdout
    rows: list[dict[str, Any]] = json.loads(told or "[]")
    return {row["node"].partition("@")[0]: row["state"] for row in rows}


def journal(cluster: Cluster) -> list[str]:
    path = cluster.home / JOURNAL
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("broker", BROKERS)
def test_who_stops_leaves_and_who_dies_is_suspect_and_then_lost_once(broker: str, tmp_path: Path) -> None:
    """Must-show 4."""
    with cluster_on(broker, tmp_path, heartbeat_interval_s=0.5, mingle_wait_s=0.3) as cluster:
        watched = cluster.start_worker("w1", "-c", "1")
        for name in ("w2", "w3"):
            cluster.start_worker(name, "-c", "1")
        with Watcher(cluster) as watcher:
            for name in ("w1", "w2", "w3"):
                watcher.wait_for(name, "joined")
            alive = dict.fromkeys(("w1", "w2", "w3"), "alive")
            wait_until(lambda: states(cluster) == alive, what="all to be known")
            cluster.stop_worker("w2")
            watcher.wait_for("w2", "joined", "left")
            cluster.kill_worker("w3")
            watcher.wait_for("w3", "joined", "suspect", "lost")
            assert watcher.changes("w1") == ["joined"]
        wait_until(
            lambda: states(cluster) == {"w1": "alive", "w2": "left", "w3": "lost"}, what="w1 to know it"
        )
        # Each hook once, although one before it raised (S5).
        wait_until(lambda: len(journal(cluster)) >= 4, what="the hooks")
        of_w1 = [
            line.partition(" saw ")[2] for line in journal(cluster) if line.startswith(f"{watched.pid} ")
        ]
        assert sorted(of_w1) == ["w2 join (umbel)", "w2 leave (went offline)", "w3 join (umbel)", "w3 lost"]
        assert "signal receiver raised an exception" in cluster.log("w1")


def test_lost_nodes_are_looked_for_as_often_as_gossip_interval_s_says(tmp_path: Path) -> None:
    """S5: a worker that looks once in thirty years has not found yet what the other found."""
    with cluster_on("sqlite", tmp_path, heartbeat_interval_s=0.3, mingle_wait_s=0.3) as cluster:
        cluster.start_worker("patient", "-c", "1", "-l", "INFO", gossip_interval_s=1e9)
        cluster.start_worker("often", "-c", "1", "-l", "INFO", gossip_interval_s=0.5)
        cluster.start_worker("killed", "-c", "1")
        wait_until(
            lambda: all(cluster.log(name).count("node joined") == 2 for name in ("patient", "often")),
            what="all to meet",
        )
        cluster.kill_worker("killed")
        wait_until(lambda: "node lost" in cluster.log("often"), what="it to be lost")
        assert "node lost" not in cluster.log("patient")
        assert "node missed its heartbeats" not in cluster.log("patient")


@pytest.mark.parametrize("broker", BROKERS if SOAK else ["redis"])
def test_a_worker_that_stands_still_for_three_seconds_is_not_lost(broker: str, tmp_path: Path) -> None:
    """Must-show 4, with the intervals that are the default."""
    with cluster_on(broker, tmp_path, mingle_wait_s=0.3) as cluster, Watcher(cluster) as watcher:
        cluster.start_worker("w1", "-c", "1")
        stopped = cluster.start_worker("w2", "-c", "1")
        watcher.wait_for("w2", "joined")
        stopped.send_signal(signal.SIGSTOP)
        since = monotonic()
        wait_until(lambda: monotonic() - since >= 3.0, what="three seconds to pass")
        stopped.send_signal(signal.SIGCONT)
        cluster.stop_worker("w2")
        wait_until(lambda: watcher.changes("w2")[-1:] == ["left"], what="w2 to leave")
        assert "lost" not in watcher.changes("w2") + watcher.changes("w1")
        assert "node lost" not in cluster.log("w1") + cluster.log("w2")


@pytest.mark.parametrize("broker", BROKERS)
def test_a_revoked_task_never_runs_whoever_was_up_when_it_was_revoked(broker: str, tmp_path: Path) -> None:
    """S3, must-show 3: no worker up; one worker down; all killed right after."""
    with cluster_on(broker, tmp_path, heartbeat_interval_s=0.5, mingle_wait_s=0.3) as cluster:
        send = cluster.app.send_task

        def revoke_one(name: str) -> None:
            send("membership_tasks.note", [name], queue="idle").revoke()

        revoke_one("revoked with no worker up")
        cluster.start_worker("w2", "-c", "1", "-Q", "other")
        revoke_one("revoked while the worker that would run it is down, before all are killed")
        cluster.kill_worker("w2")
        for name in ("first", "second"):
            send("membership_tasks.note", [name], queue="idle")
        cluster.start_worker("w1", "-c", "1", "-Q", "idle")
        wait_until(
            lambda: cluster.counters("w1").get("received") == 4,
            what="four messages to be taken",
        )
        wait_until(lambda: cluster.counters("w1").get("succeeded") == 2, what="the two others to run")
        assert [line for line in journal(cluster) if line.startswith("ran")] == ["ran first", "ran second"]
        assert cluster.counters("w1")["revoked"] == 2


@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_a_worker_that_begins_alone_waits_for_nobody(broker: str, tmp_path: Path) -> None:
    with cluster_on(broker, tmp_path, mingle_wait_s=600) as cluster:
        cluster.start_worker("w1", "-c", "1")


def test_a_worker_runs_tasks_with_everything_off(tmp_path: Path) -> None:
    """S6; each part alone is tests/worker/test_gossip.py."""
    parts = ("mingle", "gossip", "heartbeat")
    with cluster_on("sqlite", tmp_path) as cluster:
        cluster.start_worker("w1", "-c", "1", "-l", "INFO", *(f"--without-{part}" for part in parts))
        cluster.app.send_task("membership_tasks.note", ["alone"]).get(timeout=90)
        for part in parts:
            assert f"disabled by without_{part}" in cluster.log("w1")
        (clock,) = cluster.umbel_json("clock", "--timeout", "5")["nodes"].values()
        assert clock > 0


def test_after_the_broker_was_away_nodes_say_hello_again_and_nobody_is_lost(tmp_path: Path) -> None:
    """S2."""
    with place("redis", tmp_path) as where:
        assert where.restart is not None
        with Cluster(
            tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, mingle_wait_s=0.3
        ) as cluster:
            for name in ("w1", "w2"):
                cluster.start_worker(name, "-c", "1", "-l", "INFO")
            wait_until(lambda: "node joined" in cluster.log("w1"), what="them to meet")
            where.restart()
            wait_until(
                lambda: min(cluster.log(name).count("synchronized") for name in ("w1", "w2")) >= 2,
                what="both to say hello again",
            )
            assert "node lost" not in cluster.log("w1") + cluster.log("w2")


def test_nobody_there_is_said_so(tmp_path: Path) -> None:
    with cluster_on("sqlite", tmp_path) as cluster:
        asked = cluster.umbel("members", "--timeout", "2", check=False)
        assert (asked.returncode, asked.stdout) == (69, "")
        assert asked.stderr == "umbel: no node answered; start one with `umbel worker`\n"
