"""Remote control of real workers on every broker (P1-P8)."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.waiting import wait_until
from umbel.app.workers import node_name

TASKS_FILE = Path(__file__).with_name("control_tasks.py")
ONE, TWO = node_name("one"), node_name("two")
ENOUGH_S = 20.0
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", params=["sqlite", "redis", "amqp"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("broker")
    if request.param == "sqlite":
        yield f"sqlite:///{home / 'queue.db'}"
    elif request.param == "redis":
        server = RedisServer(home)
        server.start()
        yield server.url
        server.stop()
    else:
        shared = shared_server()
        yield shared.url(shared.new_vhost())


@pytest.fixture(scope="module")
def cluster(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers that the tests leave as they found them."""
    home = tmp_path_factory.mktemp("cluster")
    results = f"sqlite:///{home / 'results.db'}"
    with Cluster(home, TASKS_FILE, broker=broker, backend=results) as made:
        made.start_worker("one", "-c", "2", wait=False)
        made.start_worker("two", "-c", "2")
        wait_until(lambda: made.state_of("one"), what="the other worker")
        yield made


def ask(cluster: Cluster, node: str, command: str, **arguments: Any) -> Any:
    asked = cluster.app.control.ask(command, arguments, destination=[node], timeout=ENOUGH_S)
    assert not asked.silent
    return asked.replies[node]


def test_workers_answer_all_together_and_by_name(cluster: Cluster) -> None:
    control, pong = cluster.app.control, {"ok": "pong"}
    everyone = control.ping(timeout=ENOUGH_S, limit=2)
    assert everyone is not None and sorted(map(str, everyone)) == sorted([str({ONE: pong}), str({TWO: pong})])
    assert control.ping(destination=[TWO], timeout=ENOUGH_S) == [{TWO: pong}]
    assert control.inspect([ONE], timeout=ENOUGH_S).ping() == {ONE: pong}
    assert control.inspect(timeout=ENOUGH_S, pattern="two@*", limit=1).ping() == {TWO: pong}
    assert control.inspect(timeout=ENOUGH_S, pattern="o.e@", matcher="pcre", limit=1).ping() == {ONE: pong}
    assert control.inspect(["gone@nowhere"], timeout=0.3).ping() is None

    async def awaited() -> Any:
        return await control.aio.ping([ONE], timeout=ENOUGH_S), await control.aio.inspect(
            [TWO], timeout=ENOUGH_S
        ).clock()

    pinged, clocks = asyncio.run(awaited())
    assert pinged == [{ONE: pong}] and clocks[TWO]["clock"] > 0


def test_the_clock_moves_with_every_command(cluster: Cluster) -> None:
    """P4."""
    before = ask(cluster, ONE, "clock")["clock"]
    assert ask(cluster, ONE, "clock")["clock"] > before


def test_users_add_their_own_commands(cluster: Cluster) -> None:
    """P2."""
    assert ask(cluster, ONE, "whoami", greeting="This is") == f"This is {ONE}, True"
    assert ask(cluster, ONE, "fails", n="3") == {"error": "LookupError(3)"}


def test_a_worker_answers_while_its_children_are_blocked(cluster: Cluster, tmp_path: Path) -> None:
    """P6."""
    gate = tmp_path / "gate"
    waits_for = cluster.app.tasks["control_tasks.waits_for"]
    results = cluster.app.send_many(
        waits_for.s(str(gate), str(tmp_path / f"started-{number}")) for number in range(8)
    )
    wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 4, what="four children to be busy")
    for _ in range(10):
        assert ask(cluster, ONE, "ping") == ask(cluster, TWO, "ping") == {"ok": "pong"}
    gate.touch()
    assert {result.get(timeout=ENOUGH_S) for result in results} == {"went on"}


def test_a_worker_answers_while_it_drains(cluster: Cluster, tmp_path: Path) -> None:
    """P6, F7."""
    gate, started = tmp_path / "gate", tmp_path / "started"
    worker = cluster.start_worker("drains", "-c", "1", "-Q", "draining")
    result = cluster.app.send_task("control_tasks.waits_for", [str(gate), str(started)], queue="draining")
    wait_until(started.exists, what="the task to run")
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: "waiting for running tasks" in cluster.log("drains"), what="the worker to drain")
    for _ in range(5):
        assert ask(cluster, node_name("drains"), "ping") == {"ok": "pong"}
    gate.touch()
    assert result.get(timeout=ENOUGH_S) == "went on"
    assert worker.wait(30) == 0
    del cluster.workers["drains"]


def test_a_revoked_task_never_runs(cluster: Cluster, tmp_path: Path) -> None:
    """S3: by the record where no worker is told, by the command where one is."""
    marks = [tmp_path / name for name in ("recorded", "told", "free")]
    calls = [
        cluster.app.send_task("control_tasks.waits_for", [str(tmp_path), str(mark)], queue="late")
        for mark in marks
    ]
    cluster.app.control.revoke(calls[0].id)
    told = cluster.app.control.ask("revoke", {"task_id": calls[1].id}, timeout=ENOUGH_S, limit=2)
    assert set(map(str, told.replies.values())) == {
        str({"ok": f"tasks {{'{calls[1].id}'}} flagged as revoked"})
    }
    cluster.start_worker("late", "-c", "1", "-Q", "late")
    assert calls[2].get(timeout=ENOUGH_S) == "went on"
    wait_until(lambda: {calls[0].state, calls[1].state} == {"REVOKED"}, what="both to be revoked")
    assert [mark.exists() for mark in marks] == [False, False, True]
    assert cluster.stop_worker("late") == 0
