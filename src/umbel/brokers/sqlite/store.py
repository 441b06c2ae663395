"""Store: every operation of the embedded broker on messages and results, each one transaction.

Synchronous: the asynchronous broker calls it in a separate thread, producers and result backends call it in
the thread of their caller, before or after a fork. After a commit it wakes the processes that wait for what
has changed.
"""

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

from umbel.brokers.interface import (
    DEAD_LETTER_PEEK_MAX,
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
from umbel.brokers.rules import LOST_CHECKS_PER_LEASE, in_turn, sort_verdicts, with_pauses
from umbel.brokers.sqlite import claims, integrity, limits, messages, publishing, rows, verdicts, wakeup
from umbel.brokers.sqlite.claims import Holding
from umbel.brokers.sqlite.coordination import Clock
from umbel.brokers.sqlite.database import Database
from umbel.brokers.sqlite.files import path_from_url
from umbel.brokers.sqlite.publishing import insert
from umbel.errors import BrokerError, BrokerRefused, ClusterIdLost
from umbel.protocol.delivery.trust import ClusterId, Doubt
from umbel.wire.message import Outgoing, StoredResult
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
PURGE_ROWS_MAX = 20_000  # in one transaction
WATCHED_AT_ONCE = 10_000


class Store:
    """One process's access to the file: its claims, and all operations on messages and results."""

    def __init__(self, settings: BrokerSettings) -> None:
        self.database = Database(
            path_from_url(settings.url),
            timeout_s=settings.connect_timeout_s,
            max_bytes=settings.storage_max_bytes,
            on_open=self._greet,
            on_malformed=self.set_aside,
        )
        self.clock = Clock()
        self.settings = settings
        self._last_queue = ""  # was served last in the last claim
        self._look_first = False  # the last claim was not full, so the next one may find nothing
        self._lost_checked_at = 0.0
        self._registered: bytes | None = None  # the address for wake-ups about messages
        self._holding = Holding()
        self.replacements = 0
        """How often the file was replaced: numbers from before mean nothing now."""
        self.on_replaced: Callable[[Replaced], None] = lambda _: None

    def open(self) -> None:
        """Open the file now, so that its errors are raised here."""
        with self.database.read():
            pass

    def close(self) -> None:
        """Close the file; the next operation opens it again."""
        self.database.close()

    @contextmanager
    def write_and_wake(
        self, *, durable: bool = False, makes_room: bool = False
    ) -> Iterator[tuple[sqlite3.Connection, set[str]]]:
        """One transaction, and a set; processes that wait for the queues in it are woken after the commit.

        For operations that are not called for every message: those save the cost of this generator.
        """
        grown: set[str] = set()
        with self.database.write(durable=durable, makes_room=makes_room) as db:
            yield db, grown
            awake = wakeup.addresses(db, map(wakeup.queue, grown))
        self.poke(awake)

    def poke(self, awake: wakeup.Awake) -> None:
        """Wake the processes at these addresses, and forget addresses where no process listens."""
        if awake and (gone := wakeup.poke(awake)):
            with self.database.write() as db:
                wakeup.unregister(db, gone)

    # -- publishing ------------------------------------------------------------------------------

    def publish(self, batch: Sequence[Outgoing]) -> None:
        """Publish the batch as a whole, durable on return; BrokerRefused if SQLite cannot store a value."""
        try:
            if len(batch) == 1 and not batch[0].not_before and not batch[0].redelivered:
                self._append(batch[0])
            else:
                with self.database.write(durable=True) as db:
                    queues = insert(db, batch, self.clock.wall_s())
                    awake = wakeup.addresses(db, map(wakeup.queue, queues))
                self.poke(awake)
        except (BrokerRefused, ValueError, OverflowError) as error:
            raise publishing.not_sent(batch, error) from error

    def publish_once(self, batch: Sequence[Outgoing], *, remembered_s: float) -> None:
        """Publish the batch without messages whose ids were published this way within the time."""
        try:
            with self.database.write(durable=True) as db:
                now_s = self.clock.wall_s()
                new = publishing.not_yet_sent(db, batch, now_s, now_s + remembered_s)
                awake = wakeup.addresses(db, map(wakeup.queue, insert(db, new, now_s)))
        except (BrokerRefused, ValueError, OverflowError) as error:
            raise publishing.not_sent(batch, error) from error
        self.poke(awake)

    def _append(self, outgoing: Outgoing) -> None:
        """Publish one message that is due, as most are, in one statement."""
        channel = wakeup.queue(outgoing.queue)
        values = publishing.row(outgoing)
        number, awake = self.database.append(publishing.APPEND, values, wakeup.WAITING_ON, (channel,))
        if publishing.many_unfiled(number, number):
            # The message is sent even if this fails; the next claim files what cannot be filed now.
            with suppress(BrokerError), self.database.write() as db:
                publishing.file(db)
        if awake:  # values that are no addresses are set aside when the rows are checked
            self.poke({address: () for (address,) in awake if isinstance(address, bytes)})

    # -- claims ----------------------------------------------------------------------------------

    def claim(self, owner: str, queues: Sequence[str], limit: int, revoked_after: int = 0) -> Claim:
        """Take due messages, after returning those of dead owners and filing new ones."""
        if self._look_first and not self._worth_a_claim(queues):
            with self.database.read() as db:
                news, cursor, _ = messages.revokes_after(db, revoked_after, self.clock.wall_s())
            return Claim((), news, cursor)
        grown: set[str] = set()
        malformed: list[integrity.MalformedRow] = []
        returned = 0
        self._holding.owners.add(owner)
        with self.database.write(makes_room=True) as db:
            now = self.clock.now()
            stood = claims.lease(db, owner, now.boot_s + self.settings.lease_s)
            if self._is_lost_check_due(now.boot_s):
                self._lost_checked_at = now.boot_s
                malformed, returned, grown = self._return_lost(db)
            publishing.file(db)
            messages.release_due(db, now.wall_s)
            news, cursor, complete = messages.revokes_after(db, revoked_after, now.wall_s)
            deliveries, aside, called = self._take(db, owner, queues, limit) if complete else ([], [], set())
            grown |= called
            awake = wakeup.addresses(db, map(wakeup.queue, grown)) if grown else {}
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
        """Register for wake-ups of the queues; returns the seconds until one may have a message, if known."""
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
        """Renew the owner's lease; whether the old one still stood."""
        self._holding.owners.add(owner)
        with self.database.write(makes_room=True) as db:
            return claims.lease(db, owner, self.clock.now().boot_s + self.settings.lease_s)

    def return_lost(self) -> int:
        """Return the messages of owners whose lease ended; how many. Also checks the few rows on which all
        others depend.
        """
        with self.write_and_wake(makes_room=True) as (db, grown):
            malformed, count, queues = self._return_lost(db)
            grown.update(queues)
        integrity.report(malformed, self.database.path)
        return count

    def forget_owner(self, owner: str) -> int:
        """Return all messages of an owner that stops; how many."""
        with self.write_and_wake(makes_room=True) as (db, grown):
            count, queues = claims.forget(db, owner)
            grown.update(queues | limits.sweep_slots(db, self.clock.wall_s()))
        self._holding.forget_owner(owner)
        return count

    def cluster_id(self) -> ClusterId | None:
        """The id stored in this file, if any."""
        with self.database.read() as db:
            return claims.stored_cluster_id(db)

    def keep_cluster_id(self, made: ClusterId) -> ClusterId:
        """Store the id unless there is one; returns the stored one."""
        with self.database.write(durable=True) as db:
            return claims.store_cluster_id(db, made)

    def spend(self, batch: Sequence[Spend], cluster: str) -> Mapping[Tag, Doubt]:
        """Use the signatures of claimed messages; returns the copies. ClusterIdLost if the id changed."""
        with self.database.write() as db:
            found = claims.stored_cluster_id(db)
            if cluster and (found is None or found.id != cluster):
                raise ClusterIdLost.of(cluster, found.id if found else "")
            copies = claims.use_signatures(db, batch)
        self._holding.marks |= {use.tag: use.mark for use in batch if use.tag not in copies}
        return copies

    def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Decide which claimed messages may start under their cluster limits; returns the others, and why."""
        with self.database.write() as db:
            standing = verdicts.standing_claims(db, [question.tag for question in asked])
            made = limits.permit_each(db, asked, standing, self.clock.wall_s())
            awake = wakeup.addresses(db, map(wakeup.queue, made.queues))
        self._holding.slots |= made.slots
        self._holding.let_go([tag for tag, why in made.refused.items() if why == ""])
        self.poke(awake)
        return made.refused

    def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """The claims of these that have ended."""
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
            judged = sort_verdicts(batch, verdicts.standing_claims(db, [verdict.tag for verdict in batch]))
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
        unknown = self._holding.settle(batch)
        return Settled(judged.applied, frozenset(judged.conflicts - unknown), tuple(refused), unknown)

    def _put_results(
        self, db: sqlite3.Connection, batch: Sequence[StoredResult], now_s: float
    ) -> list[Refused]:
        def put(result: StoredResult) -> None:
            verdicts.put_results(db, [result], now_s, now_s + self.settings.result_expires_s)

        return [Refused(part, why) for part, why in rows.apply_each(db, batch, put)]

    # -- results ---------------------------------------------------------------------------------

    def store_results(self, batch: Sequence[StoredResult]) -> None:
        """Store results; BrokerRefused names those that cannot be stored, the others are stored."""
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
            found = db.execute(
                """SELECT task_id, status, payload FROM results
                   WHERE task_id IN (SELECT value FROM json_each(?)) AND expires_at > ?""",
                (rows.pack(task_ids), self.clock.wall_s()),
            )
            return {row[0]: StoredResult(*row) for row in rows.read(found, tuple[str, str, bytes])}

    def watch_results(self, task_ids: Sequence[str], address: bytes) -> None:
        """Register for wake-ups of these results, in portions: others wait during a transaction."""
        for first in range(0, len(task_ids), WATCHED_AT_ONCE):
            some = task_ids[first : first + WATCHED_AT_ONCE]
            with self.database.write() as db:
                wakeup.register(db, map(wakeup.result, some), address)

    def forget_results(self, task_ids: Iterable[str]) -> None:
        """Delete the results of these tasks."""
        with self.database.write() as db:
            packed = rows.pack(task_ids)
            db.execute("DELETE FROM results WHERE task_id IN (SELECT value FROM json_each(?))", (packed,))

    # -- queues ----------------------------------------------------------------------------------

    def depths(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        """How full each queue is that holds a message or is paused; with `only`, just the ready messages of
        these.
        """
        with self.database.read() as db:
            depths = messages.depths(db) if only is None else messages.ready_depths(db, only)
            paused = messages.read_pauses(db).keys()
        return with_pauses(depths, paused if only is None else paused & set(only))

    def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """The first messages of a queue, without claiming them."""
        with self.database.read() as db:
            return messages.peek(db, queue, limit)

    def purge(self, queue: str) -> int:
        """Remove the messages that wait now.

        This takes several transactions, because other processes wait for each.
        """
        removed = 0
        while True:
            with self.write_and_wake(makes_room=True) as (db, grown):
                portion, queues = limits.purge_queue(db, queue, PURGE_ROWS_MAX, self.clock.wall_s())
                grown.update(queues)
            removed += portion
            if not portion:
                return removed

    def pause(self, queue: str, mark: Pause) -> None:
        """Store the pause, which every claim reads."""
        with self.database.write(durable=True) as db:
            row = (queue, mark.since, rows.pack(mark.told))
            db.execute("INSERT OR REPLACE INTO pauses VALUES (?, ?, ?)", row)

    def resume(self, queue: str) -> bool:
        """Remove the pause and wake waiting workers; whether there was one."""
        with self.write_and_wake(durable=True) as (db, grown):
            grown.add(queue)
            return bool(db.execute("DELETE FROM pauses WHERE queue = ?", (queue,)).rowcount)

    def paused(self) -> Mapping[str, Pause]:
        """The paused queues, sorted by name."""
        with self.database.read() as db:
            return messages.read_pauses(db)

    def move(self, source: str, target: str, limit: int) -> int:
        """Move waiting messages; how many. BrokerRefused if the next one is signed for its queue."""
        with self.write_and_wake(durable=True) as (db, grown):
            moved, is_signed = messages.move_to_queue(db, source, target, min(limit, MOVED_AT_ONCE_MAX))
            grown.add(target)
        if is_signed and not moved:
            raise signed_for(source)
        return moved

    # -- dead letters and failures ---------------------------------------------------------------

    def bury(self, refused: Sequence[Refused]) -> None:
        """Put refused messages among the dead letters."""
        with self.database.write(durable=True) as db:
            verdicts.bury_refused(db, refused, self.clock.wall_s())

    def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        """The newest dead letters, newest first."""
        with self.database.read() as db:
            return verdicts.read_dead_letters(db, limit, self._row_max_bytes)

    def count_dead(self, limit: int) -> int:
        """How many dead letters there are, counted up to the limit."""
        with self.database.read() as db:
            found = db.execute("SELECT count(*) FROM (SELECT 1 FROM dead_letters LIMIT ?)", (limit,))
            return int(found.fetchone()[0])

    def requeue_dead(
        self, letter_ids: Sequence[int | str], signer: Signer | None, *, even_if_used: bool
    ) -> int:
        """Send dead letters as new messages; how many. BrokerRefused if some are too large."""
        with self.write_and_wake(durable=True) as (db, grown):
            count, queues, large = verdicts.requeue_dead_letters(
                db, letter_ids, self.clock.wall_s(), signer, self._row_max_bytes, even_if_used=even_if_used
            )
            grown.update(queues)
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
            packed = rows.pack(map(int, letter_ids))
            dropped = db.execute(
                "DELETE FROM dead_letters WHERE id IN (SELECT value FROM json_each(?))", (packed,)
            )
            return dropped.rowcount

    def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Retain messages that were acknowledged before their tasks failed."""
        with self.database.write(durable=True) as db:
            verdicts.keep_sent_failures(db, failed, self.settings, self.clock.wall_s())

    def failed(self, limit: int, task_id: str = "") -> Sequence[DeadLetter]:
        """Retained failures, newest first; only those of one task if its id is given."""
        with self.database.read() as db:
            after = self.clock.wall_s() - self.settings.failed_keep_s
            return verdicts.read_failures(db, limit, task_id, after)

    def resend(self, letters: Sequence[Resend]) -> Resent:
        """Send retries in place of their letters, in portions: others wait during a transaction."""
        sent: set[int] = set()
        refused: dict[int, str] = {}
        for first in range(0, len(letters), RESEND_CHUNK):
            with self.write_and_wake(durable=True) as (db, grown):
                portion = letters[first : first + RESEND_CHUNK]
                done, queues = verdicts.resend_each(db, portion, first, self.clock.wall_s())
                grown.update(queues)
            sent |= done.sent
            refused |= done.refused
        return Resent(frozenset(sent), refused)

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record revokes; RevokesFull when the record is at its limit."""
        with self.database.write(durable=True) as db:
            messages.record_revokes(db, revokes, self.settings.revokes_max, self.clock.wall_s())

    # -- the file --------------------------------------------------------------------------------

    def leave(self, addresses: Sequence[bytes | None]) -> None:
        """Unregister these addresses from wake-ups, and close the file."""
        try:
            self.unregister(*filter(None, addresses))
        finally:
            self.close()

    def unregister(self, *addresses: bytes) -> None:
        """Send no more wake-ups to these addresses."""
        with self.database.write() as db:
            wakeup.unregister(db, addresses)

    def set_aside(self, everything: bool = True) -> bool:
        """Set aside unusable rows, of all tables or of the few that others depend on; whether any were."""
        tables: Sequence[str] = ()
        if everything:
            with self.database.read() as db:
                tables = integrity.suspects(db)
        with self.write_and_wake(makes_room=True) as (db, grown):
            if everything:
                found = integrity.check_all(db, self._repair_times(), tables)
            else:
                found = integrity.check_few(db, self._repair_times())
            grown.update(messages.depths(db) if found else ())
        integrity.report(found, self.database.path)
        return bool(found)

    def is_sound(self) -> bool:
        """Whether every row can be used. This reads the whole file, in parts: a fork waits for one part."""
        for look in integrity.looks():
            with self.database.read() as db:
                if not look(db):
                    return False
        return True

    def _repair_times(self) -> integrity.RepairTimes:
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
            found = integrity.check_all(db, self._repair_times())
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

    def _return_lost(self, db: sqlite3.Connection) -> tuple[list[integrity.MalformedRow], int, set[str]]:
        """Return the messages of owners whose lease ended, and free their slots: the rows that were set aside
        before, how many messages there were, and the queues of these and of messages that were called.
        """
        now = self.clock.now()
        malformed = integrity.check_few(db, self._repair_times())
        count, queues = claims.return_lost(db, now.boot_s)
        return malformed, count, queues | limits.sweep_slots(db, now.wall_s)

    def _take(
        self, db: sqlite3.Connection, owner: str, queues: Sequence[str], limit: int
    ) -> tuple[list[Delivery], list[SetAside], set[str]]:
        """The claimed messages, those too large to claim, and the queues of messages that were called because
        of the latter.
        """
        names = in_turn(messages.not_paused(db, queues), self._last_queue)
        if not names:
            return [], [], set()
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
        if self._is_lost_check_due(now.boot_s):
            return True
        with self.database.read() as db:
            return messages.anything_due(db, messages.not_paused(db, queues), now.wall_s)

    def _is_lost_check_due(self, boot_s: float) -> bool:
        return boot_s - self._lost_checked_at >= self.settings.lease_s / LOST_CHECKS_PER_LEASE
