"""Store: every operation of the embedded broker on messages and results, each one transaction.

Those that publish are in `publishing.py`. Synchronous; the asynchronous broker calls it in a separate thread,
producers and backends in the thread of their caller. After a commit it wakes those that wait for what
changed.
"""

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from umbel.brokers.interface import (
    MOVED_AT_ONCE_MAX,
    RESEND_CHUNK,
    BrokerSettings,
    Capabilities,
    Claim,
    DeadLetter,
    Delivery,
    Depth,
    Pause,
    Permit,
    Refused,
    Replaced,
    Resend,
    Resent,
    SetAside,
    Settled,
    Spend,
    Tag,
    Verdict,
)
from umbel.brokers.refusals import ENVELOPE_BYTES, signed_for, still_too_large, too_large
from umbel.brokers.sqlite import claims, integrity, limits, messages, rows, verdicts, wakeup
from umbel.brokers.sqlite.claims import Holding
from umbel.brokers.sqlite.coordination import Clock
from umbel.brokers.sqlite.database import Database
from umbel.brokers.sqlite.files import path_from_url
from umbel.brokers.sqlite.publishing import Publisher, file, insert
from umbel.errors import BrokerRefused, ClusterIdLost
from umbel.protocol.delivery.trust import ClusterId, Doubt
from umbel.wire.message import StoredResult
from umbel.wire.records import Revoke
from umbel.wire.signing import Signer

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
LOST_CHECKS_PER_LEASE = 3
PURGE_ROWS_MAX = 20_000  # in one transaction
WATCHED_AT_ONCE = 10_000


