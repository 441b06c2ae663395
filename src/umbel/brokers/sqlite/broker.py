"""SqliteBroker: the embedded broker on asyncio. Most of its methods call the store in its thread."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from time import monotonic

from umbel import clock
from umbel.brokers.interface import (
    Broadcast,
    BrokerSettings,
    Capabilities,
    Claim,
    Replaced,
    Return,
    Spend,
    Subscription,
    Tag,
)
from umbel.brokers.links import ConfiguredBroker, signer_at
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import CAPABILITIES, Store
from umbel.brokers.sqlite.thread import AsyncBell, CallsStore, StoreThread, in_thread, thread_of
from umbel.errors import BrokerError
from umbel.protocol.delivery.trust import Doubt
from umbel.wire.control import patterns_on
from umbel.wire.message import matches

# ---- subscriptions ---------------------------------------------------------------------------------

PAGE_MAX = 500


class SqliteSubscription:
    """A subscription to one exchange, which a timer prolongs.

    It has at most PAGE_MAX broadcasts in memory; the rest waits in the table.
    """

    def __init__(
        self,
        thread: StoreThread,
        store: ClusterStore,
        bell: AsyncBell,
        exchange: str,
        patterns: Sequence[str],
        *,
        keep_alive_s: float,
    ) -> None:
        self._thread = thread
        self._store = store
        self._bell = bell
        self._exchange = exchange
        self._patterns = [pattern.split(".") for pattern in patterns_on(exchange, patterns)]
        self._keep_alive_s = keep_alive_s
        self._number = 0
        self._offset = 0
        self._replacements = 0
        self._timer: asyncio.TimerHandle | None = None
        self._prolonging: Future[object] | None = None

    async def enter(self) -> None:
        """Subscribe, and begin to prolong the subscription."""
        await self._subscribe()
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._keep_alive)

    async def _subscribe(self) -> None:
        self._number, self._offset, self._replacements = await self._thread.call_or(
            lambda entered: self._store.unsubscribe(entered[0]),
            self._store.subscribe,
            self._exchange,
            self._bell.address,
        )

    async def leave(self) -> None:
        """End the subscription."""
        if self._timer is not None:
            self._timer.cancel()
        await self._thread.call(self._store.unsubscribe, self._number)

    def _keep_alive(self) -> None:
        """Prolong the subscription, also while the listener is busy."""
        if self._prolonging is None or self._prolonging.done():
            self._prolonging = self._thread.post(
                self._store.prolong, self._number, self._exchange, self._bell.address, self._replacements
            )
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._keep_alive)

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        while True:
            rings = self._bell.rings
            page, self._offset = await self._thread.call(
                self._store.broadcasts_after, self._exchange, self._offset, PAGE_MAX
            )
            if self._store.replacements != self._replacements:  # the offset belongs to another file
                await self._subscribe()
                continue
            for broadcast in page:
                words = broadcast.routing_key.split(".")
                if any(matches(pattern, words) for pattern in self._patterns):
                    yield broadcast
            if not page:
                await self._bell.wait(rings, math.inf)


# ---- coordination ----------------------------------------------------------------------------------


class SqliteCoordination(CallsStore):
    """The CoordinationStore of the embedded broker."""

    unproven = 0  # it has no replicas

    def __init__(self, thread: StoreThread, store: ClusterStore) -> None:
        self._thread = thread
        self._store = store

    open_election = in_thread(ClusterStore.open_election)
    claim_election = in_thread(ClusterStore.claim_election)
    start_election = in_thread(ClusterStore.start_election)
    renew_election = in_thread(ClusterStore.renew_election)
    finish_election = in_thread(ClusterStore.finish_election)
    read_election = in_thread(ClusterStore.read_election)
    unfinished_elections = in_thread(ClusterStore.unfinished_elections)
    acquire_lease = in_thread(ClusterStore.acquire_lease)
    renew_lease = in_thread(ClusterStore.renew_lease)
    release_lease = in_thread(ClusterStore.release_lease)
    update_lease = in_thread(ClusterStore.update_lease)
    read_lease = in_thread(ClusterStore.read_lease)
    fenced_publish = in_thread(ClusterStore.fenced_publish)
    release_unique = in_thread(ClusterStore.release_unique)
    raise_clock = in_thread(ClusterStore.raise_clock)


# ---- broker ----------------------------------------------------------------------------------------

KEEP_ALIVES_PER_LEASE = 3
CHECK_EVERY_S = 600.0


class SqliteBroker(CallsStore, ConfiguredBroker):
    """The asynchronous broker on one file of SQLite."""

    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)  # a file has no link that could be lost
        self._store = ClusterStore(settings)
        self._thread = thread_of(self._store)
        self._coordination = SqliteCoordination(self._thread, self._store)
        self._messages_bell: AsyncBell | None = None
        self._topics_bell: AsyncBell | None = None
        self._unlisten: Callable[[], None] = lambda: None
        self._check_due = 0.0

    # Operations of the store, which documents them.
    publish = in_thread(ClusterStore.publish)
    renew = in_thread(ClusterStore.renew)
    forget_owner = in_thread(ClusterStore.forget_owner)
    ended = in_thread(ClusterStore.ended)
    settle = in_thread(ClusterStore.settle)
    permit = in_thread(ClusterStore.permit)
    cluster_id = in_thread(ClusterStore.cluster_id)
    keep_cluster_id = in_thread(ClusterStore.keep_cluster_id)
    queues = in_thread(ClusterStore.depths)
    peek = in_thread(ClusterStore.peek)
    purge = in_thread(ClusterStore.purge)
    pause = in_thread(ClusterStore.pause)
    resume = in_thread(ClusterStore.resume)
    paused = in_thread(ClusterStore.paused)
    move = in_thread(ClusterStore.move)
    bury = in_thread(ClusterStore.bury)
    dead_letters = in_thread(ClusterStore.dead_letters)
    count_dead = in_thread(ClusterStore.count_dead)
    drop_dead = in_thread(ClusterStore.drop_dead)
    keep_failed = in_thread(ClusterStore.keep_failed)
    failed = in_thread(ClusterStore.failed)
    resend = in_thread(ClusterStore.resend)
    broadcast = in_thread(ClusterStore.broadcast)
    mark_alive = in_thread(ClusterStore.mark_alive)
    probe = in_thread(ClusterStore.probe)
    revoke = in_thread(ClusterStore.revoke)
    register_recorder = in_thread(ClusterStore.register_recorder)
    forget_recorder = in_thread(ClusterStore.forget_recorder)
    recorders = in_thread(ClusterStore.recorders)
    log_events = in_thread(ClusterStore.log_events)
    read_events = in_thread(ClusterStore.read_events)
    acknowledge_events = in_thread(ClusterStore.acknowledge_events)
    lost_events = in_thread(ClusterStore.lost_events)
    event_log = in_thread(ClusterStore.event_log)

    @property
    def capabilities(self) -> Capabilities:
        """What the embedded broker supports."""
        return CAPABILITIES

    @property
    def coordination(self) -> SqliteCoordination:
        """Elections and leases in the same file."""
        return self._coordination

    async def open(self) -> None:
        """Open the file and the wake-up sockets, and find the cluster id to sign for."""
        loop = asyncio.get_running_loop()

        def tell(replaced: Replaced) -> None:  # in the store's thread
            loop.call_soon_threadsafe(self._on_replaced, replaced)

        self._store.on_replaced = tell
        await self._thread.call(self._store.open)
        self._signer = await signer_at(self, self._settings)
        file = self._store.database.path
        bell, self._topics_bell = AsyncBell(file), AsyncBell(file)
        self._messages_bell = bell

        def look_again() -> None:  # delayed messages may be due now; called in any thread
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(bell.ring)

        self._unlisten()
        self._unlisten = clock.on_change(look_again)

    async def reconnect(self) -> None:
        """Do nothing: each operation opens the file that is there."""

    async def close(self) -> None:
        """Close the sockets, unregister them, and close the file and its thread."""
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

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Take due messages; those of a cancelled call go back to their queues."""
        return await self._thread.call_or(
            self._give_back, self._store.claim, owner, queues, limit, revoked_after
        )

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Wait for a wake-up, a due message or the time-out; True in all cases."""
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

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the messages of owners whose lease ended."""
        return await self._thread.call(self._store.return_lost)

    async def leave_queue(self, owner: str, queue: str, *, is_busy: bool = False) -> None:
        """Do nothing: nothing is fetched ahead of a claim."""

    async def spend(self, signatures: Sequence[Spend]) -> Mapping[Tag, Doubt]:
        """Use the signatures of claimed messages."""
        return await self._thread.call(self._store.spend, signatures, self._signs_for)

    async def requeue_dead(self, letter_ids: Sequence[int | str], *, even_if_used: bool = False) -> int:
        """Send dead letters again; BrokerRefused if some are too large for that."""
        return await self._thread.call(
            self._store.requeue_dead, letter_ids, self.signer, even_if_used=even_if_used
        )

    @asynccontextmanager
    async def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AsyncIterator[Subscription]:
        """Listen on an exchange; leaving never hides the error that ended the listener."""
        assert self._topics_bell is not None, "the broker is open"
        subscription = SqliteSubscription(
            self._thread,
            self._store,
            self._topics_bell,
            exchange,
            patterns,
            keep_alive_s=self._settings.lease_s / KEEP_ALIVES_PER_LEASE,
        )
        await subscription.enter()
        try:
            yield subscription
        finally:
            # An error here would hide why the listener leaves, above all a cancellation.
            with suppress(BrokerError):
                await subscription.leave()

    async def store_time(self) -> None:
        """None: the only clocks are those of the nodes."""

    async def sweep(self) -> None:
        """Remove what is past its retention, and now and then check all rows of the file."""
        await self._thread.call(self._store.sweep)
        if self._check_due <= monotonic():
            self._check_due = monotonic() + CHECK_EVERY_S
            await self._check_rows()

    async def _check_rows(self) -> None:
        """Check the whole file in a separate thread and connection, so that no claim waits for it."""
        store = Store(self._settings)
        checker = StoreThread(f"the check of {store.database.path}", timeout_s=CHECK_EVERY_S)

        def is_sound() -> bool:
            try:
                return store.is_sound()
            finally:
                store.close()

        try:
            if not await checker.call(is_sound):
                await self._thread.call(self._store.set_aside)
        finally:
            checker.stop()

    def _give_back(self, claim: Claim) -> None:
        """Return the messages of a claim whose caller was cancelled: no worker will settle them."""
        if claim.deliveries:
            self._store.settle([Return(delivery.tag) for delivery in claim.deliveries])
