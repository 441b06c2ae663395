"""What becomes of a message that has ended: a table of outcomes and losses, by how it was acknowledged.

Late: the message is claimed until its task has ended. Counted: the same, and its start was counted in
the broker before it ran. Early: it was acknowledged before it ran, so no verdict can reach it any more.
"""

from collections.abc import Sequence
from time import time
from typing import Any

import pytest
from msgspec.structs import force_setattr

from tests.worker.recorded import FOLLOW_UP, QUEUE, TAG, Recorded, Report, claimed_of, delivery_of, result_of
from umbel.brokers.interface import Ack, Bury, Return, Verdict
from umbel.errors import BadMessage, TimeLimitExceeded, TooLarge, WireError
from umbel.pools.interface import LostJob, Outcome
from umbel.protocol.delivery.delivery import Admit, Refusal, TaskRules
from umbel.protocol.delivery.trust import Doubt, Doubted
from umbel.protocol.shutdown import StopRequested
from umbel.wire.message import Outgoing
from umbel.worker.context import Ending
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.delivery.end import REQUEUE_PAUSE_S, Endings
from umbel.worker.delivery.task_events import TaskEvents
from umbel.worker.events import Events

LATE = Admit(TaskRules())
COUNTED = Admit(TaskRules(), alone=True, count_start=True)
EARLY = Admit(TaskRules(acks_early=True))
RUNS = {"late": LATE, "counted": COUNTED, "early": EARLY}

SUCCESS, FAILURE, REVOKED = (result_of(status) for status in ("SUCCESS", "FAILURE", "REVOKED"))
SENT = [FOLLOW_UP]


def outcome(kind: Any, **fields: Any) -> Outcome:
    return Outcome(1, kind, started_at=5.0, runtime_s=0.5, results=[SUCCESS], follow_ups=SENT, **fields)


def lost(*, started: bool, ran: bool, **fields: Any) -> LostJob:
    return LostJob(1, started=started, ran=ran, reason="process 1 died", **fields)


def asked(recorded: Recorded) -> tuple[list[Verdict], list[Report]]:
    return recorded.sink.verdicts, recorded.sink.reports


def kinds(recorded: Recorded) -> list[str]:
    return [event["type"] for event in recorded.told]


# ---- messages that nobody opens ---------------------------------------------------------------------


@pytest.mark.parametrize("doubt", list(Doubt))
def test_what_is_not_trusted_is_buried_with_its_doubt_and_nothing_else_is_told(
    doubt: Doubt, caplog: pytest.LogCaptureFixture
) -> None:
    recorded, delivery = Recorded(), delivery_of()
    recorded.endings.bury_untrusted(delivery, Doubted(doubt, "no good"))
    recorded.endings.bury_untrusted(delivery, Doubted(doubt, "no good"))
    assert asked(recorded) == ([Bury(TAG, f"{doubt.value}: no good")] * 2, [])
    assert recorded.sink.kept == [Outgoing(QUEUE, delivery.message)] * 2
    assert recorded.counted == {doubt.value: 2, "buried": 2}
    assert recorded.told == []
    for entry in map(vars, caplog.records):
        assert (entry["name"], entry["queue"]) == ("umbel.worker.tasks", QUEUE)
        assert (doubt.value in entry["message"], entry["why"]) == (True, f"{doubt.value}: no good")


# ---- outcomes --------------------------------------------------------------------------------------

ENDED = [
    ("success", "succeeded", "task-succeeded"),
    ("failure", "failed", "task-failed"),
    ("retry", "retried", "task-retried"),
]


@pytest.mark.parametrize(("kind", "counter", "event"), ENDED)
@pytest.mark.parametrize("run", ["late", "counted"])
def test_what_ran_to_its_end_is_acknowledged_with_all_it_brings(
    run: str, kind: str, counter: str, event: str
) -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(RUNS[run]), outcome(kind))
    assert asked(recorded) == ([Ack(TAG, [SUCCESS], SENT)], [])
    assert recorded.counted == {counter: 1}
    assert kinds(recorded) == ["task-started", event]


