"""ClusterStore: the store's operations on what workers share beside messages.

Broadcasts, the event log, elections and leases, the clock mark, and the sweep that ends what is
past its retention. Like `store.py`: synchronous, and each operation is one transaction.
"""

import sqlite3
from collections.abc import Callable, Sequence

from umbel.brokers.interface import Broadcast, EventLogState, LoggedEvent
from umbel.brokers.refusals import log_refused
from umbel.brokers.sqlite import (
    chords,
    coordination,
    dead_letters,
    event_log,
    failures,
    fanout,
    limits,
    marks,
    results,
    revokes,
    signatures,
    uniques,
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

SWEEP_ROWS_MAX = 5000  # in one transaction: others wait meanwhile
DROPS_MAX = 20  # the rest goes with the next acknowledgement, or with the sweep


class ClusterStore:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._database = store.database
        self._clock = store.clock
        self._settings = store.settings

    # -- fan-out ---------------------------------------------------------------------------------

    def broadcast(self, batch: Sequence[Broadcast], ttl_s: float) -> None:
        now = self._clock.now()
        with self._database.read() as db:
            heard = fanout.heard(db, batch, now.boot_s)
        if not heard:
            return
        with self._database.write() as db:
            fanout.send(db, heard, now.boot_s, ttl_s)
            awake = wakeup.addresses(db, {wakeup.topic(broadcast.exchange) for broadcast in heard})
        self._store.poke(awake)

    @property
    def replacements(self) -> int:
        return self._store.replacements

    def subscribe(self, exchange: str, address: bytes | None) -> tuple[int, int, int]:
        """The subscription's number, its offset, and which of the files at this path they are of."""
        with self._database.write() as db:
            if address is not None:
                wakeup.register(db, [wakeup.topic(exchange)], address)
            expires_at = self._clock.now().boot_s + self._settings.lease_s
            return *fanout.subscribe(db, exchange, expires_at), self.replacements

    def prolong(self, number: int, exchange: str, address: bytes | None, replacements: int) -> None:
        with self._database.write() as db:
            if replacements != self.replacements:  # in this file the number may be another's
                return
            if address is not None:
                wakeup.register(db, [wakeup.topic(exchange)], address)
            fanout.prolong(db, number, exchange, self._clock.now().boot_s + self._settings.lease_s)

    def unsubscribe(self, number: int) -> None:
        with self._database.write() as db:
            fanout.unsubscribe(db, number)

    def heard_since(self, exchange: str, after: int, limit: int) -> tuple[Sequence[Broadcast], int]:
        with self._database.read() as db:
            return fanout.read(db, exchange, after, limit, self._clock.now().boot_s)

    # -- marks -----------------------------------------------------------------------------------

    def mark_alive(self, node: str, incarnation: int, ttl_s: float) -> None:
        with self._database.write() as db:
            marks.put(db, node, incarnation, self._clock.now().boot_s + ttl_s)

    def marked(self, node: str) -> int:
        with self._database.read() as db:
            return marks.read(db, node, self._clock.now().boot_s)

    # -- keys of unique tasks ----------------------------------------------------------------------

    def hold_unique(self, key: str, task_id: str, ttl_s: float) -> str:
        with self._database.write(durable=True) as db:
            now_s = self._clock.now().wall_s
            return uniques.hold(db, key, task_id, now_s, now_s + ttl_s)

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        with self._database.write() as db:
            uniques.release(db, held)

    # -- the event log ---------------------------------------------------------------------------

    def register_recorder(self, name: str) -> int:
        with self._database.write() as db:
            return event_log.register(db, name)

    def forget_recorder(self, name: str) -> None:
        with self._database.write() as db:
            event_log.forget(db, name)

    def recorders(self) -> Sequence[str]:
        with self._database.read() as db:
            return event_log.recorders(db)

    def log_events(self, entries: Sequence[tuple[str, bytes]], counts: Sequence[int] = ()) -> int:
        if not entries or not self.recorders():
            return 0
        with self._database.write() as db:
            if not event_log.recorders(db):
                return 0
            event_log.append(db, entries, counts, self._settings.event_log_max, self._clock.now().wall_s)
        return len(entries)

    def read_events(self, name: str, limit: int, after: int) -> Sequence[LoggedEvent]:
        with self._database.read() as db:
            return event_log.read(db, name, limit, after)

    def acknowledge_events(self, name: str, offset: int) -> None:
        with self._database.write() as db:
            event_log.acknowledge(db, name, offset)
        for _ in range(DROPS_MAX):  # in small steps, between which other processes get their turn
            with self._database.write() as db:
                if event_log.drop_acknowledged(db, SWEEP_ROWS_MAX) < SWEEP_ROWS_MAX:
                    return

    def lost_events(self) -> int:
        with self._database.read() as db:
            return event_log.lost(db)

    def event_log(self) -> EventLogState:
        with self._database.read() as db:
            return event_log.state(db)

    # -- elections -------------------------------------------------------------------------------

    def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        with self._database.write(durable=True) as db:
            record = rules.open_election(coordination.election(db, key), request, self._clock.now())
            coordination.put_election(db, key, record)
        return record

    def claim_election(self, key: str, holder: str, request: ElectionRequest, ttl_s: float) -> ElectionReply:
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
        return self._change_election(
            key, lambda record: rules.start_election(record, holder, term, self._clock.now())
        )

    def renew_election(self, key: str, holder: str, term: int) -> bool:
        return self._change_election(
            key, lambda record: rules.renew_election(record, holder, term, self._clock.now())
        )

    def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        return self._change_election(
            key, lambda record: rules.finish_election(record, holder, term, outcome, self._clock.now())
        )

    def read_election(self, key: str) -> ElectionRecord | None:
        with self._database.read() as db:
            return coordination.election(db, key)

    def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        with self._database.read() as db:
            return coordination.unfinished(db, limit, self._clock.now())

    # -- leases ----------------------------------------------------------------------------------

    def acquire_lease(self, name: str, holder: str, ttl_s: float) -> LeaseReply:
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
        return self._change_lease(
            name, lambda record: rules.renew_lease(record, holder, term, ttl_s=ttl_s, now=self._clock.now())
        )

    def release_lease(self, name: str, holder: str, term: int) -> bool:
        return self._change_lease(
            name, lambda record: rules.release_lease(record, holder, term, self._clock.now())
        )

    def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        return self._change_lease(
            name, lambda record: rules.update_lease(record, holder, term, data, self._clock.now())
        )

    def read_lease(self, name: str) -> LeaseReply:
        with self._database.read() as db:
            return rules.read_lease(coordination.lease(db, name), self._clock.now())

    def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], data: bytes | None
    ) -> bool:
        with self._database.write(durable=True) as db:
            now = self._clock.now()
            record = coordination.lease(db, name)
            if not rules.holds_lease(record, holder, term, now):
                return False
            if data is not None:
                coordination.put_lease(db, name, record.replaced(data=data))
            queues, refused = dead_letters.insert_or_bury(db, batch, now.wall_s)
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self._store.poke(awake)
        log_refused(refused)
        return True

    def raise_clock(self, value: int) -> int:
        with self._database.write() as db:
            return coordination.raise_clock(db, value)

    # -- retention -------------------------------------------------------------------------------

    def sweep(self) -> None:
        now = self._clock.now()
        older_than = now.wall_s - self._settings.event_log_retention_s
        self._repeat(lambda db: results.sweep(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: chords.sweep(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: event_log.sweep(db, older_than, SWEEP_ROWS_MAX))
        self._repeat(lambda db: coordination.sweep(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: fanout.sweep(db, now.boot_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: revokes.sweep(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: uniques.sweep(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: signatures.sweep(db, now.wall_s, SWEEP_ROWS_MAX))
        self._repeat(lambda db: limits.forget_unused(db, now.wall_s, SWEEP_ROWS_MAX))
        with self._database.write() as db:
            failures.make_room(db, self._settings, now.wall_s)
            fanout.sweep_subscriptions(db, now.boot_s)
            marks.sweep(db, now.boot_s)
            everyone = wakeup.addresses(db)
        self._store.poke(everyone)  # those who are gone are forgotten

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
