"""Who asks workers: the time for replies is for replies, and what took the rest of it is named (P7)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, cast

import pytest

from tests.waiting import until
from umbel.app.cluster.control import ControlThread
from umbel.brokers.interface import Broadcast, Broker
from umbel.brokers.sqlite.store import CAPABILITIES
from umbel.control import client
from umbel.control.client import ControlClient
from umbel.errors import BrokerUnavailable
from umbel.protocol.pidbox import Answers

BRIEF_S = 0.05


class StandingStill:
    """A broker that takes everything up to one step, and never ends that one."""

    url, keyring, signer, capabilities = "standing://still", None, None, CAPABILITIES

    def __init__(self, step: str) -> None:
        self._step = step

    async def _pass(self, step: str) -> None:
        if step == self._step:
            await asyncio.Event().wait()

    async def open(self) -> None:
        await self._pass("open")

    async def close(self) -> None:
        return

    @asynccontextmanager
    async def subscribe(self, *_: Any) -> AsyncIterator[AsyncIterator[Broadcast]]:
        await self._pass("subscribe")
        yield self._nothing()

    async def _nothing(self) -> AsyncIterator[Broadcast]:
        await asyncio.Event().wait()
        yield Broadcast("", "", b"")

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        await self._pass("broadcast")
        return None


def asker(step: str) -> ControlClient:
    return ControlClient(cast("Broker", StandingStill(step)))


@pytest.mark.parametrize(
    ("step", "named"),
    [("subscribe", "opening a reply address"), ("broadcast", "handing it to the broker")],
)
def test_a_request_that_was_not_sent_says_what_its_time_was_spent_on(step: str, named: str) -> None:
    words = f"'ping' could not be sent within 0.05 s, spent on {named}; check the broker, or raise"
    with pytest.raises(BrokerUnavailable, match=words):
        asyncio.run(asker(step).ask("ping", timeout_s=BRIEF_S))


def test_a_question_that_waits_for_others_to_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASKED_MAX", 1)

    async def scenario() -> None:
        asking = asker("nothing")
        first = asyncio.create_task(asking.ask("ping", timeout_s=60.0))
        await until(asking._turns.locked, what="the first to be asked")
        with pytest.raises(BrokerUnavailable, match="spent on waiting for one of 1 questions to end"):
            await asking.ask("stats", timeout_s=BRIEF_S)
        first.cancel()

    asyncio.run(scenario())


def test_a_request_that_was_sent_and_is_not_answered_is_no_error() -> None:
    answers = asyncio.run(asker("nothing").ask("ping", destination=["gone@x"], timeout_s=BRIEF_S))
    assert [one.node for one in answers.silent] == ["gone@x"]


class Answering(StandingStill):
    """A broker on which somebody answers each request without end."""

    async def _nothing(self) -> AsyncIterator[Broadcast]:
        for number in count():
            yield Broadcast("", "", b'{"node%d@h": "%s"}' % (number, b"x" * 1000))


def test_replies_without_end_are_taken_up_to_a_limit_of_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "REPLIES_MAX_BYTES", 10_000)
    answering = ControlClient(cast("Broker", Answering("")))
    answers = asyncio.run(answering.ask("ping", timeout_s=60.0))
    assert len(answers.replies) == 9
    assert "control replies exceed their limit" in caplog.text


@pytest.mark.parametrize("timeout_s", [2.0, None])
def test_connecting_takes_nothing_from_the_time_for_replies(
    timeout_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it takes most of a second: what was left was not enough for sending."""
    given: list[float | None] = []

    async def ask(_: ControlClient, method: str, arguments: object, *, timeout_s: float | None) -> Answers:
        given.append(timeout_s)
        return Answers({})

    class Slow(StandingStill):
        async def open(self) -> None:
            loop = asyncio.get_running_loop()
            began = loop.time()
            await until(lambda: loop.time() > began, what="time to pass")

    monkeypatch.setattr(ControlClient, "ask", ask)
    thread = ControlThread(lambda: cast("Broker", Slow("")))
    thread.wait_for(thread.ask("ping", None, timeout_s=timeout_s), 60.0)
    thread.close()
    assert given == [timeout_s]
