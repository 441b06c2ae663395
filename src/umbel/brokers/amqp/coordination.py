"""AmqpCoordination: elections and leases on RabbitMQ, by holds and facts.

A hold (`holds.py`) says who may act: it ends with its holder's connection, and the holder's own
process ends it when its time to live is over. The facts (`records.py`) say what happened: who
holds under which term, how an election ended, what data a lease has. Only who has the hold
writes, and what is written under an older term is not heard, so a holder that lost its connection
cannot overwrite its successor. Whoever has taken a hold reads the facts up to a mark of its own
before it decides: what was confirmed before may still be on its way to readers of the stream.

What this cannot promise: RabbitMQ checks nothing at the moment of an effect, so `start_election`
and `fenced_publish` are as good as the holder's own look at its connection and clock; a process
that stands still between that look and the effect may act late. In a cluster of RabbitMQ nodes
that splits without `pause_minority` both sides may hold. A lost facts stream is not noticed.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from time import time

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.holds import Holds, is_held
from umbel.brokers.amqp.records import ElectionFact, Fact, LeaseFact, MarkFact, encode_record
from umbel.brokers.amqp.session import Session, Sessions
from umbel.brokers.interface import BrokerSettings
from umbel.errors import BrokerUnavailable
from umbel.protocol import coordination as protocol
from umbel.protocol.coordination import (
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

LOOK_AGAIN_S = 0.002


@dataclass(slots=True)
class Own:
    """What this process holds: under which term, and until when on its own clock."""

    holder: str
    term: int
    ttl_s: float
    deadline: float

    @property
    def left_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()

    def prolong(self) -> None:
        self.deadline = asyncio.get_running_loop().time() + self.ttl_s


class AmqpCoordination:
    def __init__(self, sessions: Sessions, settings: BrokerSettings) -> None:
        self._sessions = sessions
        self._timeout_s = settings.connect_timeout_s
        self._holds = Holds(timeout_s=settings.connect_timeout_s, name=f"umbel {os.getpid()} holds")
        self._own: dict[str, Own] = {}
        self.unproven = 0  # what RabbitMQ confirms, it has replicated

    async def close(self) -> None:
        await self._holds.close()

    async def sweep(self) -> None:
        session = await self._current()
        session.views.facts.sweep(time())
        fading = session.views.facts.fading()
        if fading:
            await self._tell(session, *fading)

    # -- leases ----------------------------------------------------------------------------------

    async def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply:
        session, what = await self._current(), f"lease.{name}"
        facts = session.views.facts
        own = self._valid(what)
        if own is not None:
            if own.holder == holder:
                own.ttl_s = ttl_s
                own.prolong()
            return self._lease_reply(session, name, own, granted=own.holder == holder)
        self._own.pop(what, None)  # its watch must not drop what is taken now
        if not await self._holds.take(what, session.link.location):
            return await self.read_lease(name)
        await self._tell(session)
        known = facts.leases.get(name)
        term = protocol.next_term(_now(), facts.last_term)
        self._keep(what, holder, term, ttl_s)
        await self._tell(session, LeaseFact(name, holder, term, ttl_s, b"" if known is None else known.data))
        return self._lease_reply(session, name, self._own[what], granted=True)

    async def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool:
        own = self._mine(f"lease.{name}", holder, term)
        if own is None:
            return False
        own.ttl_s = ttl_s
        own.prolong()
        return True

    async def release_lease(self, name: str, holder: str, term: int) -> bool:
        what = f"lease.{name}"
        if self._mine(what, holder, term) is None:
            return False
        session = await self._current()
        known = session.views.facts.leases[name]
        await self._tell(session, LeaseFact(name, "", term, known.ttl_s, known.data))
        await self._drop(what)
        return True

    async def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        own = self._mine(f"lease.{name}", holder, term)
        if own is None:
            return False
        await self._tell(await self._current(), LeaseFact(name, holder, term, own.ttl_s, data))
        return True

    async def read_lease(self, name: str) -> LeaseReply:
        session = await self._current()
        known = session.views.facts.leases.get(name)
        if known is None:
            return protocol.NO_LEASE
        own = self._valid(f"lease.{name}")
        if own is not None:
            return self._lease_reply(session, name, own, granted=False)
        if known.holder and await is_held(session, f"lease.{name}"):
            return LeaseReply(False, known.holder, known.term, known.ttl_s, known.data)
        return LeaseReply(False, "", known.term, 0.0, known.data)

    async def fenced_publish(self, name: str, holder: str, term: int, batch: Sequence[Outgoing]) -> bool:
        session = await self._sessions.get()
        if self._mine(f"lease.{name}", holder, term) is None:
            return False
        await session.send(outbox.tasks(batch, time()))
        return True

    # -- elections -------------------------------------------------------------------------------

    async def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        session = await self._current()
        known = session.views.facts.elections.get(key)
        record = protocol.open_election(known, request, _now())
        if record is not known:
            await self._write(session, key, record)
        return session.views.facts.elections[key]

    async def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply:
        session, what = await self._current(), f"election.{key}"
        elections = session.views.facts.elections
        own = self._valid(what)
        if own is not None:
            if own.holder == holder:
                return Granted(own.term, elections[key].attempt)
            return Busy(own.holder, own.term, own.left_s)
        self._own.pop(what, None)  # its watch must not drop what is taken now
        if not await self._holds.take(what, session.link.location):
            known = elections.get(key)
            return Busy(known.holder, known.term, ttl_s) if known else Busy("", 0, ttl_s)
        await self._tell(session)
        known = elections.get(key)
        if known is not None:  # we have the hold, so whoever is written there has it no more
            known = replace(known, expires_at=0.0)
        facts = StoreFacts(born=0.0, last_term=session.views.facts.last_term)
        record, reply = protocol.claim_election(known, holder, request, ttl_s=ttl_s, now=_now(), store=facts)
        assert record is not None, "a store without a birth never holds an election back"
        if isinstance(reply, Granted):
            self._keep(what, holder, reply.term, ttl_s)
        if record != known:
            await self._write(session, key, record)
        if not isinstance(reply, Granted):
            await self._drop(what)
        return reply

    async def start_election(self, key: str, holder: str, term: int) -> bool:
        session, own = await self._current(), self._mine(f"election.{key}", holder, term)
        if own is None:
            return False
        record = replace(session.views.facts.elections[key], started=True, changed_at=time())
        await self._write(session, key, record)
        own.prolong()
        return self._mine(f"election.{key}", holder, term) is not None

    async def renew_election(self, key: str, holder: str, term: int) -> bool:
        own = self._mine(f"election.{key}", holder, term)
        if own is not None:
            own.prolong()
        return own is not None

    async def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        session = await self._current()
        known = session.views.facts.elections.get(key)
        record = protocol.finish_election(known, holder, term, outcome, _now())
        if record is None:
            return False
        await self._write(session, key, record)
        await self._drop(f"election.{key}")
        return True

    async def read_election(self, key: str) -> ElectionRecord | None:
        return (await self._current()).views.facts.elections.get(key)

    async def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        session = await self._current()
        elections = sorted(session.views.facts.elections.items(), key=lambda item: item[1].changed_at)
        found: list[tuple[str, ElectionRecord]] = []
        for key, record in elections:
            if len(found) == limit:
                break
            if record.state is ElectionState.OPEN or (
                record.state is ElectionState.HELD
                and self._valid(f"election.{key}") is None
                and not await is_held(session, f"election.{key}")
            ):
                found.append((key, record))
        return found

    # -- the clock -------------------------------------------------------------------------------

    async def raise_clock(self, value: int) -> int:
        session = await self._current()
        clock = session.views.clock
        if value > clock.mark:
            await session.publisher.send([outbox.entry(topology.CLOCK, b"%d" % value)])
            await session.catch_up()
        return clock.mark

    # -- holds and facts -------------------------------------------------------------------------

    async def _current(self) -> Session:
        """A session whose views know what was confirmed until now, but for a moment's delay."""
        session = await self._sessions.get()
        await session.catch_up()
        return session

    def _valid(self, what: str) -> Own | None:
        own = self._own.get(what)
        return own if own is not None and own.left_s > 0 and self._holds.has(what) else None

    def _mine(self, what: str, holder: str, term: int) -> Own | None:
        own = self._valid(what)
        return own if own is not None and (own.holder, own.term) == (holder, term) else None

    def _keep(self, what: str, holder: str, term: int, ttl_s: float) -> None:
        own = self._own[what] = Own(holder, term, ttl_s, 0.0)
        own.prolong()
        self._watch(what, own)

    def _watch(self, what: str, own: Own) -> None:
        """A holder that does not renew gives the hold up, though its connection lives."""
        if self._own.get(what) is not own:
            return
        if own.left_s > 0:
            asyncio.get_running_loop().call_later(own.left_s, self._watch, what, own)
        else:
            del self._own[what]
            self._holds.drop_soon(what)

    async def _drop(self, what: str) -> None:
        self._own.pop(what, None)
        await self._holds.drop(what)

    async def _write(self, session: Session, key: str, record: ElectionRecord) -> None:
        await self._tell(session, ElectionFact(key, record))

    async def _tell(self, session: Session, *facts: Fact) -> None:
        """When this returns, the facts are confirmed, and the views know all that came before them."""
        mark, read = MarkFact(token_hex(8)), asyncio.Event()
        awaited = session.views.facts.awaited
        awaited[mark.nonce] = read.set
        try:
            entries = [outbox.entry(topology.FACTS, encode_record(fact)) for fact in (*facts, mark)]
            await session.publisher.send(entries)
            async with asyncio.timeout(self._timeout_s):
                await session.catch_up()
                while not read.is_set():
                    await asyncio.sleep(LOOK_AGAIN_S)
                    await session.catch_up()
        except TimeoutError:
            raise BrokerUnavailable(
                f"RabbitMQ confirmed facts and did not show them within {self._timeout_s:g} s; try again"
            ) from None
        finally:
            awaited.pop(mark.nonce, None)

    def _lease_reply(self, session: Session, name: str, own: Own, *, granted: bool) -> LeaseReply:
        return LeaseReply(granted, own.holder, own.term, own.left_s, session.views.facts.leases[name].data)


def _now() -> Instant:
    """A shared store has one clock, and RabbitMQ none to ask: this machine's."""
    return Instant(time(), time())
