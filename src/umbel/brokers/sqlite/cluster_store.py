"""ClusterStore: the store's operations on what workers share besides messages.

Broadcasts, the event log, elections and leases, the clock mark, and the sweep that removes what is past its
retention. Like `store.py`: synchronous, and each operation is one transaction.
"""

import sqlite3
from collections.abc import Callable, Sequence

from umbel.brokers.interface import Broadcast, EventLogState, LoggedEvent
from umbel.brokers.refusals import log_refused
from umbel.brokers.sqlite import (
    broadcasts,
    chords,
    claims,
    coordination,
    limits,
    messages,
    publishing,
    verdicts,
    wakeup,
)
from umbel.brokers.sqlite.store import Store
from umbel.protocol.leadership import coordination as rules
from umbel.protocol.leadership.coordination import (
    ElectionRecord,
    ElectionReply,
    ElectionRequest,
    LeaseRecord,
    LeaseReply,
)
from umbel.wire.message import Outgoing

SWEEP_ROWS_MAX = 5000  # in one transaction: other processes wait meanwhile
DROPS_MAX = 20  # the rest is removed with the next acknowledgement, or by the sweep


class ClusterStore:
    """The operations of one store on what the cluster shares."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._database = store.database
        self._clock = store.clock
        self._settings = store.settings

    # -- fan-out ---------------------------------------------------------------------------------

    def broadcast(self, batch: Sequence[Broadcast], ttl_s: float) -> bool:
        """Write the broadcasts that have a subscriber, and wake those; whether there were any."""
        now = self._clock.now()
        with self._database.read() as db:
            wanted = broadcasts.with_listeners(db, batch, now.boot_s)
        if not wanted:
            return False
        with self._database.write() as db:
            broadcasts.send_broadcasts(db, wanted, now.boot_s, ttl_s)
            awake = wakeup.addresses(db, {wakeup.topic(broadcast.exchange) for broadcast in wanted})
        self._store.poke(awake)
        return True

    @property
    def replacements(self) -> int:
        """How often the file was replaced: numbers from before mean nothing now."""
        return self._store.replacements

    def subscribe(self, exchange: str, address: bytes | None) -> tuple[int, int, int]:
        """The subscription's number, its offset, and the count of replacements that both belong to."""
        with self._database.write() as db:
            if address is not None:
                wakeup.register(db, [wakeup.topic(exchange)], address)
            expires_at = self._clock.now().boot_s + self._settings.lease_s
            return *broadcasts.add_subscription(db, exchange, expires_at), self.replacements

    def prolong(self, number: int, exchange: str, address: bytes | None, replacements: int) -> None:
        """Extend a subscription, unless the file was replaced since."""
        with self._database.write() as db:
            if (
                replacements != self.replacements
            ):  # in this file the number may belong to another subscription
                return
            if address is not None:
                wakeup.register(db, [wakeup.topic(exchange)], address)
            broadcasts.prolong_subscription(
                db, number, exchange, self._clock.now().boot_s + self._settings.lease_s
            )

    def unsubscribe(self, number: int) -> None:
        """End a subscription."""
        with self._database.write() as db:
            broadcasts.remove_subscription(db, number)

    def heard_since(self, exchange: str, after: int, limit: int) -> tuple[Sequence[Broadcast], int]:
        """Broadcasts after an offset, and the offset to continue from."""
        with self._database.read() as db:
            return broadcasts.read_broadcasts(db, exchange, after, limit, self._clock.now().boot_s)

    # -- marks -----------------------------------------------------------------------------------

    def mark_alive(self, node: str, incarnation: int, ttl_s: float) -> None:
        """Set the mark of a live node, which expires after `ttl_s`."""
        with self._database.write() as db:
            coordination.put_node_mark(db, node, incarnation, self._clock.now().boot_s + ttl_s)

    def marked(self, node: str) -> int:
        """The incarnation in the mark of a node; 0: it has none."""
        with self._database.read() as db:
            return coordination.marked_incarnation(db, node, self._clock.now().boot_s)

    # -- keys of unique tasks ----------------------------------------------------------------------

    def hold_unique(self, key: str, task_id: str, ttl_s: float) -> str:
        """Take the key if it is free; the id of the task that holds it now."""
        with self._database.write(durable=True) as db:
            now_s = self._clock.now().wall_s
            return publishing.hold_key(db, key, task_id, now_s, now_s + ttl_s)

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Free each key that its task holds."""
        with self._database.write() as db:
            publishing.release_unique_keys(db, held)

    # -- the event log ---------------------------------------------------------------------------

    def register_recorder(self, name: str) -> int:
        """Log events for this recorder; the offset it has acknowledged."""
        with self._database.write() as db:
            return broadcasts.put_recorder(db, name)

    def forget_recorder(self, name: str) -> None:
        """Remove a recorder."""
        with self._database.write() as db:
            broadcasts.delete_recorder(db, name)

    def recorders(self) -> Sequence[str]:
        """The names of the registered recorders, sorted."""
        with self._database.read() as db:
            return broadcasts.recorder_names(db)

    def log_events(self, entries: Sequence[tuple[str, bytes]], counts: Sequence[int] = ()) -> int:
        """Append entries while a recorder is registered; how many were stored."""
        if not entries or not self.recorders():
            return 0
        with self._database.write() as db:
            if not broadcasts.recorder_names(db):
                return 0
            broadcasts.append_entries(
                db, entries, counts, self._settings.event_log_max, self._clock.now().wall_s
            )
        return len(entries)

    def read_events(self, name: str, limit: int, after: int) -> Sequence[LoggedEvent]:
        """The next entries for a recorder."""
        with self._database.read() as db:
            return broadcasts.read_entries(db, name, limit, after)

    def acknowledge_events(self, name: str, offset: int) -> None:
        """Record how far a recorder has read, and remove what all have read, in small transactions."""
        with self._database.write() as db:
            broadcasts.acknowledge_entries(db, name, offset)
        for _ in range(DROPS_MAX):  # in small transactions, so that other processes get their turn
            with self._database.write() as db:
                if broadcasts.drop_acknowledged(db, SWEEP_ROWS_MAX) < SWEEP_ROWS_MAX:
                    return

    def lost_events(self) -> int:
        """How many events were dropped before they were read."""
        with self._database.read() as db:
            return broadcasts.lost_entries(db)

    def event_log(self) -> EventLogState:
        """The last offset, and how far each recorder has read."""
        with self._database.read() as db:
            return broadcasts.event_log_state(db)

    # -- elections -------------------------------------------------------------------------------

    def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        """Create the election, or return the record of the existing one."""
        with self._database.write(durable=True) as db:
            record = rules.open_election(coordination.election(db, key), request, self._clock.now())
            coordination.put_election(db, key, record)
        return record

    def claim_election(self, key: str, holder: str, request: ElectionRequest, ttl_s: float) -> ElectionReply:
        """Ask for the right to run the request: granted with a term, busy, or closed."""
        with self._database.write(durable=True) as db:
            record, reply = rules.claim_election(
                coordination.election(db, key),
                holder,
                request,
                ttl_s=ttl_s,
                now=self._clock.now(),
                store=coordination.facts(db),
            )
            if record is not None:
                coordination.put_election(db, key, record)
                coordination.note_term(db, record.term)
        return reply

    def start_election(self, key: str, holder: str, term: int) -> bool:
        """Record that the holder has started the work."""
        return self._change_election(
            key, lambda record: rules.start_election(record, holder, term, self._clock.now())
        )

    def renew_election(self, key: str, holder: str, term: int) -> bool:
        """Extend the holder's time."""
        return self._change_election(
            key, lambda record: rules.renew_election(record, holder, term, self._clock.now())
        )

    def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        """Close the election with its outcome."""
        return self._change_election(
            key, lambda record: rules.finish_election(record, holder, term, outcome, self._clock.now())
        )

    def read_election(self, key: str) -> ElectionRecord | None:
        """The record of one election, if any."""
        with self._database.read() as db:
            return coordination.election(db, key)

    def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        """Elections that some node should claim, longest waiting first."""
        with self._database.read() as db:
            return coordination.unfinished(db, limit, self._clock.now())

    # -- leases ----------------------------------------------------------------------------------

    def acquire_lease(self, name: str, holder: str, ttl_s: float) -> LeaseReply:
        """Take the lease if it is free; the reply names its holder either way."""
        with self._database.write() as db:
            record, reply = rules.acquire_lease(
                coordination.lease(db, name),
                holder,
                ttl_s=ttl_s,
                now=self._clock.now(),
                last_term=coordination.facts(db).last_term,
            )
            coordination.put_lease(db, name, record)
            coordination.note_term(db, record.term)
        return reply

    def renew_lease(self, name: str, holder: str, term: int, ttl_s: float) -> bool:
        """Extend the lease of this term."""
        return self._change_lease(
            name, lambda record: rules.renew_lease(record, holder, term, ttl_s=ttl_s, now=self._clock.now())
        )

    def release_lease(self, name: str, holder: str, term: int) -> bool:
        """Free the lease of this term."""
        return self._change_lease(
            name, lambda record: rules.release_lease(record, holder, term, self._clock.now())
        )

    def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        """Replace the data for the next holder."""
        return self._change_lease(
            name, lambda record: rules.update_lease(record, holder, term, data, self._clock.now())
        )

    def read_lease(self, name: str) -> LeaseReply:
        """The state of the lease."""
        with self._database.read() as db:
            return rules.read_lease(coordination.lease(db, name), self._clock.now())

    def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], data: bytes | None
    ) -> bool:
        """Publish and store `data` if the term is held; refused messages become dead letters."""
        with self._database.write(durable=True) as db:
            now = self._clock.now()
            record = coordination.lease(db, name)
            if not rules.holds_lease(record, holder, term, now):
                return False
            if data is not None:
                coordination.put_lease(db, name, record.replaced(data=data))
            queues, refused = verdicts.insert_or_bury(db, batch, now.wall_s)
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self._store.poke(awake)
        log_refused(refused)
        return True

    def raise_clock(self, value: int) -> int:
        """Raise the clock mark to at least this value; the mark after that."""
        with self._database.read() as db:
            mark = coordination.clock_mark(db)
        if value <= mark:
            return mark
        with self._database.write(durable=True) as db:  # events stamped below it may be on disk already
            return coordination.raise_clock(db, value)

    # -- retention -------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove what is past its retention, in portions, and forget waiters that are gone."""
        now = self._clock.now()
        older_than = now.wall_s - self._settings.event_log_retention_s
        self._repeat(lambda db: verdicts.sweep_results(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: chords.sweep_chords(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: broadcasts.sweep_entries(db, older_than, SWEEP_ROWS_MAX))
        self._repeat(lambda db: coordination.sweep_elections(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: broadcasts.sweep_broadcasts(db, now.boot_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: messages.sweep_revokes(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: publishing.sweep_unique_keys(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: claims.sweep_signatures(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: limits.forget_unused(db, now.wall_s, SWEEP_ROWS_MAX))
        with self._database.write() as db:
            verdicts.make_room_for_failures(db, self._settings, now.wall_s)
            broadcasts.sweep_subscriptions(db, now.boot_s)
            coordination.sweep_node_marks(db, now.boot_s)
            everyone = wakeup.everybody(db)
        self._store.poke(everyone)  # waiters that are gone are forgotten

    def _repeat(self, sweep: Callable[[sqlite3.Connection], int]) -> None:
        while True:
            with self._database.write() as db:
                swept = sweep(db)
            if swept < SWEEP_ROWS_MAX:
                return

    def _change_election(
        self, key: str, decide: Callable[[ElectionRecord | None], ElectionRecord | None]
    ) -> bool:
        with self._database.write(durable=True) as db:
            record = decide(coordination.election(db, key))
            if record is not None:
                coordination.put_election(db, key, record)
        return record is not None

    def _change_lease(self, name: str, decide: Callable[[LeaseRecord | None], LeaseRecord | None]) -> bool:
        with self._database.write() as db:
            record = decide(coordination.lease(db, name))
            if record is not None:
                coordination.put_lease(db, name, record)
        return record is not None
