"""Outcomes and the event log: what is stored was told first; who cannot log is heard all the same."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.worker.light_node import LightNode, nothing_refused
from umbel.backends.sqlite import SqliteBackend
from umbel.brokers.interface import (
    Ack,
    BrokerSettings,
    Bury,
    Delivery,
    Refused,
    Return,
    Settled,
    Started,
    Verdict,
)
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.errors import BrokerUnavailable
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.worker import events as events_step
from umbel.worker.delivery.settle import Settler
from umbel.worker.events import HEARTBEAT, Events


def play(home: Path, scenario: Callable[[LightNode], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        node = LightNode("n", home)
        await node.broker.open()
        try:
            async with asyncio.timeout(30.0):
                await node.broker.register_recorder("recorder")
                await scenario(node)
        finally:
            await node.broker.close()

    asyncio.run(bounded())


def test_what_ends_while_the_log_is_waited_for_waits_for_its_own_event(tmp_path: Path) -> None:
    """D1: of tasks that were acknowledged before they ran; nobody repeats one whose ending history lacks."""
    told, logged = ["t1"], set[str]()
    too_early: list[str] = []

    class Stores(SqliteBackend):
        def store(self, results: Sequence[StoredResult]) -> None:
            too_early.extend(one.task_id for one in results if one.task_id not in logged)
            super().store(results)

    async def scenario(node: LightNode) -> None:
        url = node.broker.url
        backend = Stores(url, BrokerSettings(url))

        async def until_logged() -> None:
            place = len(told)
            if place == 1:  # another task ends meanwhile
                told.append("t2")
                settler.report([StoredResult("t2", "SUCCESS", b"{}")], ())
            logged.update(told[:place])

        settler = Settler(
            replace(node.context, backend=backend),
            cast("Any", SimpleNamespace(recorded=True, logged=until_logged)),
            refused=nothing_refused,
        )
        settler.report([StoredResult("t1", "SUCCESS", b"{}")], ())
        going_on = asyncio.create_task(settler.run())
        await settler.drained()
        going_on.cancel()
        assert (sorted(backend.read(told)), too_early) == (told, [])

    play(tmp_path, scenario)


class CannotLog(SqliteBroker):
    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        raise BrokerUnavailable("no memory left for the log")


@pytest.mark.parametrize("most_bytes", [2**20, 1000])
def test_heartbeats_are_heard_while_the_log_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """S5: however many events wait for the log, also if no more can: a node that lives is not lost."""
    monkeypatch.setattr(events_step, "BATCH_MAX", 20)
    monkeypatch.setattr(events_step, "QUEUE_MAX_BYTES", most_bytes)

    async def scenario(node: LightNode) -> None:
        node.broker.__class__ = CannotLog
        async with (
            asyncio.TaskGroup() as group,
            node.broker.subscribe(EVENT_EXCHANGE, ["worker.heartbeat"]) as heard,
        ):
            node.events.adopt(group)
            await node.events.start()
            for _ in range(100):
                node.events.send("task-started", uuid="t")
            node.events.send(HEARTBEAT, freq=2.0)
            async for _ in heard:
                break
            await node.events.end_background()

    play(tmp_path, scenario)


def test_a_worker_whose_steps_were_cancelled_logs_its_last_outcomes_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D1: after an error nobody sends events any more; what is settled then is logged first, at once."""

    async def scenario(node: LightNode) -> None:
        async with asyncio.TaskGroup() as group:
            node.events.adopt(group)
            await node.events.start()
            await cancelled(node.events)
            node.events.send("task-succeeded", uuid="t")
            await node.events.logged()
            assert not caplog.messages  # or it waited for nobody, and gave up
        (entry,) = await node.broker.read_events("recorder", 10)
        assert entry.routing_key == "task.succeeded"

    play(tmp_path, scenario)


async def cancelled(step: Events) -> None:
    """As a group of tasks does it in which one has failed."""
    for task in step._background:
        task.cancel()
    await asyncio.wait(step._background)


def test_what_only_this_worker_knows_is_kept_when_the_data_was_replaced(tmp_path: Path) -> None:
    """N2: results are stored, follow-ups sent, returned messages sent again, buried ones buried."""
    buried: list[Refused] = []

    class Forgot(SqliteBroker):
        async def settle(self, batch: Sequence[Verdict]) -> Settled:
            return Settled(0, unknown=frozenset(one.tag for one in batch))

        async def bury(self, refused: Sequence[Refused]) -> None:
            buried.extend(refused)

    async def scenario(node: LightNode) -> None:
        node.broker.__class__ = Forgot
        url = node.broker.url
        backend = SqliteBackend(url, BrokerSettings(url))

        settler = Settler(replace(node.context, backend=backend), node.events, refused=nothing_refused)
        follow_up, returned, dead, failed = (
            Outgoing(name, Message(b"{}", b"[]")) for name in ("next", "back", "dead", "failed")
        )
        settler.add(Ack("1", [StoredResult("t1", "SUCCESS", b"{}")], [follow_up]))
        settler.add(Return("2"), returned)
        settler.add(Bury("3", "poison", results=[StoredResult("t3", "FAILURE", b"{}")]), dead)
        settler.add(Started("4"))
        settler.add(Bury("5", "its message was not given"))
        settler.add_outcome(Ack("6", keep="broken"), Delivery("6", failed.queue, failed.message))
        await settler.flush()
        assert sorted(backend.read(["t1", "t3"])) == ["t1", "t3"]
        assert sorted(await node.broker.queues()) == ["back", "next"]
        assert buried == [Refused(dead, "poison")]
        assert [(one.queue, one.reason) for one in await node.broker.failed(9)] == [("failed", "broken")]
        assert (node.context.counters.unknown, node.context.counters.conflicts) == (5, 0)
        assert settler.pending == 0
        backend.close()

    play(tmp_path, scenario)
