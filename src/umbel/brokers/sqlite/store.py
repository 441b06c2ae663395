"""Store: every operation of the embedded broker on messages and results, each one transaction.

Those that publish are in `publishing.py`. Synchronous; the asynchronous broker calls it in a separate
thread, producers and backends in the thread of their caller. After a commit it pokes those who wait for
what changed.
"""

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from umbel.brokers.interface import (
    MOVED_AT_ONCE_MAX,
    RESEND_CHUNK,
    BrokerSettings,
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
    Settled,
    Spend,
    Tag,
    Verdict,
)
from umbel.brokers.refusals import signed_for
from umbel.brokers.sqlite import (
    claims,
    dead_letters,
    failures,
    limits,
    messages,
    meta,
    pauses,
    refusals,
    results,
    revokes,
    signatures,
    verdicts,
    wakeup,
)
from umbel.brokers.sqlite.clock import Clock
from umbel.brokers.sqlite.database import Database
from umbel.brokers.sqlite.holding import Holding
from umbel.brokers.sqlite.location import path_from_url
from umbel.brokers.sqlite.publishing import Publisher, file, insert
from umbel.errors import BrokerRefused
from umbel.wire.message import StoredResult
from umbel.wire.revoke import Revoke

LOST_CHECKS_PER_LEASE = 3
PURGE_ROWS_MAX = 20_000  # in one transaction