@pytest.mark.parametrize(("kind", "counter", "event"), ENDED)
def test_what_was_acknowledged_early_only_reports(kind: str, counter: str, event: str) -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(EARLY), outcome(kind))
    assert asked(recorded) == ([], [([SUCCESS], SENT)])
    assert recorded.counted == {counter: 1}
    assert kinds(recorded) == ["task-started", event]


@pytest.mark.parametrize(("expected", "level"), [(True, "INFO"), (False, "ERROR")])
def test_an_error_that_the_task_throws_is_logged_as_one_line(
    expected: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = Recorded()
    with caplog.at_level("INFO"):
        recorded.endings.settle(claimed_of(LATE), outcome("failure", traceback="Trace", expected=expected))
    (entry,) = [one for one in caplog.records if one.getMessage() == "task failed"]
    assert (entry.levelname, hasattr(entry, "traceback")) == (level, not expected)


def test_a_retry_is_logged_with_its_attempt_and_delay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.worker.delivery.end.cluster_now", lambda: 100.0)
    with caplog.at_level("INFO"):
        Recorded().endings.settle(claimed_of(LATE), outcome("retry", summary="no", not_before=107.5))
    (entry,) = [vars(one) for one in caplog.records if one.getMessage() == "task retried"]
    assert (entry["attempt"], entry["delay_s"], entry["why"]) == (0, 7.5, "no")


@pytest.mark.parametrize("asked_for", [True, False])
def test_a_success_is_logged_at_info_where_that_is_asked_for(
    asked_for: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        Recorded(log_successes=asked_for).endings.settle(claimed_of(LATE), outcome("success", summary="42"))
    told = [vars(one) for one in caplog.records if one.getMessage() == "task succeeded"]
    assert [(one["runtime_s"], one["result"], one["attempt"]) for one in told] == [(0.5, "42", 0)] * asked_for


@pytest.mark.parametrize("kind", ["success", "failure", "retry", "rejected"])
def test_an_end_is_told_with_the_time_of_the_process_that_ran_the_task(kind: str) -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(LATE), outcome(kind))
    assert [event["timestamp"] for event in recorded.told] == [5.0, 5.5]


def test_a_second_outcome_of_a_kind_is_counted_too() -> None:
    recorded = Recorded()
    for _ in range(2):
        recorded.endings.settle(claimed_of(LATE), outcome("ignored"))
    assert asked(recorded) == ([Ack(TAG, [SUCCESS], SENT)] * 2, [])
    assert recorded.counted == {"ignored": 2}


@pytest.mark.parametrize(("summary", "reason"), [("", "rejected by the task"), ("too odd", "too odd")])
@pytest.mark.parametrize("run", ["late", "counted"])
def test_what_the_task_rejected_is_buried_with_its_reason(run: str, summary: str, reason: str) -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(RUNS[run]), outcome("rejected", summary=summary))
    assert asked(recorded) == ([Bury(TAG, reason, results=[SUCCESS], follow_ups=SENT)], [])
    assert recorded.counted == {"rejected": 1, "buried": 1}
    assert kinds(recorded) == ["task-started", "task-rejected"]


def test_what_the_task_rejected_after_an_early_ack_cannot_be_buried() -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(EARLY), outcome("rejected"))
    assert asked(recorded) == ([], [([SUCCESS], SENT)])
    assert recorded.counted == {"rejected": 1}


@pytest.mark.parametrize(("run", "charged"), [("late", 0), ("counted", -1)])
def test_what_the_task_gave_back_returns_after_a_pause(run: str, charged: int) -> None:
    """The start that was counted before it ran is taken back: it killed nothing."""
    recorded, before = Recorded(), time()
    recorded.endings.settle(claimed_of(RUNS[run]), outcome("requeued"))
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Return)
    assert verdict == Return(TAG, charged, ran=True, not_before=verdict.not_before)
    assert before + REQUEUE_PAUSE_S <= verdict.not_before <= time() + REQUEUE_PAUSE_S
    assert recorded.sink.reports == [([], SENT)]
    assert recorded.counted == {"requeued": 1}


