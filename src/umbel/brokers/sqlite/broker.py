"""SqliteBroker: the embedded broker on asyncio, a thin shell around the store in its thread.

Its subscriptions hold at most PAGE_MAX broadcasts in memory; the rest waits in the table until it is asked
for. Its coordination store is called in the same thread.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from time import monotonic

from umbel import clock
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
    Evidence,
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
    judge_mark,
)
from umbel.brokers.links import ConfiguredBroker, signer_at
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import CAPABILITIES, Store
from umbel.brokers.sqlite.thread import WORK_S, AsyncBell, StoreThread
from umbel.errors import BrokerError
from umbel.protocol.delivery.trust import ClusterId, Doubt
from umbel.protocol.leadership.coordination import ElectionRecord, ElectionReply, ElectionRequest, LeaseReply
from umbel.wire.control import patterns_on
from umbel.wire.message import Outgoing, matches
from umbel.wire.records import Revoke

# ---- sqlite subscription ---------------------------------------------------------------------------
#
# One listener's offset in the broadcasts, on the event loop.
#
# It holds at most PAGE_MAX broadcasts in memory; the rest waits in the table until it is read.

PAGE_MAX = 500


class SqliteSubscription:
    """A subscription to one exchange, which is prolonged by a timer."""

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
        self._told: Future[object] | None = None

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
        if self._told is None or self._told.done():
            self._told = self._thread.post(
                self._store.prolong, self._number, self._exchange, self._bell.address, self._replacements
            )
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._keep_alive)

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        while True:
            rings = self._bell.rings
            page, self._offset = await self._thread.call(
                self._store.heard_since, self._exchange, self._offset, PAGE_MAX
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


# ---- sqlite coordination ---------------------------------------------------------------------------
#
# The coordination store of the interface, called in the broker's thread.


class SqliteCoordination:
    """The CoordinationStore of the embedded broker."""

    def __init__(self, thread: StoreThread, store: ClusterStore) -> None:
        self._call = thread.call
        self._store = store
        self.unproven = 0  # it has no replicas

    async def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        """Create the election, or return the record of the existing one."""
        return await self._call(self._store.open_election, key, request)

    async def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply:
        """Ask for the right to run the request: granted with a term, busy, or closed."""
        return await self._call(self._store.claim_election, key, holder, request, ttl_s)

    async def start_election(self, key: str, holder: str, term: int) -> bool:
        """Record that the holder has started the work."""
        return await self._call(self._store.start_election, key, holder, term)

    async def renew_election(self, key: str, holder: str, term: int) -> bool:
        """Extend the holder's time."""
        return await self._call(self._store.renew_election, key, holder, term)

    async def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        """Close the election with its outcome."""
        return await self._call(self._store.finish_election, key, holder, term, outcome)

    async def read_election(self, key: str) -> ElectionRecord | None:
        """The record of one election, if any."""
        return await self._call(self._store.read_election, key)

    async def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        """Elections that some node should claim, longest waiting first."""
        return await self._call(self._store.unfinished_elections, limit)

    async def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply:
        """Take the lease if it is free; the reply names its holder either way."""
        return await self._call(self._store.acquire_lease, name, holder, ttl_s)

    async def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool:
        """Extend the lease of this term."""
        return await self._call(self._store.renew_lease, name, holder, term, ttl_s)

    async def release_lease(self, name: str, holder: str, term: int) -> bool:
        """Free the lease of this term."""
        return await self._call(self._store.release_lease, name, holder, term)

    async def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        """Replace the data for the next holder."""
        return await self._call(self._store.update_lease, name, holder, term, data)

    async def read_lease(self, name: str) -> LeaseReply:
        """The state of the lease."""
        return await self._call(self._store.read_lease, name)

    async def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], *, data: bytes | None = None
    ) -> bool:
        """Publish and store `data` if the term is held; refused messages become dead letters."""
        return await self._call(self._store.fenced_publish, name, holder, term, batch, data)

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Free each key that its task holds."""
        await self._call(self._store.release_unique, held)

    async def raise_clock(self, value: int) -> int:
        """Raise the clock mark to at least this value; returns the mark."""
        return await self._call(self._store.raise_clock, value)


# ---- sqlite broker ---------------------------------------------------------------------------------
#
# The embedded broker on asyncio, a thin shell around the store in its thread.

KEEP_ALIVES_PER_LEASE = 3
CHECK_EVERY_S = 600.0


class SqliteBroker(ConfiguredBroker):
    """The asynchronous broker on one file of SQLite."""

    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)  # a file has no link that could be lost
        self._store = Store(settings)
        self._cluster = ClusterStore(self._store)
        # A call may wait for its turn in this process, at the gate, and for another program's lock.
        timeout_s = 3 * settings.connect_timeout_s + WORK_S
        self._thread = StoreThread(f"the database {self._store.database.path}", timeout_s=timeout_s)
        self._coordination = SqliteCoordination(self._thread, self._cluster)
        self._messages_bell: AsyncBell | None = None
        self._topics_bell: AsyncBell | None = None
        self._unlisten: Callable[[], None] = lambda: None
        self._check_due = 0.0

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

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Publish the batch in one transaction, durable on return."""
        await self._thread.call(self._store.publish, batch)

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

    async def renew(self, owner: str) -> bool:
        """Prolong the owner's lease; whether the old one still stood."""
        return await self._thread.call(self._store.renew, owner)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the messages of owners whose lease ended."""
        return await self._thread.call(self._store.return_lost)

    async def leave_queue(self, owner: str, queue: str, *, is_busy: bool = False) -> None:
        """Do nothing: nothing is fetched ahead of a claim."""

    async def forget_owner(self, owner: str) -> int:
        """Return all messages of an owner that stops."""
        return await self._thread.call(self._store.forget_owner, owner)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Those of these claims that have ended."""
        return await self._thread.call(self._store.ended, tags)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        """Apply verdicts in one transaction."""
        return await self._thread.call(self._store.settle, verdicts)

    async def cluster_id(self) -> ClusterId | None:
        """The id stored in this file, if any."""
        return await self._thread.call(self._store.cluster_id)

    async def keep_cluster_id(self, made: ClusterId) -> ClusterId:
        """Store the id unless there is one; returns the stored one."""
        return await self._thread.call(self._store.keep_cluster_id, made)

    async def spend(self, signatures: Sequence[Spend]) -> Mapping[Tag, Doubt]:
        """Use the signatures of claimed messages."""
        return await self._thread.call(self._store.spend, signatures, self._signs_for)

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Ask which claimed messages may start under their cluster limits."""
        return await self._thread.call(self._store.permit, asked)

    async def bury(self, refused: Sequence[Refused]) -> None:
        """Put refused messages among the dead letters."""
        await self._thread.call(self._store.bury, refused)

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        """How full all queues are; `only` saves nothing here."""
        return await self._thread.call(self._store.depths)

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """The first messages of a queue, without claiming them."""
        return await self._thread.call(self._store.peek, queue, limit)

    async def purge(self, queue: str) -> int:
        """Remove the waiting messages of a queue; how many there were."""
        return await self._thread.call(self._store.purge, queue)

    async def pause(self, queue: str, mark: Pause) -> None:
        """Store the pause, which every claim reads."""
        await self._thread.call(self._store.pause, queue, mark)

    async def resume(self, queue: str) -> bool:
        """Remove the pause, and wake waiting workers; returns whether there was one."""
        return await self._thread.call(self._store.resume, queue)

    async def paused(self) -> Mapping[str, Pause]:
        """The paused queues, sorted by name."""
        return await self._thread.call(self._store.paused)

    async def move(self, source: str, target: str, limit: int) -> int:
        """Move waiting messages; BrokerRefused if the next one is signed for its queue."""
        return await self._thread.call(self._store.move, source, target, limit)

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        """The newest dead letters, newest first."""
        return await self._thread.call(self._store.dead_letters, limit)

    async def count_dead(self, limit: int) -> int:
        """How many dead letters there are, up to the limit."""
        return await self._thread.call(self._store.count_dead, limit)

    async def requeue_dead(self, letter_ids: Sequence[int | str], *, even_if_used: bool = False) -> int:
        """Send dead letters again; BrokerRefused if some are too large for that."""
        return await self._thread.call(
            self._store.requeue_dead, letter_ids, self.signer, even_if_used=even_if_used
        )

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Remove dead letters for good; how many there were."""
        return await self._thread.call(self._store.drop_dead, letter_ids)

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Retain messages that were acknowledged before their tasks failed."""
        await self._thread.call(self._store.keep_failed, failed)

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        """Retained failures, newest first."""
        return await self._thread.call(self._store.failed, limit, task_id)

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Send retries in place of their letters."""
        return await self._thread.call(self._store.resend, letters)

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Write broadcasts that have a subscriber; 0: none has, None: the receivers are not counted."""
        is_heard = await self._thread.call(self._cluster.broadcast, batch, ttl_s)
        return None if is_heard else 0

    @asynccontextmanager
    async def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AsyncIterator[Subscription]:
        """Listen on an exchange; leaving never hides the error that ended the listener."""
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
            # An error here would hide why the listener leaves, above all a cancellation.
            with suppress(BrokerError):
                await subscription.leave()

    async def store_time(self) -> None:
        """None: the only clocks are those of the nodes."""

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Set the mark of a live node, which expires after `ttl_s`."""
        await self._thread.call(self._cluster.mark_alive, node, incarnation, ttl_s)

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """What the mark of a node says about this run of it."""
        return judge_mark(await self._thread.call(self._cluster.marked, node), incarnation)

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record revokes; RevokesFull when the record is at its limit."""
        await self._thread.call(self._store.revoke, revokes)

    async def register_recorder(self, name: str) -> int:
        """Log events for this recorder; returns the offset it has acknowledged."""
        return await self._thread.call(self._cluster.register_recorder, name)

    async def forget_recorder(self, name: str) -> None:
        """Remove a recorder."""
        await self._thread.call(self._cluster.forget_recorder, name)

    async def recorders(self) -> Sequence[str]:
        """The names of the registered recorders, sorted."""
        return await self._thread.call(self._cluster.recorders)

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append events while a recorder is registered; how many entries were stored."""
        return await self._thread.call(self._cluster.log_events, entries, counts)

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """The next entries for a recorder."""
        return await self._thread.call(self._cluster.read_events, name, limit, after)

    async def acknowledge_events(self, name: str, offset: int) -> None:
        """Record how far a recorder has read; what all have read is removed."""
        await self._thread.call(self._cluster.acknowledge_events, name, offset)

    async def lost_events(self) -> int:
        """How many events were dropped before they were read."""
        return await self._thread.call(self._cluster.lost_events)

    async def event_log(self) -> EventLogState:
        """The last offset, and how far each recorder has read."""
        return await self._thread.call(self._cluster.event_log)

    async def sweep(self) -> None:
        """Remove what is past its retention, and now and then check all rows of the file."""
        await self._thread.call(self._cluster.sweep)
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
