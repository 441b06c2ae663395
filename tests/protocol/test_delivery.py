"""The policy's whole decision table. A wish for the worker: nothing leaves here in silence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.delivery.delivery import (
    DUE_SLACK_S,
    PROMISES_MAX,
    AdmissionPolicy,
    Admit,
    Arrival,
    Decision,
    Park,
    Refusal,
    Refuse,
    TaskRules,
)
from umbel.protocol.delivery.revoked import RevokedTasks

NOW = 1000.0
PLAIN = TaskRules()
LIMITED = TaskRules(hard_limit_s=10.0)
RATED = TaskRules(rate_per_second=1.0)
EARLY = TaskRules(acks_early=True)
RULES = {"plain": PLAIN, "soft": TaskRules(soft_limit_s=5.0), "hard": LIMITED, "rated": RATED, "early": EARLY}


NOTHING = RevokedTasks()


def revoked_ids(*task_ids: str) -> RevokedTasks:
    revoked = RevokedTasks()
    for task_id in task_ids:
        revoked.add(task_id, NOW + 1000)
    return revoked


def admit(arrival: Arrival, *, revoked: RevokedTasks = NOTHING, now: float = NOW) -> Decision:
    return AdmissionPolicy(RULES, max_deliveries=3).admit(arrival, revoked, now)


ARRIVAL = Arrival("plain", "t")


@pytest.mark.parametrize(
    ("arrival", "decision"),
    [
        (ARRIVAL, Admit(PLAIN)),
        (ARRIVAL._replace(task="early"), Admit(EARLY)),
        # A task with a limit runs with nothing behind it: killing it must hit nobody else.
        (ARRIVAL._replace(task="hard"), Admit(LIMITED, alone=True)),
        (ARRIVAL._replace(task="soft"), Admit(RULES["soft"], alone=True)),
        (ARRIVAL._replace(task="no.such"), Refuse(Refusal.UNKNOWN)),
        (ARRIVAL._replace(expires_at=NOW - 1), Refuse(Refusal.EXPIRED)),
        (ARRIVAL._replace(expires_at=NOW), Admit(PLAIN)),
        (ARRIVAL._replace(expires_at=NOW + 1), Admit(PLAIN)),
        (ARRIVAL._replace(due=NOW + 60), Park(NOW + 60)),
        (ARRIVAL._replace(due=NOW), Admit(PLAIN)),
        (ARRIVAL._replace(due=NOW + DUE_SLACK_S / 2), Admit(PLAIN)),
        (ARRIVAL._replace(due=NOW + DUE_SLACK_S), Admit(PLAIN)),
        (ARRIVAL._replace(due=NOW + 0.5), Park(NOW + 0.5)),
        (ARRIVAL._replace(starts=2), Admit(PLAIN)),
        (ARRIVAL._replace(starts=3), Refuse(Refusal.POISONOUS)),
        (ARRIVAL._replace(starts=9), Refuse(Refusal.POISONOUS)),
        # Its former worker died: nobody knows whether it ran, so it runs alone and counted.
        (ARRIVAL._replace(redelivered=True), Admit(PLAIN, alone=True, count_start=True)),
        (ARRIVAL._replace(redelivered=True, starts=2), Admit(PLAIN, alone=True, count_start=True)),
        (ARRIVAL._replace(redelivered=True, starts=3), Refuse(Refusal.POISONOUS)),
        (ARRIVAL._replace(redelivered=True, due=NOW + 60), Park(NOW + 60)),
        # Which reason comes first where there are several.
        (ARRIVAL._replace(task="no.such", expires_at=NOW - 1), Refuse(Refusal.UNKNOWN)),
        (ARRIVAL._replace(expires_at=NOW - 1, starts=3), Refuse(Refusal.EXPIRED)),
        (ARRIVAL._replace(starts=3, due=NOW + 60), Refuse(Refusal.POISONOUS)),
        (ARRIVAL._replace(expires_at=NOW + 1, due=NOW + 60), Park(NOW + 60)),
    ],
)
def test_a_message_is_judged(arrival: Arrival, decision: Decision) -> None:
    assert admit(arrival) == decision


@pytest.mark.parametrize(
    "arrival",
    [
        ARRIVAL,
        ARRIVAL._replace(task="no.such"),
        ARRIVAL._replace(due=NOW + 60),
        ARRIVAL._replace(starts=3),
        ARRIVAL._replace(redelivered=True),
    ],
)
def test_a_revoked_message_is_refused_whatever_else_it_is(arrival: Arrival) -> None:
    assert admit(arrival, revoked=revoked_ids("t")) == Refuse(Refusal.REVOKED)  # S3


def test_a_task_with_a_revoked_stamp_does_not_run() -> None:
    revoked = RevokedTasks()
    revoked.add_header("customer=7", NOW + 1000)
    stamped = ARRIVAL._replace(stamps={"customer": ["7", "8"]})
    assert admit(stamped, revoked=revoked) == Refuse(Refusal.REVOKED)
    assert admit(stamped._replace(stamps={"customer": "9"}), revoked=revoked) == Admit(PLAIN)


def test_why_a_message_was_refused_is_a_word_that_people_read() -> None:
    assert [why.value for why in Refusal] == ["unknown", "revoked", "expired", "poisonous"]


# -- poison ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("starts", "poisonous"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_message_whose_process_died_has_three_chances(starts: int, poisonous: bool) -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    assert policy.is_poisonous_after(ARRIVAL._replace(starts=starts)) is poisonous


def test_a_message_that_kills_its_process_each_time_starts_exactly_three_times() -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    arrival = ARRIVAL
    for start in (1, 2, 3):
        assert isinstance(policy.admit(arrival, NOTHING, NOW), Admit)
        assert policy.is_poisonous_after(arrival) is (start == 3)
        arrival = arrival._replace(starts=start)
    assert policy.admit(arrival, NOTHING, NOW) == Refuse(Refusal.POISONOUS)


def test_a_message_that_kills_its_worker_each_time_is_stopped_one_delivery_later() -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    starts = 0
    ran = 1  # the first time nobody suspects it and nothing is counted
    while isinstance(
        decision := policy.admit(ARRIVAL._replace(starts=starts, redelivered=True), NOTHING, NOW), Admit
    ):
        assert decision.count_start
        starts += 1
        ran += 1
    assert (decision, ran) == (Refuse(Refusal.POISONOUS), 4)


# -- rate ------------------------------------------------------------------------------------------


def rated(number: int) -> Arrival:
    return Arrival("rated", f"t{number}")


def test_a_task_over_its_rate_is_parked_until_its_token_is_there() -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    decisions = [policy.admit(rated(number), NOTHING, NOW) for number in range(4)]
    assert decisions == [Admit(RATED), Park(NOW + 1), Park(NOW + 2), Park(NOW + 3)]


def test_a_parked_task_does_not_pay_twice() -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    for number in range(3):
        policy.admit(rated(number), NOTHING, NOW)
    assert policy.admit(rated(1), NOTHING, NOW + 1) == Admit(RATED)
    assert policy.admit(rated(2), NOTHING, NOW + 2) == Admit(RATED)
    # Had they paid again, the next one would have to wait for two more tokens.
    assert policy.admit(rated(3), NOTHING, NOW + 3) == Admit(RATED)


def test_the_same_task_pays_again_when_it_comes_a_second_time() -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    assert policy.admit(rated(0), NOTHING, NOW) == Admit(RATED)
    assert policy.admit(rated(0), NOTHING, NOW) == Park(NOW + 1)
    assert policy.admit(rated(0), NOTHING, NOW + 1) == Admit(RATED)
    assert policy.admit(rated(0), NOTHING, NOW + 1) == Park(NOW + 2)


def test_a_task_gets_other_rules_while_it_runs_on() -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    policy.change("plain", LIMITED)
    assert (policy.rules["plain"], policy.admit(ARRIVAL, NOTHING, NOW)) == (
        LIMITED,
        Admit(LIMITED, alone=True),
    )
    policy.change("rated", RATED.replaced(hard_limit_s=9.0))
    assert isinstance(policy.admit(rated(0), NOTHING, NOW), Admit)
    policy.change("rated", RATED.replaced(hard_limit_s=8.0))  # the rate is the same: so are its tokens
    assert policy.admit(rated(1), NOTHING, NOW) == Park(NOW + 1)
    policy.change("rated", RATED.replaced(rate_per_second=0.5))
    assert isinstance(policy.admit(rated(2), NOTHING, NOW), Admit)  # another bucket, and it is full
    assert policy.admit(rated(3), NOTHING, NOW) == Park(NOW + 2)
    policy.change("rated", PLAIN)
    assert [policy.admit(rated(number), NOTHING, NOW) for number in range(4, 9)] == [Admit(PLAIN)] * 5


def test_what_nobody_said_of_a_task_or_a_message_is_nothing_special() -> None:
    rules = TaskRules(False, 0.0, None, None, False, None, False, True, False, False, False)
    assert Admit(PLAIN) == Admit(rules, False, False)
    assert Arrival("plain", "t") == Arrival("plain", "t", 0.0, 0.0, 0, False, None)
    assert not PLAIN.has_limits


def test_one_tasks_rate_is_not_anothers() -> None:
    policy = AdmissionPolicy(RULES | {"other": RATED}, max_deliveries=3)
    assert policy.admit(rated(0), NOTHING, NOW) == Admit(RATED)
    assert policy.admit(Arrival("other", "o"), NOTHING, NOW) == Admit(RATED)
    assert policy.admit(ARRIVAL, NOTHING, NOW) == Admit(PLAIN)


def test_a_task_that_is_not_due_or_refused_pays_nothing() -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    policy.admit(rated(0)._replace(due=NOW + 60), NOTHING, NOW)
    policy.admit(rated(1)._replace(starts=3), NOTHING, NOW)
    policy.admit(rated(2), revoked_ids("t2"), NOW)
    assert policy.admit(rated(3), NOTHING, NOW) == Admit(RATED)


def test_a_redelivered_task_keeps_to_its_rate_and_then_runs_alone() -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    policy.admit(rated(0), NOTHING, NOW)
    again = rated(1)._replace(redelivered=True)
    assert policy.admit(again, NOTHING, NOW) == Park(NOW + 1)
    assert policy.admit(again, NOTHING, NOW + 1) == Admit(RATED, alone=True, count_start=True)


def test_what_was_promised_is_bounded() -> None:
    policy = AdmissionPolicy({"rated": TaskRules(rate_per_second=1e-6)}, max_deliveries=3)
    for number in range(PROMISES_MAX + 50):
        policy.admit(rated(number), NOTHING, NOW)
    assert len(policy._promised) == PROMISES_MAX


@given(
    st.lists(
        st.builds(
            Arrival,
            st.sampled_from([*RULES, "no.such"]),
            st.sampled_from("abcd"),
            due=st.sampled_from([0.0, NOW - 5, NOW + 5]),
            expires_at=st.sampled_from([0.0, NOW - 1, NOW + 50]),
            starts=st.integers(0, 4),
            redelivered=st.booleans(),
            stamps=st.none(),
        ),
        max_size=20,
    )
)
def test_nothing_runs_that_must_not_and_nothing_is_parked_in_the_past(arrivals: list[Arrival]) -> None:
    policy = AdmissionPolicy(RULES, max_deliveries=3)
    for arrival in arrivals:
        decision = policy.admit(arrival, revoked_ids("a"), NOW)
        if isinstance(decision, Admit):
            assert arrival.task_id != "a" and arrival.task in RULES and arrival.starts < 3
            assert not arrival.redelivered or (decision.alone and decision.count_start)
        if isinstance(decision, Park):
            assert decision.until > NOW
