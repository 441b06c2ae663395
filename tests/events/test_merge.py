"""The merge is a join (L6): order, repetition and split of the events do not matter."""

import random
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.events.histories import (
    EXAMPLES,
    ORDER_DEPENDENT_IN_CELERY,
    RUN,
    TASKS,
    Wire,
    attempt,
    event,
    histories,
    loose_events,
)
from tests.events.oracle import view_of
from umbel.events.merge import eid, is_later, join, order_key, registers_of, timeline
from umbel.events.state import ClusterState
from umbel.events.types import TaskEvent
from umbel.events.view import EventReader, TaskRecord, view


def fold(events: list[Wire]) -> ClusterState:
    state = ClusterState()
    for one in events:
        state.apply(one)
    return state


def known(state: ClusterState) -> dict[str, Any]:
    """All that two monitors must agree on."""
    newest_first = [record.uuid for record in state.tasks()]
    oldest_first = [record.uuid for record in state.tasks(newest_first=False)]
    assert newest_first == oldest_first[::-1]
    return {
        "records": state.tasks(),
        "by name": {name: [one.uuid for one in state.tasks(name=name)] for name in state.names()},
        "by worker": {
            name: [one.uuid for one in state.tasks(worker=name)] for name in state.count_by_worker()
        },
        "finished": [one.uuid for one in state.tasks(finished=True)],
        "repeats": {uuid: registers.repeats for uuid in TASKS if (registers := state.registers(uuid))},
        "counts": state.counts,
        "workers": list(state.workers),
    }


def record_of(events: list[Wire]) -> TaskRecord:
    record = fold(events).task("t1")
    assert record is not None
    return record


def read(events: list[Wire]) -> list[TaskEvent]:
    reader = EventReader()
    records = [reader.read(one) for one in events]
    return [record for record in records if isinstance(record, TaskEvent)]


# ---- any order, any repetition, any split ----------------------------------------------------------


@settings(max_examples=EXAMPLES)
@given(histories(), st.randoms(use_true_random=False), st.integers(0, 30))
def test_order_and_repetition_do_not_matter(events: list[Wire], chance: random.Random, again: int) -> None:
    shuffled = [*events, *(chance.choices(events, k=again) if events else [])]
    chance.shuffle(shuffled)
    assert known(fold(shuffled)) == known(fold(events))


@settings(max_examples=EXAMPLES)
@given(histories(), st.randoms(use_true_random=False))
def test_splits_and_batches_do_not_matter(events: list[Wire], chance: random.Random) -> None:
    parts: list[list[Wire]] = [[], [], []]
    for one in events:
        for part in chance.sample(parts, chance.choice([1, 1, 2])):  # some are heard by two
            part.append(one)
    states = [ClusterState() for _ in parts]
    for state, part in zip(states, parts, strict=True):
        state.apply(part)
    whole = ClusterState()
    for state in chance.sample(states, len(states)):
        whole.absorb(state)
    assert known(whole) == known(fold(events))


@settings(max_examples=EXAMPLES)
@given(histories(), st.integers(1, 5))
def test_asking_in_between_changes_nothing(events: list[Wire], every: int) -> None:
    state = ClusterState()
    for number, one in enumerate(events):
        state.apply(one)
        if number % every == 0:
            known(state)
    assert known(state) == known(fold(events))


@given(
    st.lists(loose_events(), max_size=6),
    st.lists(loose_events(), max_size=6),
    st.lists(loose_events(), max_size=6),
)
def test_join_is_commutative_associative_and_idempotent(
    one: list[Wire], two: list[Wire], three: list[Wire]
) -> None:
    a, b, c = (registers_of("t1", [x for x in read(part) if x.uuid == "t1"]) for part in (one, two, three))
    assert join(a, b) == join(b, a)
    assert join(a, join(b, c)) == join(join(a, b), c)
    assert join(a, a) == a


def test_events_go_on_where_another_state_was_joined() -> None:
    heard_elsewhere, state = fold([event("started", clock=5)]), ClusterState()
    state.absorb(heard_elsewhere)
    state.apply(event("received", retries=1, clock=1))  # the start now counts for this attempt
    assert state.counts == {"STARTED": 1}


# ---- the order of events ---------------------------------------------------------------------------


@given(st.lists(loose_events(), min_size=3, max_size=3))
def test_the_order_of_events_is_total(events: list[Wire]) -> None:
    one, two, three = read(events)
    assert is_later(one, two) + is_later(two, one) == (eid(one) != eid(two))
    assert not (is_later(one, two) and is_later(two, three)) or is_later(one, three)
    assert is_later(one, two) == (order_key(one) > order_key(two))


