"""Extreme and malformed messages between good ones: the bad end with a reason, the good run, the worker goes
on (N1). Each of these ended every worker that claimed it."""

import json
import sqlite3
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.servers.redis import RedisServer
from tests.waiting import wait_until
from umbel.wire.message import Message, Outgoing

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
BODY = b"[[1, 2], {}, null]"
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]

BAD: dict[str, tuple[dict[str, Any], bytes]] = {
    "time limit": ({"timelimit": [10**30, None]}, BODY),
    "soft limit": ({"timelimit": [None, 1e300]}, BODY),
    "retries": ({"retries": -(10**30)}, BODY),
    "many retries": ({"retries": 10**30}, BODY),
    "place": ({"group_index": 10**30}, BODY),
    "date as body": ({}, b'{"__type__": "datetime", "__value__": "2020-01-01T00:00:00"}'),
    "eta": ({"eta": "9999-12-31T23:59:59-12:00"}, BODY),
    "expires": ({"expires": "0001-01-01T00:00:00+12:00"}, BODY),
    "callback": (
        {},
        b'[[1, 2], {}, {"callbacks": [{"task": "x", "options": {"time_limit": 1%b}}]}]' % (b"0" * 30),
    ),
    "large headers": ({"stamps": {"x": "y" * 500_000}, "stamped_headers": ["x"]}, BODY),
}


def bad_message(name: str) -> Message:
    headers, body = BAD[name]
    return Message(json.dumps({"task": "chaos_tasks.add", "id": name, **headers}).encode(), body)


def assert_that_the_good_run_and_the_bad_are_buried(cluster: Cluster, bad: int) -> None:
    worker = cluster.start_worker("w1", "-c", "1", "-E")
    good = [cluster.app.send_task("chaos_tasks.add", [number, 1]) for number in range(5)]
    assert [one.get(timeout=90) for one in good] == [1, 2, 3, 4, 5]
    wait_until(lambda: len(cluster.umbel_json("dlq", "ls")) == bad, what="the bad ones to be buried")
    assert all(one["reason"] for one in cluster.umbel_json("dlq", "ls"))
    assert worker.poll() is None
    counters = cluster.counters("w1")
    assert (counters["faults"], counters["children_died"]) == (0, 0)


def test_extreme_messages_end_with_a_reason_on_the_embedded_broker(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.app.producer.publish([Outgoing("celery", bad_message(name)) for name in BAD])
        with sqlite3.connect(tmp_path / "queue.db") as file:
            for row in (b"", b"\xc1 no message", b"\x98\xc4\x00\xc4\x00\xa1a\xa1b\xd3" + b"\xff" * 8):
                file.execute(
                    "INSERT INTO messages (queue, priority, message) VALUES ('celery', 0, ?)", (row,)
                )
        assert_that_the_good_run_and_the_bad_are_buried(cluster, len(BAD) + 3)


def test_extreme_messages_end_with_a_reason_on_redis(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    properties: list[dict[str, Any]] = [
        {"priority": 10**20},
        {"priority": "high"},
        {"expiration": "1e30"},
        {"expiration": "-5"},
        {"correlation_id": "x" * 300},
        {"reply_to": 5},
    ]
    try:
        with Cluster(tmp_path, TASKS_FILE, broker=server.url, backend=server.url) as cluster:
            cluster.app.producer.publish([Outgoing("celery", bad_message(name)) for name in BAD])
            for one in properties:
                server.ask("LPUSH", "celery", envelope(one))
            assert_that_the_good_run_and_the_bad_are_buried(cluster, len(BAD) + len(properties))
    finally:
        server.stop()


def envelope(properties: dict[str, Any]) -> bytes:
    return json.dumps(
        {
            "body": b64encode(BODY).decode(),
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": {"task": "chaos_tasks.add", "id": "enveloped"},
            "properties": {"body_encoding": "base64", "delivery_tag": "1", **properties},
        }
    ).encode()
