"""One outage of the broker is two lines in a worker's log, and what ended meanwhile is not run again."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.scenarios.places import place
from tests.servers.way import Way
from tests.waiting import wait_until
from umbel.text import without_password

ROOT = str(Path(__file__).parents[2])
TASKS_FILE = Path(__file__).with_name("outage_tasks.py")
LONG_S = 60.0
TASKS = 2
# Of the ten seconds after a worker's start; nothing to do with the broker.
ELSEWHERE = ("too few nodes to compare", "wall clocks of the nodes differ")


@contextmanager
def server(broker: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Where the broker is, and where results are kept."""
    with place(broker, directory, durable=False) as at:
        yield at.broker, at.backend


@pytest.mark.scenario
@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_a_black_hole_is_two_lines_and_repeats_nothing(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many parts notice it: claims, fan-out, mailbox, leases, results, the recorder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((ROOT, os.environ.get("PYTHONPATH", ""))))
    with server(broker, tmp_path) as (url, backend):
        port = re.search(r":(\d+)/", url)
        assert port is not None
        way = Way(int(port[1]))
        cut = url.replace(port[0], f":{way.port}/")
        results = cut if backend == url else backend
        with Cluster(
            tmp_path, TASKS_FILE, broker=url, backend=backend, lease_s=2.0, scheduler_lease_s=4.0
        ) as cluster:
            cluster.start_worker(
                "w",
                *("-c", str(TASKS), "--record", str(tmp_path / "lake")),
                broker=cut,
                backend=results,
                connect_timeout_s=2.0,
            )
            wait_until(lambda: "scheduler acquired" in cluster.log("w"), what="the lease of the scheduler")
            wait_until(lambda: "recording started" in cluster.log("w"), what="the recorder beside it")
            cluster.start_worker("other", "-c", "1", "-Q", "elsewhere")
            wait_until(lambda: "node joined" in cluster.log("w"), what="both to know each other")
            sent = [cluster.app.tasks["outage_tasks.waits"].delay(str(tmp_path)) for _ in range(TASKS)]
            wait_until(lambda: len(runs(tmp_path)) == TASKS, deadline_s=LONG_S, what="the tasks to run")
            before = len(cluster.log("w").splitlines())

            way.silence()
            (tmp_path / "gate").touch()
            for what in ("node lost", "scheduler acquired"):
                wait_until(lambda: what in cluster.log("other"), deadline_s=LONG_S, what=what)  # noqa: B023
            assert cluster.counters("w")["succeeded"] == TASKS
            way.resume()

            assert {one.get(timeout=LONG_S) for one in sent} == {one.id for one in sent}
            wait_until(lambda: "available again" in cluster.log("w"), deadline_s=LONG_S, what="the end")
            began, ended = [
                line
                for line in cluster.log("w").splitlines()[before:]
                if not any(text in line for text in ELSEWHERE)
            ]
            assert "WARNING broker unavailable; retrying" in began
            assert without_password(cut) in began
            assert "INFO    broker available again" in ended
            assert f"outcomes settled:{TASKS}" in ended
            assert sorted(runs(tmp_path)) == sorted(one.id for one in sent)
        way.end()


def runs(directory: Path) -> list[str]:
    journal = journal_of(str(directory))
    return journal.read_text().split() if journal.exists() else []
