"""Coordination as a monitor sees it: the members of the cluster, its elections and its leases.

A monitor only listens. It judges members by the events that the nodes receive, with the workers' own
membership machine, so it needs no running Umbel worker and judges Celery's nodes too. Elections and leases
are assembled from what nodes report about them.
"""

import asyncio
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from umbel.brokers.interface import Broker
from umbel.chance import uniform
from umbel.control.client import ControlClient
from umbel.coordination.driver import Inquiries, drive
from umbel.events import types
from umbel.events.types import OtherEvent, WorkerElect, WorkerElected
from umbel.monitor.records import Candidate, Election, Happening, Lease, NodeState
from umbel.protocol.membership.gossip import Membership
from umbel.protocol.membership.members import (
    Cleared,
    Effect,
    Event,
    Introduced,
    Joined,
    Left,
    Lost,
    Member,
    Probe,
    Suspected,
)
from umbel.protocol.pidbox import HEARTBEAT_S, QUIET_S, Opinion, is_better
from umbel.wire.control import LeaseRow, is_member
from umbel.wire.coordination import read_worker_event

# ---- membership ------------------------------------------------------------------------------------

INBOX_MAX = 10_000
Rows = list[dict[str, Any]]


class MembershipWatch:
    """Follows who is a member of the cluster, by gossip and heartbeats, and announces nothing itself.

    `changed(kind, member, by)` is called for each change. Its kind is joined, returned, suspect, alive, left
    or lost; `by` is the node that reported a loss.
    """

    def __init__(
        self, broker: Broker, asker: ControlClient, changed: Callable[[str, Member, str], None]
    ) -> None:
        self._inquiries = Inquiries(asker, broker, self._answered)
        self._changed = changed
        pid = os.getpid()
        self._machine = Membership(f"gen{pid}@{socket.gethostname()}", 1, pid, uniform)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(maxsize=INBOX_MAX)
        self._group = asyncio.TaskGroup()

    @property
    def members(self) -> tuple[Member, ...]:
        """The members as this monitor sees them, including those that left."""
        return self._machine.members()

    async def run(self) -> None:
        """Drive the membership machine until cancelled."""
        async with self._group:
            await drive(self._machine, self._inbox, self._perform)

    async def introduce(self, rows: Rows) -> None:
        """Add the nodes that joined before this monitor listened, as `known_members` found them."""
        for row in rows:
            if row["state"] in ("alive", "suspect") and row.get("pid"):
                run = (row["incarnation"], row["pid"])
                member = Introduced(row["node"], *run, row["clock"], row["freq_s"], row["software"])
                await self._inbox.put(member)

    async def take(self, event: Mapping[str, Any]) -> None:
        """Pass a worker's event to the membership machine."""
        for change in read_worker_event(event):
            await self._inbox.put(change)

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Joined(member, returned):
                self._changed("returned" if returned else "joined", member, "")
            case Suspected(member):
                self._changed("suspect", member, "")
            case Cleared(member):
                self._changed("alive", member, "")
            case Left(member):
                self._changed("left", member, "")
            case Lost(member, by):
                self._changed("lost", member, by)
            case Probe(member, ping):
                self._inquiries.probe(member, self._group)
                if ping:
                    self._inquiries.ping(member, self._group)

    def _answered(self, event: Event) -> None:
        with suppress(asyncio.QueueFull):  # the machine asks again
            self._inbox.put_nowait(event)


async def known_members(asker: ControlClient, timeout_s: float | None) -> Rows:
    """Return one row per node, by name: the nodes that workers know, and other nodes that answer a ping.

    Of several opinions about a node the most credible is used (`protocol/pidbox.py`). Without `timeout_s`,
    opinions are awaited for QUIET_S at most after all nodes have answered the ping, because a cluster of
    Celery workers sends none.
    """
    viewing = asyncio.create_task(asker.ask("members", destination=["@v2"], timeout_s=timeout_s))
    try:
        pinged = await asker.ask("ping", timeout_s=timeout_s)
        await asyncio.wait([viewing], timeout=QUIET_S if timeout_s is None else None)
        views = (await viewing).replies if viewing.done() else {}
    finally:
        viewing.cancel()
        await asyncio.gather(viewing, return_exceptions=True)
    rows: dict[str, dict[str, Any]] = {}
    for view in views.values():
        for row in filter(is_member, view if isinstance(view, list) else ()):
            known = rows.get(row["node"])
            if known is None or is_better(_opinion(row), _opinion(known)):
                rows[row["node"]] = row
    for node in pinged.replies:  # a node that answers is alive, whatever other nodes report
        row = rows.setdefault(node, {"node": node, "software": "unknown"})
        rows[node] = row | {"state": "alive", "silent_s": 0.0, "reason": ""}
    return [rows[node] for node in sorted(rows)]