def test_what_the_task_gave_back_after_an_early_ack_is_sent_again() -> None:
    recorded = Recorded()
    claimed = claimed_of(EARLY)
    recorded.endings.settle(claimed, outcome("requeued"))
    before, (results, again) = recorded.sink.reports
    assert (recorded.sink.verdicts, before, results) == ([], ([], SENT), [])
    assert again == [Outgoing(QUEUE, claimed.message, again[0].not_before, redelivered=True)]
    assert again[0].not_before > time()


def test_what_is_given_back_while_the_worker_stops_does_not_wait() -> None:
    recorded = Recorded()
    recorded.context.shutdown.step(StopRequested(), now=0.0)
    recorded.endings.settle(claimed_of(LATE), outcome("requeued"))
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Return) and verdict.not_before <= time()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("late", ([Ack(TAG, [REVOKED], SENT)], [([], SENT)])),
        ("counted", ([Ack(TAG, [REVOKED], SENT)], [([], SENT)])),
        ("early", ([], [([], SENT), ([REVOKED], SENT)])),
    ],
)
def test_what_was_cancelled_is_revoked_and_what_it_sent_stays_sent(run: str, expected: object) -> None:
    recorded, claimed = Recorded(), claimed_of(RUNS[run])
    claimed.terminated_by = "SIGTERM"
    recorded.endings.settle(claimed, outcome("cancelled"))
    assert asked(recorded) == expected
    assert recorded.ended == [("TaskRevoked: terminated", "REVOKED")]
    assert recorded.counted == {"revoked": 1}
    (event,) = recorded.told
    assert (event["type"], event["terminated"], event["signum"]) == ("task-revoked", True, "SIGTERM")
    assert event["expired"] is False


# ---- losses ----------------------------------------------------------------------------------------


def after_loss(
    run: Admit, loss: LostJob, *, stopping: bool = False, starts: int = 0
) -> tuple[Recorded, Claimed]:
    recorded, claimed = Recorded(), claimed_of(run, starts=starts)
    recorded.endings.lose(claimed, loss, stopping=stopping)
    return recorded, claimed


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("late", ([Ack(TAG, [FAILURE], SENT)], [])),
        ("counted", ([Ack(TAG, [FAILURE], SENT)], [])),
        ("early", ([], [([FAILURE], SENT)])),
    ],
)
@pytest.mark.parametrize("stopping", [False, True])
def test_a_task_over_its_time_limit_has_failed(run: str, expected: object, stopping: bool) -> None:
    recorded = Recorded()
    claimed = claimed_of(
        Admit(TaskRules(acks_early=run == "early", hard_limit_s=2.5), count_start=run == "counted")
    )
    recorded.endings.lose(claimed, lost(started=True, ran=True, timed_out=True), stopping=stopping)
    assert asked(recorded) == expected
    assert recorded.ended == [("TimeLimitExceeded: the task exceeded its time limit of 2.5 s", "FAILURE")]
    assert recorded.counted == {"lost": 1, "failed": 1}
    assert kinds(recorded) == ["task-failed"]


@pytest.mark.parametrize("stopping", [False, True])
def test_a_task_that_was_acknowledged_early_fails_with_its_process(stopping: bool) -> None:
    recorded, _ = after_loss(EARLY, lost(started=True, ran=True), stopping=stopping)
    assert asked(recorded) == ([], [([FAILURE], SENT)])
    assert recorded.ended == [("WorkerLost: process 1 died while running the task", "FAILURE")]
    assert recorded.counted == {"lost": 1, "failed": 1}


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize(("run", "charged"), [("late", 0), ("counted", -1)])
def test_what_had_not_run_returns_and_nothing_is_charged(run: str, charged: int, stopping: bool) -> None:
    recorded, _ = after_loss(RUNS[run], lost(started=False, ran=False), stopping=stopping, starts=2)
    assert asked(recorded) == ([Return(TAG, charged, ran=False)], [])
    assert recorded.counted == {}


