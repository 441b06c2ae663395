"""From a request to its outcome: every row of one node's table, as docs/protocol/election.md has it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.protocol.electing import (
    AGAIN,
    ALL_STAGES,
    KEY,
    ME,
    NODE,
    ONCE,
    OTHER,
    TTL,
    WALL,
    Node,
    acting,
    claiming,
    closed,
    finishing,
    starting,
    waiting,
    watching,
)
from umbel.protocol.election.events import (
    Asked,
    CallClaim,
    CallFinish,
    CallRenew,
    CallStart,
    CancelHandler,
    ClaimReplied,
    ClosedReceived,
    Dropped,
    ElectedReceived,
    Finished,
    FinishReplied,
    HandlerEnded,
    Phase,
    Prolong,
    PublishElected,
    RenewReplied,
    Stage,
    StartReplied,
    Swept,
)
from umbel.protocol.election.table import ElectionSettings, cohort
from umbel.protocol.leadership.coordination import (
    Busy,
    Closed,
    ElectionRequest,
    ElectionState,
    Granted,
    Policy,
)
from umbel.protocol.machine import Tick

# ---- a request is heard ----------------------------------------------------------------------------


def test_a_request_waits_for_its_turn_before_the_store_is_asked() -> None:
    node = Node()
    node.machine.nodes = 1000
    assert node.do(Asked(ONCE)) == []
    assert node.machine.deadline == cohort("e", NODE, 1000) * 0.25
    assert node.record.stage is Stage.WAIT


@pytest.mark.parametrize("reach", ALL_STAGES)
def test_a_second_request_of_one_id_changes_nothing(reach: Callable[[], Node]) -> None:
    node = reach()
    before = node.machine.snapshot()
    assert node.do(Asked(replace(ONCE, action=b"[]"))) == []
    assert node.machine.snapshot() == before


def test_a_request_that_no_store_remembers_is_dropped() -> None:
    assert Node().do(Asked(replace(ONCE, asked_at=WALL - 86_700.1))) == [Dropped("e", "expired")]


def test_whether_a_request_is_over_is_for_the_store_to_judge_not_for_our_wall_clock() -> None:
    node = Node()
    assert node.do(Asked(replace(ONCE, asked_at=WALL - 86_400.0))) == []
    assert node.record.stage is Stage.WAIT


@pytest.mark.parametrize(
    "broken",
    [
        replace(ONCE, election_id=""),
        replace(ONCE, election_id="x" * 129),
        replace(ONCE, election_id="\ud800"),
        replace(ONCE, topic=""),
        replace(ONCE, asked_at=float("nan")),
        replace(ONCE, expires_s=12 * 3600 + 1.0),
        replace(ONCE, expires_s=0.0),
        replace(ONCE, expires_s=float("nan")),
    ],
)
def test_a_malformed_request_is_dropped_from_wherever_it_comes(broken: ElectionRequest) -> None:
    for event in (Asked(broken), Swept(broken), ElectedReceived(broken.election_id, OTHER, 5, 1, broken)):
        node = Node()
        (dropped,) = node.do(event)
        assert isinstance(dropped, Dropped) and dropped.reason and not dropped.shed
        assert not node.machine.snapshot().records


def test_a_node_without_a_handler_only_observes() -> None:
    node = Node("other")
    assert node.do(Asked(ONCE)) == [Finished("e", None)]
    assert node.record.stage is Stage.CLOSED
    assert node.machine.deadline == 20.0


def test_a_table_full_of_undecided_elections_sheds_and_says_so_km1() -> None:
    node = Node(settings=ElectionSettings(records_max=2))
    node.do(Asked(ONCE))
    node.do(Asked(replace(ONCE, election_id="f")))
    assert node.do(Asked(replace(ONCE, election_id="g"))) == [Dropped("g", "table full", shed=True)]
    assert node.do(Swept(replace(ONCE, election_id="g"))) == [Dropped("g", "table full", shed=True)]
    assert node.machine.snapshot().shed == 2


def test_tombstones_make_room_for_new_elections_oldest_first_km1() -> None:
    node = Node(settings=ElectionSettings(records_max=2))
    for name in ("a", "b"):
        node.do(Asked(replace(ONCE, election_id=name)))
        node.do(ClosedReceived(name, Phase.DONE))
    assert node.do(Asked(ONCE)) == []
    assert [record.election_id for record in node.machine.snapshot().records] == ["b", "e"]


def test_the_weight_of_requests_is_bounded_and_tombstones_weigh_nothing_km1() -> None:
    node = Node(settings=ElectionSettings(request_bytes_max=3_000))
    heavy = replace(ONCE, action=b"x" * 2_000)
    assert node.do(Asked(heavy)) == []
    second = replace(heavy, election_id="f")
    assert node.do(Asked(second)) == [Dropped("f", "table full", shed=True)]
    node.do(ClosedReceived("e", Phase.FAILED))
    assert node.machine.snapshot().request_bytes == 0
    assert node.do(Asked(second)) == []


# ---- claiming --------------------------------------------------------------------------------------


def test_a_claim_without_an_answer_is_made_again() -> None:
    node = claiming()
    assert node.do(Tick(), 0.9) == []
    assert node.do(Tick(), 1.0) == [CallClaim("e", KEY, ME, ONCE, TTL, sent_s=1.0)]


def test_a_record_leaves_when_the_store_stays_silent_past_the_end_of_its_request() -> None:
    node = claiming()
    effects = [effect for second in range(1, 310) for effect in node.do(Tick(), float(second))]
    assert effects[-1] == Dropped("e", "store silent")
    assert not node.machine.snapshot().records and node.machine.deadline is None


def test_who_is_granted_tells_everyone_and_asks_to_start() -> None:
    assert starting().record.stage is Stage.START


def test_who_meets_a_holder_watches_until_its_time_is_over() -> None:
    node = watching(left_s=4.0)
    assert node.machine.deadline == 4.0
    assert node.do(Tick(), 4.0) == [CallClaim("e", KEY, ME, ONCE, TTL, sent_s=4.0)]


@pytest.mark.parametrize("state", [ElectionState.FAILED, ElectionState.EXPIRED])
def test_who_closes_an_election_tells_everyone(state: ElectionState) -> None:
    reply = Closed(state, OTHER, 5, "attempts", by_me=True)
    assert claiming().do(ClaimReplied("e", 0.0, reply)) == [
        PublishElected(Phase(state), "e", "task", Policy.AT_MOST_ONCE, OTHER, 5, 0, "attempts"),
        Finished("e", state, "attempts"),
    ]


def test_who_finds_an_election_closed_tells_nobody() -> None:
    reply = Closed(ElectionState.DONE, OTHER, 5, "ok", by_me=False)
    assert claiming().do(ClaimReplied("e", 0.0, reply)) == [Finished("e", ElectionState.DONE, "ok")]


def test_a_late_answer_that_we_closed_it_is_still_told() -> None:
    node = watching()
    reply = Closed(ElectionState.FAILED, OTHER, 5, "attempts", by_me=True)
    assert len(node.do(ClaimReplied("e", 0.0, reply))) == 2


@pytest.mark.parametrize("reach", [waiting, starting, acting, finishing, watching, closed])
@pytest.mark.parametrize("reply", [Granted(9, 2), Busy(OTHER, 9, 1.0)])
def test_an_answer_to_a_claim_that_is_no_longer_waited_for_is_ignored(
    reach: Callable[[], Node], reply: Granted
) -> None:
    node = reach()
    before = node.machine.snapshot()
    assert node.do(ClaimReplied("e", 0.0, reply)) == []
    assert node.machine.snapshot() == before


def test_the_same_grant_again_is_told_once_kc1() -> None:
    node = starting()
    node.do(StartReplied("e", 7, 0.1, ok=False), 0.2)
    node.do(Tick(), 0.2)
    assert node.do(ClaimReplied("e", 0.2, Granted(7, 1)), 0.3) == [CallStart("e", KEY, ME, 7, 0.3)]


# ---- starting --------------------------------------------------------------------------------------


def test_start_is_asked_again_while_the_grant_is_believed() -> None:
    node = starting()
    assert node.do(Tick(), 1.1) == [CallStart("e", KEY, ME, 7, 1.1)]
    assert node.do(Tick(), 9.0) == []
    assert node.record.stage is Stage.WATCH
    assert node.machine.deadline == 19.0


def test_no_effect_before_start_is_answered_with_yes_r1() -> None:
    node = starting()
    assert node.do(StartReplied("e", 7, 0.1, ok=False), 0.2) == []
    assert node.record.stage is Stage.WATCH


def test_an_answer_to_start_of_another_term_is_ignored() -> None:
    node = starting()
    assert node.do(StartReplied("e", 6, 0.1, ok=True), 0.2) == []
    assert node.record.stage is Stage.START


@pytest.mark.parametrize("reach", [waiting, claiming, acting, finishing, watching, closed])
def test_an_answer_to_start_in_another_stage_is_ignored(reach: Callable[[], Node]) -> None:
    node = reach()
    before = node.machine.snapshot()
    assert node.do(StartReplied("e", 7, 0.0, ok=True)) == []
    assert node.machine.snapshot() == before


def test_a_late_yes_runs_what_nobody_else_may_ever_run() -> None:
    assert len(starting(ONCE).do(StartReplied("e", 7, 0.1, ok=True), 50.0)) == 1


def test_a_late_yes_does_not_run_what_another_may_have_taken_over() -> None:
    node = starting(AGAIN)
    assert node.do(StartReplied("e", 7, 0.1, ok=True), 9.1) == []
    assert node.record.stage is Stage.WATCH


def test_a_request_that_expired_meanwhile_is_not_run() -> None:
    node = starting()
    assert node.do(StartReplied("e", 7, 300.0, ok=True), 300.1) == []
    assert node.record.stage is Stage.WATCH


@pytest.mark.parametrize("asked", [ONCE, AGAIN])
def test_answers_that_come_twice_run_it_once_even_when_the_sweep_has_made_it_anew(
    asked: ElectionRequest,
) -> None:
    node = acting(asked)
    node.do(HandlerEnded("e", 7, ok=True))
    node.do(FinishReplied("e", 7, ok=True))
    node.do(Swept(asked))
    node.do(ClaimReplied("e", 0.0, Granted(7, 1)))
    assert node.record.stage is Stage.START
    assert node.do(StartReplied("e", 7, 0.1, ok=True)) == []


# ---- acting ----------------------------------------------------------------------------------------


def test_the_time_of_a_running_handler_is_renewed_from_when_it_was_asked() -> None:
    node = acting()
    (renew,) = node.do(Tick(), 4.0)
    assert renew == CallRenew("e", KEY, ME, 7, 4.0)
    assert node.do(RenewReplied("e", 7, 4.0, ok=True), 6.0) == [Prolong("e", 7, 13.0)]


def test_a_lost_lease_cancels_what_another_may_run() -> None:
    node = acting(AGAIN)
    assert node.do(RenewReplied("e", 7, 4.0, ok=False), 4.1) == [CancelHandler("e", 7, "lease lost")]
    assert node.do(RenewReplied("e", 7, 4.0, ok=False), 4.1) == []
    assert node.machine.deadline is None


def test_a_cancelled_handler_reports_no_outcome() -> None:
    node = acting(AGAIN)
    node.do(RenewReplied("e", 7, 4.0, ok=False), 4.1)
    assert node.do(HandlerEnded("e", 7, ok=True), 5.0) == []
    assert node.record.stage is Stage.WATCH


def test_a_handler_that_stopped_because_it_was_cut_off_reports_no_outcome() -> None:
    """The store may still have it as ours: it must be run again, and not be taken for done."""
    node = acting(AGAIN)
    stopped = HandlerEnded("e", 7, ok=False, outcome="stopped", stopped=True)
    assert node.do(stopped, 10.0) == []
    assert node.record.stage is Stage.WATCH
    (claim,) = node.do(Tick(), 20.0)
    assert isinstance(claim, CallClaim)


def test_what_nobody_else_will_run_has_failed_when_it_stopped() -> None:
    node = acting(ONCE)
    stopped = HandlerEnded("e", 7, ok=False, outcome="stopped", stopped=True)
    assert node.do(stopped, 10.0) == [CallFinish("e", KEY, ME, 7, "error: stopped")]


def test_a_lost_lease_lets_finish_what_nobody_else_will_run() -> None:
    node = acting(ONCE)
    assert node.do(RenewReplied("e", 7, 4.0, ok=False), 4.1) == []
    assert node.do(HandlerEnded("e", 7, ok=True), 5.0) == [CallFinish("e", KEY, ME, 7, "ok")]


@pytest.mark.parametrize(
    ("ok", "phase", "outcome"), [(True, Phase.DONE, "ok"), (False, Phase.FAILED, "error: broken")]
)
def test_the_end_of_the_handler_is_stored_then_told(ok: bool, phase: Phase, outcome: str) -> None:
    node = finishing(ok=ok)
    assert node.do(FinishReplied("e", 7, ok=True)) == [
        PublishElected(phase, "e", "task", Policy.AT_MOST_ONCE, ME, 7, 1, outcome),
        Finished("e", ElectionState(phase), outcome),
    ]


def test_the_end_is_told_even_when_the_store_says_no() -> None:
    tell, _ = finishing().do(FinishReplied("e", 7, ok=False))
    assert isinstance(tell, PublishElected) and tell.phase is Phase.DONE


def test_the_end_is_repeated_to_a_silent_store_and_told_after_three_ttls() -> None:
    node = finishing()
    for second in range(2, 31):
        assert node.do(Tick(), float(second)) == [CallFinish("e", KEY, ME, 7, "ok")]
    tell, _ = node.do(Tick(), 31.0)
    assert isinstance(tell, PublishElected) and tell.phase is Phase.DONE


@pytest.mark.parametrize("event", [HandlerEnded("e", 6, True), RenewReplied("e", 6, 0.0, False)])
def test_what_belongs_to_an_older_term_is_ignored(event: HandlerEnded) -> None:
    node = acting()
    before = node.machine.snapshot()
    assert node.do(event) == []
    assert node.machine.snapshot() == before