def _opinion(row: dict[str, Any]) -> Opinion:
    return Opinion(row["state"], row["silent_s"], row.get("incarnation", 0), row.get("freq_s", HEARTBEAT_S))


# ---- happenings ------------------------------------------------------------------------------------

STATES: Mapping[str, NodeState] = {
    "joined": "alive",
    "returned": "alive",
    "alive": "alive",
    "suspect": "suspect",
    "lost": "lost",
    "left": "left",
}
"""The state of a node after each kind of change; other kinds of happenings do not change a node."""


def lease_changed(name: str, holder: str, term: int, at: float) -> Happening:
    """Return the change of a lease; `holder` is its node from that time on, "" if the lease is free."""
    text = f"{name} is held by {holder}" if holder else f"{name} is free"
    return Happening(at=at, kind="lease", subject=name, text=text, node=holder, term=term)


def version_changed(node: str, old: str, new: str, at: float) -> Happening:
    """Return the change of a node's version, which marks a deploy."""
    return Happening(at=at, kind="version", subject=node, text=f"{node}: {old} → {new}", node=node)


def elected(election_id: str, topic: str, node: str, term: int, at: float) -> Happening:
    """Return the outcome of an election: the node that was elected, and the topic."""
    text = f"{node} was elected" + (f" for {topic}" if topic else "")
    return Happening(at=at, kind="elected", subject=election_id, text=text, node=node, term=term)


# ---- elections and leases --------------------------------------------------------------------------

ELECTIONS_MAX = 500
CANDIDATES_MAX = 1000
NODES_MAX = 20_000  # candidates and winners of all elections together
LEASES_MAX = 200
TEXT_MAX = 1000  # characters of any text from a node
ELECTED = "elected"
CLOSED = frozenset({"done", "failed", "expired"})
LEADER = "worker-leader"


class _ElectionState(msgspec.Struct):
    """An election as its events describe it so far."""

    id: str
    protocol: str
    topic: str = ""
    policy: str = ""
    first_at: float = 0.0
    last_at: float = 0.0
    candidates: dict[tuple[str, int], int] = {}  # (node, pid) -> clock
    winners: dict[int, str] = {}  # by term
    term: int = 0
    attempt: int = 0
    phase: str = "open"
    outcome: str = ""
    done_by: str = ""  # the first winner that reported that its handler has ended
    violations: set[str] = set()

    @property
    def nodes(self) -> int:
        return len(self.candidates) + len(self.winners)

    def stand(self, node: str, number: int, clock: int) -> None:
        if len(self.candidates) < CANDIDATES_MAX or (node, number) in self.candidates:
            self.candidates[node, number] = clock


class ElectionBook:
    """The newest elections, assembled from the events of their candidates and winners.

    In version 1 of the protocol an election is a set of candidates, and the candidate with the lowest
    (clock, process) leads. In version 2 its winner and its outcome are reported.
    """

    def __init__(self) -> None:
        self._elections: OrderedDict[str, _ElectionState] = OrderedDict()
        self._nodes = 0

    def take(self, event: types.Event) -> str:
        """Apply an event; return the id of the election that it is about, or "" for another event."""
        match event:
            case WorkerElect(id=str(given)):
                return self._apply(_cut(given), "v1", event)
            case WorkerElected(eid=str(given)):
                return self._apply(_cut(given), "v2", event)
            case _:
                return ""

    def all(self) -> list[Election]:
        """Return all known elections, the newest first."""
        shown = [_shown(election) for election in self._elections.values()]
        return sorted(shown, key=lambda election: (-election.last_at, election.id))

    def decided(self, since: float) -> list[Happening]:
        """Return the elections that have a winner, each at the time of its last event."""
        recent = [_shown(election) for election in self._elections.values() if election.last_at >= since]
        return [
            elected(election.id, election.topic, node_of(election.winner), election.term, election.last_at)
            for election in recent
            if election.winner
        ]

    def _apply(self, election_id: str, protocol: str, event: WorkerElect | WorkerElected) -> str:
        known = self._elections.get(election_id)
        if known is None:
            known = _ElectionState(election_id, protocol, first_at=event.timestamp, last_at=event.timestamp)
            self._elections[election_id] = known
        known.first_at = min(known.first_at, event.timestamp)
        known.last_at = max(known.last_at, event.timestamp)
        known.topic = _cut(event.topic) or known.topic
        nodes_before = known.nodes
        if isinstance(event, WorkerElect):
            known.stand(_cut(event.hostname), event.pid, event.clock)
            known.phase = ELECTED
        else:
            _apply_outcome(known, event)
        self._nodes += known.nodes - nodes_before
        while len(self._elections) > ELECTIONS_MAX or self._nodes > NODES_MAX:
            self._nodes -= self._elections.popitem(last=False)[1].nodes
        return election_id


