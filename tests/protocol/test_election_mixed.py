"""What our workers say beside Celery's when a Celery client starts an election (E5)."""

import pytest

from umbel.protocol.election import mixed
from umbel.protocol.election.classic import (
    AckReceived,
    ClassicRequest,
    ElectReceived,
    PublishAck,
    PublishElect,
)
from umbel.protocol.election.mixed import Enter, MixedElections, StopMixed, Unfenced, WorkerCounts
from umbel.protocol.leadership.coordination import ElectionRequest, Instant, Policy

CALLED = ClassicRequest("e", "task", b"{}")
ELECT = PublishElect("e", "task", b"{}", clock=1)
ENTER = Enter(ElectionRequest("e", "task", b"{}", Policy.AT_MOST_ONCE, asked_at=1_000_000.0))


def at(seconds: float) -> Instant:
    return Instant(seconds, 1_000_000.0 + seconds)


def classic_elect(node: str = "celery@host", version: int = 1, name: str = "e") -> ElectReceived:
    return ElectReceived(name, "task", b"{}", node, 9, 26, version)


def node(classic: int = 1, ours: int = 4, compat: str = "auto") -> MixedElections:
    machine = MixedElections("ada@host", {"task"}, compat)
    machine.step(WorkerCounts(classic, ours), at(0.0))
    return machine


def test_our_candidacy_comes_first_and_with_the_lowest_clock() -> None:
    assert node().step(CALLED, at(0.0)) == [ELECT, ENTER]


def test_few_of_ours_stand_twice_so_that_no_celery_worker_counts_over_one_candidate() -> None:
    assert node(classic=1, ours=2).step(CALLED, at(0.0)) == [ELECT, ELECT, ENTER]


def test_a_celery_candidate_is_answered_once_and_only_after_our_own_candidacy() -> None:
    machine = node()
    machine.step(CALLED, at(0.0))
    assert machine.step(classic_elect(), at(0.0)) == [PublishAck("e")]
    assert machine.step(classic_elect("other@host"), at(0.0)) == []


def test_a_celery_candidate_heard_before_the_command_makes_us_enter_then_answer() -> None:
    machine = node()
    assert machine.step(classic_elect(), at(0.0)) == [ELECT, ENTER, PublishAck("e")]
    assert machine.step(CALLED, at(0.0)) == []


def test_who_knew_of_no_classic_worker_stands_before_it_answers_the_first() -> None:
    """Whoever counts the answer knows our candidacy then."""
    machine = node(classic=0)
    assert machine.step(CALLED, at(0.0)) == [ENTER]
    assert machine.step(classic_elect(), at(0.1)) == [ELECT, PublishAck("e")]
    assert machine.step(classic_elect("other@host"), at(0.2)) == []


def test_who_has_no_handler_for_the_topic_takes_the_lead_from_nobody() -> None:
    called = ClassicRequest("f", "other", b"{}")
    highest = PublishElect("f", "other", b"{}", clock=2**53 - 1)
    assert node(classic=1).step(called, at(0.0))[0] == highest  # or a Celery worker might die of it
    for_ours = node(classic=0)
    assert isinstance(for_ours.step(called, at(0.0))[0], Enter)
    elect = ElectReceived("f", "other", b"{}", "bob@host", 9, 26, 1)
    assert for_ours.step(elect, at(0.1)) == [PublishAck("f")]


def test_a_worker_that_stops_takes_the_lead_in_no_later_election() -> None:
    machine = node(classic=0)
    machine.step(CALLED, at(0.0))
    machine.step(StopMixed(), at(0.1))
    assert machine.step(classic_elect(name="f"), at(0.2))[1:] == [PublishAck("f")]
    assert machine.step(classic_elect(), at(0.2)) == [ELECT, PublishAck("e")]  # it may have acted already


def test_candidates_of_ours_are_not_answered() -> None:
    machine = node()
    machine.step(CALLED, at(0.0))
    assert machine.step(classic_elect(version=2), at(0.0)) == []
    assert machine.step(classic_elect("ada@host"), at(0.0)) == []


def test_acks_are_never_counted() -> None:
    machine = node()
    machine.step(CALLED, at(0.0))
    assert [machine.step(AckReceived("e", f"n{number}"), at(0.0)) for number in range(9)] == [[]] * 9


def test_without_celery_workers_nothing_is_said() -> None:
    assert node(classic=0).step(CALLED, at(0.0)) == [ENTER]


def test_a_celery_worker_is_remembered_for_two_minutes() -> None:
    machine = node(classic=1)
    machine.step(WorkerCounts(classic=0, ours=4), at(10.0))
    assert machine.step(CALLED, at(119.9))[0] == ELECT
    (enter,) = machine.step(ClassicRequest("f", "task", b"{}"), at(120.0))
    assert isinstance(enter, Enter)


def test_the_setting_decides_over_what_was_seen() -> None:
    assert node(classic=0, compat="always").step(CALLED, at(0.0)) == [ELECT, ENTER]
    quiet = node(classic=1, compat="never")
    assert quiet.step(CALLED, at(0.0)) == [ENTER]
    assert quiet.step(classic_elect(), at(0.0)) == []


@pytest.mark.parametrize(
    ("classic", "ours", "fenced"), [(1, 1, False), (1, 2, True), (2, 4, True), (2, 3, False)]
)
def test_what_a_celery_worker_may_run_too_is_reported(classic: int, ours: int, fenced: bool) -> None:
    effects = node(classic, ours).step(CALLED, at(0.0))
    assert (Unfenced("e", classic, ours) in effects) is not fenced


def test_names_are_bounded_and_so_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "KNOWN_MAX", 3)
    machine = node()
    assert machine.step(ClassicRequest("x" * 129, "task", b"{}"), at(0.0)) == []
    assert machine.step(ClassicRequest("e", "task", b" " * (1 << 20 | 1)), at(0.0)) == []
    for name in "abcd":
        machine.step(ClassicRequest(name, "task", b"{}"), at(0.0))
    assert machine.step(ClassicRequest("d", "task", b"{}"), at(0.0)) == []
    assert machine.step(ClassicRequest("a", "task", b"{}"), at(0.0)) != []