class Store(Publisher):
    def __init__(self, settings: BrokerSettings) -> None:
        database = Database(
            path_from_url(settings.url),
            timeout_s=settings.connect_timeout_s,
            max_bytes=settings.storage_max_bytes,
            on_open=self._greet,
        )
        super().__init__(database, Clock())
        self.settings = settings
        self._last_queue = ""  # had the last turn in the last claim
        self._look_first = False  # the last claim came back short, so the next may be in vain
        self._lost_checked_at = 0.0
        self._registered: bytes | None = None  # as a waiter for messages
        self._holding = Holding()
        self.replacements = 0  # of the file; what was numbered before the last one means nothing now
        self.on_replaced: Callable[[Replaced], None] = lambda _: None

    def open(self) -> None:
        with self.database.read():
            pass

    def close(self) -> None:
        self.database.close()

    def claim(self, owner: str, queues: Sequence[str], limit: int, revoked_after: int) -> Claim:
        if self._look_first and not self._worth_a_claim(queues):
            with self.database.read() as db:
                news, cursor, _ = revokes.after(db, revoked_after, self.clock.wall_s())
            return Claim((), news, cursor)
        awake: set[bytes] = set()
        returned = 0
        self._holding.owners.add(owner)
        with self.database.write(makes_room=True) as db:
            now = self.clock.now()
            stood = claims.lease(db, owner, now.boot_s + self.settings.lease_s)
            if self._time_for_lost(now.boot_s):
                returned, back = claims.return_lost(db, now.boot_s)
                back |= limits.sweep(db, now.wall_s)
                awake = wakeup.addresses(db, map(wakeup.queue, back))
            file(db)
            messages.release_due(db, now.wall_s)
            news, cursor, complete = revokes.after(db, revoked_after, now.wall_s)
            deliveries = self._take(db, owner, queues, limit) if complete else []
            if self._registered and len(deliveries) >= limit:
                # Busy from here on: no need to be poked before the next idle moment.
                wakeup.unregister(db, [self._registered])
                self._registered = None
        self._holding.take(owner, deliveries)
        self._look_first = len(deliveries) < limit
        self.poke(awake)
        return Claim(deliveries, news, cursor, returned, lease_ended=not stood)

    def watch_queues(self, queues: Sequence[str], address: bytes | None) -> float | None:
        """Register for news of the queues: the seconds until one may have a message, if known."""
        now_s = self.clock.wall_s()
        channels = [wakeup.queue(queue) for queue in queues]
        with self.database.read() as db:
            if messages.anything_due(db, pauses.not_paused(db, queues), now_s):
                return 0.0
            due = messages.next_due(db)
            if address is None or wakeup.is_registered(db, channels, address):
                return None if due is None else max(0.0, due - now_s)
        with self.database.write() as db:
            wakeup.register(db, channels, address)
            self._registered = address
            if messages.anything_due(db, pauses.not_paused(db, queues), now_s):
                return 0.0
            due = messages.next_due(db)
        return None if due is None else max(0.0, due - now_s)

    def renew(self, owner: str) -> bool:
        self._holding.owners.add(owner)
        with self.database.write(makes_room=True) as db:
            return claims.lease(db, owner, self.clock.now().boot_s + self.settings.lease_s)

    def return_lost(self) -> int:
        with self.database.write(makes_room=True) as db:
            now = self.clock.now()
            count, queues = claims.return_lost(db, now.boot_s)
            queues |= limits.sweep(db, now.wall_s)
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self.poke(awake)
        return count

    def forget_owner(self, owner: str) -> int:
        with self.database.write(makes_room=True) as db:
            count, queues = claims.forget(db, owner)
            queues |= limits.sweep(db, self.clock.wall_s())
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self._holding.forget(owner)
        self.poke(awake)
        return count

    def spend(self, batch: Sequence[Spend]) -> frozenset[Tag]:
        with self.database.write() as db:
            copies = signatures.spend(db, batch)
        self._holding.marks |= {one.tag: one.mark for one in batch if one.tag not in copies}
        return copies

    def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        with self.database.write() as db:
            standing = verdicts.standing_claims(db, [one.tag for one in asked])
            made = limits.permit(db, asked, standing, self.clock.wall_s())
            awake = wakeup.addresses(db, map(wakeup.queue, made.queues))
        self._holding.slots |= made.slots
        self._holding.let_go(tag for tag, why in made.refused.items() if why == "")
        self.poke(awake)
        return made.refused

    def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        with self.database.read() as db:
            standing = verdicts.standing_claims(db, tags)
        return frozenset(tags) - standing.keys() - self._holding.unknown

    def settle(self, batch: Sequence[Verdict]) -> Settled:
        try:
            return self._settle(batch, part_by_part=False)
        except (BrokerRefused, ValueError, OverflowError):
            return self._settle(batch, part_by_part=True)

    def _settle(self, batch: Sequence[Verdict], *, part_by_part: bool) -> Settled:
        refused: list[Refused] = []
        with self.database.write() as db:
            now_s = self.clock.wall_s()
            judged = verdicts.judge(batch, verdicts.standing_claims(db, [verdict.tag for verdict in batch]))
            if judged.kept:
                failures.keep(db, judged.kept, self.settings, now_s)
            grown = verdicts.apply(db, judged, now_s)
            if self._holding.marks:
                signatures.end(db, self._holding.marks_ended(batch, judged.conflicts))
            if self._holding.slots:
                grown |= limits.free(db, self._holding.slots_ended(batch, judged.conflicts), now_s)
            if part_by_part:
                refused = self._put_results(db, judged.results, now_s)
                sent, unsent = dead_letters.insert_or_bury(db, judged.follow_ups, now_s)
                refused += unsent
            else:
                results.store(db, judged.results, now_s, now_s + self.settings.result_expires_s)
                sent = insert(db, judged.follow_ups, now_s)
            grown |= sent
            stored = (result.task_id for result in judged.results)
            awake = wakeup.addresses(db, chain(map(wakeup.queue, grown), map(wakeup.result, stored)))
        self.poke(awake)
        settled, unknown = verdicts.settled(judged, refused), self._holding.settle(batch)
        return (
            replace(settled, conflicts=settled.conflicts - unknown, unknown=unknown) if unknown else settled
        )

    def _put_results(
        self, db: sqlite3.Connection, batch: Sequence[StoredResult], now_s: float
    ) -> list[Refused]:
        def put(one: StoredResult) -> None:
            results.store(db, [one], now_s, now_s + self.settings.result_expires_s)

        return [Refused(part, why) for part, why in refusals.apply_each(db, batch, put)]

    def bury(self, refused: Sequence[Refused]) -> None:
        with self.database.write(durable=True) as db:
            dead_letters.bury_refused(db, refused, self.clock.wall_s())

    def store_results(self, batch: Sequence[StoredResult]) -> None:
        """BrokerRefused: some cannot be stored, the others are."""
        with self.database.write() as db:
            refused = self._put_results(db, batch, self.clock.wall_s())
            awake = wakeup.addresses(db, [wakeup.result(result.task_id) for result in batch])
        self.poke(awake)
        if refused:
            lost = [one.part for one in refused]
            raise BrokerRefused(
                f"{len(lost)} of {len(batch)} results cannot be stored: {refused[0].reason}",
                places=[place for place, one in enumerate(batch) if one in lost],
            )

    def read_results(self, task_ids: Iterable[str]) -> dict[str, StoredResult]:
        with self.database.read() as db:
            return results.read(db, task_ids, self.clock.wall_s())

    def watch_results(self, task_ids: Sequence[str], address: bytes) -> None:
        with self.database.write() as db:
            wakeup.register(db, map(wakeup.result, task_ids), address)

    def forget_results(self, task_ids: Iterable[str]) -> None:
        with self.database.write() as db:
            results.forget(db, task_ids)

    def depths(self) -> Mapping[str, Depth]:
        with self.database.read() as db:
            counts, paused = messages.depths(db), pauses.read(db)
        queues = sorted(counts.keys() | paused.keys())
        return {queue: Depth(*counts.get(queue, (0, 0, 0, 0)), paused=queue in paused) for queue in queues}

    def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        with self.database.read() as db:
            return messages.peek(db, queue, limit)

    def purge(self, queue: str) -> int:
        """Remove what waits now, in portions: others wait while a transaction runs."""
        removed = 0
        while True:
            with self.database.write(makes_room=True) as db:
                portion = messages.purge(db, queue, PURGE_ROWS_MAX)
                limits.recount(db)
            removed += portion
            if not portion:
                return removed

    def pause(self, queue: str, mark: Pause) -> None:
        with self.database.write(durable=True) as db:
            pauses.pause(db, queue, mark)

    def resume(self, queue: str) -> bool:
        with self.database.write(durable=True) as db:
            was_paused = pauses.resume(db, queue)
            awake = wakeup.addresses(db, [wakeup.queue(queue)])
        self.poke(awake)
        return was_paused

    def paused(self) -> Mapping[str, Pause]:
        with self.database.read() as db:
            return pauses.read(db)

    def move(self, source: str, target: str, limit: int) -> int:
        with self.database.write(durable=True) as db:
            moved, is_signed = pauses.move(db, source, target, min(limit, MOVED_AT_ONCE_MAX))
            awake = wakeup.addresses(db, [wakeup.queue(target)])
        self.poke(awake)
        if is_signed and not moved:
            raise signed_for(source)
        return moved

    def dead_letters(self, limit: int) -> Sequence[DeadLetter]:
        with self.database.read() as db:
            return dead_letters.read(db, limit)

    def requeue_dead(self, letter_ids: Sequence[int | str]) -> int:
        with self.database.write(durable=True) as db:
            keyring = self.settings.keyring
            count, queues = dead_letters.requeue(db, letter_ids, self.clock.wall_s(), keyring)
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self.poke(awake)
        return count

    def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        with self.database.write(durable=True, makes_room=True) as db:
            return dead_letters.drop(db, letter_ids)

    def keep_failed(self, failed: Sequence[Refused]) -> None:
        with self.database.write(durable=True) as db:
            failures.keep_sent(db, failed, self.settings, self.clock.wall_s())

    def failed(self, limit: int, task_id: str) -> Sequence[DeadLetter]:
        with self.database.read() as db:
            return failures.read(db, limit, task_id, self.settings, self.clock.wall_s())

    def resend(self, letters: Sequence[Resend]) -> Resent:
        """In portions: others wait while a transaction runs."""
        sent: set[int] = set()
        refused: dict[int, str] = {}
        for first in range(0, len(letters), RESEND_CHUNK):
            with self.database.write(durable=True) as db:
                portion = letters[first : first + RESEND_CHUNK]
                done, grown = failures.resend(db, portion, first, self.clock.wall_s())
                awake = wakeup.addresses(db, map(wakeup.queue, grown))
            self.poke(awake)
            sent |= done.sent
            refused |= done.refused
        return Resent(frozenset(sent), refused)

    def revoke(self, batch: Sequence[Revoke]) -> None:
        with self.database.write(durable=True) as db:
            revokes.record(db, batch, self.settings.revokes_max, self.clock.wall_s())

    def unregister(self, address: bytes) -> None:
        with self.database.write() as db:
            wakeup.unregister(db, [address])

    def leave(self, addresses: Sequence[bytes | None]) -> None:
        """Close; nobody waits at these addresses any more."""
        try:
            with self.database.write() as db:
                wakeup.unregister(db, filter(None, addresses))
        finally:
            self.close()

    def _greet(self, db: sqlite3.Connection) -> None:
        """Record the birth of a new file, and end the leases of the machine's last boot."""
        if not meta.number(db, meta.BORN):
            meta.put(db, meta.BORN, self.clock.wall_s())
        if meta.text(db, meta.BOOT_ID) != self.clock.boot_id:
            meta.put(db, meta.BOOT_ID, self.clock.boot_id)
            claims.return_lost(db, float("inf"))
            for table in ("waiters", "subscriptions", "marks", "broadcasts"):
                db.execute(f"DELETE FROM {table}")
            for table in ("elections", "leases"):
                db.execute(f"UPDATE {table} SET expires_at = 0")
        if self.database.replaced:
            self.replacements += 1
            self._holding.reconcile(db, self.clock.now().boot_s + self.settings.lease_s)
            what = f"{self.database.replaced} was deleted or replaced"
            self.on_replaced(Replaced(what, len(self._holding.unknown)))

    def _take(self, db: sqlite3.Connection, owner: str, queues: Sequence[str], limit: int) -> list[Delivery]:
        names = pauses.not_paused(db, dict.fromkeys(queues))
        if not names:
            return []
        if self._last_queue in names:
            turn = names.index(self._last_queue) + 1
            names = names[turn:] + names[:turn]
        deliveries, self._last_queue = claims.claim(db, owner, names, limit, self.clock.ticket())
        return deliveries

    def _worth_a_claim(self, queues: Sequence[str]) -> bool:
        """A look without the write lock, so that idle claimers do not hinder others."""
        now = self.clock.now()
        if self._lost_check_due(now.boot_s):
            return True
        with self.database.read() as db:
            return messages.anything_due(db, pauses.not_paused(db, queues), now.wall_s)

    def _lost_check_due(self, boot_s: float) -> bool:
        return boot_s - self._lost_checked_at >= self.settings.lease_s / LOST_CHECKS_PER_LEASE

    def _time_for_lost(self, boot_s: float) -> bool:
        if not self._lost_check_due(boot_s):
            return False
        self._lost_checked_at = boot_s
        return True
