"""PubsubAsyncProducer: publishing from an event loop, confirmed on return.

Pub/Sub cannot tell whether it has a message already. A connection that is cut before the answer leaves the
sender without one, so nothing is sent again by itself: it may be there, and then run twice.
"""

from collections.abc import Sequence

from umbel.brokers.gcpubsub import posts
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.gcpubsub.unsupported import refuse
from umbel.brokers.interface import Attempt, BrokerSettings, Capabilities
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing


class PubsubAsyncProducer:
    repeats = False

    def __init__(self, settings: BrokerSettings) -> None:
        self._service = Service(settings)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        refused = await self._service.make_for(batch)
        if not refused:
            now = cluster_now()
            sent = [posts.task(one, self._service.names, now) for one in batch]
            attempt.is_out = True
            refused = await self._service.try_send(sent)
        if refused:
            why = refused[min(refused)]
            raise BrokerRefused(f"cannot send a message: {why}", places=sorted(refused))

    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        refuse("unique")

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        refuse("unique")

    async def close(self) -> None:
        self._service.close()

    def abandon(self) -> None:
        """Its loop is closed, and with it the connections."""
