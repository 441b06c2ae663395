import signal
from types import FrameType

import pytest

from tests.waiting import wait_until


def test_waiting_ends_with_the_first_true_value() -> None:
    answers = iter([None, "", "here"])
    assert wait_until(lambda: next(answers), what="an answer") == "here"


def test_waiting_in_vain_says_for_what_and_what_was_there_instead() -> None:
    with pytest.raises(AssertionError, match=r"waited 0.01 s in vain for two children; last seen: \[\]"):
        wait_until(list, deadline_s=0.01, what="two children")


def test_a_condition_is_asked_even_when_there_is_no_time_left() -> None:
    assert wait_until(lambda: True, deadline_s=0.0, what="the truth")


def test_what_a_signal_raises_while_somebody_waits_meets_no_lock() -> None:
    """A job that waits is interrupted so. Inside `Event.wait` it would now and then break the lock."""
    places: list[str] = []

    class Interrupted(Exception):
        pass

    def interrupt(signum: int, frame: FrameType | None) -> None:
        assert frame is not None
        places.append(frame.f_globals["__name__"])
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            wait_until(lambda: False, what="nothing")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert places[0] in {wait_until.__module__, __name__}
