"""What becomes of a message that meets a fault of ours, and of what a broker or a store refuses."""

import json
import logging
from typing import Any

import pytest
from msgspec.structs import force_setattr, replace

from tests.worker.recorded import (
    FOLLOW_UP,
    QUEUE,
    TAG,
    Recorded,
    claimed_of,
    delivery_of,
    message_of,
    result_of,
)
from tests.worker.test_endings import EARLY, LATE, SENT, asked, kinds, lost, outcome
from umbel.brokers.interface import Ack, Bury, Refused
from umbel.pools.interface import Outcome
from umbel.protocol.delivery.delivery import Admit, Refusal, TaskRules
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.worker.context import Ending
from umbel.worker.delivery.end import Endings
from umbel.worker.delivery.task_events import TaskEvents
from umbel.worker.events import Events

SUCCESS, FAILURE, REVOKED = (result_of(status) for status in ("SUCCESS", "FAILURE", "REVOKED"))


def ending_with(recorded: Recorded, make: Any) -> Endings:
    """The same, where the app ends tasks like this."""
    force_setattr(recorded.context.settings, "end_without_running", make)
    events = TaskEvents(Events(recorded.context))
    return Endings(recorded.context, recorded.policy, recorded.sink, events)


FAULT = LookupError("no such thing")


