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
