"""L4: which event says the state of a task; the order of strength, and which attempt an event belongs to."""

from itertools import pairwise
from typing import Any

import pytest

from tests.events.histories import event
from umbel.events.precedence import ENDED, ENDINGS, STATES, STRENGTHS, attempt_of, rank, state_of
from umbel.events.types import RETRIES_MAX, TaskEvent, TaskReceived
from umbel.events.view import EventReader

# Celery's order, the strongest first.
BY_STRENGTH = (
    "SUCCESS",
    "FAILURE",
    "PROGRESS",
    "REVOKED",
    "STARTED",
    "RECEIVED",
    "REJECTED",
    "RETRY",
    "PENDING",
)
TYPES = {
    "SUCCESS": "succeeded",
    "FAILURE": "failed",
    "PROGRESS": "progress",
    "REVOKED": "revoked",
    "STARTED": "started",
    "RECEIVED": "received",
    "REJECTED": "rejected",
    "RETRY": "retried",
    "PENDING": "sent",
}


def of_state(state: str, **fields: Any) -> TaskEvent:
    found = EventReader().read(event(TYPES[state], **fields))
    assert isinstance(found, TaskEvent)
    return found


def receipt(**fields: Any) -> TaskReceived:
    found = of_state("RECEIVED", **fields)
    assert isinstance(found, TaskReceived)
    return found


@pytest.mark.parametrize("state", BY_STRENGTH)
def test_each_type_of_event_stands_for_one_state(state: str) -> None:
    assert state_of(of_state(state)) == state


def test_the_strengths_are_those_of_celery() -> None:
    strengths = [STRENGTHS[of_state(state).slot] for state in BY_STRENGTH]
    assert all(stronger > weaker for stronger, weaker in pairwise(strengths))
    assert sorted(STRENGTHS.values()) == list(range(len(BY_STRENGTH)))
    assert set(STRENGTHS) == {*STATES, "custom"}


ONE_ATTEMPT = [one for one in BY_STRENGTH if one not in ("SUCCESS", "FAILURE", "REVOKED", "RETRY")]


def test_of_one_attempt_the_stronger_says_the_state() -> None:
    ranks = [rank(of_state(state, retries=3), None) for state in ONE_ATTEMPT]
    assert all(stronger > weaker for stronger, weaker in pairwise(ranks))


@pytest.mark.parametrize("state", ["SUCCESS", "FAILURE", "REVOKED"])
def test_an_ending_outranks_every_attempt(state: str) -> None:
    ended = of_state(state, retries=0)
    assert ended.slot in ENDINGS
    assert all(rank(ended, None) > rank(of_state(one, retries=RETRIES_MAX), None) for one in ONE_ATTEMPT)
    assert rank(ended, None) > rank(of_state("RETRY", retries=RETRIES_MAX), None)
    assert rank(ended, None) == rank(of_state(state, retries=9), None) >= ENDED


def test_of_the_endings_the_stronger_says_the_state() -> None:
    ranks = [rank(of_state(state), None) for state in ("SUCCESS", "FAILURE", "REVOKED")]
    assert ranks == sorted(ranks, reverse=True) and len(set(ranks)) == 3


def test_a_later_attempt_outranks_an_earlier_one_whatever_was_said_of_it() -> None:
    assert all(
        rank(of_state(later, retries=1), None) > rank(of_state(earlier, retries=0), None)
        for later in ONE_ATTEMPT
        for earlier in ONE_ATTEMPT
    )


def test_a_retry_beats_the_start_it_ended_and_the_sending_it_causes_and_loses_to_the_next_receipt() -> None:
    retried = rank(of_state("RETRY", retries=0), None)
    assert retried > rank(of_state("STARTED", retries=0), None)
    assert retried > rank(of_state("PROGRESS", retries=0), None)
    assert retried > rank(of_state("PENDING", retries=1), None)
    assert retried < rank(of_state("REJECTED", retries=1), None)
    assert retried < rank(of_state("RECEIVED", retries=1), None)


@pytest.mark.parametrize(
    ("started", "received", "attempt"),
    [
        ({"retries": 2, "clock": 1}, {"retries": 5, "clock": 9}, 2),  # said is said
        ({"retries": 0, "clock": 9}, {"retries": 5, "clock": 1}, 0),
        ({"clock": 9}, None, 0),
        ({"clock": 10}, {"retries": 3, "clock": 9}, 3),
        ({"clock": 9}, {"retries": 3, "clock": 9}, 3),  # one clock: the receipt came first
        ({"clock": 8}, {"retries": 3, "clock": 9}, 2),
        ({"clock": 8}, {"retries": 0, "clock": 9}, 0),  # there is no attempt before the first
        ({"clock": 10}, {"clock": 9}, 0),
        ({"clock": 8}, {"clock": 9}, 0),
    ],
)
def test_an_event_belongs_to_the_attempt_it_says_or_to_that_of_the_receipt_before_it(
    started: dict[str, int], received: dict[str, int] | None, attempt: int
) -> None:
    known = None if received is None else receipt(**received)
    told = of_state("STARTED", **started)
    assert attempt_of(told, known) == attempt
    assert rank(told, known) == rank(of_state("STARTED", retries=attempt), None)
