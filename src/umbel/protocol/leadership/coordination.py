"""The store's decisions: which node holds an election or a lease, and under which term.

Every store (SQLite, memory, the simulator) runs these functions inside one atomic step: read the record,
decide, write the record. They implement the tables of `docs/protocol/coordination.md`, sections 2 and 7. They
use only the store's clock, so a wrong clock of a worker does not matter.

Terms strictly increase over all elections and leases of one store, because each new term is above
`last_term`. A term is also at least the store's time in microseconds, so terms keep increasing if the store
loses all data, as long as its clock does not go back.

Limits: a store that is restored from an older copy has forgotten holders that still run. A store that was
emptied knows when it was created: a request from before that time is refused under AT_MOST_ONCE and delayed
for one ttl under AT_LEAST_ONCE. This is decided when a claim finds no record, by the time at which the store
opened the election. An election that its client opens again after the loss is a new election. For an election
that was never opened (a Celery client cannot open one), the clock of the node that saw it first decides.
"""

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeGuard

from umbel.protocol.machine import Value

TTL_S = 10.0
NAMESPACE = "celery"  # the name of the control exchange: all elections of a cluster share it
ATTEMPTS_MAX = 5
RETENTION_S = 24 * 3600.0
EXPIRES_S = 300.0
LEASE_TTL_S = 15.0


class Instant(Value):
    """One moment on two clocks: `boot_s`, which never jumps, for deadlines, and `wall_s` for timestamps.

    A store that several machines share has only one clock, and uses the same value for both.
    """

    boot_s: float
    wall_s: float


class Policy(StrEnum):
    """How often an action may run if its holder dies: at most once, or at least once."""

    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"


class ElectionState(StrEnum):
    """The progress of an election in the store."""

    OPEN = "open"
    HELD = "held"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


CLOSED_STATES = frozenset({ElectionState.DONE, ElectionState.FAILED, ElectionState.EXPIRED})


@dataclass(frozen=True, slots=True)
class ElectionRequest:
    """An action that must run once.

    `asked_at` is Unix time: the store's, once the election was opened there; otherwise that of the client or
    of the first receiver.
    """

    election_id: str
    topic: str
    action: bytes  # JSON
    policy: Policy
    asked_at: float
    expires_s: float = EXPIRES_S


@dataclass(frozen=True, slots=True)
class ElectionRecord:
    """One election in the store, until RETENTION_S after `changed_at` (Unix time).

    `expires_at` is a time on the store's lease clock and has a meaning only for the store.
    """

    state: ElectionState
    request: ElectionRequest
    changed_at: float
    holder: str = ""
    term: int = 0
    attempt: int = 0
    started: bool = False
    expires_at: float = 0.0
    ttl_s: float = 0.0
    outcome: str = ""


class Granted(Value):
    """The caller holds the election. It must not act before the store has confirmed `start`."""

    term: int
    attempt: int


class Busy(Value):
    """Another node holds the election; with an empty holder, the store waits after a loss of its data."""

    holder: str
    term: int
    left_s: float


class Closed(Value):
    """The election is over. `by_me`: this call closed it, so the caller broadcasts it."""

    state: ElectionState
    holder: str
    term: int
    outcome: str
    by_me: bool


ElectionReply = Granted | Busy | Closed


class LeaseRecord(Value):
    """A lease in the store. Without a holder it is free; its term and data stay."""

    holder: str
    term: int
    expires_at: float
    data: bytes = b""


class LeaseReply(Value):
    """The current holder of the lease. A free lease has no holder and no time remaining."""

    granted: bool
    holder: str
    term: int
    left_s: float
    data: bytes


NO_LEASE = LeaseReply(granted=False, holder="", term=0, left_s=0.0, data=b"")


class StoreFacts(Value):
    """Facts about the store: when it was created (Unix time), and the last term it assigned."""

    born: float
    last_term: int


def election_key(namespace: str, election_id: str) -> str:
    """Return the key under which a store holds this election."""
    return hashlib.sha256(f"{namespace}\0{election_id}".encode()).hexdigest()[:32]


def next_term(now: Instant, last_term: int) -> int:
    """Return a term above all earlier ones of this store."""
    return max(int(now.wall_s * 1_000_000), last_term + 1)


def open_election(record: ElectionRecord | None, request: ElectionRequest, now: Instant) -> ElectionRecord:
    """Return the record of a new request, with the store's timestamp: clients' clocks may be wrong."""
    if record is not None:
        return record
    return ElectionRecord(ElectionState.OPEN, replace(request, asked_at=now.wall_s), changed_at=now.wall_s)


