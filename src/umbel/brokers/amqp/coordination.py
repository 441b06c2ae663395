"""AmqpCoordination: elections and leases on RabbitMQ, by locks and facts.

A lock (`Locks`) says who may act: it ends with its holder's connection, and the holder's process ends it when
its time to live is over. The facts (`FactsView`) say what happened: which holder has which term, how an
election ended, which data a lease has. They are a log that all read in one order, and an entry counts only if
its writer knew the last one that counted. So a holder that lost its connection cannot overwrite its
successor, and of a start and a claim that cross each other only the first counts. At most one start under
AT_MOST_ONCE holds whatever happens to locks and clocks.

RabbitMQ cannot publish and change a lease in one step. So `fenced_publish` takes three: the lease records
that messages are being sent, they are sent and confirmed, the lease gets its new data. A holder that dies in
between leaves the old data; the next holder sends the messages again, as redelivered.

The limits of this: RabbitMQ has no conditional publish, so `fenced_publish` relies on the holder's check of
its connection, its clock and the log; a process that is suspended between that check and the effect may act
late. In a cluster of RabbitMQ nodes that splits without `pause_minority`, both sides may hold a lease. If the
stream of facts is lost, elections start over.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import time
from weakref import WeakValueDictionary

from msgspec.structs import replace as replace_fact

from umbel.brokers.amqp import publishing, topology, verdicts
from umbel.brokers.amqp.locks import HeldLock, Locks, heartbeat_for, is_locked
from umbel.brokers.amqp.session import Session, Sessions, write_facts, write_if_current
from umbel.brokers.amqp.streams import ElectionFact, LeaseFact
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.refusals import unsupported
from umbel.clock import cluster_now
from umbel.errors import BrokerUnavailable
from umbel.protocol.leadership import coordination as protocol
from umbel.protocol.leadership.coordination import (
    Busy,
    ElectionRecord,
    ElectionReply,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    LeaseReply,
    StoreFacts,
)
from umbel.wire.message import Outgoing

ASK_AGAIN_SHARE = 0.02  # of a time to live
WRITES_MAX = 5  # attempts for one change; each failed because another writer was faster


class AmqpCoordination:
    """The leases and elections of one broker, and its logical clock."""

    release_unique = unsupported(CAPABILITIES.reasons["unique"])

    def __init__(self, sessions: Sessions, settings: BrokerSettings) -> None:
        self._sessions = sessions
        self._timeout_s = settings.connect_timeout_s
        self._queue_locks: dict[int, Locks] = {}  # by their connection's heartbeat
        self._own: dict[str, HeldLock] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.unproven = 0  # what RabbitMQ confirms is replicated

    async def close(self) -> None:
        """Give up all locks and close their connections."""
        for locks in self._queue_locks.values():
            await locks.close()

    async def reconnect(self) -> None:
        """Reconnect the connections of locks that were lost."""
        await asyncio.gather(*(locks.reconnect() for locks in self._queue_locks.values()))

    async def sweep(self) -> None:
        """Forget ended elections, and write facts again before they fall off the stream's end."""
        session = await self._current()
        session.views.facts.sweep(cluster_now())
        to_rewrite = session.views.facts.to_rewrite()
        if to_rewrite:
            await write_facts(session, *to_rewrite, timeout_s=self._timeout_s)

    # -- leases ----------------------------------------------------------------------------------

    async def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply:
        """Take the lease or renew it; the reply names the present holder."""
        what = f"lease.{name}"
        async with self._serialized(what):
            session = await self._current()
            own = self._valid(what)
            if own is not None and own.holder != holder:
                return self._lease_reply(session, name, own, granted=False)
            is_recorded = own is not None and self._holds_lease(session, name, holder, own.term)
            if own is not None and is_recorded and await self._renew(what, own, ttl_s):
                return self._lease_reply(session, name, own, granted=True)
            async with self._taken(what, ttl_s, session) as lock:
                if lock is None:
                    return _busy(session.views.facts.leases.get(name), ttl_s)
                term = 0
                for _ in range(WRITES_MAX):
                    known = session.views.facts.leases.get(name)
                    term = protocol.next_term(_now(), session.views.facts.last_term)
                    data, sending = (b"", False) if known is None else (known.data, known.sending)
                    fact = LeaseFact(name, holder, term, ttl_s, data, 0, sending)
                    if await self._write_lease(session, fact):
                        self._store_lock(what, lock, holder, term, ttl_s)
                        break
            own = self._mine(what, holder, term)
            if own is None:  # its connection ended meanwhile
                return await self.read_lease(name)
            return self._lease_reply(session, name, own, granted=True)

    async def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool:
        """Extend the lease; False if this holder does not have it under this term any more."""
        own = self._mine(f"lease.{name}", holder, term)
        if own is None:
            return False
        session = await self._current()
        return self._holds_lease(session, name, holder, term) and await self._renew(
            f"lease.{name}", own, ttl_s
        )

    async def release_lease(self, name: str, holder: str, term: int) -> bool:
        """Give the lease up; False if this holder did not have it under this term."""
        if not await self._change_lease(name, holder, term, {"holder": ""}):
            return False
        await self._drop(f"lease.{name}")
        return True

    async def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        """Replace the lease's data; False if this holder does not have it under this term."""
        return await self._change_lease(name, holder, term, {"data": data})

    async def read_lease(self, name: str) -> LeaseReply:
        """Return the lease's holder and data, without a holder if its lock is free."""
        session = await self._current()
        known = session.views.facts.leases.get(name)
        if known is None:
            return protocol.NO_LEASE
        own = self._valid(f"lease.{name}")
        if own is not None:
            return self._lease_reply(session, name, own, granted=False)
        if known.holder and await is_locked(session, f"lease.{name}"):
            return LeaseReply(False, known.holder, known.term, known.ttl_s, known.data)
        return LeaseReply(False, "", known.term, 0.0, known.data)

    async def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], *, data: bytes | None = None
    ) -> bool:
        """Publish under the lease and replace its data; False if this holder does not have it under this
        term.
        """
        session = await self._current()
        if not self._holds_lease(session, name, holder, term):
            return False
        if batch and data is not None:
            if session.views.facts.leases[name].sending:  # recorded by a holder that died or got no answer
                batch = [replace_fact(outgoing, redelivered=True) for outgoing in batch]
            elif not await self._change_lease(name, holder, term, {"sending": True}):
                return False
            session = await self._current()
            if not self._holds_lease(session, name, holder, term):
                return False
        if batch:
            await verdicts.send_or_bury(
                session, publishing.tasks(batch, session.queues, cluster_now()), batch
            )
        if data is None:
            return True
        return await self._change_lease(name, holder, term, {"data": data, "sending": False})

    async def _change_lease(self, name: str, holder: str, term: int, changes: Mapping[str, object]) -> bool:
        async with self._serialized(f"lease.{name}"):
            session = await self._current()
            for _ in range(WRITES_MAX):
                if not self._holds_lease(session, name, holder, term):
                    return False
                if await self._write_lease(
                    session, replace_fact(session.views.facts.leases[name], **changes)
                ):
                    return True
        return False

    def _holds_lease(self, session: Session, name: str, holder: str, term: int) -> bool:
        """Whether the lease is ours by our connection and clock, and no other holder is recorded since."""
        known = session.views.facts.leases.get(name)
        is_recorded = known is not None and (known.holder, known.term) == (holder, term)
        return is_recorded and self._mine(f"lease.{name}", holder, term) is not None

    # -- elections -------------------------------------------------------------------------------

    async def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        """Return the election's record, opened by this request if there was none."""
        async with self._serialized(f"election.{key}"):
            session = await self._current()
            elections = session.views.facts.elections
            record = protocol.open_election(elections.get(key), request, _now())
            if key not in elections:
                await self._write_election(session, key, record)
            return elections.get(key, record)  # unless the stream was deleted meanwhile

    async def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply:
        """Claim the election: granted with a term, busy with another holder, or decided already."""
        what = f"election.{key}"
        async with self._serialized(what):
            session = await self._current()
            elections = session.views.facts.elections
            own = self._valid(what)
            if own is not None:
                if own.holder == holder and self._holds_election(session, key, holder, own.term):
                    return Granted(own.term, elections[key].attempt)
                return Busy(own.holder, own.term, own.left_s)
            async with self._taken(what, ttl_s, session) as lock:
                if lock is None:
                    known = elections.get(key)
                    return Busy(known.holder, known.term, ttl_s) if known else Busy("", 0, ttl_s)
                reply = await self._claim(session, key, holder, request, ttl_s)
                if isinstance(reply, Granted):
                    self._store_lock(what, lock, holder, reply.term, ttl_s)
            if isinstance(reply, Granted) and self._mine(what, holder, reply.term) is None:
                return Busy(holder, reply.term, ttl_s)  # its connection ended meanwhile
            return reply

    async def _claim(
        self, session: Session, key: str, holder: str, request: ElectionRequest, ttl_s: float
    ) -> ElectionReply:
        """Decide while this node has the lock: the recorded holder has lost it."""
        facts = session.views.facts
        for _ in range(WRITES_MAX):
            known = facts.elections.get(key)
            if known is not None:
                known = replace(known, expires_at=0.0)
            store = StoreFacts(born=0.0, last_term=facts.last_term)
            now = _now()
            record, reply = protocol.claim_election(known, holder, request, ttl_s=ttl_s, now=now, store=store)
            assert record is not None, "a store without a birth never holds an election back"
            if record == known or await self._write_election(session, key, record):
                return reply
        return Busy("", 0, ttl_s)

    async def start_election(self, key: str, holder: str, term: int) -> bool:
        """Record the start. True only if this entry counted: the next claimer has read that the election has
        started.
        """
        what = f"election.{key}"
        async with self._serialized(what):
            own = self._mine(what, holder, term)
            if own is None:
                return False
            session = await self._current()
            if not self._holds_election(session, key, holder, term):
                return False
            record = replace(session.views.facts.elections[key], started=True, changed_at=time())
            return await self._write_election(session, key, record) and await self._renew(what, own)

    async def renew_election(self, key: str, holder: str, term: int) -> bool:
        """Extend the holder's lock; False if it has lost the election."""
        own = self._mine(f"election.{key}", holder, term)
        if own is None:
            return False
        session = await self._current()
        return self._holds_election(session, key, holder, term) and await self._renew(f"election.{key}", own)

    async def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        """Record the outcome and give the lock up; False if this holder has lost the election."""
        async with self._serialized(f"election.{key}"):
            session = await self._current()
            for _ in range(WRITES_MAX):
                known = session.views.facts.elections.get(key)
                record = protocol.finish_election(known, holder, term, outcome, _now())
                if record is None:
                    return False
                if await self._write_election(session, key, record):
                    await self._drop(f"election.{key}")
                    return True
        return False

    async def read_election(self, key: str) -> ElectionRecord | None:
        """Return the election's record; None if there is none."""
        return (await self._current()).views.facts.elections.get(key)

    async def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        """Return up to `limit` elections that are open or whose holder has lost its lock, oldest first."""
        session = await self._current()
        elections = sorted(session.views.facts.elections.items(), key=lambda item: item[1].changed_at)
        found: list[tuple[str, ElectionRecord]] = []
        for key, record in elections:
            if len(found) == limit:
                break
            if record.state is ElectionState.OPEN or (
                record.state is ElectionState.HELD
                and self._valid(f"election.{key}") is None
                and not await is_locked(session, f"election.{key}")
            ):
                found.append((key, record))
        return found

    def _holds_election(self, session: Session, key: str, holder: str, term: int) -> bool:
        """Whether the election is ours by our connection and clock, and no other claim is recorded since."""
        known = session.views.facts.elections.get(key)
        if known is None or known.state is not ElectionState.HELD:
            return False
        is_recorded = (known.holder, known.term) == (holder, term)
        return is_recorded and self._mine(f"election.{key}", holder, term) is not None

    # -- the clock -------------------------------------------------------------------------------

    async def raise_clock(self, value: int) -> int:
        """Raise the shared logical clock to at least `value`; return the clock's value."""
        session = await self._current()
        clock = session.views.clock
        if (higher := max(value, clock.mark)) > clock.stored:
            await session.publisher.send([publishing.entry(topology.CLOCK, b"%d" % higher)])
            await session.catch_up()
        return clock.mark

    # -- locks and facts -------------------------------------------------------------------------

    async def _current(self) -> Session:
        """Return a session whose views know all that was confirmed until now, but for a moment's delay."""
        session = await self._sessions.get()
        await session.catch_up()
        return session

    def _serialized(self, what: str) -> asyncio.Lock:
        """Return the lock that serializes this process's calls about the same record.

        It exists while a caller uses it.
        """
        lock = self._locks.get(what)
        if lock is None:
            lock = self._locks[what] = asyncio.Lock()
        return lock

    @asynccontextmanager
    async def _taken(
        self, what: str, ttl_s: float, session: Session
    ) -> AsyncIterator[tuple[Locks, float] | None]:
        """Yield the lock, or None if another process has it. Unless the block stores it, it is given up at
        the end.
        """
        self._forget(what)
        heartbeat_s = heartbeat_for(ttl_s)
        locks = self._queue_locks.get(heartbeat_s)
        if locks is None:
            name = f"umbel {os.getpid()} holds {heartbeat_s}"
            locks = self._queue_locks[heartbeat_s] = Locks(
                self._timeout_s, heartbeat_s, name, self._sessions.on_link
            )
        taken_at = await locks.take(what, ttl_s, session.link.location)
        if taken_at is None:
            yield None
            return
        try:
            await session.catch_up()  # read what the last holder wrote
            yield locks, taken_at
        finally:
            if what not in self._own:
                locks.drop(what)

    def _valid(self, what: str) -> HeldLock | None:
        own = self._own.get(what)
        return own if own is not None and own.left_s > 0 and own.locks.has(what) else None

    def _mine(self, what: str, holder: str, term: int) -> HeldLock | None:
        own = self._valid(what)
        return own if own is not None and (own.holder, own.term) == (holder, term) else None

    def _store_lock(self, what: str, lock: tuple[Locks, float], holder: str, term: int, ttl_s: float) -> None:
        locks, taken_at = lock
        own = self._own[what] = HeldLock(locks, holder, term, ttl_s)
        own.extend(taken_at)
        self._watch(what, own)

    async def _renew(self, what: str, own: HeldLock, ttl_s: float | None = None) -> bool:
        try:
            proven_at = await own.locks.extend(what)
        except BrokerUnavailable:  # its connection ended, and the lock with it
            return False
        if self._valid(what) is not own:
            return False
        # The server uses the time to live of the first declaration.
        own.ttl_s = min(own.ttl_s, ttl_s or own.ttl_s)
        own.extend(proven_at)
        return True

    def _watch(self, what: str, own: HeldLock) -> None:
        """Give the lock up when its holder does not renew it, though its connection lives."""
        if self._own.get(what) is not own:
            return
        if own.left_s > 0:
            asyncio.get_running_loop().call_later(own.left_s, self._watch, what, own)
        else:
            self._forget(what)

    def _forget(self, what: str) -> None:
        own = self._own.pop(what, None)
        if own is not None:
            own.locks.drop(what)

    async def _drop(self, what: str) -> None:
        own = self._own.pop(what, None)
        if own is not None:
            await own.locks.drop_now(what)

    async def _write_election(self, session: Session, key: str, record: ElectionRecord) -> bool:
        version = session.views.facts.next_version("election", key)
        return await write_if_current(session, ElectionFact(key, record, version), timeout_s=self._timeout_s)

    async def _write_lease(self, session: Session, fact: LeaseFact) -> bool:
        version = session.views.facts.next_version("lease", fact.name)
        return await write_if_current(session, replace_fact(fact, version=version), timeout_s=self._timeout_s)

    def _lease_reply(self, session: Session, name: str, own: HeldLock, *, granted: bool) -> LeaseReply:
        known = session.views.facts.leases.get(name)  # unless the stream was deleted meanwhile
        return LeaseReply(granted, own.holder, own.term, own.left_s, b"" if known is None else known.data)


def _busy(known: LeaseFact | None, ttl_s: float) -> LeaseReply:
    """Return the reply for a lease that another holder has.

    RabbitMQ does not tell for how long: a short time lets the caller ask again soon, so that the lease is not
    free for long.
    """
    if known is None:
        return protocol.NO_LEASE
    return LeaseReply(False, known.holder, known.term, ASK_AGAIN_SHARE * ttl_s, known.data)


def _now() -> Instant:
    """Return this machine's time: a shared store has one clock, but RabbitMQ has none to ask."""
    return Instant(time(), time())
