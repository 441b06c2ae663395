"""C3: which messages are kept when their tasks end: those of failures, unless task or size forbids."""

from typing import Any

import pytest

from tests.worker.recorded import QUEUE, TAG, Recorded, claimed_of, result_of
from umbel.brokers.interface import Ack, Bury
from umbel.pools.interface import LostJob, Outcome
from umbel.protocol.delivery.delivery import Admit, Refusal, TaskRules
from umbel.wire.message import Outgoing
from umbel.worker.delivery.end import REASON_MAX_CHARS

LATE = Admit(TaskRules(keeps_failed=True))
EARLY = Admit(TaskRules(acks_early=True, keeps_failed=True))
FAILURE = result_of("FAILURE")


def ended(kind: Any, summary: str = "ValueError('bad')") -> Outcome:
    return Outcome(1, kind, started_at=5.0, runtime_s=0.5, results=[FAILURE], summary=summary)


def kept(recorded: Recorded) -> list[str]:
    return [one.keep for one in recorded.sink.verdicts if isinstance(one, Ack)]


def test_the_message_of_a_failure_is_kept_with_what_it_raised() -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(LATE), ended("failure"))
    assert recorded.sink.verdicts == [Ack(TAG, [FAILURE], keep="ValueError('bad')")]


@pytest.mark.parametrize("kind", ["success", "retry", "ignored"])
def test_what_did_not_fail_is_not_kept(kind: str) -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(LATE), ended(kind))
    assert kept(recorded) == [""]


def test_a_revoked_task_and_one_that_is_not_to_be_kept_are_not() -> None:
    recorded = Recorded()
    recorded.endings.refuse(claimed_of(LATE), Refusal.REVOKED)
    recorded.endings.settle(claimed_of(Admit(TaskRules())), ended("failure"))
    assert kept(recorded) == ["", ""]


def test_a_failure_that_says_nothing_and_one_that_says_much_are_kept() -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(LATE), ended("failure", ""))
    recorded.endings.settle(claimed_of(LATE), ended("failure", "x" * 10 * REASON_MAX_CHARS))
    short, long = kept(recorded)
    assert (short, len(long) < 2 * REASON_MAX_CHARS) == ("failed", True)


def test_one_that_was_acknowledged_early_is_kept_by_itself() -> None:
    recorded, claimed = Recorded(), claimed_of(EARLY)
    recorded.endings.settle(claimed, ended("failure"))
    recorded.endings.settle(claimed_of(EARLY), ended("success"))
    assert recorded.sink.failed == [(Outgoing(QUEUE, claimed.message), "ValueError('bad')")]
    assert recorded.sink.verdicts == []


def test_a_lost_run_that_counts_as_a_failure_is_kept() -> None:
    recorded = Recorded()
    lost = LostJob(1, started=True, ran=True, reason="process 1 died")
    recorded.endings.lose(claimed_of(EARLY), lost, stopping=False)
    rules = TaskRules(keeps_failed=True, redelivers_lost=False)
    recorded.endings.lose(claimed_of(Admit(rules)), lost, stopping=False)
    assert [why for _, why in recorded.sink.failed] == ["process 1 died while running the task"]
    assert kept(recorded) == ["process 1 died while running the task"]


def test_a_rejected_one_is_a_dead_letter_and_nothing_more() -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(LATE), ended("rejected"))
    (burial,) = recorded.sink.verdicts
    assert isinstance(burial, Bury) and recorded.sink.failed == []


def test_a_message_that_is_too_large_is_not_kept_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    claimed = claimed_of(LATE)
    size = len(claimed.message.body) + len(claimed.message.headers)
    for most, expected in ((size, ["ValueError('bad')"]), (size - 1, [""])):
        recorded = Recorded(failed_keep_max_bytes=most)
        recorded.endings.settle(claimed_of(LATE), ended("failure"))
        assert kept(recorded) == expected
    assert [one.message for one in caplog.records if "too large" in one.message] == [
        "message of a failed task is too large to store; `umbel task retry` cannot retry it"
    ]