@pytest.mark.parametrize("stopping", [False, True])
def test_what_had_not_run_and_was_acknowledged_early_is_sent_again(stopping: bool) -> None:
    recorded, claimed = after_loss(EARLY, lost(started=False, ran=False), stopping=stopping)
    assert asked(recorded) == ([], [([], [Outgoing(QUEUE, claimed.message)])])


@pytest.mark.parametrize(("run", "charged"), [("late", 0), ("counted", -1)])
def test_what_the_stopping_worker_cut_off_returns_as_one_that_ran(run: str, charged: int) -> None:
    recorded, _ = after_loss(RUNS[run], lost(started=True, ran=True), stopping=True, starts=2)
    assert asked(recorded) == ([Return(TAG, charged, ran=True)], [])
    assert recorded.counted == {"lost": 1}


@pytest.mark.parametrize(("run", "charged"), [("late", True), ("counted", False)])
def test_a_task_whose_process_died_returns_with_one_start_charged(run: str, charged: bool) -> None:
    """One that was counted before it ran is charged already."""
    recorded, claimed = after_loss(RUNS[run], lost(started=True, ran=True), starts=1)
    assert asked(recorded) == ([Return(TAG, charged, ran=True)], [])
    assert recorded.sink.kept == [Outgoing(QUEUE, claimed.message, redelivered=True)]
    assert recorded.counted == {"lost": 1}


@pytest.mark.parametrize(("run", "charged"), [("late", True), ("counted", False)])
def test_the_third_process_that_dies_buries_its_task(run: str, charged: bool) -> None:
    recorded, _ = after_loss(RUNS[run], lost(started=True, ran=True), starts=2)
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Bury)
    assert "process 1 died" in verdict.reason and "started 3 times" in verdict.reason
    assert verdict == Bury(TAG, verdict.reason, charged, [FAILURE], SENT)
    assert recorded.counted == {"lost": 1, "buried": 1}
    assert kinds(recorded) == ["task-failed"]


def test_an_outcome_that_got_lost_is_not_held_against_its_task() -> None:
    """It ran to its end: however often it has started, it did not kill its process."""
    recorded, _ = after_loss(LATE, lost(started=False, ran=True), starts=2)
    assert asked(recorded) == ([Return(TAG, False, ran=True)], [])


# ---- the rules of a Celery task --------------------------------------------------------------------

CELERY_LATE = TaskRules(redelivers_lost=False)
NO_ACKS = TaskRules(
    redelivers_lost=False,
    rejects_failed=True,
    redelivers_timed_out=True,
    rejects_by_queue=True,
    hard_limit_s=2.5,
)
TAKEN = TaskRules(acks_taken=True, hard_limit_s=2.5)
KILLED = lost(started=True, ran=True)
LOST_TEXT = "process 1 died while running the task"


def test_a_loss_that_counts_as_a_failure_ends_the_message() -> None:
    recorded, _ = after_loss(Admit(CELERY_LATE), KILLED)
    assert asked(recorded) == ([Ack(TAG, [FAILURE], SENT)], [])
    assert recorded.ended == [(f"WorkerLost: {LOST_TEXT}", "FAILURE")]
    assert recorded.counted == {"lost": 1, "failed": 1}
    assert kinds(recorded) == ["task-failed"]


def test_a_loss_may_make_the_message_a_dead_letter_of_its_queue() -> None:
    recorded = Recorded()
    recorded.endings.lose(claimed_of(Admit(NO_ACKS), unique="k"), KILLED, stopping=False)
    assert asked(recorded) == ([Bury(TAG, LOST_TEXT, False, [FAILURE], SENT, by_queue=True)], [])
    assert recorded.counted == {"lost": 1, "failed": 1, "buried": 1}
    assert kinds(recorded) == ["task-failed", "task-rejected"]
    assert recorded.told[-1]["requeue"] is False
    assert recorded.sink.released == [("k", "t")]


