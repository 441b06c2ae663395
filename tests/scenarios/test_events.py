"""Every step of a task and of a worker is told to whoever asked (L1)."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.events_tail import EventsTail
from umbel.brokers.interface import Broker
from umbel.brokers.registry import open_broker
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.event import decode_events

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(120)]


async def collect_until(broker: Broker, last: str, act: Any) -> list[dict[str, Any]]:
    """Act, and return every event up to the first of type `last`."""
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(60), broker.subscribe(EVENT_EXCHANGE, ["#"]) as subscription:
        acting = asyncio.create_task(asyncio.to_thread(act))
        async for broadcast in subscription:
            events += decode_events(broadcast.body)
            if any(event["type"] == last for event in events):
                break
        await acting
    return events


def run_a_worker_and_two_tasks(cluster: Cluster) -> None:
    cluster.start_worker("w1", "-c", "1", "-E")
    assert cluster.app.send_task("chaos_tasks.add", [1, 2], task_id="good").get(timeout=90) == 3
    cluster.app.send_task("chaos_tasks.add", [1, "x"], task_id="bad").get(timeout=90, propagate=False)
    assert cluster.stop_worker("w1") == 0


def test_a_workers_and_its_tasks_story_is_told_in_order(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        broker = open_broker(cluster.app.settings.for_broker())

        async def scenario() -> list[dict[str, Any]]:
            await broker.open()
            try:
                return await collect_until(
                    broker, "worker-offline", lambda: run_a_worker_and_two_tasks(cluster)
                )
            finally:
                await broker.close()

        events = asyncio.run(scenario())
    types = [event["type"] for event in events if event["type"] != "worker-heartbeat"]
    assert types[0] == "worker-online"
    assert types[-1] == "worker-offline"
    told = [(event["type"], event["uuid"]) for event in events if "uuid" in event]
    steps = ("task-received", "task-started")
    assert told == [
        *((step, "good") for step in steps),
        ("task-succeeded", "good"),
        *((step, "bad") for step in steps),
        ("task-failed", "bad"),
    ]
    by_sequence = sorted(events, key=lambda event: int(event["seq"]))
    assert [event["seq"] for event in by_sequence] == list(range(1, len(events) + 1))  # no gap
    clocks = [event["clock"] for event in by_sequence]
    assert all(earlier < later for earlier, later in pairwise(clocks))
    assert {event["inc"] for event in events} == {events[0]["inc"]}
    assert all("retries" in event for event in events if "uuid" in event)


def test_task_events_are_logged_for_a_recorder_although_nobody_said_so_to_the_worker(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE, task_send_sent_event=True) as cluster:
        broker = open_broker(cluster.app.settings.for_broker())

        async def scenario() -> list[dict[str, Any]]:
            await broker.open()
            try:
                await broker.register_recorder("archive")
                await asyncio.to_thread(run_one_task, cluster)
                logged = await broker.read_events("archive", 1000)
                return [event for one in logged for event in decode_events(one.body)]
            finally:
                await broker.close()

        events = asyncio.run(scenario())
    of_the_task = [event["type"] for event in events if event.get("uuid") == "kept"]
    # The client tells that it has sent a task once the task is safe, and a worker may be quicker.
    of_the_task.remove("task-sent")
    assert of_the_task == ["task-received", "task-started", "task-succeeded"]
    assert events[-1]["type"] == "worker-offline"


def run_one_task(cluster: Cluster) -> None:
    cluster.start_worker("w1", "-c", "1")
    cluster.app.send_task("chaos_tasks.add", [1, 2], task_id="kept").get(timeout=90)
    cluster.stop_worker("w1")


def test_the_events_command_shows_them_in_order(tmp_path: Path) -> None:
    """L3, L7. The tail has begun to listen when it hears the worker."""
    with Cluster(tmp_path, TASKS_FILE, task_send_sent_event=True) as cluster:
        cluster.start_worker("w1", "-c", "1")
        broker = cluster.app.settings.broker
        with EventsTail(tmp_path, broker, "--enable", "--window", "1") as tail:
            tail.wait_for("a heartbeat", type="worker-heartbeat")
            results = [cluster.app.send_task("chaos_tasks.add", [n, n], task_id=f"t{n}") for n in range(20)]
            assert [result.get(timeout=90) for result in results] == [2 * n for n in range(20)]
            for number in range(20):
                tail.wait_for("the end of a task", type="task-succeeded", uuid=f"t{number}")
            assert tail.stop() == 0
            shown = tail.seen()
    assert [one["order"] for one in shown] == sorted(one["order"] for one in shown)
    for number in range(20):
        story = [one["type"] for one in shown if one.get("uuid") == f"t{number}"]
        assert story == ["task-sent", "task-received", "task-started", "task-succeeded"]


def test_the_events_command_says_when_nothing_was_heard(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        done = cluster.umbel("events", "--timeout", "0.1", check=False)
        assert (done.returncode, done.stdout) == (3, "")
        assert "listening for events" in done.stderr
