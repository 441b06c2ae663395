"""Live order and waiting times, against a ledger of those who send and of the tasks that run.

Everything runs on one machine, so all have one clock, and the ledger brackets each stamp: a task was
sent before its client handed it to the broker, and one of a single child started after the one before
it had ended.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster import Cluster
from tests.events_tail import EventsTail
from tests.history.recording import recording, rows_of
from tests.scenarios.ledger_tasks import send
from tests.servers.rabbitmq import amqp_url
from tests.servers.redis import redis_server, redis_url
from tests.waiting import wait_until
from umbel.events.types import TaskEvent
from umbel.events.view import EventReader
from umbel.history.story import Story, as_wire, story_of

__all__ = ["amqp_url", "redis_server", "redis_url"]
TASKS_FILE = Path(__file__).with_name("ledger_tasks.py")
TASKS = 1_500 if os.environ.get("UMBEL_SOAK") else 60  # every third of them is sent by a task
STEPS = ["task-sent", "task-received", "task-started", "task-succeeded"]
LATE = range(3, 12)  # some of these are told late; the first waits for the child to connect
WINDOW_S = "4"
MICROSECOND = 1e-6  # the lake keeps no less
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(240)]

Span = tuple[float, float]


class Ledger(NamedTuple):
    sent: dict[str, Span]
    ran: dict[str, Span]


def read_ledger(home: Path) -> Ledger:
    return Ledger(spans(home / "sent.txt"), spans(home / "ran.txt"))


def spans(path: Path) -> dict[str, Span]:
    lines = (line.split() for line in path.read_text().splitlines()) if path.exists() else ()
    return {task_id: (float(began), float(ended)) for task_id, began, ended in lines}


@pytest.mark.parametrize("broker", ["", "redis_url", "amqp_url"])
def test_live_order_and_waiting_times_are_those_of_the_ledger(
    broker: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(broker) if broker else f"sqlite:///{tmp_path / 'queue.db'}"
    lake = tmp_path / "lake"
    settings = {"broker": url, "task_send_sent_event": True, "task_ignore_result": True}
    with Cluster(tmp_path, TASKS_FILE, **settings) as cluster, recording(url, lake) as recorder:
        cluster.start_worker("w1", "-c", "1", "-E", wait=False)
        with EventsTail(tmp_path, url, "--window", WINDOW_S) as tail:
            recorder.wait_for("recording")
            send_all(cluster, tmp_path)
            wait_until(lambda: len(read_ledger(tmp_path).ran) == TASKS, deadline_s=120, what="all to run")
            wait_until(lambda: len(ended(tail.seen())) == TASKS, what="all to be shown")
            assert tail.stop() == 0
            shown = tail.seen()
        wait_until(lambda: len(ended(rows_of(lake))) == TASKS, what="all to be recorded")
        assert cluster.stop_worker("w1") == 0
        assert recorder.stop() == 0
    ledger = read_ledger(tmp_path)
    assert ledger.sent.keys() == ledger.ran.keys()
    check_order(shown)
    check_waits(of_live_events(shown), ledger)
    check_history(rows_of(lake), ledger)


def send_all(cluster: Cluster, home: Path) -> None:
    for number in range(0, TASKS, 3):
        telling = told_late(cluster, home, f"t{number}") if number in LATE else nullcontext()
        with telling:
            send(cluster.app, str(home), f"t{number}", f"t{number + 1}")
        send(cluster.app, str(home), f"t{number + 2}")


@contextmanager
def told_late(cluster: Cluster, home: Path, task_id: str) -> Iterator[None]:
    """The worker is quicker than the client, who tells of sending when the task has run."""

    def late(*args: Any, **options: Any) -> None:
        wait_until(lambda: task_id in read_ledger(home).ran, deadline_s=120, what="the task to run")
        broadcast(*args, **options)

    broadcast = cluster.app.producer.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.app.producer, "broadcast", late)
        yield


def ended(events: list[dict[str, Any]]) -> set[str]:
    return {one["uuid"] for one in events if one["type"] == "task-succeeded"}


def check_order(shown: list[dict[str, Any]]) -> None:
    stories: dict[str, list[str]] = {}
    for one in shown:
        if "uuid" in one:
            stories.setdefault(one["uuid"], []).append(one["type"])
    assert len(stories) == TASKS
    assert {uuid: story for uuid, story in stories.items() if story != STEPS} == {}
    assert [one["order"] for one in shown] == sorted(one["order"] for one in shown)


class Stamps(NamedTuple):
    sent: float
    received: float
    started: float


def of_live_events(shown: list[dict[str, Any]]) -> dict[str, Stamps]:
    at = {(one["uuid"], one["type"]): one["timestamp"] for one in shown if "uuid" in one}
    return {uuid: Stamps(*(at[uuid, kind] for kind in STEPS[:3])) for uuid in ended(shown)}


def check_waits(stamps: dict[str, Stamps], ledger: Ledger) -> None:
    """Never below zero, and what the ledger says: no longer and no shorter than it leaves room for."""
    order = sorted(stamps, key=lambda task: ledger.ran[task])
    ended_before = {later: ledger.ran[earlier][1] for earlier, later in pairwise(order)}
    for task, (sent, received, started) in stamps.items():
        before, handed = ledger.sent[task]
        assert before - MICROSECOND <= sent <= handed + MICROSECOND
        assert sent <= received + MICROSECOND
        assert received <= started + MICROSECOND
        free = ended_before.get(task, received)
        assert free - MICROSECOND <= started <= ledger.ran[task][0] + MICROSECOND


def check_history(rows: list[dict[str, Any]], ledger: Ledger) -> None:
    """In what was recorded, as `umbel task show` and the tables read it."""
    reader, stamps = EventReader(), {}
    heard = [event for row in rows if isinstance(event := reader.read(as_wire(row)), TaskEvent)]
    by_task: dict[str, list[TaskEvent]] = {}
    for event in heard:
        by_task.setdefault(event.uuid, []).append(event)
    for task in ledger.ran:
        story = story_of(task, by_task[task])
        assert story is not None
        assert [one.type for one in story.events] == STEPS
        stamps[task] = of_story(story)
    check_waits(stamps, ledger)


def of_story(story: Story) -> Stamps:
    record = story.record
    assert record is not None
    assert record.sent_at is not None and record.received_at is not None and record.started_at is not None
    return Stamps(record.sent_at, record.received_at, record.started_at)
