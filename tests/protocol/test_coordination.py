"""Every row of the store's tables, and the promises that must hold over all of their histories."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.protocol.leadership.coordination import (
    ATTEMPTS_MAX,
    CLOSED_STATES,
    NO_LEASE,
    Busy,
    Closed,
    ElectionRecord,
    ElectionReply,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    LeaseRecord,
    LeaseReply,
    Policy,
    StoreFacts,
    acquire_lease,
    claim_election,
    election_key,
    finish_election,
    holds_lease,
    is_unfinished,
    next_term,
    open_election,
    read_lease,
    release_lease,
    renew_election,
    renew_lease,
    start_election,
    update_lease,
)

EXAMPLES = 500 if os.environ.get("UMBEL_SOAK") else 100
A, B = "ada.1.100", "bob.2.200"
TTL = 10.0
BORN = 1_000.0
STORE = StoreFacts(born=BORN, last_term=0)


def at(seconds: float) -> Instant:
    """Unlike in life the two clocks differ by a round number: a mix-up of them shows."""
    return Instant(boot_s=seconds, wall_s=BORN + seconds)


def ask(
    policy: Policy = Policy.AT_MOST_ONCE, asked_at: float = BORN, expires_s: float = 300.0
) -> ElectionRequest:
    return ElectionRequest("e", "task", b"{}", policy, asked_at, expires_s)


def claim(
    record: ElectionRecord | None,
    holder: str = A,
    *,
    now: Instant,
    request: ElectionRequest | None = None,
    store: StoreFacts = STORE,
) -> tuple[ElectionRecord | None, ElectionReply]:
    return claim_election(record, holder, request or ask(), ttl_s=TTL, now=now, store=store)


def held(
    holder: str = A, *, policy: Policy = Policy.AT_MOST_ONCE, attempt: int = 1, started: bool = False
) -> ElectionRecord:
    """Held since second 0, so its time is over at second 10."""
    return ElectionRecord(
        ElectionState.HELD, ask(policy), BORN, holder, 7, attempt, started, expires_at=TTL, ttl_s=TTL
    )


# ---- open ------------------------------------------------------------------------------------------


def test_opening_makes_a_record_once() -> None:
    opened = open_election(None, ask(), at(1))
    assert opened == ElectionRecord(ElectionState.OPEN, ask(asked_at=BORN + 1), changed_at=BORN + 1)
    assert open_election(opened, ask(Policy.AT_LEAST_ONCE), at(2)) is opened
    assert open_election(held(), ask(), at(2)) == held()


@pytest.mark.parametrize("wrong_by_s", [-86_400.0, 86_400.0])
def test_an_election_is_kept_under_the_stores_time_whatever_its_askers_clock_says(wrong_by_s: float) -> None:
    opened = open_election(None, ask(asked_at=BORN + wrong_by_s), at(1))
    assert opened.request.asked_at == BORN + 1


# ---- claim -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [None, ElectionRecord(ElectionState.OPEN, ask(), BORN)])
def test_what_nobody_holds_is_granted(record: ElectionRecord | None) -> None:
    after, reply = claim(record, now=at(1))
    term = int((BORN + 1) * 1_000_000)
    assert reply == Granted(term, 1)
    assert after == ElectionRecord(
        ElectionState.HELD, ask(), BORN + 1, A, term, 1, started=False, expires_at=1 + TTL, ttl_s=TTL
    )


def test_a_holder_that_asks_again_gets_the_same_answer() -> None:
    assert claim(held(), A, now=at(9.9)) == (held(), Granted(7, 1))


def test_others_are_told_who_holds_it_and_for_how_long() -> None:
    assert claim(held(), B, now=at(4)) == (held(), Busy(A, 7, 6.0))


def test_a_winner_lost_after_its_start_ends_an_election_that_may_run_once() -> None:
    after, reply = claim(held(started=True), B, now=at(TTL))
    assert reply == Closed(ElectionState.FAILED, A, 7, "winner lost after start", by_me=True)
    assert after is not None and after.state is ElectionState.FAILED and after.started


def test_a_winner_lost_after_its_start_is_replaced_where_the_election_may_run_again() -> None:
    record = held(policy=Policy.AT_LEAST_ONCE, started=True)
    after, reply = claim(record, B, now=at(TTL), store=StoreFacts(BORN, last_term=7))
    assert isinstance(reply, Granted) and reply.attempt == 2 and reply.term > 7
    assert after is not None and (after.holder, after.started) == (B, False)


@pytest.mark.parametrize("holder", [A, B])
def test_a_winner_lost_before_its_start_is_replaced(holder: str) -> None:
    after, reply = claim(held(), holder, now=at(TTL))
    assert isinstance(reply, Granted) and reply.attempt == 2
    assert after is not None and after.expires_at == 2 * TTL


def test_the_last_attempt_is_the_last() -> None:
    after, reply = claim(held(attempt=ATTEMPTS_MAX), B, now=at(TTL))
    assert reply == Closed(ElectionState.FAILED, A, 7, "attempts", by_me=True)
    assert after is not None and after.state is ElectionState.FAILED


@pytest.mark.parametrize("record", [None, ElectionRecord(ElectionState.OPEN, ask(), BORN), held()])
def test_a_request_past_its_deadline_expires_unless_it_is_held_or_has_started(
    record: ElectionRecord | None,
) -> None:
    assert isinstance(claim(record, B, now=at(300))[1], Granted)
    after, reply = claim(record, B, now=at(300.1))
    assert isinstance(reply, Closed)
    assert (reply.state, reply.outcome, reply.by_me) == (ElectionState.EXPIRED, "deadline", True)
    assert after is not None and after.state is ElectionState.EXPIRED


def test_a_deadline_does_not_touch_who_holds_it_nor_what_has_started() -> None:
    holding = replace(held(), expires_at=400.0)
    assert claim(holding, A, now=at(350)) == (holding, Granted(7, 1))
    started = held(policy=Policy.AT_LEAST_ONCE, started=True)
    assert isinstance(claim(started, B, now=at(350))[1], Granted)


@pytest.mark.parametrize("state", sorted(CLOSED_STATES))
def test_a_closed_election_stays_closed_whatever_is_asked(state: ElectionState) -> None:
    record = replace(held(), state=state, outcome="so it was")
    for now in (at(1), at(1000)):
        assert claim(record, A, now=now) == (record, Closed(state, A, 7, "so it was", by_me=False))


def test_a_request_older_than_the_store_is_refused_if_it_may_run_only_once() -> None:
    after, reply = claim(None, now=at(1), request=ask(asked_at=BORN - 1))
    assert reply == Closed(ElectionState.EXPIRED, "", 0, "store reset", by_me=True)
    assert after is not None and after.state is ElectionState.EXPIRED


def test_a_request_older_than_the_store_waits_one_ttl_if_it_may_run_again() -> None:
    request = ask(Policy.AT_LEAST_ONCE, asked_at=BORN - 1)
    assert claim(None, now=at(4), request=request) == (None, Busy("", 0, 6.0))
    assert isinstance(claim(None, now=at(TTL), request=request)[1], Granted)


# ---- start, renew, done ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [start_election, renew_election])
def test_only_the_holder_in_its_term_and_time_may_go_on(
    step: Callable[[ElectionRecord | None, str, int, Instant], ElectionRecord | None],
) -> None:
    assert step(held(), A, 7, at(9.9)) is not None
    assert step(held(), B, 7, at(1)) is None
    assert step(held(), A, 8, at(1)) is None
    assert step(held(), A, 7, at(TTL)) is None
    assert step(None, A, 7, at(1)) is None
    for state in [ElectionState.OPEN, *CLOSED_STATES]:
        assert step(replace(held(), state=state), A, 7, at(1)) is None


def test_starting_is_noted_and_prolongs_as_renewing_does() -> None:
    assert start_election(held(), A, 7, at(5)) == replace(
        held(), started=True, expires_at=5 + TTL, changed_at=BORN + 5
    )
    assert renew_election(held(), A, 7, at(5)) == replace(held(), expires_at=5 + TTL, changed_at=BORN + 5)


def test_what_was_done_is_noted_however_late_it_is_told() -> None:
    done = replace(held(), state=ElectionState.DONE, outcome="sent", changed_at=BORN + 50)
    assert finish_election(held(), A, 7, "sent", at(50)) == done
    assert finish_election(done, A, 7, "sent", at(50)) == done
    failed = replace(held(started=True), state=ElectionState.FAILED, outcome="winner lost after start")
    told = finish_election(failed, A, 7, "sent", at(50))
    assert told is not None and (told.state, told.outcome) == (ElectionState.DONE, "sent")


def test_nobody_else_can_finish_an_election() -> None:
    assert finish_election(None, A, 7, "", at(1)) is None
    assert finish_election(held(), B, 7, "", at(1)) is None
    assert finish_election(held(), A, 6, "", at(1)) is None
    for state in (ElectionState.OPEN, ElectionState.FAILED, ElectionState.EXPIRED):
        assert finish_election(replace(held(), state=state), A, 7, "", at(1)) is None


def test_open_ones_and_those_whose_holder_is_silent_are_unfinished() -> None:
    assert is_unfinished(ElectionRecord(ElectionState.OPEN, ask(), BORN), at(0))
    assert not is_unfinished(held(), at(9.9))
    assert is_unfinished(held(), at(TTL))
    assert not any(is_unfinished(replace(held(), state=state), at(99)) for state in CLOSED_STATES)


# ---- terms and keys --------------------------------------------------------------------------------


def test_a_term_is_the_stores_time_in_microseconds_or_one_more_than_the_last() -> None:
    assert next_term(at(1), 0) == 1_001_000_000
    assert next_term(at(1), 5_000_000_000) == 5_000_000_001


def test_a_key_tells_namespaces_and_ids_apart() -> None:
    keys = {
        election_key(namespace, name) for namespace, name in [("a", "b"), ("ab", ""), ("a", "c"), ("", "ab")]
    }
    assert len(keys) == 4
    assert all(len(key) == 32 for key in keys)


# ---- leases ----------------------------------------------------------------------------------------

LEASE = LeaseRecord(A, term=7, expires_at=TTL, data=b"state")


def test_a_lease_that_nobody_holds_is_granted_under_a_new_term() -> None:
    record, reply = acquire_lease(None, A, ttl_s=TTL, now=at(1), last_term=2_000_000_000)
    assert record == LeaseRecord(A, 2_000_000_001, 1 + TTL)
    assert reply == LeaseReply(True, A, 2_000_000_001, TTL, b"")


def test_a_lease_is_refused_while_another_holds_it_and_taken_over_with_its_data_after() -> None:
    assert acquire_lease(LEASE, B, ttl_s=TTL, now=at(4), last_term=7) == (
        LEASE,
        LeaseReply(False, A, 7, 6.0, b"state"),
    )
    for holder in (A, B):
        record, reply = acquire_lease(LEASE, holder, ttl_s=TTL, now=at(TTL), last_term=7)
        assert reply.granted and reply.term > 7
        assert record == LeaseRecord(holder, reply.term, 2 * TTL, b"state")


def test_a_holder_that_acquires_again_keeps_its_term_for_another_ttl() -> None:
    record, reply = acquire_lease(LEASE, A, ttl_s=TTL, now=at(4), last_term=9)
    assert record == LEASE.replaced(expires_at=14.0)
    assert reply == LeaseReply(True, A, 7, TTL, b"state")


def test_only_the_holder_in_its_term_and_time_may_change_a_lease() -> None:
    assert renew_lease(LEASE, A, 7, ttl_s=TTL, now=at(5)) == LEASE.replaced(expires_at=15.0)
    assert update_lease(LEASE, A, 7, b"new", at(5)) == LEASE.replaced(data=b"new")
    assert release_lease(LEASE, A, 7, at(5)) == LeaseRecord("", 7, 0.0, b"state")
    for record, holder, term, now in (
        (None, A, 7, at(1)),
        (LEASE, B, 7, at(1)),
        (LEASE, A, 8, at(1)),
        (LEASE, A, 7, at(TTL)),
        (LeaseRecord("", 7, 0.0), "", 7, at(1)),
    ):
        assert not holds_lease(record, holder, term, now)
        assert renew_lease(record, holder, term, ttl_s=TTL, now=now) is None
        assert update_lease(record, holder, term, b"", now) is None
        assert release_lease(record, holder, term, now) is None


def test_reading_a_lease_shows_its_holder_only_while_it_lasts() -> None:
    assert read_lease(None, at(1)) == NO_LEASE
    assert read_lease(LEASE, at(4)) == LeaseReply(False, A, 7, 6.0, b"state")
    assert read_lease(LEASE, at(TTL)) == LeaseReply(False, "", 7, 0.0, b"state")


# ---- over all histories ----------------------------------------------------------------------------

HOLDERS = (A, B, "cy.3.300")
steps = st.tuples(
    st.sampled_from(["open", "claim", "claim", "start", "renew", "done", "forget"]),
    st.sampled_from(HOLDERS),
    st.floats(0.0, 12.0),  # time that passes before the step
    st.booleans(),  # act on the newest grant, or on an older one
)


@dataclass
class History:
    """A store with one election, as its workers see it. `runs` are the starts answered with yes."""

    policy: Policy
    record: ElectionRecord | None = None
    now: float = 1.0
    last_term: int = 0
    born: float = BORN
    grants: dict[str, list[int]] = field(default_factory=dict)
    runs: list[tuple[str, int]] = field(default_factory=list)
    done: bool = False

    def step(self, what: str, holder: str, pause_s: float, newest: bool) -> None:
        self.now += pause_s
        terms = self.grants.get(holder, [])
        term = 0 if not terms else terms[-1] if newest else terms[0]
        match what:
            case "open":
                self.record = open_election(self.record, ask(self.policy), at(self.now))
            case "claim":
                self._claim(holder)
            case "start":
                self._keep(start_election(self.record, holder, term, at(self.now)), holder, term, run=True)
            case "renew":
                self._keep(renew_election(self.record, holder, term, at(self.now)), holder, term)
            case "done":
                kept = finish_election(self.record, holder, term, "ok", at(self.now))
                self._keep(kept, holder, term)
                self.done = self.done or kept is not None
            case "forget":  # the store loses everything but its clock
                self.record, self.last_term, self.born = None, 0, BORN + self.now

    def _claim(self, holder: str) -> None:
        store = StoreFacts(self.born, self.last_term)
        self.record, reply = claim(
            self.record, holder, now=at(self.now), request=ask(self.policy), store=store
        )
        if isinstance(reply, Granted):
            assert self.record is not None and self.record.holder == holder
            self.last_term = max(self.last_term, reply.term)
            known = self.grants.setdefault(holder, [])
            everyones = [term for terms in self.grants.values() for term in terms]
            if reply.term not in known:
                assert reply.term > max(everyones, default=0), "terms strictly increase"
                known.append(reply.term)

    def _keep(self, kept: ElectionRecord | None, holder: str, term: int, *, run: bool = False) -> None:
        if kept is None:
            return
        assert (kept.holder, kept.term) == (holder, term)
        self.record = kept
        if run and (holder, term) not in self.runs:
            assert not self.done, "nothing runs after DONE"
            assert all(term > earlier for _, earlier in self.runs), "runs carry growing terms"
            self.runs.append((holder, term))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(steps, max_size=40))
def test_an_election_that_may_run_once_runs_at_most_once_even_if_the_store_forgets(
    history: list[tuple[str, str, float, bool]],
) -> None:
    world = History(Policy.AT_MOST_ONCE)
    forgotten = False
    for what, holder, pause_s, newest in history:
        forgotten = forgotten or what == "forget"
        if what == "open" and forgotten:
            continue  # a client that opens it anew asks for a new election
        world.step(what, holder, pause_s, newest)
        assert len(world.runs) <= 1


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(steps.filter(lambda step: step[0] != "forget"), max_size=40))
def test_an_election_that_may_run_again_does_so_under_growing_terms_and_never_after_it_is_done(
    history: list[tuple[str, str, float, bool]],
) -> None:
    world = History(Policy.AT_LEAST_ONCE)
    for step in history:
        world.step(*step)
        assert len(world.runs) <= ATTEMPTS_MAX


lease_steps = st.tuples(
    st.sampled_from(["acquire", "renew", "release", "update"]),
    st.sampled_from(HOLDERS),
    st.floats(0.0, 12.0),
    st.booleans(),
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(lease_steps, max_size=40))
def test_a_lease_has_at_most_one_valid_holder_at_any_instant(
    history: list[tuple[str, str, float, bool]],
) -> None:
    record: LeaseRecord | None = None
    now, last_term = 1.0, 0
    grants: dict[str, list[int]] = {holder: [] for holder in HOLDERS}
    for what, holder, pause_s, newest in history:
        now += pause_s
        term = 0 if not grants[holder] else grants[holder][-1 if newest else 0]
        if what == "acquire":
            record, reply = acquire_lease(record, holder, ttl_s=TTL, now=at(now), last_term=last_term)
            if reply.granted and reply.term not in grants[holder]:
                assert reply.term > last_term
                last_term = reply.term
                grants[holder].append(reply.term)
        elif what == "renew":
            record = renew_lease(record, holder, term, ttl_s=TTL, now=at(now)) or record
        elif what == "release":
            record = release_lease(record, holder, term, at(now)) or record
        else:
            record = update_lease(record, holder, term, b"x", at(now)) or record
        valid = [
            (name, given_term)
            for name, terms in grants.items()
            for given_term in terms
            if holds_lease(record, name, given_term, at(now))
        ]
        assert len(valid) <= 1
        assert all(given_term == last_term for _, given_term in valid), "an older term holds nothing"
