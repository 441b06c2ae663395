"""What real workers may be recorded to do, and what they may not: each checker fails where it should."""

from collections.abc import Callable
from typing import Any

from tests.partitions.recorder import Record
from tests.partitions.replay import Replay, Sample
from umbel.protocol.election import events as election
from umbel.protocol.leadership import lease
from umbel.protocol.leadership.coordination import (
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    LeaseReply,
    Policy,
)
from umbel.protocol.machine import Tick
from umbel.protocol.membership.members import Joined, Left, Lost, Member, MemberState
from umbel.sim.plan import Ask

WALL_S = 1_800_000_000.0  # where the boot clock begins
A, B = "a@h.1.1", "b@h.2.2"
TTL_S = 10.0


def at(boot_s: float) -> Instant:
    return Instant(boot_s, WALL_S + boot_s)


def term(boot_s: float) -> int:
    return int((WALL_S + boot_s) * 1e6)


def judged(*records: Record, samples: tuple[Sample, ...] = (), well: bool = False) -> list[str]:
    named = {
        effect.election_id for one in records for effect in one.effects if hasattr(effect, "election_id")
    }
    replay = Replay({name: ASKS[name] for name in named}, nodes=2, is_well=lambda *_: well)
    replay.read(records)
    replay.read_samples(samples)
    return [one.promise for one in replay.judge(there=frozenset())]


# ---- leases ----------------------------------------------------------------------------------------


def leads(who: str, asked_s: float, given_s: float, *, until: float | None = None) -> list[Record]:
    """It asks, is granted the lease a tenth of a second after it was given, and believes in it."""
    reply = LeaseReply(True, who, term(given_s), TTL_S, b"")
    believed = asked_s + 0.9 * TTL_S if until is None else until
    ask = lease.CallAcquire("scheduler", who, TTL_S, asked_s)
    return [
        Record(at(asked_s), who, "lease", "scheduler", Tick(), (ask,)),
        Record(
            at(given_s + 0.1),
            *(who, "lease", "scheduler", lease.AcquireReplied(asked_s, reply), ()),
            (term(given_s), believed),
        ),
    ]


def test_a_leader_after_another_is_right_and_one_beside_it_is_not() -> None:
    assert judged(*leads(A, 1.0, 1.1), *leads(B, 11.0, 11.2)) == []
    assert "L1" in judged(*leads(A, 1.0, 1.1), *leads(B, 6.0, 6.1)), "given away too early"
    assert "L1" in judged(*leads(A, 1.0, 1.1, until=30.0), *leads(B, 11.0, 11.2)), "believes for too long"


def test_a_lease_that_was_renewed_or_released_counts_as_that() -> None:
    renewed = lease.LeaseRenewReplied(term(1.1), 6.0, True)
    renewal = Record(at(6.2), A, "lease", "scheduler", renewed, (), (term(1.1), 15.0))
    assert judged(*leads(A, 1.0, 1.1), renewal, *leads(B, 16.5, 16.6)) == []
    assert "L1" in judged(*leads(A, 1.0, 1.1), renewal, *leads(B, 12.0, 12.1))
    release = lease.CallRelease("scheduler", A, term(1.1))
    released = Record(at(3.0), A, "lease", "scheduler", lease.StopCampaign(), (release,))
    assert judged(*leads(A, 1.0, 1.1), released, *leads(B, 3.5, 3.6)) == []


def test_a_term_is_given_once() -> None:
    release = lease.CallRelease("scheduler", A, term(1.1))
    released = Record(at(3.0), A, "lease", "scheduler", lease.StopCampaign(), (release,))
    assert "L1" in judged(*leads(A, 1.0, 1.1), released, *_with_term(leads(B, 3.5, 3.6), term(1.1)))


def _with_term(records: list[Record], number: int) -> list[Record]:
    ask, granted = records
    reply = granted.event.reply.replaced(term=number)
    event = granted.event.replaced(reply=reply)
    return [ask, Record(granted.at, granted.who, "lease", "scheduler", event, (), (number, granted.view[1]))]


def test_what_the_store_was_seen_to_say_is_compared_with_who_believes_to_lead() -> None:
    agrees = Sample(2.0, 2.1, "scheduler", A, term(1.1), 9.0)
    other = Sample(2.0, 2.1, "scheduler", B, term(1.5), 9.0)
    free = Sample(2.0, 2.1, "scheduler", "", term(1.1), 0.0)
    early = Sample(0.9, 1.3, "scheduler", "", 0, 0.0)  # asked before it was given
    assert judged(*leads(A, 1.0, 1.1), samples=(agrees, early)) == []
    assert judged(*leads(A, 1.0, 1.1), samples=(other,)) == ["L1"]
    stale = Sample(5.9, 6.3, "scheduler", A, term(1.1), 4.5)  # renewed while it was asked
    renewed = lease.LeaseRenewReplied(term(1.1), 6.0, True)
    renewal = Record(at(6.2), A, "lease", "scheduler", renewed, (), (term(1.1), 15.0))
    assert judged(*leads(A, 1.0, 1.1), renewal, samples=(stale,)) == []
    shorter = Sample(6.3, 6.4, "scheduler", A, term(1.1), 4.5)
    assert judged(*leads(A, 1.0, 1.1), renewal, samples=(shorter,)) == ["L1"]
    assert judged(*leads(A, 1.0, 1.1), samples=(free,)) == ["L1"]


# ---- elections -------------------------------------------------------------------------------------

