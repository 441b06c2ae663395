"""Remote control of real workers on every broker (P1-P8)."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster import Cluster
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.servers.way import Way
from tests.waiting import wait_until
from umbel.errors import TaskRevoked, TimeLimitExceeded
from umbel.launch.preparation import node_name
from umbel.launch.workers import MAILBOX
from umbel.pools.guard import Returned, call_guarded

TASKS_FILE = Path(__file__).with_name("control_tasks.py")
ONE, TWO = node_name("one"), node_name("two")
ENOUGH_S = 20.0
ON_SQLITE = pytest.mark.parametrize("broker", ["sqlite"], indirect=True)
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


@pytest.fixture
def cut_connections(broker: str) -> Callable[[], None]:
    """Have the server end every connection there is."""

    def cut() -> None:
        if broker.startswith("redis"):
            address = urlsplit(broker)
            with socket.create_connection((address.hostname or "", address.port or 0), 10) as link:
                for kind in ("pubsub", "normal"):
                    link.sendall(f"CLIENT KILL TYPE {kind}\r\n".encode())
                    assert link.recv(100).startswith(b":")
        else:
            shared_server().close_connections(broker.rpartition("/")[2])

    return cut


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
    assert control.inspect(["gone@nowhere"], timeout=0.5).ping() is None

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


def test_their_commands_reach_the_app_and_change_the_prefetch(cluster: Cluster) -> None:
    assert ask(cluster, TWO, "hold_at_most", n=7) == [True, cluster.app.name, 1000, 7]
    assert ask(cluster, TWO, "hold_at_most", n=1000) == [True, cluster.app.name, 7, 1000]
    assert "must be at least 1" in ask(cluster, TWO, "hold_at_most", n=0)["error"]


@ON_SQLITE
def test_users_add_their_own_bootsteps(cluster: Cluster) -> None:
    """S1: in the graph, guarded."""
    steps = ask(cluster, ONE, "stats")["umbel"]["steps"]
    assert steps["cache"] == ["connection", "control"] and steps["broken"] == ["cache"]
    names = list(steps)
    assert names.index("connection") < names.index("control") < names.index("cache") < names.index("broken")
    assert ask(cluster, ONE, "cached") == [f"started beside {ONE}"]
    log = cluster.log("one")
    assert "bootstep raised an exception in start(); worker continues without it step=broken" in log
    assert "no such cache" in log
    cluster.start_worker("three", "-c", "1")
    cluster.stop_worker("three")
    assert f"the cache of {node_name('three')} is closed" in cluster.log("three")


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
    wait_until(
        lambda: "waiting for running tasks to finish" in cluster.log("drains"), what="the worker to drain"
    )
    for _ in range(5):
        assert ask(cluster, node_name("drains"), "ping") == {"ok": "pong"}
    gate.touch()
    assert result.get(timeout=ENOUGH_S) == "went on"
    assert worker.wait(30) == 0
    del cluster.workers["drains"]


@pytest.mark.parametrize("broker", ["redis", "amqp"], indirect=True)
def test_a_green_worker_answers_whatever_its_tasks_and_its_link_do(cluster: Cluster, tmp_path: Path) -> None:
    """P6: while a coroutine holds the loop of the others, and while only the mailbox gets through."""
    address = urlsplit(cluster.app.settings.broker)
    way = Way(address.port or 0)
    through = address._replace(netloc=address.netloc.replace(f":{address.port}", f":{way.port}")).geturl()
    cluster.start_worker("green", "-P", "asyncio", "-c", "101", "-Q", "green", broker=through)
    tasks, green, gate = cluster.app.tasks, node_name("green"), tmp_path / "gate"
    waits = tasks["control_tasks.waits_in_loop"].s(str(gate)).set(queue="green")
    waiting = cluster.app.send_many(waits for _ in range(100))
    holds = tasks["control_tasks.holds_its_loop"].s(2.0, str(tmp_path / "held")).set(queue="green")
    cluster.app.send_many([holds])
    wait_until((tmp_path / "held").exists, what="the loop to be held")
    assert [ask(cluster, green, "ping") for _ in range(5)] == [{"ok": "pong"}] * 5
    gate.touch()
    assert {result.get(timeout=ENOUGH_S) for result in waiting} == {"went on"}
    way.silence_all_but(MAILBOX.encode())
    assert [ask(cluster, green, "ping") for _ in range(5)] == [{"ok": "pong"}] * 5
    cluster.kill_worker("green")
    way.end()


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


def test_a_revoke_can_be_taken_back(cluster: Cluster) -> None:
    """In the record, and with the workers that knew it."""
    sent = cluster.app.send_task("control_tasks.add", [1, 2], queue="taken-back")
    control = cluster.app.control
    control.revoke(sent.id)
    wait_until(lambda: sent.id in ask(cluster, ONE, "revoked"), what="it to be known")
    told = control.unrevoke(sent.id, reply=True, timeout=ENOUGH_S, limit=2)
    assert told is not None and len(told) == 2
    assert {ONE: {"ok": f"tasks {{'{sent.id}'}} may start again"}} in told
    assert sent.id not in ask(cluster, ONE, "revoked")
    ask_for_queue(cluster, ONE, "taken-back")
    assert sent.get(timeout=ENOUGH_S) == 3
    ask(cluster, ONE, "cancel_consumer", queue="taken-back")


def test_the_holders_of_leases_are_shown(cluster: Cluster) -> None:
    """E6."""

    async def held() -> Any:
        async with cluster.app.lease("of-a-test", timeout=ENOUGH_S) as lease:
            seen = await cluster.app.control.aio.inspect([ONE], timeout=ENOUGH_S).leases("of-a-test")
            return lease.term, seen

    term, seen = asyncio.run(held())
    ((row,),) = seen.values()
    assert (row["name"], row["term"], row["mine"]) == ("of-a-test", term, False)
    assert row["holder"] and row["left_s"] > 0
    (free,) = ask(cluster, ONE, "leases", names=["nobody's"])
    assert free == {"name": "nobody's", "holder": "", "term": 0, "left_s": 0.0, "mine": False}

    def sweeper() -> Any:
        rows = {node: ask(cluster, node, "leases") for node in (ONE, TWO)}
        return [node for node, of in rows.items() for row in of if row["mine"]]

    assert set(wait_until(sweeper, what="one of them to hold a lease")) <= {ONE, TWO}


# -- every command, with Celery's reply shapes (P3) --------------------------------------------------


def test_what_runs_and_waits_can_be_seen(cluster: Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    one = ask_for_queue(cluster, ONE, "seen")
    names = [f"started-{number}" for number in range(3)]
    calls = [
        cluster.app.send_task(
            "control_tasks.waits_for", [str(gate)], {"started": str(tmp_path / name)}, queue="seen"
        )
        for name in names
    ]
    wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2, what="two of them to run")
    running = wait_until(lambda: one("active") if len(one("active")) == 2 else None, what="both to be seen")
    first = next(shown for shown in running if shown["id"] == calls[0].id)
    assert first == {
        "id": calls[0].id,
        "name": "control_tasks.waits_for",
        "args": [str(gate)],
        "kwargs": {"started": str(tmp_path / names[0])},
        "type": "control_tasks.waits_for",
        "hostname": ONE,
        "time_start": first["time_start"],
        "acknowledged": False,
        "worker_pid": first["worker_pid"],
        "delivery_info": {"exchange": "", "routing_key": "seen", "priority": 0, "redelivered": False},
    }
    assert first["worker_pid"] in one("stats")["pool"]["processes"] and first["time_start"] > 1e9
    safe = next(shown for shown in one("active", safe=True) if shown["id"] == calls[0].id)
    assert safe["args"] == f"('{gate}',)" or safe["args"] == repr([str(gate)])
    assert {shown["id"] for shown in one("reserved")} <= {calls[2].id}
    found = one("query_task", ids=[calls[0].id, "nobody's"])
    assert found == {calls[0].id: ["active", first]}
    assert one("scheduled") == []
    gate.touch()
    assert {call.get(timeout=ENOUGH_S) for call in calls} == {"went on"}
    assert ask(cluster, ONE, "cancel_consumer", queue="seen") == {"ok": "no longer consuming from seen"}


def ask_for_queue(cluster: Cluster, node: str, queue: str) -> Any:
    """Have a node consume a queue of the test's own; what asks that node."""
    assert ask(cluster, node, "add_consumer", queue=queue) == {"ok": f"add consumer {queue}"}
    assert queue in [shown["name"] for shown in ask(cluster, node, "active_queues")]
    return lambda command, **arguments: ask(cluster, node, command, **arguments)


