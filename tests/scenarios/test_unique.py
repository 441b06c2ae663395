"""Unique tasks: a second send gets the first one's result, until that one has ended."""

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.errors import NotSupported

TASKS_FILE = Path(__file__).with_name("unique_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


def runs(directory: Path) -> list[str]:
    file = directory / "runs.txt"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("broker", ["sqlite", "redis"])
def test_a_unique_task_waits_and_runs_once_until_it_has_ended(broker: str, tmp_path: Path) -> None:
    with (
        place(broker, tmp_path) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
    ):
        builds = cluster.app.tasks["unique_tasks.builds"]
        first = builds.delay(str(tmp_path), "docs")
        assert builds.delay(str(tmp_path), "docs").id == first.id  # waits
        assert builds.s(str(tmp_path), name="docs").apply_async().id != first.id  # said in another way
        other = builds.apply_async((str(tmp_path), "docs"), unique_key="mine")
        assert other.id != first.id
        assert builds.apply_async((str(tmp_path), "other"), unique_key="mine").id == other.id
        cluster.start_worker("w1", "-c", "4")
        wait_until(lambda: len(runs(tmp_path)) == 3, what="all that are different to run")
        assert builds.delay(str(tmp_path), "docs").id == first.id  # runs
        (tmp_path / "gate").touch()
        assert first.get(timeout=90) == "docs"
        wait_until(lambda: builds.delay(str(tmp_path), "docs").id != first.id, what="its key to be free")


def test_a_retry_and_a_crash_are_no_end_and_a_failure_is(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "2")
        tries, dies = cluster.app.tasks["unique_tasks.tries"], cluster.app.tasks["unique_tasks.dies_once"]
        fails = cluster.app.tasks["unique_tasks.fails"]
        first = tries.delay(str(tmp_path))
        wait_until(lambda: runs(tmp_path) == ["try 0", "try 1"], what="the second attempt")
        assert tries.delay(str(tmp_path)).id == first.id
        (tmp_path / "gate").touch()
        assert first.get(timeout=90) == 1
        (tmp_path / "gate").unlink()
        (tmp_path / "runs.txt").unlink()
        crashed = dies.delay(str(tmp_path))
        wait_until(lambda: len(runs(tmp_path)) == 2, what="the run after the crash")
        assert dies.delay(str(tmp_path)).id == crashed.id
        (tmp_path / "gate").touch()
        assert crashed.get(timeout=90) == "survived"
        failed = fails.delay()
        failed.get(timeout=90, propagate=False)
        wait_until(lambda: fails.delay().id != failed.id, what="its key to be free")


def test_rabbitmq_refuses_unique_tasks_in_one_line_that_names_the_remedy(tmp_path: Path) -> None:
    with (
        place("amqp", tmp_path) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
        pytest.raises(NotSupported, match=r"unique_tasks\.fails.*RabbitMQ has no key.*use Redis") as refused,
    ):
        cluster.app.tasks["unique_tasks.fails"].delay()
    assert "\n" not in str(refused.value)


def test_eager_tasks_have_ended_before_anybody_could_send_them_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster, cluster.app.eager():
        fails = cluster.app.tasks["unique_tasks.fails"]
        assert fails.delay().id != fails.delay().id


def test_a_key_needs_a_time(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster, pytest.raises(ValueError, match="give seconds"):
        cluster.app.send_task("elsewhere", unique_key="mine")
