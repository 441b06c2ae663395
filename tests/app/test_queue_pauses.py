"""Who is told of a pause, what their answers mean, and what is refused before anything is done."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from umbel.brokers.interface import Broker, BrokerSettings, Pause
from umbel.brokers.registry import open_broker
from umbel.control.client import ControlClient
from umbel.control.queue_pauses import move_messages, pause_queue, resume_queue
from umbel.errors import ConfigurationError
from umbel.protocol.pidbox import Answers, MemberReport

QUEUE = "mail"


class Cluster(ControlClient):
    """Answers as a cluster of five would, of which Celery's do not look at the mark."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.interrupted_at = ""

    def last(self) -> tuple[str, tuple[str, ...]]:
        return self.asked[-1]

    async def ask(  # type: ignore[override]
        self,
        method: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
        timeout_s: float = 1.0,
    ) -> Answers:
        self.asked.append((method, tuple(destination or ())))
        if method == self.interrupted_at:
            raise asyncio.CancelledError
        if method == "active_queues":
            consumes: list[Any] = [{"name": QUEUE}, {"name": "other"}]
            replies: dict[str, Any] = dict.fromkeys(("obeys@c", "refuses@c", "sleeps@c"), consumes)
            replies |= {"ours@u": [{"name": QUEUE, "paused": True}], "elsewhere@c": [{"name": "other"}]}
            return Answers(replies, silent=(MemberReport("lost@c"),))
        replies = {"obeys@c": {"ok": "done"}, "refuses@c": {"error": "not allowed"}}
        silent = tuple(MemberReport(node) for node in destination or () if node not in replies)
        return Answers({node: said for node, said in replies.items() if node in (destination or ())}, silent)


@pytest.fixture
def settings(tmp_path: Path) -> BrokerSettings:
    return BrokerSettings(f"sqlite:///{tmp_path / 'queue.db'}")


def test_who_does_not_look_at_the_mark_is_told_and_remembered(settings: BrokerSettings) -> None:
    async def scenario() -> None:
        broker = open_broker(settings)
        await broker.open()
        cluster = Cluster(broker)
        outcome = await pause_queue(broker, cluster, QUEUE, timeout_s=1.0)
        assert outcome.paused and outcome.changed and outcome.told == ("obeys@c",)
        assert outcome.silent == ("lost@c", "sleeps@c") and outcome.refused == {"refuses@c": "not allowed"}
        assert cluster.last() == ("cancel_consumer", ("obeys@c", "refuses@c", "sleeps@c"))
        assert outcome.ask_again == "umbel queues pause mail"
        before = (await broker.paused())[QUEUE]
        assert before.told == ("obeys@c", "sleeps@c")  # who does not answer may obey later
        again = await pause_queue(broker, cluster, QUEUE, timeout_s=1.0)
        assert not again.changed and (await broker.paused())[QUEUE] == before
        resumed = await resume_queue(broker, cluster, QUEUE, timeout_s=1.0)
        assert cluster.last() == ("add_consumer", ("obeys@c", "sleeps@c"))
        assert (resumed.paused, resumed.changed, resumed.told) == (False, True, ("obeys@c",))
        assert resumed.silent == ("sleeps@c",)
        assert resumed.ask_again == "umbel control add_consumer mail -d sleeps@c"
        nothing = await resume_queue(broker, cluster, QUEUE, timeout_s=1.0)
        assert not nothing.changed and not nothing.ask_again and await broker.paused() == {}
        assert len(cluster.asked) == 5
        await broker.close()

    asyncio.run(scenario())


def test_who_is_interrupted_leaves_a_mark_that_knows_whom_to_tell(settings: BrokerSettings) -> None:
    async def scenario() -> None:
        broker = open_broker(settings)
        await broker.open()
        cluster = Cluster(broker)
        for change, at in ((pause_queue, "cancel_consumer"), (resume_queue, "add_consumer")):
            cluster.interrupted_at = at
            with pytest.raises(asyncio.CancelledError):
                await change(broker, cluster, QUEUE, timeout_s=1.0)
            assert (await broker.paused())[QUEUE].told == ("obeys@c", "refuses@c", "sleeps@c")
        cluster.interrupted_at = ""
        assert (await resume_queue(broker, cluster, QUEUE, timeout_s=1.0)).told == ("obeys@c",)
        await broker.close()

    asyncio.run(scenario())


def test_names_that_cannot_be_and_one_pause_too_many_are_refused(
    settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.control.queue_pauses.PAUSED_MAX", 3)

    async def scenario() -> None:
        broker = open_broker(settings)
        await broker.open()
        cluster = Cluster(broker)
        with pytest.raises(ConfigurationError, match="1 to 200 characters and no NUL, not ''"):
            await pause_queue(broker, cluster, "", timeout_s=1.0)
        with pytest.raises(ConfigurationError, match="no NUL"):
            await resume_queue(broker, cluster, "a\0b", timeout_s=1.0)
        with pytest.raises(ConfigurationError, match="no NUL"):
            await move_messages(broker, QUEUE, "x" * 201)
        with pytest.raises(ConfigurationError, match="from 'mail' to itself"):
            await move_messages(broker, QUEUE, QUEUE)
        for number in range(3):
            await broker.pause(f"q{number}", Pause(1.0))
        with pytest.raises(ConfigurationError, match="which is the limit; resume some first"):
            await pause_queue(broker, cluster, QUEUE, timeout_s=1.0)
        assert (await pause_queue(broker, cluster, "q1", timeout_s=1.0)).changed is False
        await broker.close()

    asyncio.run(scenario())
