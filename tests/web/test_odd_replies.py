"""Replies that no worker of ours sends, shown by every page, endpoint and command that shows replies (N1).

Genuine replies are changed by the mutator of `tests/fuzz` and read as they come from the broker. `make soak`
shows twenty thousand, `make test` some hundred; a failure prints the seed with which it is repeated.
"""

import asyncio
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

import pytest

from tests.fuzz.mutator import HOSTILE, _Change
from tests.fuzz.seeds import seeds
from tests.web.test_answers import app_in, told
from umbel.app.cluster.elections import refuse_untaken
from umbel.cli import asking, workers
from umbel.cli.asking import print_answers
from umbel.control.client import ControlClient
from umbel.control.queue_pauses import _consumes_anyway
from umbel.coordination.driver import instant
from umbel.errors import ElectionError, WireError
from umbel.protocol.membership.members import Introduced
from umbel.protocol.pidbox import Answers, Collection, Reply
from umbel.web import exporters
from umbel.web.application import application
from umbel.web.dashboard import Dashboard
from umbel.web.settings import WebSettings
from umbel.wire.control import (
    OwnStats,
    PoolStats,
    QueueRow,
    Stats,
    Stopping,
    TaskRow,
    Usage,
    decode_reply,
    rows,
    texts,
    typed,
)

SOAK = bool(os.environ.get("UMBEL_SOAK"))
SEED = int(os.environ.get("FUZZ_SEED") or random.randrange(2**31))
ROUNDS = 1000 if SOAK else 25
NODE = "odd@x"
TASK = {
    "id": "t",
    "name": "pay",
    "type": "pay",
    "args": [1],
    "kwargs": {},
    "time_start": 5.5,
    "worker_pid": 7,
}
GENUINE: Mapping[str, Any] = {
    "stats": {
        "total": {"pay": 3},
        "pid": 5,
        "clock": "9",
        "uptime": 12,
        "pool": {
            "implementation": "umbel.pools.prefork",
            "processes": [7, 8],
            "max-concurrency": 2,
            "running": {"7": "t"},
        },
        "rusage": {"maxrss": 1000},
        "umbel": {
            "counters": {"processed": 3, "children_died": 0},
            "links": {"main": 1},
            "stopping": {"phase": "draining", "left_s": 3.5, "running": 1},
        },
    },
    "active": [TASK],
    "reserved": [TASK],
    "scheduled": [{"eta": "2026-01-01T00:00:00", "request": TASK}],
    "active_queues": [{"name": "q", "exchange": {"name": "q"}, "routing_key": "q", "paused": False}],
    "registered": ["pay"],
    "conf": {"broker": "sqlite:///x", "queues": ["celery"]},
    "members": [
        {
            **dict.fromkeys(("pid", "incarnation", "clock"), 1),
            "node": "w@h",
            "state": "alive",
            "software": "umbel",
            "freq_s": 2.0,
            "silent_s": 0.5,
        }
    ],
    "leases": [{"name": "scheduler", "holder": "w@h.1.1", "term": 3, "left_s": 9.0, "mine": True}],
    "dlq": [{"id": 1, "queue": "celery", "buried_at": 5.0, "starts": 2, "reason": "no such task"}],
    "clock": {"clock": 9},
    "ping": {"ok": "pong"},
}
OTHER = {"ok": "new rate limit set"}
PAGES = (
    "/",
    "/cluster",
    "/queues",
    "/elections",
    f"/workers/{NODE}",
    f"/api/v1/nodes/{NODE}",
    "/api/v1/nodes",
    "/api/v1/queues",
    "/api/v1/leases",
    "/api/v1/overview",
    "/api/workers?refresh=1",
    f"/api/workers?workername={NODE}",
    "/metrics",
)


