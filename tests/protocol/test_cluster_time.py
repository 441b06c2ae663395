"""What time it is, when clocks are wrong."""

from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.cluster_time import OWN, PEERS, SILENT_S, STORE, TOLERANCE_S, VOICES_MAX, ClusterTime
from umbel.protocol.leadership.coordination import Instant

TRUE_S = 1_800_000_000.0
HOUR_S = 3600.0
errors = st.floats(-4e8, 4e8)  # a dozen years either way
late = st.floats(0.0, 1.0)


def at(boot_s: float, wrong_s: float = 0.0) -> Instant:
    return Instant(boot_s, TRUE_S + boot_s + wrong_s)


@given(errors, st.lists(late, min_size=3, max_size=30), st.lists(errors, max_size=30))
def test_while_fewer_than_half_are_wrong_the_time_is_right(
    own_wrong_s: float, true: list[float], wrong: list[float]
) -> None:
    wrong = wrong[: len(true) - 2]  # and this node's own may be wrong as well
    machine, now = ClusterTime(), at(100.0, own_wrong_s)
    for number, late_s in enumerate(true):
        machine.hear_peer(f"true{number}", TRUE_S + 100.0 - late_s, now)
    for number, wrong_s in enumerate(wrong):
        machine.hear_peer(f"wrong{number}", TRUE_S + 100.0 + wrong_s, now)
    judged = machine.judge(now)
    assert judged.source == PEERS
    assert abs(now.wall_s + judged.offset_s - (TRUE_S + 100.0)) <= 1.0 + TOLERANCE_S


@given(errors, st.lists(errors, max_size=5))
def test_a_store_with_a_clock_decides_whatever_others_say(own_wrong_s: float, peers: list[float]) -> None:
    machine, now = ClusterTime(), at(50.0, own_wrong_s)
    machine.hear_store(TRUE_S + 50.0, 0.0, now)
    for number, wrong_s in enumerate(peers):
        machine.hear_peer(f"n{number}", TRUE_S + 50.0 + wrong_s, now)
    judged = machine.judge(now)
    assert judged.source == STORE
    assert abs(now.wall_s + judged.offset_s - (TRUE_S + 50.0)) <= TOLERANCE_S


@given(st.floats(0.0, 60.0), st.floats(0.0, 1.0), st.booleans())
def test_a_right_clock_is_not_taken_for_wrong_because_the_store_was_hard_to_reach(
    way_s: float, share: float, known_before: bool
) -> None:
    machine, now = ClusterTime(), at(100.0)
    if known_before:
        machine.hear_store(TRUE_S + 70.0, 0.0, at(70.0))
    machine.hear_store(TRUE_S + 100.0 - way_s * share, way_s, now)  # it answered somewhere on the way
    assert machine.judge(now).offset_s == 0.0


def test_a_slow_answer_of_the_store_does_not_prolong_what_is_known_of_its_clock() -> None:
    machine = ClusterTime()
    machine.hear_store(TRUE_S + HOUR_S, 0.0, at(0.0))
    machine.hear_store(TRUE_S + SILENT_S, 30.0, at(SILENT_S))
    assert machine.judge(at(SILENT_S - 1.0)).source == STORE
    assert machine.judge(at(SILENT_S)).source == OWN


def test_alone_or_with_one_other_the_own_clock_is_trusted_and_that_they_differ_is_said() -> None:
    machine = ClusterTime()
    alone = machine.judge(at(1.0, HOUR_S))
    assert (alone.offset_s, alone.source, alone.disagreeing) == (0.0, OWN, False)
    machine.hear_peer("b", TRUE_S + 2.0, at(2.0, HOUR_S))
    two = machine.judge(at(2.0, HOUR_S))
    assert (two.offset_s, two.source, two.voices, two.disagreeing) == (0.0, OWN, 2, True)


@given(errors.filter(lambda s: abs(s) > TOLERANCE_S))
def test_a_wall_clock_that_is_set_is_seen_and_does_not_move_the_time(step_s: float) -> None:
    machine = ClusterTime()
    for node in ("b", "c"):
        machine.hear_peer(node, TRUE_S + 1.0, at(1.0))
    assert machine.judge(at(1.0)).offset_s == 0.0
    set_by = machine.judge(at(2.0, step_s))
    assert abs(set_by.stepped_s - step_s) < 0.001
    assert abs(set_by.offset_s + step_s) < 0.001
    assert machine.judge(at(3.0, step_s)).stepped_s == 0.0


def test_clocks_that_agree_are_left_alone_and_the_silent_are_forgotten() -> None:
    machine = ClusterTime()
    for node in ("b", "c", "d"):
        machine.hear_peer(node, TRUE_S + 1.0 - TOLERANCE_S / 2, at(1.0))
    assert machine.judge(at(1.0)).offset_s == 0.0
    later = machine.judge(at(1.0 + SILENT_S, HOUR_S))
    assert (later.source, later.voices) == (OWN, 1)


def test_the_store_s_clock_counts_no_more_when_it_was_not_read_for_long() -> None:
    machine = ClusterTime()
    machine.hear_store(TRUE_S, 0.0, at(0.0))
    assert machine.judge(at(SILENT_S)).source == OWN


def test_so_many_voices_are_kept_and_no_more() -> None:
    machine = ClusterTime()
    for number in range(VOICES_MAX + 5):
        machine.hear_peer(f"n{number}", TRUE_S, at(0.0))
    assert machine.judge(at(0.0)).voices == VOICES_MAX + 1


def test_where_everybody_says_something_else_the_own_clock_is_trusted() -> None:
    machine, now = ClusterTime(), at(100.0)
    for number in range(1, 20):
        machine.hear_peer(f"made-up{number}", number * 1e6, now)
    judged = machine.judge(now)
    assert (judged.offset_s, judged.source, judged.disagreeing) == (0.0, OWN, True)


def test_who_is_no_member_has_no_voice() -> None:
    machine, now = ClusterTime(), at(100.0)
    for number in range(20):
        machine.hear_peer(f"made-up{number}", 1.0, now)
    for node in ("b", "c"):
        machine.hear_peer(node, now.wall_s, now)
    assert machine.judge(now).offset_s < -TRUE_S / 2
    machine.forget_all_but({"b", "c", "d"})
    judged = machine.judge(now)
    assert (judged.offset_s, judged.source, judged.voices) == (0.0, PEERS, 3)
