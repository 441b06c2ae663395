"""The store's decisions: which node holds an election or a lease, and under which term.

Every store (SQLite, memory, the simulator) runs these functions inside one atomic step: read the record,
decide, write the record back. They are the tables of `docs/protocol/coordination.md`, sections 2 and 7, and
they decide by the store's clock alone, so that no worker's clock matters.

Terms strictly increase over all elections and leases of one store, because each new one is above `last_term`;
and because it is also at least the store's time in microseconds, they go on increasing when the store loses
all data but its clock still runs forward.

Where this stops being right: a store that is rolled back to an older copy has forgotten holders that still
run. A store that was emptied knows when it was created: a request from before that is refused under
AT_MOST_ONCE and delayed for one ttl under AT_LEAST_ONCE. That is judged when a claim finds no record, by the
time at which the store opened the election. An election that its client opens again after the loss is a new
election; one that was never opened (a Celery client cannot) is judged by the clock of the node that saw it
first.
"""

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeGuard

from umbel.protocol.machine import Value

TTL_S = 10.0
NAMESPACE = "celery"  # the control exchange's name: all elections of a cluster share it
ATTEMPTS_MAX = 5
RETENTION_S = 24 * 3600.0
EXPIRES_S = 300.0
LEASE_TTL_S = 15.0


class Instant(Value):
    """One moment on two clocks: `boot_s` for deadlines, as it never jumps, `wall_s` for timestamps.

    A store that several machines share has only one clock, and gives the same value twice.
    """

    boot_s: float
    wall_s: float


class Policy(StrEnum):
    """How often an action may run when its holder dies: at most once, or at least once."""

    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"


class ElectionState(StrEnum):
    """How far an election is, in the store."""

    OPEN = "open"
    HELD = "held"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


CLOSED_STATES = frozenset({ElectionState.DONE, ElectionState.FAILED, ElectionState.EXPIRED})


@dataclass(frozen=True, slots=True)
class ElectionRequest:
    """What must be done once.

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
    """One election as the store holds it, until RETENTION_S after `changed_at` (Unix time).

    `expires_at` is an instant of the store's lease clock and means something to the store only.
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
    """The caller holds the election. It acts only after the store has confirmed `start`."""

    term: int
    attempt: int


class Busy(Value):
    """Another node holds it; with an empty holder, the store waits after a loss of its data."""

    holder: str
    term: int
    left_s: float


class Closed(Value):
    """The election is over. `by_me`: this very call closed it, so the caller broadcasts it."""

    state: ElectionState
    holder: str
    term: int
    outcome: str
    by_me: bool


ElectionReply = Granted | Busy | Closed


class LeaseRecord(Value):
    """A lease as the store holds it. Without a holder it is free; its term and data stay."""

    holder: str
    term: int
    expires_at: float
    data: bytes = b""


class LeaseReply(Value):
    """Which node holds the lease now. A free lease has no holder and no time left."""

    granted: bool
    holder: str
    term: int
    left_s: float
    data: bytes


NO_LEASE = LeaseReply(granted=False, holder="", term=0, left_s=0.0, data=b"")


class StoreFacts(Value):
    """What the store knows of itself: when it was created (Unix time), and the last term it gave."""

    born: float
    last_term: int


def election_key(namespace: str, election_id: str) -> str:
    """Return the key under which a store holds this election."""
    return hashlib.sha256(f"{namespace}\0{election_id}".encode()).hexdigest()[:32]


def next_term(now: Instant, last_term: int) -> int:
    """Return a term above all earlier ones of this store."""
    return max(int(now.wall_s * 1_000_000), last_term + 1)


def open_election(record: ElectionRecord | None, request: ElectionRequest, now: Instant) -> ElectionRecord:
    """Return the record of a new request, timestamped by the store: clocks of clients may be wrong."""
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
    """Decide one claim: return the record after it (None: still no record), and the reply."""
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
    """The fence before any effect: return the new record, or None for a refusal."""
    renewed = renew_election(record, holder, term, now)
    return None if renewed is None else replace(renewed, started=True)


def renew_election(
    record: ElectionRecord | None, holder: str, term: int, now: Instant
) -> ElectionRecord | None:
    """Return the record with a new expiry, or None for a refusal."""
    if record is None or record.state is not ElectionState.HELD:
        return None
    if (record.holder, record.term) != (holder, term) or now.boot_s >= record.expires_at:
        return None
    return replace(record, expires_at=now.boot_s + record.ttl_s, changed_at=now.wall_s)


def finish_election(
    record: ElectionRecord | None, holder: str, term: int, outcome: str, now: Instant
) -> ElectionRecord | None:
    """Return the finished record, or None for a refusal. A late report is accepted: the work is done."""
    if record is None or (record.holder, record.term) != (holder, term):
        return None
    reported_late = record.state is ElectionState.FAILED and record.started
    if record.state not in (ElectionState.HELD, ElectionState.DONE) and not reported_late:
        return None
    return replace(record, state=ElectionState.DONE, outcome=outcome, changed_at=now.wall_s)


def is_unfinished(record: ElectionRecord, now: Instant) -> bool:
    """Whether the election is open, or its holder's time is over: a node should claim it."""
    if record.state is ElectionState.HELD:
        return now.boot_s >= record.expires_at
    return record.state is ElectionState.OPEN


def acquire_lease(
    record: LeaseRecord | None, holder: str, *, ttl_s: float, now: Instant, last_term: int
) -> tuple[LeaseRecord, LeaseReply]:
    """Take a free lease under a new term; its present holder keeps its term and gets more time."""
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
    """Return the record with a new expiry, or None for a refusal."""
    if not holds_lease(record, holder, term, now):
        return None
    return record.replaced(expires_at=now.boot_s + ttl_s)


def release_lease(record: LeaseRecord | None, holder: str, term: int, now: Instant) -> LeaseRecord | None:
    """Return the record without a holder, or None for a refusal."""
    if not holds_lease(record, holder, term, now):
        return None
    return record.replaced(holder="", expires_at=0.0)


def update_lease(
    record: LeaseRecord | None, holder: str, term: int, data: bytes, now: Instant
) -> LeaseRecord | None:
    """Return the record with new data, or None for a refusal."""
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
    """Whether (holder, term) may act now: the comparison behind every fenced effect."""
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