def test_queues_are_added_and_cancelled_while_it_runs(cluster: Cluster) -> None:
    two = ask_for_queue(cluster, TWO, "extra")
    sent = cluster.app.send_task("control_tasks.add", [2, 3], queue="extra")
    assert sent.get(timeout=ENOUGH_S) == 5
    assert "extra" not in [shown["name"] for shown in ask(cluster, ONE, "active_queues")]
    assert two("cancel_consumer", queue="extra") == {"ok": "no longer consuming from extra"}
    assert [shown["name"] for shown in two("active_queues")] == ["celery"]
    left = cluster.app.send_task("control_tasks.add", [2, 3], queue="extra")
    sent = cluster.app.send_task("control_tasks.add", [4, 5])
    assert sent.get(timeout=ENOUGH_S) == 9
    assert left.state == "PENDING"
    two("add_consumer", queue="extra")
    assert left.get(timeout=ENOUGH_S) == 5
    two("cancel_consumer", queue="extra")
    assert "error" in two("add_consumer", queue="extra", exchange="elsewhere")


def test_limits_are_changed_while_it_runs(cluster: Cluster) -> None:
    task = "control_tasks.add"

    def shown() -> str:
        items = ["rate_limit", "time_limit", "soft_time_limit"]
        (line,) = [
            one for one in ask(cluster, ONE, "registered", taskinfoitems=items) if one.startswith(task)
        ]
        return str(line)

    assert shown() == task
    told = ask(cluster, ONE, "rate_limit", task_name=task, rate_limit="100/m")
    assert told == {"ok": "new rate limit set successfully"}
    told = ask(cluster, ONE, "time_limit", task_name=task, soft=5, hard=10.0)
    assert told == {"ok": "time limits set successfully"}
    assert shown() == f"{task} [rate_limit=100/m time_limit=10.0 soft_time_limit=5.0]"
    assert ask(cluster, TWO, "registered") == sorted(cluster.app.tasks)
    told = ask(cluster, ONE, "rate_limit", task_name=task, rate_limit=0)
    assert told == {"ok": "rate limit disabled successfully"}
    assert ask(cluster, ONE, "time_limit", task_name=task) == {"ok": "time limits set successfully"}
    assert shown() == task
    assert ask(cluster, ONE, "rate_limit", task_name="no", rate_limit="1/s") == {"error": "unknown task"}
    bad = ask(cluster, ONE, "rate_limit", task_name=task, rate_limit="often")["error"]
    assert bad.startswith("Invalid rate limit string: ")
    assert ask(cluster, ONE, "time_limit", task_name="no") == {"error": "unknown task"}


