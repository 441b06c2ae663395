"""What a node makes of what others say, of the sweep, of a stop and of its timers."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.protocol.electing import (
    KEY,
    ME,
    ONCE,
    OTHER,
    TTL,
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
    ClaimReplied,
    ClosedReceived,
    ElectedReceived,
    Finished,
    FinishReplied,
    HandlerEnded,
    HolderLost,
    Phase,
    PublishElected,
    Resend,
    Stage,
    StopElections,
    Swept,
)
from umbel.protocol.election.table import cohort
from umbel.protocol.leadership.coordination import (
    Closed,
    ElectionState,
    Granted,
)
from umbel.protocol.machine import Tick

# ---- hearing from others ---------------------------------------------------------------------------


def test_an_election_first_heard_of_by_its_winner_is_watched() -> None:
    node = Node()
    assert node.do(ElectedReceived("e", OTHER, 5, 1, ONCE)) == []
    assert (node.record.stage, node.machine.deadline) == (Stage.WATCH, TTL)


def test_an_election_first_heard_of_without_its_request_cannot_be_followed() -> None:
    node = Node()
    assert node.do(ElectedReceived("e", OTHER, 5, 1, None)) == []
    assert node.do(ElectedReceived("e", OTHER, 5, 1, replace(ONCE, election_id="f"))) == []
    assert not node.machine.snapshot().records


def test_who_waits_stands_back_for_the_winner() -> None:
    node = waiting()
    assert node.do(ElectedReceived("e", OTHER, 5, 1, ONCE)) == []
    assert (node.record.stage, node.record.winner, node.machine.deadline) == (Stage.WATCH, OTHER, TTL)


def test_an_older_winner_changes_nothing() -> None:
    node = watching()
    assert node.do(ElectedReceived("e", "carl.3.300", 5, 1, ONCE)) == []
    assert node.record.winner == OTHER


@pytest.mark.parametrize("reach", [claiming, starting, acting, finishing, closed])
def test_who_asks_or_acts_listens_to_the_store_alone(reach: Callable[[], Node]) -> None:
    node = reach()
    before = node.machine.snapshot()
    assert node.do(ElectedReceived("e", OTHER, 99, 3, ONCE)) == []
    assert node.machine.snapshot() == before


@pytest.mark.parametrize("reach", [waiting, claiming, starting, watching])
@pytest.mark.parametrize("phase", [Phase.DONE, Phase.FAILED, Phase.EXPIRED])
def test_who_does_not_act_takes_the_news_that_it_is_over(reach: Callable[[], Node], phase: Phase) -> None:
    node = reach()
    assert node.do(ClosedReceived("e", phase)) == [Finished("e", ElectionState(phase))]
    assert node.record.stage is Stage.CLOSED


@pytest.mark.parametrize("reach", [acting, finishing])
def test_who_acts_goes_on_whatever_is_said(reach: Callable[[], Node]) -> None:
    node = reach()
    before = node.machine.snapshot()
    assert node.do(ClosedReceived("e", Phase.DONE)) == []
    assert node.machine.snapshot() == before


def test_a_lost_winner_makes_its_watchers_ask_at_once() -> None:
    node = watching(left_s=8.0)
    node.do(HolderLost("carl.3.300"), 1.0)
    assert node.machine.deadline == 8.0
    node.do(HolderLost(OTHER), 1.0)
    assert node.machine.deadline == 1.0


def test_a_tombstone_goes_after_two_ttls() -> None:
    node = closed()
    assert node.do(Tick(), 19.9) == []
    assert node.record.stage is Stage.CLOSED
    assert node.do(Tick(), 20.0) == []
    assert not node.machine.snapshot().records


# ---- the sweep -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", [Node, waiting, watching, closed])
def test_what_the_sweep_finds_is_claimed_at_once(reach: Callable[[], Node]) -> None:
    node = reach()
    assert node.do(Swept(ONCE), 0.5) == [CallClaim("e", KEY, ME, ONCE, TTL, sent_s=0.5)]


@pytest.mark.parametrize("reach", [claiming, starting, acting, finishing])
def test_the_sweep_disturbs_nobody_at_work(reach: Callable[[], Node]) -> None:
    node = reach()
    before = node.machine.snapshot()
    assert node.do(Swept(ONCE)) == []
    assert node.machine.snapshot() == before


def test_the_sweep_sends_on_what_has_no_handler_here() -> None:
    assert Node("other").do(Swept(ONCE)) == [Resend(ONCE)]


def test_what_nobody_can_handle_is_closed_once_it_is_over_r6() -> None:
    node = Node("other")
    assert node.do(Swept(ONCE)) == [Resend(ONCE)]
    assert node.do(Swept(ONCE), 305.0) == [Resend(ONCE)]
    (call,) = node.do(Swept(ONCE), 305.1)
    assert isinstance(call, CallClaim)
    reply = Closed(ElectionState.EXPIRED, "", 0, "deadline", by_me=True)
    tell, _ = node.do(ClaimReplied("e", 305.1, reply))
    assert isinstance(tell, PublishElected) and tell.phase is Phase.EXPIRED


def test_who_has_no_handler_judges_by_how_long_it_has_seen_it_not_by_its_wall_clock() -> None:
    node = Node("other")
    assert node.do(Swept(replace(ONCE, asked_at=0.0))) == [Resend(replace(ONCE, asked_at=0.0))]


def test_who_has_no_handler_never_acts_even_if_granted() -> None:
    node = Node("other")
    node.do(Swept(ONCE))
    node.do(Swept(ONCE), 305.1)
    assert node.do(ClaimReplied("e", 305.1, Granted(7, 1))) == [Finished("e", None)]


# ---- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", [waiting, claiming, starting, watching, closed])
def test_a_stop_forgets_what_does_not_act(reach: Callable[[], Node]) -> None:
    node = reach()
    assert node.do(StopElections()) == []
    assert not node.machine.snapshot().records
    assert (
        node.do(Asked(ONCE)) + node.do(Swept(ONCE)) + node.do(ElectedReceived("e", OTHER, 5, 1, ONCE)) == []
    )


def test_a_stop_lets_a_handler_finish() -> None:
    node = acting()
    node.do(StopElections())
    assert node.machine.acting == 1
    node.do(HandlerEnded("e", 7, ok=True))
    assert len(node.do(FinishReplied("e", 7, ok=True))) == 2
    assert node.machine.acting == 0
    assert not node.machine.snapshot().records


# ---- timers and turns ------------------------------------------------------------------------------


def test_only_the_newest_timer_of_a_record_fires() -> None:
    node = watching(left_s=4.0)
    node.do(ElectedReceived("e", OTHER, 6, 2, ONCE), 1.0)
    assert node.do(Tick(), 4.0) == []
    assert node.machine.deadline == 11.0


def test_about_one_of_many_nodes_asks_first() -> None:
    first = [
        sum(cohort(f"election {number}", f"node {node}", 200) == 0 for node in range(200))
        for number in range(50)
    ]
    assert 0.5 < sum(first) / len(first) < 2.0


def test_the_last_turn_of_a_thousand_nodes_comes_within_three_seconds() -> None:
    turns = [cohort("e", f"node {node}", 1000) for node in range(1000)]
    assert max(turns) * 0.25 + 0.125 <= 2.75
