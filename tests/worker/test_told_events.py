"""A worker's events on their way: encoded once, for who listens and for the log; a queue with a limit."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.brokers.under_test import eventually
from tests.worker.light_node import LightNode
from tests.worker.test_settling import play
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.events.types import TaskFailed, TaskStarted, TaskSucceeded
from umbel.wire import told
from umbel.wire.event import decode_events
from umbel.worker.steps import events as events_step

TASKS = 30


def tell_tasks(node: LightNode, count: int = TASKS) -> None:
    for number in range(count):
        node.events.tell_task(TaskStarted, 1.0, f"t{number}", 0)
        node.events.tell_task(TaskSucceeded, 2.0, f"t{number}", 0, "None", 0.5)


def parts_of(bodies: list[bytes]) -> list[bytes]:
    """The bytes of each event of lists and single ones."""
    split = msgspec.json.Decoder(list[msgspec.Raw]).decode
    return [
        bytes(part) for body in bodies for part in (split(body) if body[:1] == b"[" else [msgspec.Raw(body)])
    ]


def test_listeners_and_the_log_get_the_same_bytes_of_an_event_that_was_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[bytes] = []

    def encode(event: object) -> bytes:
        encoded.append(msgspec.json.encode(event))
        return encoded[-1]

    monkeypatch.setattr(told, "_encode", encode)

    async def scenario(node: LightNode) -> None:
        heard: list[bytes] = []
        async with (
            asyncio.TaskGroup() as group,
            node.broker.subscribe(EVENT_EXCHANGE, ["task.#"]) as subscription,
        ):
            node.events.adopt(group)
            await node.events.start()
            tell_tasks(node)
            async for broadcast in subscription:
                heard += parts_of([broadcast.body])
                if len(heard) >= 2 * TASKS:
                    break
            await node.events.end_background()
        entries = await node.broker.read_events("recorder", 1000)
        assert heard == encoded  # in the order in which things happened
        assert sorted(parts_of([one.body for one in entries])) == sorted(encoded)
        assert {one.routing_key for one in entries} == {"task.started", "task.succeeded"}
        assert len(entries) < TASKS and entries[-1].offset - 2 * TASKS == 0

    play(tmp_path, scenario)


def test_events_that_find_no_room_are_counted_and_leave_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_step, "QUEUE_MAX_BYTES", 2000)

    async def scenario(node: LightNode) -> None:
        tell_tasks(node)
        dropped = node.context.counters.events_dropped
        assert 0 < dropped < 2 * TASKS
        async with asyncio.TaskGroup() as group:
            node.events.adopt(group)
            await node.events.start()
            await eventually(lambda: has_room(node), what="the queue to be sent")
            node.events.tell_task(TaskStarted, 3.0, "last", 0)
            await node.events.logged()
            await node.events.end_background()
        assert await numbers(node) == [*range(1, 2 * TASKS - dropped + 1), 2 * TASKS + 1]

    play(tmp_path, scenario)


def test_an_event_that_cannot_be_encoded_is_dropped_and_keeps_no_other_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(node: LightNode) -> None:
        async with asyncio.TaskGroup() as group:
            node.events.adopt(group)
            await node.events.start()
            node.events.tell_task(TaskFailed, 1.0, "t", 0, "\ud800", "")
            node.events.tell("task-paid", uuid="t", amount=float("nan"))
            node.events.tell_task(TaskStarted, 1.0, "t", 0)
            await node.events.logged()
            await node.events.end_background()
        assert await numbers(node) == [3]
        assert node.context.counters.events_dropped == 2

    play(tmp_path, scenario)
    assert caplog.messages.count("events cannot be encoded; dropped") == 1


async def has_room(node: LightNode) -> bool:
    return not node.events._waiting


async def numbers(node: LightNode) -> list[int]:
    entries = await node.broker.read_events("recorder", 1000)
    told_events: list[dict[str, Any]] = [event for one in entries for event in decode_events(one.body)]
    return sorted(event["seq"] for event in told_events)
