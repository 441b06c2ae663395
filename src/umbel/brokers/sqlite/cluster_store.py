"""ClusterStore: a store with the operations on what workers share besides messages.

Broadcasts, the event log, elections and leases, the clock mark, and the sweep that removes what is past its
retention. As in `store.py`, each operation is synchronous and one transaction.

A program without a worker and without an event loop opens a `SqliteProducer`. It loads no asyncio.
"""

import sqlite3
from collections.abc import Callable, Collection, Sequence
from functools import partial

from umbel.brokers.interface import (
    Broadcast,
    BrokerSettings,
    Capabilities,
    EventLogState,
    Evidence,
    LoggedEvent,
    judge_mark,
)
from umbel.brokers.refusals import log_refused
from umbel.brokers.sqlite import (
    broadcasts,
    chords,
    coordination,
    limits,
    messages,
    publishing,
    rows,
    verdicts,
    wakeup,
)
from umbel.brokers.sqlite.store import CAPABILITIES, Store
from umbel.protocol.leadership import coordination as rules
from umbel.protocol.leadership.coordination import (
    RETENTION_S,
    ElectionRecord,
    ElectionReply,
    ElectionRequest,
    LeaseRecord,
    LeaseReply,
)
from umbel.wire.message import Outgoing

SWEEP_ROWS_MAX = 5000  # in one transaction: other processes wait meanwhile
DROPS_MAX = 20  # transactions of one acknowledgement; the next one or the sweep continues


