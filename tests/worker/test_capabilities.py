"""What a transport lacks is said in its own words (S7)."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.worker.light_node import LightNode
from tests.worker.test_faults import Bench, play
from umbel import App
from umbel.brokers.amqp.topology import CAPABILITIES as OF_AMQP
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES as OF_PUBSUB
from umbel.brokers.interface import BrokerSettings, Capabilities
from umbel.brokers.interface.connection import why_reserved
from umbel.brokers.redis.keys import CAPABILITIES as OF_REDIS
from umbel.brokers.registry import refuse_reserved_on
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.brokers.sqlite.store import CAPABILITIES as OF_SQLITE
from umbel.errors import BrokerRefused
from umbel.worker.remote.view import WorkerView


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ({"fanout": "a pigeon carries one letter at a time"}, "a pigeon carries one letter at a time"),
        ({}, "transport sqlite has no fan-out"),
    ],
)
def test_steps_that_are_off_say_why_in_the_words_of_the_transport(
    reasons: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = SqliteBroker.capabilities.fget  # type: ignore[attr-defined]
    lacking = property(lambda broker: replace(whole(broker), fanout=False, reasons=reasons))
    monkeypatch.setattr(SqliteBroker, "capabilities", lacking)

    async def start() -> None:
        node = LightNode("w", tmp_path)
        await asyncio.gather(node.control.start(), node.mingle.start(), node.gossip.start())

    asyncio.run(start())
    for step in ("remote control", "mingle", "gossip"):
        assert f"{step} disabled: {said}" in caplog.text


RESERVED = {"umbel.*": "Umbel's", "unacked": "Celery's"}


@pytest.mark.parametrize(
    ("queue", "why"),
    [
        ("umbel.dead", "(names that begin with 'umbel.' are Umbel's)"),
        ("umbel.", "(names that begin with 'umbel.' are Umbel's)"),
        ("unacked", "(this name is Celery's)"),
        *((name, "") for name in ("umbel", "umbels", "unacked_mail", "my.umbel.dead", "", "celery")),
    ],
)
def test_a_name_is_reserved_whole_or_by_how_it_begins(queue: str, why: str) -> None:
    found = why_reserved(RESERVED, queue)
    assert found == (f"the queue {queue!r} is reserved {why}: use a queue with another name" if why else "")


@pytest.mark.parametrize(
    ("url", "capabilities"),
    [
        ("redis://h/0", OF_REDIS),
        ("amqp://h", OF_AMQP),
        ("gcpubsub://projects/p", OF_PUBSUB),
        ("sqlite:///q.db", OF_SQLITE),
    ],
)
def test_the_names_of_a_broker_are_known_without_a_connection(url: str, capabilities: Capabilities) -> None:
    names = {name.replace("*", "x") for name in capabilities.reserved}
    assert names or url.startswith("sqlite")
    for name in names:
        with pytest.raises(BrokerRefused, match="is reserved"):
            refuse_reserved_on(BrokerSettings(url), name)
    refuse_reserved_on(BrokerSettings(url), "mail")


def test_a_worker_consumes_no_queue_whose_name_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = property(lambda _: replace(OF_SQLITE, reserved=RESERVED))
    monkeypatch.setattr(SqliteBroker, "capabilities", lists)

    def start(bench: Bench, _app: App) -> Coroutine[Any, Any, None]:
        async def scenario() -> None:
            node = SimpleNamespace(_context=bench.context, _tasks=bench.tasks)
            for name in ("umbel.dead", "unacked"):
                with pytest.raises(BrokerRefused, match=f"{name!r} is reserved"):
                    WorkerView.add_queue(cast("Any", node), name)
            WorkerView.add_queue(cast("Any", node), "mail")
            bench.context.queues.append("umbel.dead")
            with pytest.raises(BrokerRefused, match=r"'umbel\.dead' is reserved"):
                await bench.tasks.start()

        return scenario()

    play(tmp_path, start)
