import asyncio
from pathlib import Path
from time import time

from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.monitor.feed import Feed
from umbel.wire.control import LeaseRow


def test_a_lease_whose_holder_died_is_named_no_longer(tmp_path: Path) -> None:
    """No node is left to say so: the store is asked."""

    async def scenario() -> None:
        broker = open_broker(BrokerSettings(f"sqlite:///{tmp_path / 'queue.db'}"))
        await broker.open()
        feed = Feed(broker, enable=False)
        book = feed.model.leases
        granted = await broker.coordination.acquire_lease("mine", "app.1.1", ttl_s=60.0)
        rows = [("scheduler", "dead@h.7.9", 3), ("mine", "app.1.1", granted.term)]
        book.answered([LeaseRow(*row) for row in rows], time())
        await feed._poll_leases()
        assert book.held() == {"mine"}
        assert [one.text for one in feed.model.happenings] == ["scheduler is free"]
        await broker.close()

    asyncio.run(scenario())
