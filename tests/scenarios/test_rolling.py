"""F7: workers are restarted one after the other under load, by SIGTERM to their process groups.

Nothing is lost, and no task runs twice but those that a worker cut off at the end of its grace.
"""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.protocol.delivery.states import READY_STATES, SUCCESS

SOAK = bool(os.environ.get("UMBEL_SOAK"))
WORKERS = 8 if SOAK else 3
ROUNDS = 3 if SOAK else 1
QUICK, LONG = (400, 8) if SOAK else (60, 2)  # tasks that are sent before each restart
GRACE_S = "0.5"
TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")


@pytest.mark.scenario
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"])
def test_a_rolling_restart_loses_nothing_and_repeats_only_what_was_cut_off(
    broker: str, tmp_path: Path
) -> None:
    names = [f"w{number}" for number in range(WORKERS)]
    with (
        place(broker, tmp_path) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
    ):
        for name in names:
            cluster.start_worker(name, "-c", "2", "--grace", GRACE_S, wait=False)
        ids: set[str] = set()
        for _ in range(ROUNDS):
            for name in names:
                ids |= _send(cluster)
                _restart(cluster, name)
        wait_until(lambda: _ended(cluster, ids) == len(ids), deadline_s=300, what="every task to end")
        assert {kept.status for kept in cluster.app.backend.read(list(ids)).values()} == {SUCCESS}
        for name in names:
            assert cluster.stop_worker(name) == 0
        cut = sum(_cut(cluster, name) for name in names)
    runs = _runs(tmp_path)
    repeats = {task_id: flags for task_id, flags in runs.items() if len(flags) > 1}
    repeated = sum(len(flags) - 1 for flags in repeats.values())
    print(
        f"{broker}: {WORKERS * ROUNDS} restarts, {len(ids)} tasks, lost 0, cut off {cut}, repeated {repeated}"
    )
    assert runs.keys() == ids
    assert all(all(later) for _, *later in repeats.values())  # repeats know that they are
    assert not any(first for first, *_ in repeats.values())
    assert repeated <= cut


def _send(cluster: Cluster) -> set[str]:
    """Some of them take longer than the grace."""
    work = cluster.app.tasks["chaos_tasks.work"]
    times = [1.5] * LONG + [0.04] * QUICK
    return {one.id for one in cluster.app.send_many(work.s(str(cluster.home), time) for time in times)}


def _restart(cluster: Cluster, name: str) -> None:
    process = cluster.workers[name]
    wait_until(lambda: _is_busy(cluster, name, process.pid), deadline_s=120, what=f"{name} to be at work")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    cluster.start_worker(name, "-c", "2", "--grace", GRACE_S, wait=False)


def _is_busy(cluster: Cluster, name: str, pid: int) -> bool:
    state = cluster.state_of(name)
    return state is not None and state.ready and state.fields["pid"] == pid


def _ended(cluster: Cluster, ids: set[str]) -> int:
    return sum(kept.status in READY_STATES for kept in cluster.app.backend.read(list(ids)).values())


def _cut(cluster: Cluster, name: str) -> int:
    """As each of its runs said when it had stopped."""
    return sum(map(int, re.findall(r"worker stopped.*\bcut=(\d+)", cluster.log(name))))


def _runs(directory: Path) -> dict[str, list[int]]:
    """For each task, whether each of its runs knew that it was a repetition."""
    runs: dict[str, list[int]] = {}
    for line in journal_of(str(directory)).read_text().splitlines():
        task_id, redelivered, _pid = line.split()
        runs.setdefault(task_id, []).append(int(redelivered))
    return runs