def test_an_event_that_differs_in_one_field_only_is_another_one() -> None:
    """Everything before the digest is equal, so the digest decides, the same way in both orders."""
    pair = [event("succeeded", result="1"), event("succeeded", result="2")]
    assert record_of(pair) == record_of(pair[::-1])
    assert record_of(pair).n_terminal == 2


# ---- the view --------------------------------------------------------------------------------------


@settings(max_examples=EXAMPLES)
@given(histories())
def test_the_view_is_the_one_computed_from_the_timeline(events: list[Wire]) -> None:
    state, records = fold(events), read(events)
    for uuid in {record.uuid for record in records}:
        story = timeline(record for record in records if record.uuid == uuid)
        assert state.task(uuid) == view(registers_of(uuid, story))
        assert state.task(uuid) == view_of(story)


@pytest.mark.parametrize("history", ORDER_DEPENDENT_IN_CELERY)
def test_every_order_gives_one_result(history: str) -> None:
    events, state = ORDER_DEPENDENT_IN_CELERY[history]
    results = {repr(record_of(list(order))) for order in permutations(events)}
    assert len(results) == 1
    assert record_of(events).state == state


def test_late_events_fill_in_what_they_know_and_move_nothing_back() -> None:
    """L4: the name and arguments of a late receipt are kept, the state is not touched."""
    sent = event("sent", name="app.sent", args="(0,)", queue="q", hostname="gen1@z", clock=99)
    received = event("received", name="app.add", args="(1,)", kwargs="{}", root_id="r", clock=3, retries=0)
    record = record_of([event("succeeded", clock=7, result="5", retries=0, hostname="u2@b"), received, sent])
    assert (record.state, record.worker, record.clock, record.result) == ("SUCCESS", "u2@b", 7, "5")
    assert (record.name, record.args, record.root_id) == ("app.add", "(1,)", "r")
    assert (record.queue, record.client) == ("q", "gen1@z")


def test_the_newest_attempt_describes_the_task() -> None:
    received = event("received", name="old", args="(1,)", eta="soon", retries=0, clock=5)
    record = record_of([received, event("sent", name="new", args="(2,)", retries=1)])
    assert (record.name, record.args, record.eta) == ("new", "(2,)", "soon")
    assert (record.state, record.worker, record.retries) == ("PENDING", None, 1)


def test_a_retry_belongs_to_the_attempt_it_asks_for() -> None:
    first = attempt(0, "received", "started", "retried")
    assert record_of([*first, event("sent", retries=1)]).state == "RETRY"
    assert record_of([*first, event("sent", retries=1), *attempt(1, "received", clock=9)]).state == "RECEIVED"


def test_an_ending_stands() -> None:
    ended = attempt(0, *RUN)
    assert record_of([*ended, *attempt(3, "received", "started", clock=50)]).state == "SUCCESS"
    assert record_of([*attempt(0, "revoked"), event("progress", retries=2, clock=9)]).state == "REVOKED"


def test_deliveries_and_endings_are_counted_once_each() -> None:
    once, again = attempt(0, *RUN), attempt(0, "received", "failed", clock=9, hostname="u2@b")
    record = record_of([*once, *again, *once, *again])
    assert (record.n_deliveries, record.n_terminal) == (2, 2)
    assert (record.received_at, record.first_received_at) == (10.0, 1.0)


def test_an_event_without_its_attempt_counts_for_the_receipt_before_it() -> None:
    """As Celery's workers tell it: the second attempt was received at 10 and started at 11."""
    receipts = [event("received", retries=0, clock=1), event("received", retries=1, clock=10)]
    second = [*receipts, event("retried", clock=3), event("started", clock=11)]
    assert record_of(second).state == "STARTED"
    first = [*receipts, event("started", clock=2)]
    assert record_of(first).state == "RECEIVED"


def test_a_said_attempt_takes_the_place_of_one_that_was_only_read() -> None:
    """The start that is kept is the one whose sender said its attempt, and that is not the newest."""
    receipt, unsaid = event("received", retries=2, clock=1), event("started", clock=5)
    said = event("started", retries=1, clock=3)
    assert record_of([receipt, unsaid]).state == "STARTED"
    for order in permutations([receipt, unsaid, said]):
        assert record_of(list(order)).state == "RECEIVED"
        assert fold(list(order)).counts == {"RECEIVED": 1}


def test_a_state_of_a_users_making_is_shown_with_what_it_carries() -> None:
    record = record_of([*attempt(0, "received", "started"), event("progress", retries=0, clock=5, done=0.5)])
    assert (record.state, record.extra) == ("PROGRESS", {"done": 0.5})