def test_a_message_that_meets_a_fault_is_buried_with_the_error(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has opened it, so nothing is known of its task."""
    recorded = Recorded()
    recorded.endings.bury_faulty_delivery(delivery_of(), FAULT)
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Bury) and verdict == Bury(TAG, verdict.reason)
    assert verdict.reason.startswith("internal error in the worker: LookupError: no such thing\n")
    assert (recorded.counted, recorded.ended) == ({"faults": 1, "buried": 1}, [])
    (entry,) = caplog.records
    assert (vars(entry)["task_id"], entry.exc_info and entry.exc_info[1]) == ("t", FAULT)
    assert "dead letters" in entry.message


@pytest.mark.parametrize(
    ("ended", "results"), [(None, [FAILURE]), (outcome("success"), [SUCCESS])], ids=["running", "ended"]
)
def test_a_task_that_meets_a_fault_has_failed_unless_it_has_ended(
    ended: Outcome | None, results: list[StoredResult]
) -> None:
    recorded, claimed = Recorded(), claimed_of(LATE, unique="k")
    recorded.endings.bury_faulty(claimed, FAULT, ended)
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Bury) and verdict == Bury(TAG, verdict.reason, False, results, SENT)
    why = "UmbelError: internal error in the worker: LookupError: no such thing"
    assert recorded.ended == ([] if ended else [(why, "FAILURE")])
    assert recorded.sink.released == [("k", "t")]
    assert recorded.counted == {"faults": 1, "buried": 1}


@pytest.mark.parametrize(
    ("ended", "results"), [(None, [FAILURE]), (outcome("success"), [SUCCESS])], ids=["running", "ended"]
)
def test_after_an_early_ack_a_fault_is_only_reported(
    ended: Outcome | None, results: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    recorded, claimed = Recorded(), claimed_of(EARLY)
    recorded.endings.bury_faulty(claimed, FAULT, ended)
    assert asked(recorded) == ([], [(results, SENT)])
    assert recorded.counted == {"faults": 1}
    assert "internal error" in caplog.messages[0] and "dead letters" not in caplog.messages[0]


def test_a_fault_is_logged_under_the_id_of_the_task_where_that_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded, claimed = Recorded(), claimed_of(LATE)
    claimed.headers = replace(claimed.headers, id="known")
    recorded.endings.bury_faulty(claimed, FAULT)
    assert vars(caplog.records[0])["task_id"] == "known"


def test_a_fault_is_named_by_its_type_however_many_lines_it_has() -> None:
    recorded = Recorded()
    recorded.endings.bury_faulty_delivery(delivery_of(), SyntaxError("odd", ("file", 1, 1, "line")))
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Bury) and verdict.reason.startswith(
        "internal error in the worker: SyntaxError: odd\n"
    )


def test_a_task_that_cannot_even_fail_is_buried_without_a_result() -> None:
    def broken(*_: object, **__: object) -> Any:
        raise OSError("no")

    recorded, claimed = Recorded(), claimed_of(LATE)
    ending_with(recorded, broken).bury_faulty(claimed, FAULT)
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Bury) and not verdict.results and not verdict.follow_ups


def test_a_job_that_met_a_fault_in_the_pool_is_not_tried_again() -> None:
    recorded = Recorded()
    recorded.endings.lose(claimed_of(LATE), lost(started=True, ran=True, fault="no frame"), stopping=True)
    assert asked(recorded) == ([Bury(TAG, "no frame", False, [FAILURE], SENT)], [])
    assert recorded.ended == [("PoolError: no frame", "FAILURE")]
    assert recorded.counted == {"lost": 1, "faults": 1, "buried": 1}
    assert kinds(recorded) == ["task-failed"]


def test_a_job_that_met_a_fault_in_the_pool_after_an_early_ack_has_failed() -> None:
    recorded = Recorded()
    recorded.endings.lose(claimed_of(EARLY), lost(started=True, ran=False, fault="no frame"), stopping=False)
    assert asked(recorded) == ([], [([FAILURE], SENT)])
    assert recorded.counted == {"faults": 1, "failed": 1}


def test_what_comes_before_an_ending_is_done_first_and_its_results_are_addressed_too() -> None:
    def count() -> Ending:
        return Ending([REVOKED], SENT, after=b"later")

    for before in (None, count):
        recorded = Recorded(results="rpc://")
        endings = ending_with(recorded, lambda *_, one=before, **__: Ending([FAILURE], [], one, 3, b"then"))
        endings.refuse(claimed_of(None, reply_to="asker"), Refusal.EXPIRED)
        assert recorded.sink.verdicts == [Ack(TAG, [replace(FAILURE, reply_to="asker")], [], b"then")]
        made = [(work(), attempts) for work, attempts in recorded.sink.first]
        more = Ending([replace(REVOKED, reply_to="asker")], SENT, after=b"later")
        assert made == ([(more, 3)] if before else [])


def test_who_waits_for_a_result_that_cannot_be_stored_is_told_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded = Recorded()
    refused = StoredResult("id", "SUCCESS", b"{}", reply_to="asker")
    recorded.endings.end_refused_parts([Refused(refused, "too large"), Refused(FAILURE, "too large")])
    ((results, sent),) = recorded.sink.reports
    (told,) = results
    assert (told.task_id, told.status, told.reply_to, sent) == ("id", "FAILURE", "asker", [])
    assert "ended as SUCCESS" in str(json.loads(told.payload)["result"])
    assert recorded.counted == {"refused": 2}
    about = vars(caplog.records[0])
    assert (about["task_id"], about["state"], about["why"]) == ("id", "SUCCESS", "too large")


def test_a_message_that_its_queue_refused_has_failed_to_those_who_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded = Recorded()
    sent = Outgoing("next", message_of())
    recorded.endings.end_refused_parts([Refused(sent, "not a list")])
    assert recorded.ended == [("BrokerRefused: the queue 'next' refused the message: not a list", "FAILURE")]
    assert asked(recorded) == ([], [([FAILURE], SENT)])
    assert kinds(recorded) == ["task-failed"]
    unreadable = Outgoing(QUEUE, Message(b"", b"no message"))
    recorded.endings.end_refused_parts([Refused(unreadable, "not a list"), Refused(FOLLOW_UP, "not a list")])
    assert recorded.counted == {"refused": 3} and len(recorded.ended) == 2
    about = vars(caplog.records[0])
    assert (about["queue"], about["task_id"], about["why"]) == ("next", "t", "not a list")


@pytest.mark.parametrize(
    ("kind", "fields", "level", "traced"),
    [
        ("success", {}, logging.DEBUG, False),
        ("failure", {"traceback": "Traceback"}, logging.ERROR, True),
        ("failure", {}, logging.ERROR, False),
        ("retry", {"traceback": "Traceback"}, logging.INFO, False),
    ],
)
def test_the_log_says_how_a_task_ended(
    caplog: pytest.LogCaptureFixture, kind: str, fields: dict[str, str], level: int, traced: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    Recorded().endings.settle(claimed_of(LATE), outcome(kind, **fields))
    (entry,) = caplog.records
    about = vars(entry)
    assert (entry.levelno, "traceback" in about) == (level, traced)
    assert (about["task"], about["task_id"]) == ("t.task", "t")


def test_what_comes_before_an_ending_joins_the_verdict_that_ends_the_message() -> None:
    """Not one that returns it, nor any after an early ack."""
    limited = TaskRules(redelivers_timed_out=True, hard_limit_s=1.0)
    late = lost(started=True, ran=True, timed_out=True)
    for joins in (True, False):
        recorded = Recorded()
        endings = ending_with(recorded, lambda *_, one=joins, **__: Ending(before=Ending, joins=one))
        endings.refuse(claimed_of(None), Refusal.EXPIRED)
        endings.refuse(claimed_of(None), Refusal.UNKNOWN)
        endings.lose(claimed_of(Admit(limited)), late, stopping=False)
        endings.lose(claimed_of(EARLY), lost(started=True, ran=True), stopping=False)
        assert recorded.sink.joined == ([TAG, TAG, None, None] if joins else [None] * 4)