def test_a_new_time_limit_ends_the_next_run(cluster: Cluster, tmp_path: Path) -> None:
    ask_for_queue(cluster, ONE, "limited")
    ask(cluster, ONE, "time_limit", task_name="control_tasks.waits_for", hard=0.5)
    sent = cluster.app.send_task("control_tasks.waits_for", [str(tmp_path / "never")], queue="limited")
    with pytest.raises(TimeLimitExceeded):
        sent.get(timeout=ENOUGH_S)
    ask(cluster, ONE, "time_limit", task_name="control_tasks.waits_for")
    ask(cluster, ONE, "cancel_consumer", queue="limited")


def test_a_running_task_is_terminated_and_its_neighbour_is_not(cluster: Cluster, tmp_path: Path) -> None:
    one = ask_for_queue(cluster, ONE, "doomed")
    gate = tmp_path / "gate"
    doomed, spared = (
        cluster.app.send_task("control_tasks.waits_for", [str(gate), str(tmp_path / name)], queue="doomed")
        for name in ("doomed", "spared")
    )
    wait_until(lambda: len(one("active")) == 2, what="both to run")
    assert one("revoke", task_id=doomed.id, terminate=True) == {"ok": f"terminate: {doomed.id}"}
    with pytest.raises(TaskRevoked, match="terminated"):
        doomed.get(timeout=ENOUGH_S)
    assert one("terminate", signal="KILL", task_id=["nobody's"]) == {"ok": "terminate: tasks unknown"}
    assert "unknown signal" in one("terminate", signal="LOUDLY", task_id="x")["error"]
    gate.touch()
    assert spared.get(timeout=ENOUGH_S) == "went on"
    one("cancel_consumer", queue="doomed")


