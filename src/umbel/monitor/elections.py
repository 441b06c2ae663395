"""Elections and leases, from what nodes say of them; the newest are kept.

An election of v1 is a set of candidates, and the lowest (clock, process) leads. One of v2 tells its winners
and how it ended. A lease is told when it changes hands, and asked for in between.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from umbel.events.types import Event, OtherEvent, WorkerElect, WorkerElected
from umbel.monitor.happenings import elected
from umbel.monitor.shapes import Candidate, Election, Happening, Lease

ELECTIONS_MAX = 500
CANDIDATES_MAX = 1000
LEASES_MAX = 200
TEXT_MAX = 1000  # of anything that a node says
ELECTED = "elected"
CLOSED = frozenset({"done", "failed", "expired"})
LEADER = "worker-leader"


class _Heard(msgspec.Struct):
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
    done_by: str = ""  # the first that said so
    violations: set[str] = set()

    def stand(self, node: str, number: int, clock: int) -> None:
        if len(self.candidates) < CANDIDATES_MAX or (node, number) in self.candidates:
            self.candidates[node, number] = clock


class ElectionBook:
    def __init__(self) -> None:
        self._elections: OrderedDict[str, _Heard] = OrderedDict()

    def take(self, event: Event) -> str:
        """The id of the election that the event is about; "" for another event."""
        match event:
            case WorkerElect(id=str(given)):
                self._stood(self._of(id := _cut(given), "v1", event), event)
                return id
            case WorkerElected(eid=str(given)):
                self._told(self._of(id := _cut(given), "v2", event), event)
                return id
            case _:
                return ""

    def all(self) -> list[Election]:
        """The newest first."""
        shown = [_shown(one) for one in self._elections.values()]
        return sorted(shown, key=lambda one: (-one.last_at, one.id))

    def decided(self, since: float) -> list[Happening]:
        """Those that have a winner, each at the time of its last event."""
        recent = [_shown(one) for one in self._elections.values() if one.last_at >= since]
        return [
            elected(one.id, one.topic, node_of(one.winner), one.term, one.last_at)
            for one in recent
            if one.winner
        ]

    def _of(self, election_id: str, protocol: str, event: Event) -> _Heard:
        known = self._elections.get(election_id)
        if known is None:
            at = event.timestamp
            known = self._elections[election_id] = _Heard(election_id, protocol, first_at=at, last_at=at)
            if len(self._elections) > ELECTIONS_MAX:
                self._elections.popitem(last=False)
        known.first_at = min(known.first_at, event.timestamp)
        known.last_at = max(known.last_at, event.timestamp)
        return known

    def _stood(self, known: _Heard, event: WorkerElect) -> None:
        known.topic = _cut(event.topic) or known.topic
        known.stand(_cut(event.hostname), event.pid, event.clock)
        known.phase = ELECTED

    def _told(self, known: _Heard, event: WorkerElected) -> None:
        known.topic, known.policy = _cut(event.topic) or known.topic, _cut(event.policy) or known.policy
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


def _shown(known: _Heard) -> Election:
    stood = sorted((clock, node, number) for (node, number), clock in known.candidates.items())
    by_term = known.winners.get(known.term) or (known.winners[max(known.winners)] if known.winners else "")
    first = min(stood, key=lambda one: (one[0], f"{one[1]}.{one[2]}"), default=None)
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
    """Who holds which lease, as was last told or answered."""

    def __init__(self) -> None:
        self._leases: OrderedDict[str, Lease] = OrderedDict()

    def all(self) -> list[Lease]:
        return sorted(self._leases.values(), key=lambda one: one.name)

    def held_by(self, node: str) -> list[str]:
        return sorted(one.name for one in self._leases.values() if one.holder == node)

    def held(self) -> set[str]:
        """The names of those that somebody holds."""
        return {one.name for one in self._leases.values() if one.holder}

    def get(self, name: str) -> Lease | None:
        return self._leases.get(name)

    def take(self, event: Event) -> Lease | None:
        """The lease as it is now, if the event says that it changed hands."""
        if not isinstance(event, OtherEvent) or event.told_type != LEADER or not event.extra:
            return None
        name, leader, term = (event.extra.get(one) for one in ("lease", "leader", "term"))
        if not isinstance(name, str) or not isinstance(leader, str) or not isinstance(term, int):
            return None
        is_held = event.extra.get("phase") == "acquired"
        return self._put(name, node_of(leader) if is_held else "", term, event.timestamp, 0.0)

    def answered(self, rows: Iterable[Mapping[str, Any]], now: float) -> list[Lease]:
        """What the store says, itself or by a node; the leases that changed."""
        changed = []
        for row in rows:
            name, holder, term = row.get("name"), row.get("holder"), row.get("term")
            if isinstance(name, str) and isinstance(holder, str) and isinstance(term, int):
                left_s, known = row.get("left_s"), self._leases.get(name)
                if not holder and known is not None:  # a store that was emptied knows no term either
                    term = max(term, known.term)
                put = self._put(
                    name, node_of(holder), term, now, left_s if isinstance(left_s, float) else 0.0
                )
                changed += [put] if put is not None else []
        return changed

    def _put(self, name: str, holder: str, term: int, at: float, left_s: float) -> Lease | None:
        """A term only grows: what is older than what is known says nothing."""
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
    """The node of a holder, which is named with its process and incarnation."""
    head, _, tail = holder.rpartition(".")
    before, _, pid = head.rpartition(".")
    return before if before and tail.isdecimal() and pid.isdecimal() else holder
