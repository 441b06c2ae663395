"""What our workers say beside Celery's when a Celery client starts an election (E5)."""

import pytest

from umbel.protocol.compat import election_mixed
from umbel.protocol.compat.election_mixed import Enter, Membership, MixedElections, Unfenced
from umbel.protocol.compat.election_v1_events import AckHeard, Called, ElectHeard, PublishAck, PublishElect
from umbel.protocol.leadership.coordination import ElectionRequest, Instant, Policy

CALLED = Called("e", "task", b"{}")
ELECT = PublishElect("e", "task", b"{}", clock=1)
ENTER = Enter(ElectionRequest("e", "task", b"{}", Policy.AT_MOST_ONCE, asked_at=1_000_000.0))


def at(seconds: float) -> Instant:
    return Instant(seconds, 1_000_000.0 + seconds)


def classic_elect(node: str = "celery@host", version: int = 1, name: str = "e") -> ElectHeard:
    return ElectHeard(name, "task", b"{}", node, 9, 26, version)


def node(classic: int = 1, ours: int = 4, compat: str = "auto") -> MixedElections:
    machine = MixedElections("ada@host", compat)
    machine.step(Membership(classic, ours), at(0.0))
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


def test_candidates_of_ours_are_not_answered() -> None:
    machine = node()
    machine.step(CALLED, at(0.0))
    assert machine.step(classic_elect(version=2), at(0.0)) == []
    assert machine.step(classic_elect("ada@host"), at(0.0)) == []


def test_acks_are_never_counted() -> None:
    machine = node()
    machine.step(CALLED, at(0.0))
    assert [machine.step(AckHeard("e", f"n{number}"), at(0.0)) for number in range(9)] == [[]] * 9


def test_without_celery_workers_nothing_is_said() -> None:
    assert node(classic=0).step(CALLED, at(0.0)) == [ENTER]


def test_a_celery_worker_is_remembered_for_two_minutes() -> None:
    machine = node(classic=1)
    machine.step(Membership(classic=0, ours=4), at(10.0))
    assert machine.step(CALLED, at(119.9))[0] == ELECT
    (enter,) = machine.step(Called("f", "task", b"{}"), at(120.0))
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
    monkeypatch.setattr(election_mixed, "KNOWN_MAX", 3)
    machine = node()
    assert machine.step(Called("x" * 129, "task", b"{}"), at(0.0)) == []
    assert machine.step(Called("e", "task", b" " * (1 << 20 | 1)), at(0.0)) == []
    for name in "abcd":
        machine.step(Called(name, "task", b"{}"), at(0.0))
    assert machine.step(Called("d", "task", b"{}"), at(0.0)) == []
    assert machine.step(Called("a", "task", b"{}"), at(0.0)) != []