def test_a_message_may_run_again_after_its_hard_limit_and_its_failure_is_stored() -> None:
    recorded = Recorded()
    claimed = claimed_of(Admit(NO_ACKS), unique="k")
    recorded.endings.lose(claimed, lost(started=True, ran=True, timed_out=True), stopping=False)
    assert asked(recorded) == ([Return(TAG, True, ran=True)], [([FAILURE], SENT)])
    assert recorded.ended == [("TimeLimitExceeded: the task exceeded its time limit of 2.5 s", "FAILURE")]
    assert recorded.counted == {"lost": 1, "failed": 1}
    assert kinds(recorded) == ["task-failed", "task-rejected"]
    assert recorded.told[-1]["requeue"] is True
    assert recorded.sink.released == []


def test_a_message_that_ran_into_its_hard_limit_too_often_is_buried() -> None:
    recorded, _ = after_loss(Admit(NO_ACKS), lost(started=True, ran=True, timed_out=True), starts=2)
    text = "the task exceeded its time limit of 2.5 s; started 3 times, 'task_max_deliveries' reached"
    assert asked(recorded) == ([Bury(TAG, text, True, [FAILURE], SENT, by_queue=True)], [])


def test_a_failure_may_make_the_message_a_dead_letter_of_its_queue() -> None:
    recorded = Recorded()
    recorded.endings.settle(
        claimed_of(Admit(NO_ACKS)), outcome("failure", summary="KeyError(1)", after=b"then")
    )
    assert asked(recorded) == ([Bury(TAG, "KeyError(1)", False, [SUCCESS], SENT, True, b"then")], [])
    assert recorded.counted == {"failed": 1, "buried": 1}
    assert kinds(recorded) == ["task-started", "task-failed", "task-rejected"]


def test_what_a_child_has_taken_is_acknowledged_once_and_then_only_reports() -> None:
    recorded, claimed = Recorded(), claimed_of(Admit(TAKEN))
    recorded.endings.acknowledge_taken(claimed)
    recorded.endings.acknowledge_taken(claimed)
    assert claimed.acked and asked(recorded) == ([Ack(TAG)], [])
    recorded.endings.settle(claimed, outcome("success", after=b"then"))
    assert asked(recorded) == ([Ack(TAG)], [([SUCCESS], SENT)])
    assert recorded.sink.work_after == [b"then"]


@pytest.mark.parametrize("run", RUNS)
def test_what_is_acknowledged_by_another_rule_is_not_when_a_child_takes_it(run: str) -> None:
    recorded, claimed = Recorded(), claimed_of(RUNS[run])
    recorded.endings.acknowledge_taken(claimed)
    assert asked(recorded) == ([], []) and claimed.acked == (run == "early")


def test_what_ends_before_it_is_known_to_run_is_acknowledged_with_its_outcome() -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(Admit(TAKEN)), outcome("success", after=b"then"))
    assert asked(recorded) == ([Ack(TAG, [SUCCESS], SENT, b"then")], [])


@pytest.mark.parametrize("taken", [False, True])
def test_what_a_child_took_runs_once(taken: bool) -> None:
    recorded, claimed = Recorded(), claimed_of(Admit(TAKEN))
    if taken:
        recorded.endings.acknowledge_taken(claimed)
    recorded.endings.lose(claimed, KILLED, stopping=True)
    expected = ([Ack(TAG)], [([FAILURE], SENT)]) if taken else ([Ack(TAG, [FAILURE], SENT)], [])
    assert asked(recorded) == expected


def test_the_error_of_a_hard_limit_says_how_long_that_was() -> None:
    recorded, errors = Recorded(), list[Exception]()

    def end(message: object, queue: str, error: Exception, status: str, **_: object) -> Ending:
        errors.append(error)
        return Ending()

    force_setattr(recorded.context.settings, "end_without_running", end)
    events = TaskEvents(Events(recorded.context))
    endings = Endings(recorded.context, recorded.policy, recorded.sink, events)
    endings.lose(claimed_of(Admit(TAKEN)), lost(started=True, ran=True, timed_out=True), stopping=False)
    (error,) = errors
    assert isinstance(error, TimeLimitExceeded) and error.limit_s == 2.5


# ---- refused before they ran -----------------------------------------------------------------------


