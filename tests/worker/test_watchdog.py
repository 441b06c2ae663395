"""Watchdog: a worker that could start a message and fetches none is stalled; a busy one is not."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from tests.brokers.under_test import QUEUE, eventually, outgoing
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.errors import WorkerStalled
from umbel.worker.context import WorkerContext
from umbel.worker.steps import health
from umbel.worker.steps.health import Watchdog


@pytest.mark.parametrize("free", [0, 1])
def test_only_a_worker_with_free_children_is_stalled(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose children are all busy claims nothing ahead after a while, for as long as its tasks take."""
    monkeypatch.setattr(health, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(health, "PATIENCE_S", 0.02)
    looks = Mock(return_value=free)

    async def scenario() -> None:
        broker = open_broker(BrokerSettings(f"sqlite:///{tmp_path / 'queue.db'}"))
        await broker.open()
        await broker.publish(outgoing("a"))
        context = SimpleNamespace(
            broker=broker,
            queues=[QUEUE],
            pool=SimpleNamespace(free=looks, room=lambda: 1),
            counters=SimpleNamespace(received=7),
            shutdown=SimpleNamespace(is_stopping=False),
        )
        context.ready_messages = lambda: WorkerContext.ready_messages(cast(Any, context))
        tasks = SimpleNamespace(cannot_settle=False)
        step = Watchdog(cast(Any, context), cast(Any, tasks))
        looking = asyncio.create_task(step._watch_queues())
        await eventually(
            AsyncMock(side_effect=lambda: looks.call_count >= 20 or looking.done()), what="looks"
        )
        looking.cancel()
        try:
            await looking
        except asyncio.CancelledError:
            pass
        finally:
            await broker.close()

    if free:
        with pytest.raises(WorkerStalled, match="1 messages are ready and 1 could run"):
            asyncio.run(scenario())
    else:
        asyncio.run(scenario())