class Store(Publisher):
    """One process's access to the file: its claims, and all operations on messages and results."""

    def __init__(self, settings: BrokerSettings) -> None:
        database = Database(
            path_from_url(settings.url),
            timeout_s=settings.connect_timeout_s,
            max_bytes=settings.storage_max_bytes,
            on_open=self._greet,
            on_malformed=self.set_aside,
        )
        super().__init__(database, Clock())
        self.settings = settings
        self._last_queue = ""  # had the last turn in the last claim
        self._look_first = False  # the last claim was not full, so the next may find nothing
        self._lost_checked_at = 0.0
        self._registered: bytes | None = None  # as a waiter for messages
        self._holding = Holding()
        self.replacements = 0  # of the file; numbers from before the last one mean nothing now
        self.on_replaced: Callable[[Replaced], None] = lambda _: None

    def open(self) -> None:
        """Open the file now, so that its errors are raised here."""
        with self.database.read():
            pass

    def close(self) -> None:
        """Close the file; the next operation opens it again."""
        self.database.close()

    def claim(self, owner: str, queues: Sequence[str], limit: int, revoked_after: int) -> Claim:
        """Take due messages, after returning those of dead owners and filing new ones."""
        if self._look_first and not self._worth_a_claim(queues):
            with self.database.read() as db:
                news, cursor, _ = messages.revokes_after(db, revoked_after, self.clock.wall_s())
            return Claim((), news, cursor)
        awake: wakeup.Awake = {}
        malformed: list[integrity.MalformedRow] = []
        returned = 0
        self._holding.owners.add(owner)
        with self.database.write(makes_room=True) as db:
            now = self.clock.now()
            stood = claims.lease(db, owner, now.boot_s + self.settings.lease_s)
            if self._time_for_lost(now.boot_s):
                malformed = integrity.check_few(db, self._now())
                returned, back = claims.return_lost(db, now.boot_s)
                back |= limits.sweep_slots(db, now.wall_s)
                awake = wakeup.addresses(db, map(wakeup.queue, back))
            file(db)
            messages.release_due(db, now.wall_s)
            news, cursor, complete = messages.revokes_after(db, revoked_after, now.wall_s)
            deliveries, aside, called = self._take(db, owner, queues, limit) if complete else ([], [], set())
            if called:
                awake = {**awake, **wakeup.addresses(db, map(wakeup.queue, called))}
            if self._registered and len(deliveries) >= limit:
                # Busy from now on: no wake-up is needed before the worker is idle again.
                wakeup.unregister(db, [self._registered])
                self._registered = None
        self._holding.take(owner, deliveries)
        self._look_first = len(deliveries) + len(aside) < limit
        integrity.report(malformed, self.database.path)
        self.poke(awake)
        return Claim(deliveries, news, cursor, returned, lease_ended=not stood, set_aside=aside)

    def watch_queues(self, queues: Sequence[str], address: bytes | None) -> float | None:
        """Register for wake-ups of the queues: the seconds until one may have a message, if known."""
        now_s = self.clock.wall_s()
        channels = [wakeup.queue(queue) for queue in queues]
        with self.database.read() as db:
            if messages.anything_due(db, messages.not_paused(db, queues), now_s):
                return 0.0
            due = messages.next_due(db)
            if address is None or wakeup.is_registered(db, channels, address):
                return None if due is None else max(0.0, due - now_s)
        with self.database.write() as db:
            wakeup.register(db, channels, address)
            self._registered = address
            if messages.anything_due(db, messages.not_paused(db, queues), now_s):
                return 0.0
            due = messages.next_due(db)
        return None if due is None else max(0.0, due - now_s)

    def renew(self, owner: str) -> bool:
        """Prolong the owner's lease; whether the old one still stood."""
        self._holding.owners.add(owner)
        with self.database.write(makes_room=True) as db:
            return claims.lease(db, owner, self.clock.now().boot_s + self.settings.lease_s)

    def return_lost(self) -> int:
        """Return the messages of owners whose lease ended, and check the few rows all depend on; how many."""
        with self.database.write(makes_room=True) as db:
            now = self.clock.now()
            malformed = integrity.check_few(db, self._now())
            count, queues = claims.return_lost(db, now.boot_s)
            queues |= limits.sweep_slots(db, now.wall_s)
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        integrity.report(malformed, self.database.path)
        self.poke(awake)
        return count

    def forget_owner(self, owner: str) -> int:
        """Return all messages of an owner that stops; how many."""
        with self.database.write(makes_room=True) as db:
            count, queues = claims.forget(db, owner)
            queues |= limits.sweep_slots(db, self.clock.wall_s())
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self._holding.forget(owner)
        self.poke(awake)
        return count

    def cluster_id(self) -> ClusterId | None:
        """The id stored in this file, if any."""
        with self.database.read() as db:
            return claims.stored_cluster_id(db)

    def keep_cluster_id(self, made: ClusterId) -> ClusterId:
        """Store the id unless there is one; the stored one."""
        with self.database.write(durable=True) as db:
            return claims.store_cluster_id(db, made)

    def spend(self, batch: Sequence[Spend], cluster: str) -> Mapping[Tag, Doubt]:
        """Use the signatures of claimed messages; those that are copies. ClusterIdLost if the id changed."""
        with self.database.write() as db:
            found = claims.stored_cluster_id(db)
            if cluster and (found is None or found.id != cluster):
                raise ClusterIdLost.of(cluster, found.id if found else "")
            copies = claims.use_signatures(db, batch)
        self._holding.marks |= {use.tag: use.mark for use in batch if use.tag not in copies}
        return copies

    def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Decide which claimed messages may start under their cluster limits; those that may not, and why."""
        with self.database.write() as db:
            standing = verdicts.standing_claims(db, [question.tag for question in asked])
            made = limits.permit_each(db, asked, standing, self.clock.wall_s())
            awake = wakeup.addresses(db, map(wakeup.queue, made.queues))
        self._holding.slots |= made.slots
        self._holding.let_go(tag for tag, why in made.refused.items() if why == "")
        self.poke(awake)
        return made.refused

    def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Those of these claims that have ended."""
        with self.database.read() as db:
            standing = verdicts.standing_claims(db, tags)
        return frozenset(tags) - standing.keys() - self._holding.unknown

    def settle(self, batch: Sequence[Verdict]) -> Settled:
        """Apply verdicts as a whole; if SQLite refuses a value, again with each part under a savepoint."""
        try:
            return self._settle(batch, part_by_part=False)
        except (BrokerRefused, ValueError, OverflowError):
            return self._settle(batch, part_by_part=True)

    def _settle(self, batch: Sequence[Verdict], *, part_by_part: bool) -> Settled:
        refused: list[Refused] = []
        with self.database.write() as db:
            now_s = self.clock.wall_s()
            judged = verdicts.sort_verdicts(
                batch, verdicts.standing_claims(db, [verdict.tag for verdict in batch])
            )
            if judged.kept:
                verdicts.keep_failures(db, judged.kept, self.settings, now_s)
            grown = verdicts.apply_verdicts(db, judged, now_s)
            if self._holding.marks:
                claims.end_signatures(db, self._holding.marks_ended(batch, judged.conflicts))
            if self._holding.slots:
                grown |= limits.free_slots(db, self._holding.slots_ended(batch, judged.conflicts), now_s)
            if part_by_part:
                refused = self._put_results(db, judged.results, now_s)
                sent, unsent = verdicts.insert_or_bury(db, judged.follow_ups, now_s)
                refused += unsent
            else:
                verdicts.put_results(db, judged.results, now_s, now_s + self.settings.result_expires_s)
                sent = insert(db, judged.follow_ups, now_s)
            grown |= sent
            stored = (result.task_id for result in judged.results)
            awake = wakeup.addresses(db, chain(map(wakeup.queue, grown), map(wakeup.result, stored)))
        self.poke(awake)
        settled, unknown = verdicts.as_settled(judged, refused), self._holding.settle(batch)
        return (
            replace(settled, conflicts=settled.conflicts - unknown, unknown=unknown) if unknown else settled
        )

    def _put_results(
        self, db: sqlite3.Connection, batch: Sequence[StoredResult], now_s: float
    ) -> list[Refused]:
        def put(result: StoredResult) -> None:
            verdicts.put_results(db, [result], now_s, now_s + self.settings.result_expires_s)

        return [Refused(part, why) for part, why in rows.apply_each(db, batch, put)]

    def bury(self, refused: Sequence[Refused]) -> None:
        """Put refused messages among the dead letters."""
        with self.database.write(durable=True) as db:
            verdicts.bury_refused(db, refused, self.clock.wall_s())

    def store_results(self, batch: Sequence[StoredResult]) -> None:
        """Store results; BrokerRefused names those that cannot be stored, the others are."""
        with self.database.write() as db:
            refused = self._put_results(db, batch, self.clock.wall_s())
            awake = wakeup.addresses(db, [wakeup.result(result.task_id) for result in batch])
        self.poke(awake)
        if refused:
            lost = [refusal.part for refusal in refused]
            raise BrokerRefused(
                f"{len(lost)} of {len(batch)} results cannot be stored: {refused[0].reason}",
                places=[place for place, result in enumerate(batch) if result in lost],
            )

    def read_results(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> dict[str, StoredResult]:
        """The results of these tasks that have not expired, by task id."""
        with self.database.read(timeout_s) as db:
            return verdicts.select_results(db, task_ids, self.clock.wall_s())

    def watch_results(self, task_ids: Sequence[str], address: bytes) -> None:
        """Register for wake-ups of these results, in portions: others wait during a transaction."""
        for first in range(0, len(task_ids), WATCHED_AT_ONCE):
            some = task_ids[first : first + WATCHED_AT_ONCE]
            with self.database.write() as db:
                wakeup.register(db, map(wakeup.result, some), address)

    def forget_results(self, task_ids: Iterable[str]) -> None:
        """Delete the results of these tasks."""
        with self.database.write() as db:
            verdicts.delete_results(db, task_ids)

    def depths(self) -> Mapping[str, Depth]:
        """How full each queue is that holds a message or is paused."""
        with self.database.read() as db:
            counts, paused = messages.depths(db), messages.read_pauses(db)
        queues = sorted(counts.keys() | paused.keys())
        return {queue: Depth(*counts.get(queue, (0, 0, 0, 0)), paused=queue in paused) for queue in queues}

    def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """The first messages of a queue, without claiming them."""
        with self.database.read() as db:
            return messages.peek(db, queue, limit)

    def purge(self, queue: str) -> int:
        """Remove what waits now, in portions: other processes wait during a transaction."""
        removed = 0
        while True:
            with self.database.write(makes_room=True) as db:
                portion, grown = limits.purge_queue(db, queue, PURGE_ROWS_MAX, self.clock.wall_s())
                awake = wakeup.addresses(db, map(wakeup.queue, grown))
            self.poke(awake)
            removed += portion
            if not portion:
                return removed

    def pause(self, queue: str, mark: Pause) -> None:
        """Store the pause of a queue."""
        with self.database.write(durable=True) as db:
            messages.add_pause(db, queue, mark)

    def resume(self, queue: str) -> bool:
        """Remove the pause and wake waiting workers; whether there was one."""
        with self.database.write(durable=True) as db:
            was_paused = messages.remove_pause(db, queue)
            awake = wakeup.addresses(db, [wakeup.queue(queue)])
        self.poke(awake)
        return was_paused

    def paused(self) -> Mapping[str, Pause]:
        """The paused queues, sorted by name."""
        with self.database.read() as db:
            return messages.read_pauses(db)

    def move(self, source: str, target: str, limit: int) -> int:
        """Move waiting messages; how many. BrokerRefused if the next one is signed for its queue."""
        with self.database.write(durable=True) as db:
            moved, is_signed = messages.move_to_queue(db, source, target, min(limit, MOVED_AT_ONCE_MAX))
            awake = wakeup.addresses(db, [wakeup.queue(target)])
        self.poke(awake)
        if is_signed and not moved:
            raise signed_for(source)
        return moved

    def dead_letters(self, limit: int) -> Sequence[DeadLetter]:
        """The newest dead letters, newest first."""
        with self.database.read() as db:
            return verdicts.read_dead_letters(db, limit, self._row_max_bytes)

    def count_dead(self, limit: int) -> int:
        """How many dead letters there are, up to the limit."""
        with self.database.read() as db:
            return verdicts.count_dead_letters(db, limit)

    def requeue_dead(
        self, letter_ids: Sequence[int | str], signer: Signer | None, *, even_if_used: bool
    ) -> int:
        """Send dead letters as new messages; how many. BrokerRefused if some are too large."""
        with self.database.write(durable=True) as db:
            count, queues, large = verdicts.requeue_dead_letters(
                db, letter_ids, self.clock.wall_s(), signer, self._row_max_bytes, even_if_used=even_if_used
            )
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self.poke(awake)
        if large:
            number, size = next(iter(large.items()))
            raise BrokerRefused(
                f"{count} dead letters requeued, {len(large)} refused: "
                + still_too_large(number, size, self.settings.message_max_bytes)
            )
        return count

    def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Remove dead letters for good; how many there were."""
        with self.database.write(durable=True, makes_room=True) as db:
            return verdicts.drop_dead_letters(db, letter_ids)

    def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Retain messages that were acknowledged before their tasks failed."""
        with self.database.write(durable=True) as db:
            verdicts.keep_sent_failures(db, failed, self.settings, self.clock.wall_s())

    def failed(self, limit: int, task_id: str) -> Sequence[DeadLetter]:
        """Retained failures, newest first; those of one task if its id is given."""
        with self.database.read() as db:
            return verdicts.read_failures(db, limit, task_id, self.settings, self.clock.wall_s())

    def resend(self, letters: Sequence[Resend]) -> Resent:
        """Send retries in place of their letters, in portions: others wait during a transaction."""
        sent: set[int] = set()
        refused: dict[int, str] = {}
        for first in range(0, len(letters), RESEND_CHUNK):
            with self.database.write(durable=True) as db:
                portion = letters[first : first + RESEND_CHUNK]
                done, grown = verdicts.resend_each(db, portion, first, self.clock.wall_s())
                awake = wakeup.addresses(db, map(wakeup.queue, grown))
            self.poke(awake)
            sent |= done.sent
            refused |= done.refused
        return Resent(frozenset(sent), refused)

    def revoke(self, batch: Sequence[Revoke]) -> None:
        """Record revokes; RevokesFull when the record is at its limit."""
        with self.database.write(durable=True) as db:
            messages.record_revokes(db, batch, self.settings.revokes_max, self.clock.wall_s())

    def unregister(self, address: bytes) -> None:
        """Send no more wake-ups to this address."""
        with self.database.write() as db:
            wakeup.unregister(db, [address])

    def leave(self, addresses: Sequence[bytes | None]) -> None:
        """Close, and unregister these addresses."""
        try:
            with self.database.write() as db:
                wakeup.unregister(db, filter(None, addresses))
        finally:
            self.close()

    def set_aside(self, everything: bool = True) -> bool:
        """Set aside unusable rows, of all tables or of the few that others depend on; whether any were."""
        tables: Sequence[str] = ()
        if everything:
            with self.database.read() as db:
                tables = integrity.suspects(db)
        with self.database.write(makes_room=True) as db:
            if everything:
                found = integrity.check_all(db, self._now(), tables)
            else:
                found = integrity.check_few(db, self._now())
            queues = messages.depths(db) if found else ()
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        integrity.report(found, self.database.path)
        self.poke(awake)
        return bool(found)

    def is_sound(self) -> bool:
        """Whether every row can be used. It reads the whole file, in parts: a fork waits for one of them."""
        for look in integrity.looks():
            with self.database.read() as db:
                if not look(db):
                    return False
        return True

    def _now(self) -> integrity.RepairTimes:
        now = self.clock.now()
        return integrity.RepairTimes(
            now.wall_s,
            now.boot_s,
            self.clock.boot_id,
            lease_s=self.settings.lease_s,
            revoke_retention_s=self.settings.revoke_retention_s,
        )

    def _greet(self, db: sqlite3.Connection) -> None:
        """Record the birth of a new file, and end the leases of the machine's last boot."""
        integrity.prepare(db)
        try:
            self._note_boot(db)
        except (rows.Malformed, sqlite3.OperationalError):
            found = integrity.check_all(db, self._now())
            if not found:
                raise
            integrity.report(found, self.database.path)
            self._note_boot(db)
        if self.database.replaced:
            self.replacements += 1
            self._holding.reconcile(db, self.clock.now().boot_s + self.settings.lease_s)
            what = f"{self.database.replaced} was deleted or replaced"
            self.on_replaced(Replaced(what, len(self._holding.unknown)))

    def _note_boot(self, db: sqlite3.Connection) -> None:
        if not rows.meta_number(db, rows.BORN):
            rows.put_meta(db, rows.BORN, self.clock.wall_s())
        if rows.meta_text(db, rows.BOOT_ID) != self.clock.boot_id:
            rows.put_meta(db, rows.BOOT_ID, self.clock.boot_id)
            claims.return_lost(db, float("inf"))
            for table in ("waiters", "subscriptions", "marks", "broadcasts"):
                db.execute(f"DELETE FROM {table}")
            for table in ("elections", "leases"):
                db.execute(f"UPDATE {table} SET expires_at = 0")

    def _take(
        self, db: sqlite3.Connection, owner: str, queues: Sequence[str], limit: int
    ) -> tuple[list[Delivery], list[SetAside], set[str]]:
        """The claimed messages, those too large for that, and the queues that grew because of the latter."""
        names = messages.not_paused(db, dict.fromkeys(queues))
        if not names:
            return [], [], set()
        if self._last_queue in names:
            turn = names.index(self._last_queue) + 1
            names = names[turn:] + names[:turn]
        deliveries, large, self._last_queue = claims.claim(
            db, owner, names, limit, self.clock.ticket(), self._row_max_bytes
        )
        called = self._set_aside_unread(db, large) if large else set()
        return deliveries, list(large.values()), called

    def _set_aside_unread(self, db: sqlite3.Connection, large: Mapping[int, SetAside]) -> set[str]:
        now_s, most = self.clock.wall_s(), self.settings.message_max_bytes
        reasons = {number: too_large(aside.size_bytes, most) for number, aside in large.items()}
        verdicts.bury_claimed(db, reasons, now_s)
        turns = limits.release_held(db, "SELECT value FROM json_each(?)", (rows.pack(large),))
        messages.remove(db, list(large))
        return limits.call_waiting_in(db, turns, now_s)

    @property
    def _row_max_bytes(self) -> int:
        return self.settings.message_max_bytes + ENVELOPE_BYTES

    def _worth_a_claim(self, queues: Sequence[str]) -> bool:
        """Whether a claim may find something: a read without the write lock, so that idle workers do not
        delay others.
        """
        now = self.clock.now()
        if self._lost_check_due(now.boot_s):
            return True
        with self.database.read() as db:
            return messages.anything_due(db, messages.not_paused(db, queues), now.wall_s)

    def _lost_check_due(self, boot_s: float) -> bool:
        return boot_s - self._lost_checked_at >= self.settings.lease_s / LOST_CHECKS_PER_LEASE

    def _time_for_lost(self, boot_s: float) -> bool:
        if not self._lost_check_due(boot_s):
            return False
        self._lost_checked_at = boot_s
        return True
