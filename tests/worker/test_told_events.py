"""A worker's events on their way: encoded once, for who listens and for the log; a queue with a limit."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.brokers.under_test import eventually
from tests.worker.light_node import LightNode
from tests.worker.test_settling import play
from umbel.brokers.interface import Broadcast
from umbel.errors import BrokerUnavailable
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.events.types import TaskFailed, TaskStarted, TaskSucceeded
from umbel.protocol import clock
from umbel.wire import event
from umbel.wire.event import decode_events
from umbel.worker import events as events_step

TASKS = 30


def tell_tasks(node: LightNode, count: int = TASKS) -> None:
    for number in range(count):
        node.events.send_task(TaskStarted, 1.0, f"t{number}", 0)
        node.events.send_task(TaskSucceeded, 2.0, f"t{number}", 0, "None", 0.5)


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

    monkeypatch.setattr(event, "_encode", encode)

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
            node.events.send_task(TaskStarted, 3.0, "last", 0)
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
            node.events.send_task(TaskFailed, 1.0, "t", 0, "\ud800", "")
            node.events.send("task-paid", uuid="t", amount=float("nan"))
            node.events.send_task(TaskStarted, 1.0, "t", 0)
            await node.events.logged()
            await node.events.end_background()
        assert await numbers(node) == [3]
        assert node.context.counters.events_dropped == 2

    play(tmp_path, scenario)
    assert caplog.messages.count("events cannot be encoded; dropped") == 1


def test_no_event_leaves_before_the_brokers_clock_mark_is_as_high_and_most_cost_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: whoever reads the mark at its start begins above all that was heard of this node."""
    monkeypatch.setattr(clock, "BLOCK", 50)
    monkeypatch.setattr(events_step, "BATCH_MAX", 7)
    marks: list[int] = []

    async def scenario(node: LightNode) -> None:
        broadcast, raise_clock = node.broker.broadcast, node.broker.coordination.raise_clock

        async def checked(messages: Sequence[Broadcast], *, ttl_s: float) -> int | None:
            clocks = [event["clock"] for message in messages for event in decode_events(message.body)]
            assert max(clocks) <= await raise_clock(0)
            return await broadcast(messages, ttl_s=ttl_s)

        async def raised(value: int) -> int:
            marks.append(value)
            return await raise_clock(value)

        monkeypatch.setattr(node.broker, "broadcast", checked)
        monkeypatch.setattr(node.broker.coordination, "raise_clock", raised)
        await raise_clock(1000)
        async with asyncio.TaskGroup() as group:
            node.events.adopt(group)
            await node.events.start()
            for _ in range(3):
                tell_tasks(node)
                await node.events.logged()
            await node.events.stop()
        assert min(await clocks_of(node)) > 1000
        assert marks[0] == 0 and len(marks) <= 1 + 3 * 2 * TASKS // 50

    play(tmp_path, scenario)


def test_while_the_clock_mark_cannot_be_raised_events_leave_and_it_is_raised_as_soon_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(node: LightNode) -> None:
        raise_clock, outages = node.broker.coordination.raise_clock, node.context.outages

        async def refused(value: int) -> int:
            if value:
                raise BrokerUnavailable("no")
            return await raise_clock(0)

        async with asyncio.TaskGroup() as group:
            node.events.adopt(group)
            with monkeypatch.context() as changed:
                changed.setattr(node.broker.coordination, "raise_clock", refused)
                await node.events.start()
                tell_tasks(node)
                await node.events.logged()
                assert outages.problem == "clock mark: no"
                node.events._reservation.raised(10**9)  # as the look every ten seconds does
                await node.events.reserve_clock()
                assert not outages._machine.is_failing("clock mark")
                node.events._reservation.lost()
            assert max(await clocks_of(node)) > await raise_clock(0)
            node.events.send_task(TaskStarted, 3.0, "next", 0)
            await node.events.logged()
            assert max(await clocks_of(node)) <= await raise_clock(0)
            await node.events.stop()

    play(tmp_path, scenario)


def test_a_worker_whose_clock_cannot_be_read_from_the_broker_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would say things that sort before what was said."""

    async def scenario(node: LightNode) -> None:
        async def refused(_: int) -> int:
            raise BrokerUnavailable("no")

        monkeypatch.setattr(node.broker.coordination, "raise_clock", refused)
        with pytest.raises(BrokerUnavailable, match="no"):
            await node.events.start()

    play(tmp_path, scenario)


def test_a_clock_mark_that_went_with_the_brokers_data_is_raised_again(tmp_path: Path) -> None:
    async def scenario(node: LightNode) -> None:
        async with asyncio.TaskGroup() as group:
            node.events.adopt(group)
            await node.events.start()
            tell_tasks(node)
            await node.events.logged()
            with closing(sqlite3.connect(tmp_path / "queue.db")) as file, file:
                file.execute("UPDATE meta SET value = 0 WHERE name = 'clock'")
            node.events.reserve_again()
            node.events.send_task(TaskStarted, 3.0, "next", 0)
            await node.events.logged()
            assert max(await clocks_of(node)) <= await node.broker.coordination.raise_clock(0)
            await node.events.stop()

    play(tmp_path, scenario)


async def has_room(node: LightNode) -> bool:
    return not node.events._waiting


async def numbers(node: LightNode) -> list[int]:
    return sorted(event["seq"] for event in await logged_events(node))


async def clocks_of(node: LightNode) -> list[int]:
    return [event["clock"] for event in await logged_events(node)]


async def logged_events(node: LightNode) -> list[dict[str, Any]]:
    entries = await node.broker.read_events("recorder", 1000)
    return [event for one in entries for event in decode_events(one.body)]