@ON_SQLITE
def test_a_task_that_was_taken_and_has_not_started_can_still_be_revoked(
    cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    cluster.start_worker("narrow", "-c", "1", "-Q", "narrow")
    narrow = node_name("narrow")
    first = cluster.app.send_task("control_tasks.waits_for", [str(gate), str(tmp_path / "a")], queue="narrow")
    wait_until((tmp_path / "a").exists, what="the first to run")
    second = cluster.app.send_task("control_tasks.add", [1, 1], queue="narrow")
    assert "flagged" in ask(cluster, narrow, "revoke", task_id=second.id)["ok"]
    gate.touch()
    assert first.get(timeout=ENOUGH_S) == "went on"
    with pytest.raises(TaskRevoked):
        second.get(timeout=ENOUGH_S)
    # Told to one node only, it is no matter of the others, and is recorded nowhere.
    assert second.id not in ask(cluster, ONE, "revoked")
    cluster.app.control.shutdown(destination=[narrow])
    assert cluster.workers.pop("narrow").wait(30) == 0


def test_what_is_known_of_a_worker_has_celerys_form(cluster: Cluster, broker: str) -> None:
    stats = ask(cluster, ONE, "stats")
    assert {"total", "pid", "clock", "uptime", "prefetch_count", "pool", "broker", "rusage"} <= set(stats)
    assert isinstance(stats["clock"], str) and len(stats["rusage"]) == 16
    assert stats["pool"]["max-concurrency"] == 2 == len(stats["pool"]["processes"])
    assert stats["broker"]["transport"] == broker.partition(":")[0]
    (queue,) = ask(cluster, ONE, "active_queues")
    assert (queue["name"], queue["exchange"]["type"], queue["routing_key"]) == ("celery", "direct", "celery")
    conf = ask(cluster, ONE, "conf")
    assert "broker" in conf and "guest:guest" not in str(conf)
    assert set(conf) < set(ask(cluster, ONE, "conf", with_defaults=True))
    assert "umbel:" in ask(cluster, ONE, "report")["ok"]
    assert ask(cluster, ONE, "memsample").endswith("MB")
    assert "rss (end)" in ask(cluster, ONE, "memdump")
    assert "run: pip install objgraph" in ask(cluster, ONE, "objgraph")["error"]
    assert ask(cluster, ONE, "autoscale", max=3, min=1) == {"error": "ValueError('Autoscale not enabled')"}
    restarts = {"error": "ValueError('Pool restarts not enabled')"}
    assert ask(cluster, ONE, "pool_restart", modules=[]) == restarts
    assert ask(cluster, ONE, "heartbeat") is None
    assert ask(cluster, ONE, "dlq") == []
    assert ask(cluster, ONE, "health")["problem"] == ""
    assert ask(cluster, ONE, "report", unknown=1)["error"].startswith("TypeError(")


def test_the_pool_grows_and_shrinks(cluster: Cluster) -> None:
    """F4, P3: the answer comes at once, the effective state follows."""

    def size() -> tuple[int, int]:
        pool = ask(cluster, ONE, "stats")["pool"]
        return pool["max-concurrency"], len(pool["processes"])

    assert ask(cluster, ONE, "pool_grow", n=2) == {"ok": "pool will grow"}
    wait_until(lambda: size() == (4, 4), what="four children")
    assert ask(cluster, ONE, "pool_shrink", n="2") == {"ok": "pool will shrink"}
    wait_until(lambda: size() == (2, 2), what="two children")
    assert "at least 1 must remain" in ask(cluster, ONE, "pool_shrink", n=2)["error"]
    assert "n, must be from 1" in ask(cluster, ONE, "pool_grow", n=0)["error"]
    assert size() == (2, 2)


def test_task_events_are_switched_on_and_off(cluster: Cluster) -> None:
    said = [
        ask(cluster, ONE, command)["ok"]
        for command in ("disable_events", "enable_events", "enable_events", "disable_events")
    ]
    assert said == [
        "task events already disabled",
        "task events enabled",
        "task events already enabled",
        "task events disabled",
    ]


def test_the_answers_tell_who_is_a_member(cluster: Cluster) -> None:
    """P7: without a limit and without names the question ends when all members have answered."""

    def ended_before_its_deadline() -> bool:
        began = monotonic()
        asked = cluster.app.control.ask("ping", timeout=2.0)
        return set(asked.replies) == {ONE, TWO} and not asked.silent and monotonic() - began < 2.0

    # Workers that have just started do not say yet who the members are.
    wait_until(ended_before_its_deadline, what="an early end", deadline_s=ENOUGH_S)


@ON_SQLITE
def test_a_task_that_catches_the_signal_is_ended_all_the_same(cluster: Cluster, tmp_path: Path) -> None:
    one = ask_for_queue(cluster, ONE, "stubborn")
    sent = cluster.app.send_task("control_tasks.stubborn", [str(tmp_path / "started")], queue="stubborn")
    wait_until((tmp_path / "started").exists, what="it to run")
    assert one("revoke", task_id=sent.id, terminate=True) == {"ok": f"terminate: {sent.id}"}
    with pytest.raises(TaskRevoked, match="terminated"):
        sent.get(timeout=ENOUGH_S)
    one("cancel_consumer", queue="stubborn")


@ON_SQLITE
@pytest.mark.parametrize("task", ["tidies_up", "awaits"])
def test_a_task_that_is_revoked_while_it_runs_can_tidy_up(
    cluster: Cluster, tmp_path: Path, task: str
) -> None:
    """P3: the task is asked first; its process, and whatever else is in it, goes on."""
    one = ask_for_queue(cluster, ONE, "tidy")

    def both() -> Any:
        found = one("stats")["pool"]["processes"]
        return found if len(found) == 2 else None

    children = wait_until(both, what="two children")
    started, tidied = tmp_path / "started", tmp_path / "tidied"
    sent = cluster.app.send_task(f"control_tasks.{task}", [str(started), str(tidied)], queue="tidy")
    wait_until(started.exists, what="it to run")
    assert one("revoke", task_id=sent.id, terminate=True) == {"ok": f"terminate: {sent.id}"}
    with pytest.raises(TaskRevoked, match="terminated"):
        sent.get(timeout=ENOUGH_S)
    assert tidied.exists()
    assert one("stats")["pool"]["processes"] == children
    one("cancel_consumer", queue="tidy")


@ON_SQLITE
def test_a_stuck_child_shows_where_it_is(cluster: Cluster, tmp_path: Path) -> None:
    one = ask_for_queue(cluster, ONE, "stuck")
    gate, started = tmp_path / "gate", tmp_path / "started"
    sent = cluster.app.send_task("control_tasks.waits_for", [str(gate), str(started)], queue="stuck")
    wait_until(started.exists, what="it to run")
    for _ in range(2):  # the second look is not longer for the first
        seen = one("stacks")
        (stuck,) = [child for child in seen.values() if child["task_id"] == sent.id]
        assert stuck["stack"].count("in waits_for") == 1 and "control_tasks.py" in stuck["stack"]
        assert len(seen) == 2 and all(child["stack"] for child in seen.values())
    gate.touch()
    assert sent.get(timeout=ENOUGH_S) == "went on"
    one("cancel_consumer", queue="stuck")


@ON_SQLITE
def test_commands_by_pattern_reach_exactly_their_part(cluster: Cluster) -> None:
    """P1: what is told by glob and by regular expression changes those workers and no others."""

    def seen(node: str) -> dict[str, Any]:
        limits = ["rate_limit", "time_limit"]
        return {
            "limits": ask(cluster, node, "registered", taskinfoitems=limits)[0],
            "queues": [queue["name"] for queue in ask(cluster, node, "active_queues")],
            "children": ask(cluster, node, "stats")["pool"]["max-concurrency"],
            "revoked": "by-pattern" in ask(cluster, node, "revoked"),
        }

    add, before = "control_tasks.add", {node: seen(node) for node in (ONE, TWO)}
    ways: dict[str, dict[str, Any]] = {ONE: {"pattern": "on?@*"}, TWO: {"pattern": "t.*@", "matcher": "pcre"}}
    for node, other in ((ONE, TWO), (TWO, ONE)):

        def tell(command: str, node: str = node, **arguments: Any) -> None:
            answers = cluster.app.control.ask(command, arguments, timeout=ENOUGH_S, limit=1, **ways[node])
            assert list(answers.replies) == [node] and "ok" in answers.replies[node]

        tell("rate_limit", task_name=add, rate_limit="7/m")
        tell("time_limit", task_name=add, hard=70)
        tell("add_consumer", queue="by-pattern")
        tell("pool_grow", n=1)
        tell("revoke", task_id="by-pattern")
        assert seen(other) == before[other]
        assert seen(node) == {
            "limits": f"{add} [rate_limit=7/m time_limit=70.0]",
            "queues": ["celery", "by-pattern"],
            "children": 3,
            "revoked": True,
        }
        tell("rate_limit", task_name=add, rate_limit=0)
        tell("time_limit", task_name=add)
        tell("cancel_consumer", queue="by-pattern")
        tell("pool_shrink", n=1)
        before[node] = seen(node)
    cluster.start_worker("third", "-c", "1", wait=False)
    cluster.start_worker("fourth", "-c", "1")
    wait_until(lambda: cluster.state_of("third"), what="the other one")
    cluster.app.control.shutdown(pattern="thir*")
    assert cluster.workers.pop("third").wait(30) == 0
    assert ask(cluster, node_name("fourth"), "ping") == {"ok": "pong"}
    cluster.app.control.shutdown(pattern="f.*h@", matcher="pcre")
    assert cluster.workers.pop("fourth").wait(30) == 0
    assert ask(cluster, ONE, "ping") == ask(cluster, TWO, "ping") == {"ok": "pong"}
    # Else the next test waits for replies of the two, for their last events may not have been read yet.
    wait_until(lambda: _present(cluster, ONE) == _present(cluster, TWO) == {ONE, TWO}, what="both to leave")


def _present(cluster: Cluster, node: str) -> set[str]:
    """The nodes that it takes for members that are there."""
    return {
        member["node"] for member in ask(cluster, node, "members") if member["state"] in ("alive", "suspect")
    }


@pytest.mark.parametrize("broker", ["redis", "amqp"], indirect=True)
def test_a_mailbox_whose_connection_is_cut_is_made_anew(
    cluster: Cluster, cut_connections: Callable[[], None]
) -> None:
    """P5: the workers go on, and answer again."""
    pids = {node: ask(cluster, node, "stats")["pid"] for node in (ONE, TWO)}
    cut_connections()

    def answered() -> bool:
        asked = cluster.app.control.ask("stats", destination=[ONE, TWO], timeout=1.0)
        return {node: stats["pid"] for node, stats in asked.replies.items()} == pids

    wait_until(lambda: call_guarded(answered) == Returned(True), what="both to answer")


# -- the command line (P7) -------------------------------------------------------------------------


@ON_SQLITE
def test_the_command_line_asks_and_tells(cluster: Cluster) -> None:
    pinged = cluster.umbel("ping", "-d", f"{ONE},{TWO}", "--timeout", "20")
    assert pinged.stdout == f"{ONE}: pong\n{TWO}: pong\n"
    seen = cluster.umbel_json("inspect", "registered", "rate_limit", "-d", ONE, "--timeout", "20")
    assert seen["replies"] == {ONE: sorted(cluster.app.tasks)}
    told = cluster.umbel(
        "control", "rate_limit", "control_tasks.add", "10/s", "--glob", "one@*", "--timeout", "20"
    )
    assert told.stdout == f"{ONE}: ok\n    new rate limit set successfully\n"
    cluster.umbel("control", "rate_limit", "control_tasks.add", "0", "-d", ONE, "--timeout", "20")
    own = cluster.umbel("inspect", "who", "Here is", "--regex", "two@", "--timeout", "20")
    assert own.stdout == f"{TWO}: ok\n    Here is {TWO}, True\n"
    status = cluster.umbel("status", "-d", ONE, "--timeout", "20")
    assert ONE in status.stdout and "prefork" in status.stdout
    assert "sqlite supports remote control, mingle, gossip" in status.stderr
    revoked = cluster.umbel_json("revoke", "no-such-task", "--timeout", "20")
    assert revoked["recorded"] == ["no-such-task"] and ONE in revoked["replies"]
    assert "no-such-task" in ask(cluster, TWO, "revoked")
    back = cluster.umbel_json("revoke", "--undo", "no-such-task", "--timeout", "20")
    assert back["replies"][ONE] == {"ok": "tasks {'no-such-task'} may start again"}
    assert "no-such-task" not in ask(cluster, TWO, "revoked")
    both = cluster.umbel("revoke", "--undo", "--terminate", "x", check=False)
    assert both.returncode == 2 and "stay ended" in both.stderr
    queues = cluster.umbel("inspect", "active_queues", "-d", ONE, "--timeout", "20").stdout.split()
    assert queues == ["node", "queue", "exchange", "routing", "key", ONE, "celery", "celery", "celery"]
    failed = cluster.umbel(
        "control", "rate_limit", "nobody", "1/s", "-d", ONE, "--timeout", "20", check=False
    )
    assert (failed.returncode, failed.stdout) == (1, f"{ONE}: error\n    unknown task\n")


@ON_SQLITE
def test_the_exit_code_says_who_answered(cluster: Cluster) -> None:
    nobody = cluster.umbel("ping", "-d", "gone@x", "--timeout", "2", check=False)
    assert (nobody.returncode, nobody.stderr) == (69, "umbel: no worker answered: gone@x\n")
    some = cluster.umbel("inspect", "clock", "-d", f"gone@x,{ONE}", "--timeout", "5", check=False)
    assert (some.returncode, some.stderr) == (75, "umbel: 1 of 2 replied; gone@x did not answer\n")
    asked = cluster.umbel("control", "shutdown", "-d", ONE, check=False)
    assert asked.returncode == 1 and "shutdown on one@" in asked.stderr  # nobody was there to say yes
    assert ask(cluster, ONE, "ping") == {"ok": "pong"}
