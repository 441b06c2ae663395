"""The cluster's time as tests move it: it stands where it was put, and who waits for a moment looks again."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbel import clock
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.brokers.sqlite.cluster_store import PendingWork
from umbel.wire.message import Message, Outgoing

LATER_S = 4_000_000_000.0


@pytest.fixture(autouse=True)
def _time_passes_again() -> Iterator[None]:
    yield
    clock.stand_still(None)
    clock.correct(0.0)


def test_time_stands_still_until_it_is_moved() -> None:
    clock.stand_still(LATER_S)
    assert (clock.cluster_now(), clock.cluster_now()) == (LATER_S, LATER_S)
    clock.correct(5.0)
    assert clock.cluster_now() == LATER_S
    clock.stand_still(None)
    assert clock.cluster_now() < LATER_S


def test_whoever_waits_for_a_moment_hears_of_every_change_until_it_leaves() -> None:
    heard: list[float] = []
    leave = clock.on_change(lambda: heard.append(clock.cluster_now()))
    clock.stand_still(LATER_S)
    clock.stand_still(LATER_S + 1)
    clock.correct(5.0)
    clock.correct(5.0)
    leave()
    clock.stand_still(LATER_S + 2)
    assert heard == [LATER_S, LATER_S + 1, LATER_S + 1]


def test_a_delayed_message_is_there_when_time_was_moved(tmp_path: Path) -> None:
    settings = BrokerSettings(url=f"sqlite:///{tmp_path}/umbel.db")
    look = PendingWork(settings)

    async def scenario() -> None:
        broker = SqliteBroker(settings)
        await broker.open()
        try:
            await broker.publish([Outgoing("q", Message(b"{}", b""), not_before=LATER_S)])
            assert (look.left(["q"]), look.next_due()) == (0, LATER_S)
            waiting = asyncio.create_task(broker.wait_ready(["q"], 60.0))
            assert not (await broker.claim("w", ["q"], 1)).deliveries
            bell = broker._messages_bell
            assert bell is not None
            rings = bell.rings
            clock.stand_still(LATER_S)
            await waiting
            assert bell.rings > rings
            assert look.left(["q"]) == 1
            assert len((await broker.claim("w", ["q"], 1)).deliveries) == 1
            assert (look.left(["q"]), look.left(["other"]), look.next_due()) == (1, 0, None)
        finally:
            await broker.close()

    asyncio.run(scenario())
    look.close()
    clock.stand_still(LATER_S + 1)  # its loop has ended