def claim_election(
    record: ElectionRecord | None,
    holder: str,
    request: ElectionRequest,
    *,
    ttl_s: float,
    now: Instant,
    store: StoreFacts,
) -> tuple[ElectionRecord | None, ElectionReply]:
    """Decide one claim: return the new record (None: still no record), and the reply."""
    if record is None:
        if request.asked_at < store.born:
            if request.policy is Policy.AT_MOST_ONCE:
                fresh = ElectionRecord(ElectionState.OPEN, request, changed_at=now.wall_s)
                return _close(fresh, ElectionState.EXPIRED, "store reset", now)
            if now.wall_s < store.born + ttl_s:
                return None, Busy("", 0, store.born + ttl_s - now.wall_s)
        record = ElectionRecord(ElectionState.OPEN, request, changed_at=now.wall_s)
    if record.state in CLOSED_STATES:
        return record, _closed(record, by_me=False)
    if record.state is ElectionState.HELD and now.boot_s < record.expires_at:
        if record.holder == holder:  # the reply to its first claim was lost
            return record, Granted(record.term, record.attempt)
        return record, Busy(record.holder, record.term, record.expires_at - now.boot_s)
    if not record.started and now.wall_s > record.request.asked_at + record.request.expires_s:
        return _close(record, ElectionState.EXPIRED, "deadline", now)
    if record.started and record.request.policy is Policy.AT_MOST_ONCE:
        return _close(record, ElectionState.FAILED, "winner lost after start", now)
    if record.attempt >= ATTEMPTS_MAX:
        return _close(record, ElectionState.FAILED, "attempts", now)
    held = replace(
        record,
        state=ElectionState.HELD,
        holder=holder,
        term=next_term(now, store.last_term),
        attempt=record.attempt + 1,
        started=False,
        expires_at=now.boot_s + ttl_s,
        ttl_s=ttl_s,
        changed_at=now.wall_s,
    )
    return held, Granted(held.term, held.attempt)


def start_election(
    record: ElectionRecord | None, holder: str, term: int, now: Instant
) -> ElectionRecord | None:
    """Fence: confirm before any effect that the caller still holds the election; return None to refuse."""
    renewed = renew_election(record, holder, term, now)
    return None if renewed is None else replace(renewed, started=True)


def renew_election(
    record: ElectionRecord | None, holder: str, term: int, now: Instant
) -> ElectionRecord | None:
    """Return the record with a new expiry, or None to refuse."""
    if record is None or record.state is not ElectionState.HELD:
        return None
    if (record.holder, record.term) != (holder, term) or now.boot_s >= record.expires_at:
        return None
    return replace(record, expires_at=now.boot_s + record.ttl_s, changed_at=now.wall_s)


def finish_election(
    record: ElectionRecord | None, holder: str, term: int, outcome: str, now: Instant
) -> ElectionRecord | None:
    """Return the finished record, or None to refuse. A late report is accepted, because the work is done."""
    if record is None or (record.holder, record.term) != (holder, term):
        return None
    reported_late = record.state is ElectionState.FAILED and record.started
    if record.state not in (ElectionState.HELD, ElectionState.DONE) and not reported_late:
        return None
    return replace(record, state=ElectionState.DONE, outcome=outcome, changed_at=now.wall_s)


def is_unfinished(record: ElectionRecord, now: Instant) -> bool:
    """Return whether a node should claim the election: it is open, or its holder's time has expired."""
    if record.state is ElectionState.HELD:
        return now.boot_s >= record.expires_at
    return record.state is ElectionState.OPEN


def acquire_lease(
    record: LeaseRecord | None, holder: str, *, ttl_s: float, now: Instant, last_term: int
) -> tuple[LeaseRecord, LeaseReply]:
    """Grant a free lease under a new term; the current holder gets more time under its old term."""
    if record is not None and _is_held(record, now):
        if record.holder != holder:
            return record, read_lease(record, now)
        lease = record.replaced(expires_at=now.boot_s + ttl_s)
    else:
        data = b"" if record is None else record.data
        lease = LeaseRecord(holder, next_term(now, last_term), now.boot_s + ttl_s, data)
    return lease, LeaseReply(True, holder, lease.term, ttl_s, lease.data)


def renew_lease(
    record: LeaseRecord | None, holder: str, term: int, *, ttl_s: float, now: Instant
) -> LeaseRecord | None:
    """Return the record with a new expiry, or None to refuse."""
    if not holds_lease(record, holder, term, now):
        return None
    return record.replaced(expires_at=now.boot_s + ttl_s)


def release_lease(record: LeaseRecord | None, holder: str, term: int, now: Instant) -> LeaseRecord | None:
    """Return the record without a holder, or None to refuse."""
    if not holds_lease(record, holder, term, now):
        return None
    return record.replaced(holder="", expires_at=0.0)


def update_lease(
    record: LeaseRecord | None, holder: str, term: int, data: bytes, now: Instant
) -> LeaseRecord | None:
    """Return the record with new data, or None to refuse."""
    if not holds_lease(record, holder, term, now):
        return None
    return record.replaced(data=data)


def read_lease(record: LeaseRecord | None, now: Instant) -> LeaseReply:
    """Return the lease's holder and data, as a reply that grants nothing."""
    if record is None:
        return NO_LEASE
    if not _is_held(record, now):
        return LeaseReply(False, "", record.term, 0.0, record.data)
    return LeaseReply(False, record.holder, record.term, record.expires_at - now.boot_s, record.data)


def holds_lease(record: LeaseRecord | None, holder: str, term: int, now: Instant) -> TypeGuard[LeaseRecord]:
    """Return whether (holder, term) may act now: every fenced effect makes this comparison."""
    return record is not None and _is_held(record, now) and (record.holder, record.term) == (holder, term)


def _is_held(record: LeaseRecord, now: Instant) -> bool:
    return bool(record.holder) and now.boot_s < record.expires_at


def _close(
    record: ElectionRecord, state: ElectionState, outcome: str, now: Instant
) -> tuple[ElectionRecord, ElectionReply]:
    closed = replace(record, state=state, outcome=outcome, changed_at=now.wall_s)
    return closed, _closed(closed, by_me=True)


def _closed(record: ElectionRecord, *, by_me: bool) -> Closed:
    return Closed(record.state, record.holder, record.term, record.outcome, by_me)
