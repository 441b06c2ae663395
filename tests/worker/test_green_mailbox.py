"""The mailbox with a connection, a loop and a thread of its own (P6)."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.worker.test_control import ENOUGH_S, Cluster, play
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.control.client import ControlClient
from umbel.control.panel import UsersPanel
from umbel.errors import BrokerUnavailable


@pytest.fixture(autouse=True)
def green(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "is_green", True)


def ask_from_elsewhere(url: str, *methods: str) -> list[Any]:
    """As another process would: on a loop and a connection of its own."""

    async def asked() -> list[Any]:
        broker = SqliteBroker(BrokerSettings(url))
        await broker.open()
        try:
            asker = ControlClient(broker)
            answers = [await asker.ask(one, timeout_s=ENOUGH_S, limit=1) for one in methods]
            return [one.replies.get("a@x") for one in answers]
        finally:
            await broker.close()

    return asyncio.run(asked())


def test_ping_is_answered_although_the_workers_loop_is_blocked(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x"):
            answers: list[Any] = []
            asking = threading.Thread(
                target=lambda: answers.extend(ask_from_elsewhere(cluster.url, *["ping"] * 5))
            )
            asking.start()
            asking.join(2 * ENOUGH_S)  # the loop stands still all the while
            assert answers == [{"ok": "pong"}] * 5

    play(tmp_path, scenario)


def test_other_commands_wait_for_the_workers_loop_and_run_on_it(tmp_path: Path) -> None:
    """So that nothing looks at what is being changed, and the clock moves first (P4)."""
    panel = UsersPanel()
    ran_in: list[str] = []

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x", commands=panel):
            state = cluster.states["a@x"]
            before = state.clock.value

            def stats() -> dict[str, Any]:
                ran_in.append(threading.current_thread().name)
                return {"clock": state.clock.value}

            state.stats = stats  # type: ignore[method-assign]
            asked = await cluster.asker.ask("stats", timeout_s=ENOUGH_S, limit=1)
            assert asked.replies["a@x"]["clock"] > before
            assert ran_in == [threading.main_thread().name]

    play(tmp_path, scenario)


def test_stopping_waits_until_the_thread_has_ended(tmp_path: Path) -> None:
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "umbel-mailbox"]

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x"):
            assert threads() == ["umbel-mailbox"]
            assert await asyncio.to_thread(ask_from_elsewhere, cluster.url, "ping") == [{"ok": "pong"}]
        assert threads() == []

    play(tmp_path, scenario)


def test_a_fault_of_its_channel_makes_it_anew_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5."""
    subscribe, faults = SqliteBroker.subscribe, iter([1, 2, 3])

    def fails_at_first(self: SqliteBroker, exchange: str, patterns: Sequence[str]) -> Any:
        if threading.current_thread().name == "umbel-mailbox" and next(faults, None):
            raise BrokerUnavailable("cut off")
        return subscribe(self, exchange, patterns)

    monkeypatch.setattr(SqliteBroker, "subscribe", fails_at_first)

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x"):
            assert (await cluster.asker.ask("ping", timeout_s=ENOUGH_S, limit=1)).replies
            assert cluster.figures["a@x"].resets == 3

    play(tmp_path, scenario)


def test_a_connection_that_cannot_be_closed_does_not_keep_other_steps_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged. Raised in the worker's task group, it would cancel the rest of the shutdown."""
    close = SqliteBroker.close

    async def fails_in_its_thread(self: SqliteBroker) -> None:
        await close(self)
        if threading.current_thread().name == "umbel-mailbox":
            raise BrokerUnavailable("the disk is full")

    monkeypatch.setattr(SqliteBroker, "close", fails_in_its_thread)

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x"):
            assert (await cluster.asker.ask("ping", timeout_s=ENOUGH_S, limit=1)).replies

    play(tmp_path, scenario)
    (line,) = [record for record in caplog.records if "failed to stop cleanly" in record.message]
    assert getattr(line, "why", "") == "the disk is full"
