"""Floods: bad messages, made-up nodes and commands by the ten thousand, on real workers (N1).

`make test` sends a part of what the soak does; what is promised is the same: everything real is
answered, listed and run, and memory and log stay bounded.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import time
from typing import Any
from uuid import uuid4

import pytest

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.brokers.interface import Broadcast, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.launch.preparation import node_name
from umbel.wire.control import REPLY_EXCHANGE, REQUEST_EXCHANGE
from umbel.wire.message import Message, Outgoing

TASKS_FILE = Path(__file__).with_name("membership_tasks.py")
SOAK = bool(os.environ.get("UMBEL_SOAK"))
NAMES = 150_000 if SOAK else 15_000
COMMANDS = 50_000 if SOAK else 10_000
BAD_TASKS = 120_000 if SOAK else 5_000
BATCH = 500
GROWTH_MAX_BYTES = 64 * 2**20
LOG_MAX_BYTES = 100_000
ENOUGH_S = 900.0 if SOAK else 90.0
REAL = {node_name("w1"), node_name("w2")}
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(2700 if SOAK else 240)]


@pytest.fixture(scope="module", params=["redis", "sqlite", "amqp"] if SOAK else ["redis"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers that know each other."""
    home = tmp_path_factory.mktemp("floods")
    with (
        place(request.param, home, durable=False) as where,
        Cluster(home, TASKS_FILE, broker=where.broker, backend=where.backend, mingle_wait_s=0.3) as made,
    ):
        for name in ("w1", "w2"):
            made.start_worker(name, "-c", "1", "-l", "INFO")
        wait_until(lambda: listed(made) == REAL, what="them to meet")
        yield made


def listed(cluster: Cluster) -> set[str]:
    """Whom w1 lists as members, whatever their state."""
    replies = cluster.app.control.ask("members", destination=[node_name("w1")], timeout=ENOUGH_S).replies
    rows = next(iter(replies.values()))
    return {row["node"] for row in rows} if isinstance(rows, list) else set()


def flood(cluster: Cluster, count: int, made: Callable[[int], Broadcast]) -> None:
    async def send() -> None:
        broker = open_broker(BrokerSettings(cluster.app.settings.broker))
        await broker.open()
        try:
            for start in range(0, count, BATCH):
                batch = [made(number) for number in range(start, min(count, start + BATCH))]
                await broker.broadcast(batch, ttl_s=60.0)
        finally:
            await broker.close()

    asyncio.run(send())


def ping(cluster: Cluster) -> set[str]:
    return set(cluster.app.control.ask("ping", destination=sorted(REAL), timeout=ENOUGH_S).replies)


def resident_bytes(cluster: Cluster, name: str) -> int:
    status = Path(f"/proc/{cluster.workers[name].pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


class Bounded:
    """Inside this block the workers live on, and neither their memory nor their logs grow without bound."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> None:
        self._before = {name: self._size(name) for name in ("w1", "w2")}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, (resident, logged) in self._before.items():
            assert self._cluster.workers[name].poll() is None
            now_resident, now_logged = self._size(name)
            assert kind or now_resident - resident < GROWTH_MAX_BYTES, f"{name} grew to {now_resident} bytes"
            assert kind or now_logged - logged < LOG_MAX_BYTES, f"{name} logged {now_logged - logged} bytes"

    def _size(self, name: str) -> tuple[int, int]:
        return resident_bytes(self._cluster, name), len(self._cluster.log(name))


def ghost(number: int) -> Broadcast:
    """An event of a node that does not exist: it beats, comes online, accuses, stands or names others."""
    kind = ("heartbeat", "online", "suspect", "heartbeat", "view")[number % 5]
    runs = [[f"hearsay{number}@nowhere", 1, 1, 1, 2.0, "umbel"]]
    event: dict[str, Any] = {
        "type": f"worker-{kind}",
        "hostname": f"ghost{number}@nowhere",
        "pid": number % 30_000 + 1,
        "inc": number + 1 if number % 3 else 0,
        "clock": number % 1000 + 1,
        "timestamp": time(),
        "freq": (2.0, 0.01, 600.0, None)[number % 4],
        "sw_ident": "umbel" if number % 3 else "py-celery",
        **({"after": "", "until": "", "runs": runs} if kind == "view" else {}),
        **({"subject": node_name("w2"), "subject_inc": 1, "subject_pid": 1} if kind == "suspect" else {}),
    }
    return Broadcast(EVENT_EXCHANGE, f"worker.{kind}", json.dumps(event).encode(), b"{}")


def odd_command(number: int) -> Broadcast:
    """Commands whose answers nobody wants, hellos of nobody, unknown and huge ones, and what is none."""
    method = ("ping", "stats", "no_such_command", "hello", "heartbeat", "x" * 3000, "clock")[number % 7]
    hello = {
        "from_node": f"ghost{number}@nowhere",
        "revoked": [],
        "members": [["g@x", 1, 1, 1, 2.0, "umbel"]],
    }
    request = {
        "method": method,
        "arguments": hello if method == "hello" else {} if number % 11 else {"n" * 300: number},
        "ticket": str(uuid4()) if number % 13 else "t" * 2000,
        "reply_to": {"exchange": REPLY_EXCHANGE, "routing_key": f"nobody{number % 3}"},
    }
    body = b"{" * 50 if number % 17 == 0 else json.dumps(request).encode()
    return Broadcast(REQUEST_EXCHANGE, "", body, b'{"clock": 1, "expires": 0}')


def test_nodes_that_are_made_up_are_not_listed_and_take_no_place(cluster: Cluster) -> None:
    with Bounded(cluster):
        flood(cluster, NAMES // 2, ghost)
        assert ping(cluster) == REAL
        flood(cluster, NAMES // 2, lambda number: ghost(NAMES // 2 + number))
        assert ping(cluster) == REAL and listed(cluster) == REAL
        cluster.app.send_task("membership_tasks.note", ["in a flood"]).get(timeout=ENOUGH_S)
        assert listed(cluster) == REAL
    assert "ghost" not in cluster.umbel("members", "--timeout", "10").stdout


def test_a_ping_among_thousands_of_commands_is_answered(cluster: Cluster) -> None:
    with Bounded(cluster):
        flood(cluster, COMMANDS // 2, odd_command)
        assert ping(cluster) == REAL
        flood(cluster, COMMANDS // 2, lambda number: odd_command(COMMANDS // 2 + number))
        assert ping(cluster) == REAL
        cluster.app.send_task("membership_tasks.note", ["in a flood"]).get(timeout=ENOUGH_S)
        assert listed(cluster) == REAL


def test_bad_tasks_write_a_bounded_log_that_counts_what_it_leaves_out(cluster: Cluster) -> None:
    def in_log(text: str) -> int:
        lines = [line for name in ("w1", "w2") for line in cluster.log(name).splitlines() if text in line]
        return sum(int(line.partition("left_out=")[2] or 1) for line in lines)

    with Bounded(cluster):
        for start in range(0, BAD_TASKS, BATCH):
            bad = [
                Message(headers=b'{"task": 1, "id": 2}', body=b"%d" % (start + number))
                for number in range(BATCH)
            ]
            cluster.app.producer.publish([Outgoing("celery", message) for message in bad])
        cluster.app.send_task("membership_tasks.note", ["behind them"]).get(timeout=ENOUGH_S)
        wait_until(
            lambda: in_log("corrupt message") == BAD_TASKS,
            deadline_s=ENOUGH_S,
            what="every bad task to be in a line or a count",
        )