class OddWorker:
    """What a worker answers: a genuine reply, changed, as far as it can be read at all."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._change = _Change(self._chance, seeds())

    def answers(self, method: str) -> Answers:
        genuine = GENUINE.get(method, OTHER)
        while True:
            if self._chance.random() < 0.2:
                body = json.dumps({NODE: self._chance.choice(HOSTILE)}).encode("utf-8", "replace")
            else:
                body = self._change.payload(json.dumps({NODE: genuine}).encode())
            try:
                reply = decode_reply(b'{"total": %d}' % self._chance.choice((-1, 5, 10**9)), body)
            except WireError:
                continue
            collection = Collection(timeout_s=1.0, limit=1)
            collection.take(Reply(NODE, reply.value, total=reply.total), 0.0)
            return collection.answers()

    async def ask(self, _asker: ControlClient, method: str, *_: Any, **__: Any) -> Answers:
        return self.answers(method)


def test_no_reply_is_a_fault_of_a_page_or_an_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        import httpx

        monkeypatch.setattr(exporters, "ASKED_EVERY_S", 0.0)
        settings = WebSettings(state_file=tmp_path / "web.db", authenticate=lambda _scope: ("ann", "admin"))
        site = Dashboard(app_in(tmp_path), settings)
        await site._broker.open()
        monkeypatch.setattr(site, "start", _nothing)  # its feed asks when this test says so
        site.cluster.model.take(told("worker-online", hostname=NODE), time())
        site.feed.membership._machine.step(Introduced(NODE, 2, 1, 0, 2.0, "umbel"), instant())
        transport = httpx.ASGITransport(app=application(site))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:5555") as client:
                csrf = (await client.get("/api/v1/me")).json()["csrf"]
                client.headers.update({"x-csrf-token": csrf, "origin": "http://127.0.0.1:5555"})
                for number in range(ROUNDS):
                    worker = OddWorker(SEED + number)
                    monkeypatch.setattr(
                        ControlClient,
                        "ask",
                        lambda *given, _worker=worker, **named: _worker.ask(*given, **named),
                    )
                    await _show_all(site, client, f"FUZZ_SEED={SEED + number}")
        finally:
            await site.stop()
            await site._broker.close()

    asyncio.run(scenario())


async def _show_all(site: Dashboard, client: Any, seed: str) -> None:
    await site.feed._poll_views()
    await site.feed._poll_leases()
    for path in PAGES:
        found = await client.get(path)
        assert found.status_code == 200, f"{seed} {path}: {found.text[:500]}"
    grow = {"action": "grow", "nodes": [NODE]}
    for path, given in (("/api/v1/actions", {"json": grow}), ("/do", {"data": grow})):
        found = await client.post(path, **given)
        assert found.status_code == 200, f"{seed} {path}: {found.text[:500]}"


async def _nothing() -> None:
    pass


def test_no_reply_is_a_fault_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(ROUNDS * 4):
        worker = OddWorker(SEED + number)
        for method in GENUINE:
            answers = worker.answers(method)
            try:
                print_answers(method, answers)
                workers._print_workers(answers)
                workers._print_pings(answers)
                asking.judge(answers)
                for reply in answers.replies.values():
                    _consumes_anyway(reply, "celery")
                refuse_untaken("topic", answers)
            except ElectionError:
                pass  # it says that nobody takes part
            except Exception as error:
                raise AssertionError(f"FUZZ_SEED={SEED + number}: {method} {answers.replies}") from error
    assert NODE in capsys.readouterr().out


def test_what_is_right_of_a_reply_is_read_and_the_rest_is_unknown() -> None:
    assert typed(GENUINE["stats"], Stats) == Stats(
        PoolStats("umbel.pools.prefork", [7, 8], 2, {"7": "t"}),
        Usage(1000),
        {"pay": 3},
        12,
        "9",
        OwnStats({"processed": 3, "children_died": 0}, {"main": 1}, Stopping("draining", 3.5, 1)),
    )
    odd = {
        "pool": {"processes": [7, "8", -1, None]},
        "rusage": {"maxrss": 10**400},
        "umbel": [],
        "total": {"a": 1, "b": "x"},
    }
    assert typed(odd, Stats) == Stats(PoolStats(processes=[7]), total={"a": 1})
    assert typed("no", Stats) == typed({}, Stats) == Stats()
    assert rows([{"name": "q", "exchange": "x"}, 5, {"name": ["q"]}], QueueRow) == [QueueRow("q"), QueueRow()]
    assert rows({"error": "not allowed"}, TaskRow) == []
    assert texts(["a", 5, "b"]) == ["a", "b"] and texts({"a": "b"}) == []


def test_what_a_node_does_not_say_has_no_series(tmp_path: Path) -> None:
    """Unknown is never shown as zero."""
    site = Dashboard(app_in(tmp_path), WebSettings(state_file=tmp_path / "web.db"))
    collector = exporters.ClusterCollector(site)
    collector._stats = {
        "a@h": typed({"pool": {"processes": "none"}}, Stats),
        "b@h": typed(GENUINE["stats"], Stats),
    }
    nodes = {
        metric.name: {sample.labels["node"] for sample in metric.samples}
        for metric in collector._of_stats()
        if metric.samples
    }
    assert nodes["umbel_node_children"] == nodes["umbel_node_memory_bytes"] == {"b@h"}
    asyncio.run(site.stop())