def _apply_outcome(known: _ElectionState, event: WorkerElected) -> None:
    known.policy = _cut(event.policy) or known.policy
    known.attempt = max(known.attempt, event.attempt or 0)
    term, winner, phase = event.term or 0, _cut(event.winner), _cut(event.phase)
    if phase == ELECTED and winner:
        if known.winners.get(term, winner) != winner:
            known.violations.add("two winners in one term")
        if len(known.winners) < CANDIDATES_MAX or term in known.winners:
            known.winners[term] = winner
        known.stand(winner, term, event.clock)
    if phase == "done" and winner:
        known.done_by = known.done_by or winner
        if known.done_by != winner:
            known.violations.add("done by more than one winner")
    if (term, phase in CLOSED) >= (known.term, known.phase in CLOSED):
        known.term, known.phase, known.outcome = term, phase, _cut(event.outcome)


def _cut(text: str | None) -> str:
    return (text or "")[:TEXT_MAX]


def _shown(known: _ElectionState) -> Election:
    stood = sorted((clock, node, number) for (node, number), clock in known.candidates.items())
    by_term = known.winners.get(known.term) or (known.winners[max(known.winners)] if known.winners else "")
    first = min(stood, key=lambda candidate: (candidate[0], f"{candidate[1]}.{candidate[2]}"), default=None)
    return Election(
        id=known.id,
        protocol=known.protocol,
        topic=known.topic,
        phase=known.phase,
        winner=by_term if known.protocol == "v2" else "" if first is None else first[1],
        term=known.term,
        attempt=known.attempt,
        policy=known.policy,
        outcome=known.outcome,
        candidates=[Candidate(node, number, clock) for clock, node, number in stood],
        first_at=known.first_at,
        last_at=known.last_at,
        duration_s=known.last_at - known.first_at,
        violations=sorted(known.violations),
    )


class LeaseBook:
    """The holder and term of each lease: reported by events when it changes hands, polled in between."""

    def __init__(self) -> None:
        self._leases: OrderedDict[str, Lease] = OrderedDict()

    def all(self) -> list[Lease]:
        """Return all known leases, by name."""
        return sorted(self._leases.values(), key=lambda lease: lease.name)

    def held_by(self, node: str) -> list[str]:
        """Return the names of the leases that this node holds."""
        return sorted(lease.name for lease in self._leases.values() if lease.holder == node)

    def held(self) -> set[str]:
        """Return the names of the leases that any node holds."""
        return {lease.name for lease in self._leases.values() if lease.holder}

    def take(self, event: types.Event) -> Lease | None:
        """Apply an event; return the lease if it changed hands."""
        if not isinstance(event, OtherEvent) or event.told_type != LEADER or not event.extra:
            return None
        name, leader, term = (event.extra.get(field) for field in ("lease", "leader", "term"))
        if not isinstance(name, str) or not isinstance(leader, str) or not isinstance(term, int):
            return None
        is_held = event.extra.get("phase") == "acquired"
        return self._put(name, node_of(leader) if is_held else "", term, event.timestamp, 0.0)

    def answered(self, rows: Iterable[LeaseRow], now: float) -> list[Lease]:
        """Apply polled leases, as the store or a node reports them; return those that changed."""
        changed = []
        for row in rows:
            name, holder, term = row.name, row.holder, row.term
            if name is None or holder is None or term is None:
                continue
            known = self._leases.get(name)
            if not holder and known is not None:  # a store that was emptied has forgotten the term too
                term = max(term, known.term)
            put = self._put(name, node_of(holder), term, now, row.left_s or 0.0)
            changed += [put] if put is not None else []
        return changed

    def _put(self, name: str, holder: str, term: int, at: float, left_s: float) -> Lease | None:
        """Store the lease unless its term is older than the known one; return it if it is new."""
        known = self._leases.get(name)
        if known is not None and term < known.term:
            return None
        is_new = known is None or (known.term, known.holder) != (term, holder)
        since = at if is_new or known is None else known.since
        lease = Lease(name=name, holder=holder, term=term, left_s=left_s, since=since)
        self._leases[name] = lease
        if len(self._leases) > LEASES_MAX:
            self._leases.popitem(last=False)
        return lease if is_new else None


def node_of(holder: str) -> str:
    """Return the node of a lease holder, whose name ends with its process and incarnation."""
    head, _, tail = holder.rpartition(".")
    before, _, pid = head.rpartition(".")
    return before if before and tail.isdecimal() and pid.isdecimal() else holder
