"""Replay: the checkers of the simulator judge what real workers did.

Workers on one machine share its clocks, so that their records are one story; what the store decided is
reconstructed from the answers it gave, and from what somebody who was never cut off read there meanwhile.

The store decided between the sending of a call and its answer. A term is the store's time in microseconds, so
that a grant is placed there, but never outside of its call. Of an expiry the earliest possible moment is
taken, a ttl after the call was sent: the store may keep a promise longer, not shorter. Answers that were lost
are unknown; they made nobody act.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.partitions.recorder import Record
from umbel.protocol.election import events as election
from umbel.protocol.leadership import lease
from umbel.protocol.leadership.coordination import (
    Closed,
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    LeaseRecord,
)
from umbel.protocol.membership.members import Joined, Left, Lost
from umbel.sim.checkers import Checkers, Violation
from umbel.sim.membership import MemberChecks
from umbel.sim.plan import Ask
from umbel.sim.world import World


@dataclass(frozen=True, slots=True)
class Sample:
    """What a lease was when somebody asked the store; it was asked and answered at these boot times."""

    asked_s: float
    answered_s: float
    name: str
    holder: str
    term: int
    left_s: float


@dataclass(slots=True)
class Counts:
    """How much there was to judge."""

    grants: int = 0  # of leases
    leaderships: int = 0
    samples: int = 0
    runs: int = 0
    elections: int = 0
    lost: int = 0
    returned: int = 0


class Replay:
    """`is_well(observer, by, subject, at_s)`: whether nothing in the network explains the loss."""

    def __init__(
        self, asks: Mapping[str, Ask], *, nodes: int, is_well: Callable[[str, str, str, float], bool]
    ) -> None:
        self.violations: list[Violation] = []
        self.counts = Counts(elections=len(asks))
        self.elections: dict[str, ElectionRecord] = {}
        self._world = World("real")
        self._checkers = Checkers(self._world, asks, nodes=nodes)
        self._members = MemberChecks(self._report)
        self._is_well = is_well
        self._facts: list[tuple[float, int, Callable[[], None]]] = []
        self._leases: dict[str, LeaseRecord] = {}
        self._leading: dict[
            tuple[str, str], tuple[int, float, float]
        ] = {}  # term, since when it believes until when
        self._views: dict[str, frozenset[str]] = {}
        # What is known of calls, while records are read: their time to live, and since when was asked.
        self._ttl_s: dict[str, float] = {}
        self._asked_s: dict[tuple[str, str], float] = {}
        self._requests: dict[str, ElectionRequest] = {}
        self._outcomes: dict[tuple[str, str], str] = {}

    def read(self, records: Iterable[Record]) -> None:
        readers = {
            "lease": self._read_lease,
            "elections": self._read_election,
            "membership": self._read_member,
        }
        for record in records:
            readers[record.machine](record)

    def read_samples(self, samples: Iterable[Sample]) -> None:
        for one in samples:
            self._at(one.answered_s, self._sampled, one)

    def read_outcomes(self, at_s: float, kept: Mapping[str, ElectionRecord]) -> None:
        """What the store says of elections in the end."""
        for election_id, record in kept.items():
            self._at(
                at_s, self._closed, election_id, record.state, record.holder, record.term, record.outcome
            )

    def judge(self, *, there: frozenset[str]) -> list[Violation]:
        """Everything in its order; `there` are the runs of nodes that are up in the end."""
        for at_s, _, happen in sorted(self._facts, key=lambda fact: fact[:2]):
            self._world.now = at_s
            happen()
            self._collect()
        self._checkers.check_all_closed()
        self._collect()
        for node in sorted(there):
            self._members.check_view(node, self._views.get(node, frozenset()), there)
        return self.violations

    # ---- leases ------------------------------------------------------------------------------------

    def _read_lease(self, record: Record) -> None:
        name, who, now = record.name, record.who, record.at
        match record.event:
            case lease.AcquireReplied(sent_s, reply):
                asked_s = self._asked_s.pop((who, name), sent_s)
                if reply.granted:
                    at_s = _placed(reply.term, asked_s, now)
                    self._at(at_s, self._lease_granted, name, who, reply.term, sent_s + self._ttl_s[name])
            case lease.LeaseRenewReplied(term, sent_s, True):
                self._at(now.boot_s, self._lease_renewed, name, who, term, sent_s + self._ttl_s[name])
            case _:
                pass
        for effect in record.effects:
            match effect:
                case lease.CallAcquire(ttl_s=ttl_s, sent_s=sent_s):
                    self._ttl_s[name] = ttl_s
                    self._asked_s.setdefault((who, name), sent_s)
                case lease.CallRelease(term=term):
                    self._at(now.boot_s, self._lease_released, name, who, term)
                case _:
                    pass
        self._at(now.boot_s, self._believes, name, who, record.view)

    def _lease_granted(self, name: str, holder: str, term: int, expires_at: float) -> None:
        before = self._leases.get(name)
        if before is not None and (before.holder, before.term) == (holder, term):  # an answer came late
            self._lease_renewed(name, holder, term, expires_at)
            return
        self.counts.grants += 1
        after = LeaseRecord(holder, term, expires_at)
        self._checkers.lease_changed(name, before, after)
        self._leases[name] = after
        self._check_leaders(name, after)

    def _lease_renewed(self, name: str, holder: str, term: int, expires_at: float) -> None:
        before = self._leases.get(name)
        if before is not None and (before.holder, before.term) == (holder, term):
            self._leases[name] = before.replaced(expires_at=max(expires_at, before.expires_at))

    def _lease_released(self, name: str, holder: str, term: int) -> None:
        before = self._leases.get(name)
        if before is not None and (before.holder, before.term) == (holder, term):
            self._leases[name] = before.replaced(holder="", expires_at=self._world.now)

    def _believes(self, name: str, holder: str, view: tuple[int, float] | None) -> None:
        before = self._leading.pop((name, holder), None)
        if view is None:
            return
        term, until = view
        self.counts.leaderships += before is None or before[0] != term
        same = before is not None and (before[0], before[2]) == view
        self._leading[name, holder] = (term, before[1] if before and same else self._world.now, until)
        self._checkers.led(holder, term, until, self._leases.get(name))

    def _check_leaders(self, name: str, kept: LeaseRecord, *, since_s: float = float("inf")) -> None:
        """Of those who believed the same at `since_s`: of a renewal meanwhile `kept` may not know."""
        for (led, holder), (term, began, until) in self._leading.items():
            if led == name and self._world.now < until and began <= since_s:
                self._checkers.led(holder, term, until, kept)

    def _sampled(self, sample: Sample) -> None:
        self.counts.samples += 1
        kept = LeaseRecord(sample.holder, sample.term, sample.answered_s + sample.left_s)
        self._check_leaders(sample.name, kept, since_s=sample.asked_s)

    # ---- elections ---------------------------------------------------------------------------------

    def opened(self, at_s: float, request: ElectionRequest) -> None:
        """A client asked for it, and the store has it."""
        self._requests[request.election_id] = request
        self._at(at_s, self._opened, request)

    def _opened(self, request: ElectionRequest) -> None:
        if request.election_id not in self.elections:
            self._change(request.election_id, ElectionRecord(ElectionState.OPEN, request, self._world.now))

    def _read_election(self, record: Record) -> None:
        who, now = record.who, record.at
        match record.event:
            case election.ClaimReplied(name, sent_s, reply):
                asked_s = self._asked_s.pop((who, name), sent_s)
                match reply:
                    case Granted(term, attempt):
                        at_s = _placed(term, asked_s, now)
                        expires_at = sent_s + self._ttl_s[name]
                        self._at(at_s, self._granted, name, who, term, attempt, expires_at)
                    case Closed(state, holder, term, outcome):
                        self._at(now.boot_s, self._closed, name, state, holder, term, outcome)
                    case _:
                        pass
            case election.StartReplied(name, term, sent_s, True):
                self._at(now.boot_s, self._kept, name, who, term, sent_s + self._ttl_s[name], True)
            case election.RenewReplied(name, term, sent_s, True):
                self._at(now.boot_s, self._kept, name, who, term, sent_s + self._ttl_s[name], False)
            case election.FinishReplied(name, term, True):
                outcome = self._outcomes[who, name]
                self._at(now.boot_s, self._closed, name, ElectionState.DONE, who, term, outcome)
            case election.HandlerEnded(election_id=name):
                self._at(now.boot_s, self._checkers.ended, who, name)
            case _:
                pass
        for effect in record.effects:
            self._read_effect(who, now, effect)

    def _read_effect(self, who: str, now: Instant, effect: election.Effect) -> None:
        checkers = self._checkers
        match effect:
            case election.CallClaim(election_id=name, request=request, ttl_s=ttl_s, sent_s=sent_s):
                self._ttl_s[name] = ttl_s
                self._requests.setdefault(name, request)
                self._asked_s.setdefault((who, name), sent_s)
            case election.CallFinish(election_id=name, outcome=outcome):
                self._outcomes[who, name] = outcome
            case election.RunHandler() as run:
                self.counts.runs += 1
                self._at(now.boot_s, checkers.ran, who, run, run.deadline_s)
            case election.Prolong(name, _, until):
                self._at(now.boot_s, checkers.prolonged, who, name, until)
            case election.CancelHandler(election_id=name):
                self._at(now.boot_s, checkers.ended, who, name)
            case election.PublishElected() as tell:
                self._at(now.boot_s, checkers.told, tell)
            case _:
                pass

    def _granted(self, name: str, holder: str, term: int, attempt: int, expires_at: float) -> None:
        before = self.elections.get(name)
        if before is not None and (before.holder, before.term) == (holder, term):  # an answer came late
            return
        self._change(
            name,
            ElectionRecord(
                *(ElectionState.HELD, self._requests[name], self._world.now, holder, term, attempt),
                expires_at=expires_at,
                ttl_s=expires_at - self._world.now,
            ),
        )

    def _kept(self, name: str, holder: str, term: int, expires_at: float, starts: bool) -> None:
        before = self.elections.get(name)
        if before is not None and (before.holder, before.term) == (holder, term):
            self._change(name, replace(before, started=before.started or starts, expires_at=expires_at))

    def _closed(self, name: str, state: ElectionState, holder: str, term: int, outcome: str) -> None:
        before = self.elections.get(name)
        request = self._requests[name]
        after = ElectionRecord(state, request, self._world.now, holder, term, outcome=outcome)
        if before is None or (before.state, before.outcome) != (state, outcome):
            self._change(name, after)

    def _change(self, name: str, after: ElectionRecord) -> None:
        before = self.elections.get(name)
        self.elections[name] = after
        self._checkers.changed(name, before, after)

    # ---- membership --------------------------------------------------------------------------------

    def _read_member(self, record: Record) -> None:
        for change in record.effects:
            self._at(record.at.boot_s, self._member_changed, record.who, change)
        self._at(record.at.boot_s, self._views.__setitem__, record.who, record.view)

    def _member_changed(self, observer: str, change: Joined | Left | Lost) -> None:
        subject = change.member.holder
        match change:
            case Joined(returned=returned):
                self.counts.returned += returned
                self._members.joined(observer, subject, returned=returned)
            case Left():
                self._members.gone(observer, subject)
            case Lost(by=by):
                self.counts.lost += 1
                well = self._is_well(_place(observer), _place(by), _place(subject), self._world.now)
                reason = change.member.reason or f"by {by}"
                self._members.gone(observer, subject, unfounded=reason if well else "")

    # ---- inside ------------------------------------------------------------------------------------

    def _at(self, at_s: float, happen: Callable[..., Any], *arguments: Any) -> None:
        self._facts.append((at_s, len(self._facts), lambda: happen(*arguments)))

    def _report(self, promise: str, detail: str) -> None:
        self.violations.append(Violation(promise, self._world.now, "", detail))

    def _collect(self) -> None:
        """The simulator ends with the first; here all of them are of interest."""
        if self._checkers.violation is not None:
            self.violations.append(self._checkers.violation)
            self._checkers.violation = None


def _placed(term: int, asked_s: float, answered: Instant) -> float:
    """When the store gave this term, on the boot clock."""
    given_s = term / 1e6 - (answered.wall_s - answered.boot_s)
    return min(max(given_s, asked_s), answered.boot_s)


def _place(node: str) -> str:
    return node.partition("@")[0]
