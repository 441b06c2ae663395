from itertools import permutations

from umbel.protocol.pidbox import Opinion, is_better


def believed(*opinions: Opinion) -> str:
    """The same whoever answers first."""
    found = set()
    for order in permutations(opinions):
        best = order[0]
        for one in order[1:]:
            best = one if is_better(one, best) else best
        found.add(best.state)
    (state,) = found
    return state


def test_whoever_heard_it_just_now_knows_that_it_is_there() -> None:
    assert believed(Opinion("lost", 20.0), Opinion("alive", 0.5), Opinion("suspect", 6.0)) == "alive"


def test_one_that_was_cut_off_itself_knows_least() -> None:
    """It has heard nobody, and so has not judged; its silence may be a little shorter all the same."""
    assert believed(Opinion("lost", 20.0), Opinion("alive", 19.9)) == "lost"
    assert believed(Opinion("suspect", 7.0), Opinion("alive", 6.9)) == "suspect"


def test_a_newer_run_counts_before_what_became_of_the_older() -> None:
    assert believed(Opinion("lost", 20.0, incarnation=1), Opinion("alive", 9.0, incarnation=2)) == "alive"


def test_who_heard_it_leave_heard_it_last() -> None:
    assert believed(Opinion("left", 1.0), Opinion("alive", 2.0)) == "left"
    assert believed(Opinion("left", 60.0), Opinion("lost", 59.0)) == "left"


def test_slow_heartbeats_are_waited_for() -> None:
    assert believed(Opinion("alive", 20.0, freq_s=15.0), Opinion("lost", 40.0, freq_s=15.0)) == "alive"
