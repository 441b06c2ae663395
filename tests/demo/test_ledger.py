"""The demo's verdict notices whatever does not fit."""

from pathlib import Path
from typing import Any

import pytest

from umbel.demo.load import Ledger, judge, read_ledger

SENT = {"a": "quick", "b": "failing", "c": "never"}
STATES = {"a": "SUCCESS", "b": "FAILURE", "c": "REVOKED"}
SLOTS = {"s1": 1, "s2": 2, "s3": 3}
ONCE = ["w1"]
RAN = {("a", 0): ONCE, ("b", 0): ONCE, ("s1", 0): ONCE, ("s2", 0): ONCE}
HISTORY = {**STATES, "s1": "SUCCESS", "s2": "SUCCESS"}


def problems(**other: Any) -> list[str]:
    found: dict[str, Any] = {"sent": SENT, "states": STATES, "history": HISTORY, "slots": SLOTS, "ran": RAN}
    found |= {"last_slot": 2} | other
    return judge(ledger=Ledger(found.pop("ran")), **found).problems


def test_a_run_in_which_all_fits() -> None:
    assert problems() == []
    assert problems(history=None) == []


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"states": {**STATES, "a": "FAILURE"}}, "1 task did not end as expected"),
        ({"states": {"a": "SUCCESS", "b": "FAILURE"}}, "did not end as expected: never c is unknown"),
        ({"ran": {key: ONCE for key in RAN if key[0] != "a"}}, "1 task never ran: a"),
        ({"ran": {**RAN, ("c", 0): ONCE}}, "a revoked task ran: c"),
        ({"ran": {**RAN, ("x", 0): ONCE}}, "1 task ran without being sent"),
        ({"ran": {("a", 0): ONCE, ("b", 0): ONCE}}, "no periodic task ran"),
        (
            {"ran": {("a", 0): ONCE, ("b", 0): ONCE, ("s1", 0): ONCE, ("s3", 0): ONCE}},
            "the periodic task missed 1 slot",
        ),
        ({"last_slot": 3}, "the periodic task missed 1 slot"),
        ({"history": {**HISTORY, "a": "STARTED"}}, "history and results differ in quick a is STARTED"),
        ({"ran": {**RAN, ("a", 0): ["w1", "w1"]}}, "1 task ran twice without a cause: a"),
        ({"ran": {**RAN, ("a", 0): ["w1", "w2"]}, "killed": "w2"}, "ran twice without a cause: a"),
        ({"killed": "w2", "interrupted": {"a"}}, "not run again by another worker: 1 task of w2"),
        ({"history": STATES}, "history lacks 2 tasks that ran"),
    ],
)
def test_what_does_not_fit_is_said(other: dict[str, Any], problem: str) -> None:
    assert any(problem in one for one in problems(**other))


def test_a_slot_that_came_when_the_workers_were_stopping_may_be_left_waiting() -> None:
    late = {**SLOTS, "s4": 4}
    assert problems(slots=late, ran={**RAN, ("s4", 0): ONCE}, history={**HISTORY, "s4": "SUCCESS"}) == []


def test_history_must_know_the_endings_of_a_killed_worker_too() -> None:
    assert problems(history={**HISTORY, "a": "STARTED"}, killed="w1") != []


def test_repeats_have_a_cause_when_their_worker_was_killed_or_their_process_crashed() -> None:
    assert problems(ran={**RAN, ("a", 0): ["w1", "w2"]}, killed="w1", interrupted={"a"}) == []
    crashed = {"ran": {**RAN, ("d", 0): ["w1", "w1"]}, "sent": {**SENT, "d": "crashing"}}
    assert problems(**crashed, states={**STATES, "d": "SUCCESS"}, history=None) == []


def test_what_a_killed_worker_held_may_be_there_twice() -> None:
    """On RabbitMQ: it put a copy aside, or sent the next attempt, and was killed before it acknowledged."""
    put_aside = Ledger({("a", 0): ["k"], ("a", 1): ["w", "w"]}, {("a", 1)})
    sent_again = Ledger({("a", 0): ["k", "w"], ("a", 1): ["w", "w"]}, {("a", 0), ("a", 1)})
    assert put_aside.recovered("k") == {"a": 1} and sent_again.recovered("k") == {"a": 2}
    assert not put_aside.recovered("")
    unmarked = Ledger({("a", 0): ["k", "w"], ("a", 1): ["w", "w"]}, {("a", 0)})
    assert unmarked.recovered("k") == {"a": 1}, "what was sent again says so"


def test_runs_beyond_the_first_of_an_attempt_are_repeats(tmp_path: Path) -> None:
    lines = ["t quick 0 w@h first", "u retried 0 w@h first", "u retried 1 v@h first", "t quick 0 w@h again"]
    (tmp_path / "ledger").write_text("\n".join(lines))
    ledger = read_ledger(tmp_path / "ledger")
    assert ledger.repeats() == ledger.recovered("w") == {"t": 1}
    assert ledger.redelivered == {("t", 0)}
    assert (ledger.began_on("w"), ledger.began_on("v"), ledger.total) == ({"t", "u"}, {"u"}, 4)
    assert read_ledger(tmp_path / "none").runs == {}