ASKS = {
    "once": Ask(0.0, "once", Policy.AT_MOST_ONCE),
    "again": Ask(0.0, "again", Policy.AT_LEAST_ONCE),
}


def request(name: str) -> ElectionRequest:
    return ElectionRequest(name, "task", b"{}", ASKS[name].policy, WALL_S)


def runs(who: str, name: str, asked_s: float, *, starts: bool = True, attempt: int = 1) -> list[Record]:
    """It claims, starts and runs."""
    given, wanted = term(asked_s + 0.1), request(name)
    claim = election.CallClaim(name, "key", who, wanted, TTL_S, asked_s)
    granted = election.ClaimReplied(name, asked_s, Granted(given, attempt))
    tell = election.PublishElected(election.Phase.ELECTED, name, "task", wanted.policy, who, given, attempt)
    run = election.RunHandler(wanted, "key", given, attempt, asked_s + 0.2 + 0.9 * TTL_S)
    started = election.StartReplied(name, given, asked_s + 0.2, True) if starts else Tick()
    return [
        Record(at(asked_s), who, "elections", "", Tick(), (claim,)),
        Record(at(asked_s + 0.2), who, "elections", "", granted, (tell,)),
        Record(at(asked_s + 0.4), who, "elections", "", started, (run,)),
    ]


def ends(who: str, name: str, asked_s: float, at_s: float, outcome: str = "") -> list[Record]:
    """Its handler returns, and the store is told."""
    given = term(asked_s + 0.1)
    said = outcome or f"ok: {who} {given}"
    finish = election.CallFinish(name, "key", who, given, said)
    done = election.FinishReplied(name, given, True)
    return [
        Record(at(at_s), who, "elections", "", election.HandlerEnded(name, given, True), (finish,)),
        Record(at(at_s + 0.1), who, "elections", "", done, ()),
    ]


def test_an_election_that_ran_once_and_was_closed_is_right() -> None:
    assert judged(*runs(A, "once", 1.0), *ends(A, "once", 1.0, 2.0)) == []
    assert judged(*runs(A, "once", 1.0)) == ["KL1"], "it was never closed"


def test_a_second_run_breaks_at_most_once_and_is_allowed_to_at_least_once() -> None:
    ended = ends(B, "once", 12.0, 13.0)
    assert "KS1" in judged(*runs(A, "once", 1.0), *runs(B, "once", 12.0, attempt=2), *ended)
    ended = ends(B, "again", 12.0, 13.0)
    assert judged(*runs(A, "again", 1.0), *runs(B, "again", 12.0, attempt=2), *ended) == []
    ended = ends(B, "again", 5.0, 6.0)
    assert "KS2" in judged(*runs(A, "again", 1.0), *runs(B, "again", 5.0, attempt=2), *ended)


def test_nobody_runs_what_it_did_not_start_or_what_is_done() -> None:
    assert "KS1" in judged(*runs(A, "once", 1.0, starts=False), *ends(A, "once", 1.0, 2.0))
    done = [*runs(A, "again", 1.0), *ends(A, "again", 1.0, 2.0)]
    assert "KS3" in judged(*done, *runs(B, "again", 15.0, attempt=2))
    assert "KS2" in judged(*runs(A, "again", 1.0), *ends(A, "again", 1.0, 2.0, outcome="ok: somebody"))


def test_what_the_store_says_in_the_end_closes_an_election() -> None:
    replay = Replay({"once": ASKS["once"]}, nodes=2, is_well=lambda *_: False)
    replay.opened(0.5, request("once"))
    failed = ElectionRecord(ElectionState.FAILED, request("once"), 0.0, A, term(1.1), outcome="winner lost")
    replay.read(runs(A, "once", 1.0))
    replay.read_outcomes(60.0, {"once": failed})
    assert replay.judge(there=frozenset()) == []


# ---- membership ------------------------------------------------------------------------------------


def sees(make: Callable[[Member], Any], at_s: float, *, observer: str = A) -> Record:
    state = MemberState.LOST if make is lost else MemberState.ALIVE
    change = make(Member("b@h", 2, 2, state, "umbel", 0, 1.0, 0.0, 0.0, "silent"))
    return Record(at(at_s), observer, "membership", "", None, (change,), frozenset())


def lost(member: Member) -> Lost:
    return Lost(member, "a@h")


def returns(member: Member) -> Joined:
    return Joined(member, returned=True)


def test_a_node_is_lost_after_it_joined_and_returns_after_it_was_lost() -> None:
    assert judged(sees(Joined, 1.0), sees(lost, 2.0), sees(returns, 3.0), sees(Left, 4.0)) == []
    assert judged(sees(Joined, 1.0), sees(Joined, 2.0)) == ["M1"]
    assert judged(sees(Joined, 1.0), sees(lost, 2.0), sees(lost, 3.0)) == ["M1"]
    assert judged(sees(Joined, 1.0), sees(returns, 2.0)) == ["M1"]


def test_a_node_that_was_well_must_not_be_lost() -> None:
    assert judged(sees(Joined, 1.0), sees(lost, 2.0), well=True) == ["M2"]


def test_who_is_still_missing_in_the_end_is_found() -> None:
    replay = Replay({}, nodes=2, is_well=lambda *_: False)
    replay.read([sees(Joined, 1.0), sees(lost, 2.0)])
    assert [one.promise for one in replay.judge(there=frozenset({A, B}))] == ["M3", "M3"]
