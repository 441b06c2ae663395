"""SqliteBroker: the embedded broker on asyncio, a thin shell around the store in its thread."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from umbel import clock
from umbel.brokers.configured import ConfiguredBroker
from umbel.brokers.evidence import Evidence, judge_mark
from umbel.brokers.interface import (
    DEAD_LETTER_PEEK_MAX,
    Broadcast,
    BrokerSettings,
    Capabilities,
    Claim,
    DeadLetter,
    Delivery,
    Depth,
    EventLogState,
    LoggedEvent,
    Pause,
    Permit,
    Refused,
    Replaced,
    Resend,
    Resent,
    Return,
    Settled,
    Spend,
    Subscription,
    Tag,
    Verdict,
)
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.coordination_client import SqliteCoordination
from umbel.brokers.sqlite.store import Store
from umbel.brokers.sqlite.subscription import SqliteSubscription
from umbel.brokers.sqlite.thread import StoreThread
from umbel.brokers.sqlite.wakeup import AsyncBell
from umbel.errors import BrokerError
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke

CAPABILITIES = Capabilities(
    transport="sqlite",
    atomic_settle=True,
    stores_results=True,
    fanout=True,
    leases=True,
    delayed=True,
    event_log=True,
    priorities="0 first",
    unique=True,
    limits=True,
)
WORK_S = 10.0  # the most that one operation may take once it has the database
KEEP_ALIVES_PER_LEASE = 3


class SqliteBroker(ConfiguredBroker):
    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)  # a file has no link that could be lost
        self._store = Store(settings)
        self._cluster = ClusterStore(self._store)
        # It may wait for its turn in this process, at the gate, and for a stranger's lock.
        timeout_s = 3 * settings.connect_timeout_s + WORK_S
        self._thread = StoreThread(f"the database {self._store.database.path}", timeout_s=timeout_s)
        self._coordination = SqliteCoordination(self._thread, self._cluster)
        self._messages_bell: AsyncBell | None = None
        self._topics_bell: AsyncBell | None = None
        self._unlisten: Callable[[], None] = lambda: None

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def coordination(self) -> SqliteCoordination:
        return self._coordination

    async def open(self) -> None:
        loop = asyncio.get_running_loop()

        def tell(replaced: Replaced) -> None:  # in the store's thread
            loop.call_soon_threadsafe(self._on_replaced, replaced)

        self._store.on_replaced = tell
        await self._thread.call(self._store.open)
        bell, self._topics_bell = AsyncBell(), AsyncBell()
        self._messages_bell = bell

        def look_again() -> None:  # what was not due may be due now; in any thread
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(bell.ring)

        self._unlisten()
        self._unlisten = clock.on_change(look_again)

    async def reconnect(self) -> None:
        """Nothing to do: each operation opens the file that is there."""

    async def close(self) -> None:
        self._unlisten()
        for bell in (self._messages_bell, self._topics_bell):
            if bell is not None:
                bell.close()
        addresses = [bell.address for bell in (self._messages_bell, self._topics_bell) if bell is not None]
        self._messages_bell = self._topics_bell = None
        try:
            await self._thread.call(self._store.leave, addresses)
        finally:
            self._thread.stop()

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        await self._thread.call(self._store.publish, batch)

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        return await self._thread.call_or(
            self._give_back, self._store.claim, owner, queues, limit, revoked_after
        )

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        bell = self._messages_bell
        assert bell is not None, "the broker is open"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            rings = bell.rings
            due_s = await self._thread.call(self._store.watch_queues, queues, bell.address)
            left_s = deadline - loop.time()
            if due_s == 0.0 or left_s <= 0.0:
                return True
            await bell.wait(rings, left_s if due_s is None else min(left_s, due_s))

    async def renew(self, owner: str) -> bool:
        return await self._thread.call(self._store.renew, owner)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        return await self._thread.call(self._store.return_lost)

    async def leave_queue(self, owner: str, queue: str) -> None:
        """Nothing to do: nothing is fetched ahead of a claim."""

    async def forget_owner(self, owner: str) -> int:
        return await self._thread.call(self._store.forget_owner, owner)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        return await self._thread.call(self._store.ended, tags)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        return await self._thread.call(self._store.settle, verdicts)

    async def spend(self, signatures: Sequence[Spend]) -> frozenset[Tag]:
        return await self._thread.call(self._store.spend, signatures)

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        return await self._thread.call(self._store.permit, asked)

    async def bury(self, refused: Sequence[Refused]) -> None:
        await self._thread.call(self._store.bury, refused)

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        return await self._thread.call(self._store.depths)

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        return await self._thread.call(self._store.peek, queue, limit)

    async def purge(self, queue: str) -> int:
        return await self._thread.call(self._store.purge, queue)

    async def pause(self, queue: str, mark: Pause) -> None:
        await self._thread.call(self._store.pause, queue, mark)

    async def resume(self, queue: str) -> bool:
        return await self._thread.call(self._store.resume, queue)

    async def paused(self) -> Mapping[str, Pause]:
        return await self._thread.call(self._store.paused)

    async def move(self, source: str, target: str, limit: int) -> int:
        return await self._thread.call(self._store.move, source, target, limit)

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        return await self._thread.call(self._store.dead_letters, limit)

    async def requeue_dead(self, letter_ids: Sequence[int | str]) -> int:
        return await self._thread.call(self._store.requeue_dead, letter_ids)

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        return await self._thread.call(self._store.drop_dead, letter_ids)

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        await self._thread.call(self._store.keep_failed, failed)

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        return await self._thread.call(self._store.failed, limit, task_id)

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        return await self._thread.call(self._store.resend, letters)

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        await self._thread.call(self._cluster.broadcast, batch, ttl_s)
        return None

    @asynccontextmanager
    async def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AsyncIterator[Subscription]:
        assert self._topics_bell is not None, "the broker is open"
        subscription = SqliteSubscription(
            self._thread,
            self._cluster,
            self._topics_bell,
            exchange,
            patterns,
            keep_alive_s=self._settings.lease_s / KEEP_ALIVES_PER_LEASE,
        )
        await subscription.enter()
        try:
            yield subscription
        finally:
            # Failing here would hide why the listener leaves, a cancellation above all.
            with suppress(BrokerError):
                await subscription.leave()

    async def store_time(self) -> None:
        """None: the nodes' clocks are all there are."""

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        await self._thread.call(self._cluster.mark_alive, node, incarnation, ttl_s)

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        return judge_mark(await self._thread.call(self._cluster.marked, node), incarnation)

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        await self._thread.call(self._store.revoke, revokes)

    async def register_recorder(self, name: str) -> int:
        return await self._thread.call(self._cluster.register_recorder, name)

    async def forget_recorder(self, name: str) -> None:
        await self._thread.call(self._cluster.forget_recorder, name)

    async def recorders(self) -> Sequence[str]:
        return await self._thread.call(self._cluster.recorders)

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        return await self._thread.call(self._cluster.log_events, entries, counts)

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        return await self._thread.call(self._cluster.read_events, name, limit, after)

    async def acknowledge_events(self, name: str, offset: int) -> None:
        await self._thread.call(self._cluster.acknowledge_events, name, offset)

    async def lost_events(self) -> int:
        return await self._thread.call(self._cluster.lost_events)

    async def event_log(self) -> EventLogState:
        return await self._thread.call(self._cluster.event_log)

    async def sweep(self) -> None:
        await self._thread.call(self._cluster.sweep)

    def _give_back(self, claim: Claim) -> None:
        """The claimer was cancelled while its claim was made: it will never settle these."""
        if claim.deliveries:
            self._store.settle([Return(delivery.tag) for delivery in claim.deliveries])