class ClusterStore(Store):
    """A store with the operations on what the cluster shares."""

    # -- fan-out ---------------------------------------------------------------------------------

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Write the broadcasts that have a subscriber, and wake the subscribers. Returns 0 if there are none,
        otherwise None: they are not counted.
        """
        now = self.clock.now()
        with self.database.read() as db:
            wanted = broadcasts.with_listeners(db, batch, now.boot_s)
        if not wanted:
            return 0
        with self.database.write() as db:
            broadcasts.send_broadcasts(db, wanted, now.boot_s, ttl_s)
            awake = wakeup.addresses(db, {wakeup.topic(broadcast.exchange) for broadcast in wanted})
        self.poke(awake)
        return None

    def subscribe(self, exchange: str, address: bytes | None) -> tuple[int, int, int]:
        """Subscribe: the subscription's number, its offset, and the count of replacements that both belong
        to.
        """
        with self.database.write() as db:
            if address is not None:
                wakeup.register(db, [wakeup.topic(exchange)], address)
            expires_at = self.clock.now().boot_s + self.settings.lease_s
            return *broadcasts.add_subscription(db, exchange, expires_at), self.replacements

    def prolong(self, number: int, exchange: str, address: bytes | None, replacements: int) -> None:
        """Extend a subscription, unless the file was replaced since it was made."""
        with self.database.write() as db:
            if replacements != self.replacements:
                return  # in this file the number may belong to another subscription
            if address is not None:
                wakeup.register(db, [wakeup.topic(exchange)], address)
            broadcasts.prolong_subscription(
                db, number, exchange, self.clock.now().boot_s + self.settings.lease_s
            )

    def unsubscribe(self, number: int) -> None:
        """End a subscription."""
        with self.database.write() as db:
            db.execute("DELETE FROM subscriptions WHERE id = ?", (number,))

    def broadcasts_after(self, exchange: str, offset: int, limit: int) -> tuple[Sequence[Broadcast], int]:
        """Broadcasts after an offset, and the offset to continue from."""
        with self.database.read() as db:
            return broadcasts.read_broadcasts(db, exchange, offset, limit, self.clock.now().boot_s)

    # -- liveness marks and unique tasks ---------------------------------------------------------

    def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Record that this run of the node is alive for `ttl_s`."""
        with self.database.write() as db:
            row = (node, incarnation, self.clock.now().boot_s + ttl_s)
            db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", row)

    def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """What the liveness mark of a node says about this run of it."""
        query = "SELECT incarnation FROM marks WHERE node = ? AND expires_at > ?"
        with self.database.read() as db:
            row = rows.read_one(db.execute(query, (node, self.clock.now().boot_s)), tuple[int])
        return judge_mark(0 if row is None else row[0], incarnation)

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        """Take the key if it is free; returns the id of the task that holds it now."""
        with self.database.write(durable=True) as db:
            now_s = self.clock.wall_s()
            return publishing.hold_key(db, key, task_id, now_s, now_s + ttl_s)

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """(key, task id): free each key that this task holds."""
        with self.database.write() as db:
            publishing.release_unique_keys(db, held)

    # -- the event log ---------------------------------------------------------------------------

    def register_recorder(self, name: str) -> int:
        """Log events for this recorder; returns the offset that it has acknowledged."""
        with self.database.write() as db:
            return broadcasts.put_recorder(db, name)

    def forget_recorder(self, name: str) -> None:
        """Remove a recorder."""
        with self.database.write() as db:
            db.execute("DELETE FROM recorders WHERE name = ?", (name,))

    def recorders(self) -> Sequence[str]:
        """The names of the registered recorders, sorted."""
        with self.database.read() as db:
            return broadcasts.recorder_names(db)

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append entries while a recorder is registered; how many were stored."""
        if not entries or not self.recorders():
            return 0
        with self.database.write() as db:
            if not broadcasts.recorder_names(db):
                return 0
            broadcasts.append_entries(db, entries, counts, self.settings.event_log_max, self.clock.wall_s())
        return len(entries)

    def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """The next entries for a recorder."""
        with self.database.read() as db:
            return broadcasts.read_entries(db, name, limit, after)

    def acknowledge_events(self, name: str, offset: int) -> None:
        """Record how far a recorder has read, and remove what all have read."""
        with self.database.write() as db:
            change = "UPDATE recorders SET acknowledged = max(acknowledged, ?) WHERE name = ?"
            db.execute(change, (offset, name))
        for _ in range(DROPS_MAX):  # in small transactions, so that other processes get their turn
            with self.database.write() as db:
                if broadcasts.drop_acknowledged(db, SWEEP_ROWS_MAX) < SWEEP_ROWS_MAX:
                    return

    def lost_events(self) -> int:
        """How many events were dropped before they were read."""
        with self.database.read() as db:
            return rows.meta_count(db, rows.EVENTS_LOST)

    def event_log(self) -> EventLogState:
        """The last offset, and how far each recorder has read."""
        with self.database.read() as db:
            return broadcasts.event_log_state(db)

    # -- elections -------------------------------------------------------------------------------

    def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        """Create the election, or return the record of the existing one."""
        with self.database.write(durable=True) as db:
            record = rules.open_election(coordination.election(db, key), request, self.clock.now())
            coordination.put_election(db, key, record)
        return record

    def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply:
        """Ask for the right to run the request: granted with a term, busy, or closed."""
        with self.database.write(durable=True) as db:
            record, reply = rules.claim_election(
                coordination.election(db, key),
                holder,
                request,
                ttl_s=ttl_s,
                now=self.clock.now(),
                store=coordination.facts(db),
            )
            if record is not None:
                coordination.put_election(db, key, record)
                coordination.note_term(db, record.term)
        return reply

    def start_election(self, key: str, holder: str, term: int) -> bool:
        """Record that the holder has started the work; False if it does not hold this term."""
        return self._change_election(
            key, lambda record: rules.start_election(record, holder, term, self.clock.now())
        )

    def renew_election(self, key: str, holder: str, term: int) -> bool:
        """Extend the holder's time; False if it does not hold this term."""
        return self._change_election(
            key, lambda record: rules.renew_election(record, holder, term, self.clock.now())
        )

    def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        """Close the election with its outcome; False if the holder does not hold this term."""
        return self._change_election(
            key, lambda record: rules.finish_election(record, holder, term, outcome, self.clock.now())
        )

    def read_election(self, key: str) -> ElectionRecord | None:
        """The record of one election, if any."""
        with self.database.read() as db:
            return coordination.election(db, key)

    def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        """Elections that some node should claim, the longest waiting first."""
        with self.database.read() as db:
            return coordination.unfinished(db, limit, self.clock.now())

    # -- leases ----------------------------------------------------------------------------------

    def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply:
        """Take the lease if it is free; the reply names its holder either way."""
        with self.database.write() as db:
            record, reply = rules.acquire_lease(
                coordination.lease(db, name),
                holder,
                ttl_s=ttl_s,
                now=self.clock.now(),
                last_term=coordination.facts(db).last_term,
            )
            coordination.put_lease(db, name, record)
            coordination.note_term(db, record.term)
        return reply

    def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool:
        """Extend the lease; False if the holder does not hold this term."""
        return self._change_lease(
            name, lambda record: rules.renew_lease(record, holder, term, ttl_s=ttl_s, now=self.clock.now())
        )

    def release_lease(self, name: str, holder: str, term: int) -> bool:
        """Free the lease; False if the holder does not hold this term."""
        return self._change_lease(
            name, lambda record: rules.release_lease(record, holder, term, self.clock.now())
        )

    def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        """Replace the data for the next holder; False if the holder does not hold this term."""
        return self._change_lease(
            name, lambda record: rules.update_lease(record, holder, term, data, self.clock.now())
        )

    def read_lease(self, name: str) -> LeaseReply:
        """The state of the lease."""
        with self.database.read() as db:
            return rules.read_lease(coordination.lease(db, name), self.clock.now())

    def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], *, data: bytes | None = None
    ) -> bool:
        """Publish and store `data` if the term is held; refused messages become dead letters."""
        with self.write_and_wake(durable=True) as (db, grown):
            now = self.clock.now()
            record = coordination.lease(db, name)
            if not rules.holds_lease(record, holder, term, now):
                return False
            if data is not None:
                coordination.put_lease(db, name, record.replaced(data=data))
            queues, refused = verdicts.insert_or_bury(db, batch, now.wall_s)
            grown.update(queues)
        log_refused(refused)
        return True

    def raise_clock(self, value: int) -> int:
        """Raise the clock mark to at least this value; returns the mark after that."""
        with self.database.read() as db:
            mark = rows.meta_count(db, rows.CLOCK)
        if value <= mark:
            return mark
        with self.database.write(durable=True) as db:  # events with lower times may be on disk already
            mark = max(rows.meta_count(db, rows.CLOCK), value)
            rows.put_meta(db, rows.CLOCK, mark)
            return mark

    # -- retention -------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove what is past its retention, in portions, and forget waiters that are gone."""
        now = self.clock.now()
        logged_before = now.wall_s - self.settings.event_log_retention_s
        for table, key, column, before in (
            ("results", "task_id", "expires_at", now.wall_s),
            ("elections", "key", "changed_at", now.wall_s - RETENTION_S),
            ("broadcasts", "offset", "expires_at", now.boot_s),
            ("revokes", "cursor", "expires_at", now.wall_s),
            ("uniques", "key", "expires_at", now.wall_s),
            ("signatures", "mark", "expires_at", now.wall_s),
        ):
            expired = partial(rows.sweep, table=table, before=before, limit=SWEEP_ROWS_MAX)
            self._repeat(partial(expired, key=key, column=column))
        self._repeat(lambda db: chords.sweep_chords(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: broadcasts.drop_acknowledged(db, SWEEP_ROWS_MAX, before=logged_before))
        self._repeat(lambda db: limits.forget_unused(db, now.wall_s, SWEEP_ROWS_MAX))
        with self.database.write() as db:
            verdicts.trim_failures(db, self.settings, now.wall_s)
            for table in ("subscriptions", "marks"):
                db.execute(f"DELETE FROM {table} WHERE expires_at <= ?", (now.boot_s,))
            everyone = wakeup.everybody(db)
        self.poke(everyone)  # waiters that are gone are forgotten

    def _repeat(self, sweep: Callable[[sqlite3.Connection], int]) -> None:
        while True:
            with self.database.write() as db:
                swept = sweep(db)
            if swept < SWEEP_ROWS_MAX:
                return

    def _change_election(
        self, key: str, decide: Callable[[ElectionRecord | None], ElectionRecord | None]
    ) -> bool:
        with self.database.write(durable=True) as db:
            record = decide(coordination.election(db, key))
            if record is not None:
                coordination.put_election(db, key, record)
        return record is not None

    def _change_lease(self, name: str, decide: Callable[[LeaseRecord | None], LeaseRecord | None]) -> bool:
        with self.database.write() as db:
            record = decide(coordination.lease(db, name))
            if record is not None:
                coordination.put_lease(db, name, record)
        return record is not None


# ---- clients ---------------------------------------------------------------------------------------


class SqliteProducer(ClusterStore):
    """The synchronous producer: a store, called in the thread of the caller."""

    @property
    def capabilities(self) -> Capabilities:
        """What the embedded broker supports."""
        return CAPABILITIES

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        """Write broadcasts that have a subscriber, and wake those."""
        super().broadcast(batch, ttl_s=ttl_s)


class PendingWork:
    """How much work is pending in the file, for tests that run a worker.

    It claims nothing, uses a separate connection, and is to be used in one thread.
    """

    def __init__(self, settings: BrokerSettings) -> None:
        self._store = Store(settings)

    def left(self, queues: Collection[str]) -> int:
        """How many messages of these queues are due or claimed.

        A worker removes a message in the transaction that inserts its follow-ups: 0 means that no message
        comes by itself before the next delayed one is due.
        """
        with self._store.database.read() as db:
            depths = messages.depths(db)
            due = messages.next_due(db)
        left = sum(depth.ready + depth.claimed for name, depth in depths.items() if name in queues)
        return left or int(due is not None and due <= self._store.clock.wall_s())

    def next_due(self) -> float | None:
        """When the first delayed message is due, in Unix time."""
        with self._store.database.read() as db:
            return messages.next_due(db)

    def close(self) -> None:
        """Close the connection."""
        self._store.close()
