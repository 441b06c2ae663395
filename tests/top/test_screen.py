"""The monitor on a real broker: what it draws, and what its keys do (L7, P3)."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from tests.waiting import DEADLINE_S
from umbel.brokers.interface import Broadcast, Broker, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.monitor.feed import Feed
from umbel.top import Top
from umbel.wire.event import encode_event, routing_key

NODE = "w@h"


def told(type_name: str, clock: int, **fields: Any) -> Broadcast:
    event = {"type": type_name, "clock": clock, "hostname": NODE, "pid": 1, "timestamp": time(), **fields}
    return Broadcast(EVENT_EXCHANGE, routing_key(type_name), encode_event(event))


BEAT = {"freq": 60.0, "active": 1, "processed": 7, "sw_ident": "umbel"}


def test_it_shows_members_tasks_and_one_tasks_story(tmp_path: Path) -> None:
    async def scenario(broker: Broker, top: Top, pilot: Pilot[None]) -> None:
        tasks: DataTable[Any] = top.query_one("#tasks", DataTable)
        await tell_until(broker, pilot, lambda: tasks.row_count == 2)
        assert cells(top, "tasks")[0][1:4] == ["FAILURE", "shop.[red]pay", NODE]
        assert cells(top, "tasks")[0][-1] == "t2"
        assert cells(top, "members")[0][:4] == [NODE, "alive", "1", "7"]
        await pilot.press("enter")
        assert "task-failed" in shown(top, "#story") and "ValueError" in shown(top, "#story")
        await pilot.press("slash", *"ship", "enter")
        await until(pilot, lambda: tasks.row_count == 1)
        assert cells(top, "tasks")[0][2] == "shop.ship"
        await pilot.press("escape")
        await until(pilot, lambda: tasks.row_count == 2)
        await pilot.press("space")
        assert "PAUSED" in shown(top, "#summary")

    run(tmp_path, scenario)


def test_revoking_asks_first_and_is_recorded(tmp_path: Path) -> None:
    async def scenario(broker: Broker, top: Top, pilot: Pilot[None]) -> None:
        tasks: DataTable[Any] = top.query_one("#tasks", DataTable)
        await tell_until(broker, pilot, lambda: tasks.row_count == 2)
        tasks.move_cursor(row=0)  # t2; the cursor stays on t1 if that is shown first
        await pilot.press("r", "n")
        assert not (await broker.claim("nobody", ["celery"], 1)).revokes
        await pilot.press("r", "y")
        await until(pilot, lambda: bool(top._notifications))
        (revoke,) = (await broker.claim("nobody", ["celery"], 1)).revokes
        assert revoke.task_id == "t2"
        assert revoke.expires_at - revoke.recorded_at == pytest.approx(60.0)

    run(tmp_path, scenario)


async def tell_until(broker: Broker, pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Again and again: whoever subscribes hears only what is told from then on."""
    batch = [
        told("worker-online", 0, **BEAT),
        told("worker-heartbeat", 1, **BEAT),
        told("task-received", 2, uuid="t1", name="shop.ship", retries=0),
        told("task-received", 3, uuid="t2", name="shop.[red]pay", retries=0),
        told("task-failed", 4, uuid="t2", retries=0, exception="ValueError()"),
    ]

    async def said() -> bool:
        await broker.broadcast(batch, ttl_s=10)
        return condition()

    await until(pilot, said)


async def until(pilot: Pilot[None], condition: Callable[[], Any]) -> None:
    deadline = monotonic() + DEADLINE_S
    while True:
        met = condition()
        if await met if asyncio.iscoroutine(met) else met:
            return
        assert monotonic() < deadline, "waited in vain"
        await pilot.pause(0.05)


def cells(top: Top, table: str) -> list[list[str]]:
    found: DataTable[Any] = top.query_one(f"#{table}", DataTable)
    return [[str(cell) for cell in found.get_row_at(at)] for at in range(found.row_count)]


def shown(top: Top, name: str) -> str:
    return str(top.query_one(name, Static).render())


def run(tmp_path: Path, scenario: Callable[[Broker, Top, Pilot[None]], Any]) -> None:
    async def opened() -> None:
        broker = open_broker(BrokerSettings(f"sqlite:///{tmp_path / 'queue.db'}", revoke_retention_s=60.0))
        await broker.open()
        try:
            top = Top(Feed(broker, enable=True), "here")
            async with top.run_test(size=(160, 45)) as pilot:
                await scenario(broker, top, pilot)
            top.draw()  # as its timer does that fires while it closes
        finally:
            await broker.close()

    asyncio.run(opened())
