"""What becomes of a message whose run was lost, timed out or failed: Celery's table, and every other case."""

from itertools import product
from typing import Any

import pytest

from umbel.protocol.delivery.delivery import Fate, Loss, TaskRules, after_failure, after_loss

LATE = TaskRules()
EARLY = TaskRules(acks_early=True)
TAKEN = TaskRules(acks_taken=True)
# What Celery calls them: late, with and without reject_on_worker_lost, acks_on_failure and acks_on_timeout.
CELERY_LATE = TaskRules(redelivers_lost=False)
REJECT_ON_WORKER_LOST = TaskRules(redelivers_lost=True)
NO_ACK_ON_FAILURE = TaskRules(redelivers_lost=False, rejects_failed=True, redelivers_timed_out=True)

KILLED = Loss(ran=True, started=True)
NOT_RUN = Loss(ran=False)
LATE_OUTCOME = Loss(ran=True)  # its outcome was lost, and it is not to blame
TIMED_OUT = Loss(ran=True, started=True, timed_out=True)


@pytest.mark.parametrize(
    ("rules", "fate"),
    [
        (LATE, Fate.REDELIVER),
        (EARLY, Fate.FAIL),
        (TAKEN, Fate.FAIL),
        (CELERY_LATE, Fate.FAIL),
        (REJECT_ON_WORKER_LOST, Fate.REDELIVER),
        (NO_ACK_ON_FAILURE, Fate.REJECT),
    ],
)
def test_what_becomes_of_a_message_whose_child_was_killed(rules: TaskRules, fate: Fate) -> None:
    assert after_loss(rules, KILLED, last_chance=False, stopping=False) is fate


@pytest.mark.parametrize(
    ("rules", "fate"),
    [
        (LATE, Fate.FAIL),
        (EARLY, Fate.FAIL),
        (CELERY_LATE, Fate.FAIL),
        (NO_ACK_ON_FAILURE, Fate.FAIL_AND_REDELIVER),
        (TaskRules(acks_taken=True, redelivers_timed_out=True), Fate.FAIL),
    ],
)
def test_what_becomes_of_a_message_at_its_hard_limit(rules: TaskRules, fate: Fate) -> None:
    for stopping in (False, True):
        assert after_loss(rules, TIMED_OUT, last_chance=False, stopping=stopping) is fate


@pytest.mark.parametrize(
    ("rules", "fate"),
    [
        (LATE, Fate.FAIL),
        (CELERY_LATE, Fate.FAIL),
        (NO_ACK_ON_FAILURE, Fate.REJECT),
        (TaskRules(acks_early=True, rejects_failed=True), Fate.FAIL),
        (TaskRules(acks_taken=True, rejects_failed=True), Fate.FAIL),
    ],
)
def test_what_becomes_of_a_message_whose_task_raised(rules: TaskRules, fate: Fate) -> None:
    assert after_failure(rules) is fate


def every_case() -> list[tuple[TaskRules, Loss, bool, bool]]:
    flags = ("acks_early", "acks_taken", "redelivers_lost", "redelivers_timed_out", "rejects_failed")
    chosen: list[dict[str, Any]] = [
        dict(zip(flags, values, strict=True)) for values in product((False, True), repeat=len(flags))
    ]
    rules = [TaskRules(**one) for one in chosen]
    losses = (KILLED, NOT_RUN, LATE_OUTCOME, TIMED_OUT)
    return list(product(rules, losses, (False, True), (False, True)))


def test_no_message_is_forgotten_none_runs_for_ever_and_none_twice_that_may_not() -> None:
    again = {Fate.GIVE_BACK, Fate.REDELIVER, Fate.FAIL_AND_REDELIVER}
    for rules, loss, last_chance, stopping in every_case():
        fate = after_loss(rules, loss, last_chance=last_chance, stopping=stopping)
        if not loss.ran:
            assert fate is Fate.GIVE_BACK
        if loss.ran and rules.acks_before:
            assert fate is Fate.FAIL
        if loss.ran and stopping and not rules.acks_before and not loss.timed_out:
            assert fate is Fate.GIVE_BACK  # nobody is to blame
        if loss.started and last_chance and fate in again:
            assert stopping and not loss.timed_out
        if fate is Fate.BURY:
            assert loss.started and last_chance
        if fate is Fate.REDELIVER:
            assert rules.redelivers_lost and not loss.timed_out
        if fate is Fate.FAIL_AND_REDELIVER:
            assert rules.redelivers_timed_out and loss.timed_out
        if fate is Fate.REJECT:
            assert rules.rejects_failed and not rules.redelivers_lost


@pytest.mark.parametrize(("loss", "fate"), [(KILLED, Fate.BURY), (LATE_OUTCOME, Fate.REDELIVER)])
def test_only_a_run_that_is_to_blame_uses_up_the_last_chance(loss: Loss, fate: Fate) -> None:
    assert after_loss(LATE, loss, last_chance=True, stopping=False) is fate


def test_a_message_that_never_ends_in_time_is_buried_in_the_end() -> None:
    assert after_loss(NO_ACK_ON_FAILURE, TIMED_OUT, last_chance=True, stopping=False) is Fate.BURY


def test_fates_are_named_in_words() -> None:
    assert [fate.value for fate in Fate] == [
        "give back",
        "redeliver",
        "fail",
        "reject",
        "fail and redeliver",
        "bury",
    ]