@pytest.mark.parametrize(("why", "expired"), [(Refusal.REVOKED, False), (Refusal.EXPIRED, True)])
def test_what_must_not_run_any_more_ends_as_revoked(why: Refusal, expired: bool) -> None:
    recorded = Recorded()
    recorded.endings.refuse(claimed_of(None), why)
    assert asked(recorded) == ([Ack(TAG, [REVOKED], SENT)], [])
    assert recorded.ended == [(f"TaskRevoked: {why.value}", "REVOKED")]
    assert recorded.counted == {"revoked": 1}
    (event,) = recorded.told
    assert (event["type"], event["expired"], event["terminated"]) == ("task-revoked", expired, False)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (Refusal.UNKNOWN, "t.task"),
        (Refusal.POISONOUS, "the task started 3 times, and its process died each time"),
    ],
)
def test_what_cannot_run_is_buried_with_the_reason(why: Refusal, words: str) -> None:
    recorded = Recorded()
    recorded.endings.refuse(claimed_of(None, starts=3), why)
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Bury) and words in verdict.reason
    assert verdict == Bury(TAG, verdict.reason, False, [FAILURE], SENT)
    assert [status for _, status in recorded.ended] == ["FAILURE"]
    assert recorded.counted == {"buried": 1}
    assert kinds(recorded) == ["task-failed"]


@pytest.mark.parametrize(
    ("error", "kind"), [(BadMessage("no JSON"), "corrupt message"), (TooLarge("9 bytes"), "message refused")]
)
def test_what_cannot_be_read_is_buried_with_the_reason(error: WireError, kind: str) -> None:
    """N1: nothing is stored for it; nobody knows who sent it."""
    recorded = Recorded()
    recorded.endings.bury_unreadable(delivery_of(), error)
    assert asked(recorded) == ([Bury(TAG, f"{kind}: {error}")], [])
    assert recorded.counted == {"buried": 1}


def test_what_is_given_back_before_it_was_judged_is_not_charged() -> None:
    recorded = Recorded()
    recorded.endings.give_back(claimed_of(None), ran=False, not_before=9.0)
    assert asked(recorded) == ([Return(TAG, 0, False, 9.0)], [])


# ---- unique tasks, and results that are sent -------------------------------------------------------

OVER: Sequence[tuple[str, bool]] = (
    ("success", True),
    ("failure", True),
    ("ignored", True),
    ("rejected", True),
    ("cancelled", True),
    ("requeued", False),
    ("retry", False),
)


@pytest.mark.parametrize(("kind", "over"), OVER)
@pytest.mark.parametrize("run", RUNS)
def test_a_unique_task_may_be_sent_again_once_it_is_over(run: str, kind: str, over: bool) -> None:
    recorded = Recorded()
    recorded.endings.settle(claimed_of(RUNS[run], unique="one a day"), outcome(kind))
    assert recorded.sink.released == ([("one a day", "t")] if over else [])


def test_a_unique_task_that_was_lost_or_buried_may_be_sent_again() -> None:
    recorded = Recorded()
    recorded.endings.lose(claimed_of(LATE, unique="k"), lost(started=True, ran=True), stopping=False)
    assert recorded.sink.released == []  # it runs once more
    recorded.endings.refuse(claimed_of(None, unique="k"), Refusal.POISONOUS)
    recorded.endings.refuse(claimed_of(None, unique="k"), Refusal.EXPIRED)
    assert recorded.sink.released == [("k", "t")] * 2


@pytest.mark.parametrize(("reply_to", "addressed"), [("client", ["client"]), ("", [])])
def test_results_that_are_sent_go_to_who_asked_or_nowhere(reply_to: str, addressed: list[str]) -> None:
    recorded = Recorded(results="rpc://")
    recorded.endings.settle(claimed_of(LATE, reply_to=reply_to), outcome("success"))
    recorded.endings.refuse(claimed_of(None, reply_to=reply_to), Refusal.EXPIRED)
    recorded.endings.refuse(claimed_of(None, reply_to=reply_to), Refusal.UNKNOWN)
    for verdict in recorded.sink.verdicts:
        assert isinstance(verdict, Ack | Bury)
        assert [result.reply_to for result in verdict.results] == addressed
