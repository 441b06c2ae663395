"""A fleet of Umbel 0.3 and of this version with the same keys, and what holds when 0.3 is gone.

Umbel 0.3 signs and verifies without being bound to a cluster. Each verifies what the other signs, and of all
copies of a message one runs, whichever kind of worker takes them.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.commanding import run_beside
from tests.scenarios.places import place
from tests.scenarios.signed_tasks import runs_of
from tests.waiting import wait_until
from umbel.launch.preparation import node_name
from umbel.wire.message import Outgoing

TASKS_FILE = Path(__file__).with_name("signed_tasks.py")
KEYS = "first:" + "f" * 32
OF_EACH = 200 if os.environ.get("UMBEL_SOAK") else 20
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(240)]


class MixedFleet:
    def __init__(self, cluster: Cluster, old_source: Path) -> None:
        self.cluster = cluster
        self._environment = {**cluster._environment(), "UMBEL_APP": f"{TASKS_FILE}:app"}
        self._old = ["env", f"PYTHONPATH={old_source}"]

    def start_old(self, name: str, *flags: str) -> None:
        self.cluster.start_worker(name, "-c", "2", *flags, prefix=self._old)

    def old_command(self, *arguments: str) -> str:
        command = [*self._old, sys.executable, "-m", "umbel.cli.main", *arguments]
        done = run_beside(command, self.cluster.home, self._environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def counters(self, name: str) -> dict[str, int]:
        node = node_name(name)
        found = self.cluster.app.control.inspect(timeout=20, destination=[node]).stats() or {}
        counters: dict[str, int] = found[node]["umbel"]["counters"]
        return counters


def call(cluster: Cluster, task: str, word: str, queue: str) -> Outgoing:
    prepared = cluster.app.prepare(f"signed_tasks.{task}", [str(cluster.home), word], {}, {"queue": queue})
    return prepared.outgoing


@pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"])
def test_workers_of_both_versions_verify_what_either_signs_and_run_no_copy(
    broker: str, tmp_path: Path, old_source: Path
) -> None:
    home = str(tmp_path)
    with (
        place(broker, tmp_path, durable=False) as at,
        Cluster(tmp_path, TASKS_FILE, broker=at.broker, backend=at.backend, signing_keys=KEYS) as cluster,
    ):
        fleet = MixedFleet(cluster, old_source)
        fleet.start_old("old", "-Q", "both,for_old")
        # What 0.3 sent before the upgrade waits, and runs after it.
        fleet.old_command("call", "signed_tasks.note", "--args", f'["{home}", "before"]', "-q", "for_new")
        assert cluster.umbel("cluster-id", "show", check=False).returncode == 3
        assert cluster.umbel("cluster-id", "make", "upgraded").stdout == "upgraded\n"
        cluster.start_worker("new", "-c", "2", "-Q", "both,for_new")
        wait_until(lambda: runs_of(home) == ["before"], what="what was sent before the upgrade")
        assert fleet.counters("new")["unbound"] == 1

        words = [f"word-{number}" for number in range(OF_EACH)]
        sent = [call(cluster, "note", word, "both") for word in words]
        sent += [call(cluster, "second_try", f"again-{word}", "both") for word in words]
        sent.append(call(cluster, "note", "to-the-old", "for_old"))
        cluster.app.producer.publish(sent)
        cluster.app.producer.publish(sent)  # as somebody does who has no key
        for number in range(3):
            word = f'["{home}", "old-{number}"]'
            fleet.old_command("call", "signed_tasks.second_try", "--args", word, "-q", "both")
        expected = sorted(
            ["before", "to-the-old", *words, *(f"again-{word}" for word in words), "old-0", "old-1", "old-2"]
        )
        wait_until(lambda: len(runs_of(home)) >= len(expected), what="all of them to run")
        wait_until(
            lambda: sum(fleet.counters(name)["replayed"] for name in ("old", "new")) == len(sent),
            what="every copy to be refused",
        )
        assert sorted(runs_of(home)) == expected
        both = [fleet.counters(name) for name in ("old", "new")]
        assert sum(one[doubt] for one in both for doubt in ("unsigned", "forged", "stale")) == 0

        # Commands, in both directions.
        fleet.old_command("control", "pool_grow", "1", "-d", node_name("new"), "--timeout", "20")
        cluster.umbel("control", "pool_grow", "1", "-d", node_name("old"), "--timeout", "20")
        found: dict[str, Any] = cluster.app.control.inspect(timeout=20, limit=2).stats() or {}
        assert [one["pool"]["max-concurrency"] for one in found.values()] == [3, 3]

        assert cluster.stop_worker("old") == 0
        cluster.stop_worker("new")
        cluster.start_worker("after", "-c", "1", "-Q", "both", signing_accept_unbound="false")
        fleet.old_command("call", "signed_tasks.note", "--args", f'["{home}", "late"]', "-q", "both")
        wait_until(lambda: fleet.counters("after")["forged"] == 1, what="what 0.3 signs to be refused")
        cluster.app.producer.publish([call(cluster, "note", "last", "both")])
        wait_until(lambda: "last" in runs_of(home), what="what this version signs")
        assert "late" not in runs_of(home)
