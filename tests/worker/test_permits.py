"""Messages whose tasks have a limit for the cluster: who starts, and what becomes of the rest."""

from collections.abc import Mapping, Sequence
from time import monotonic
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from tests.worker.recorded import QUEUE, TAG, TASK, Recorded, delivery_of, message_of
from tests.worker.test_judging import admit, told
from umbel.brokers.interface import Bury, Delivery, Permit, Return
from umbel.errors import BrokerRefused, BrokerUnavailable
from umbel.pools.interface import Outcome
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.delivery.limits import ClusterLimit, Field, Rate, Terms
from umbel.wire.call import read_headers
from umbel.wire.message import Outgoing
from umbel.worker.delivery.admit import job_of
from umbel.worker.delivery.permits import START_WITHIN_S

LIMIT = ClusterLimit(TASK, "{customer}", (Field("customer", 0),), Terms(1))
LIMITED = TaskRules(limit=LIMIT)


class Asked:
    """A broker that answers what it is told to."""

    def __init__(self, recorded: Recorded, refused: Mapping[Any, str | None] = {}) -> None:
        self.asked: list[Permit] = []
        self.refused = refused
        self.error: Exception | None = None
        recorded.broker.permit = self.permit  # type: ignore[attr-defined]

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Any, str | None]:
        self.asked += asked
        if self.error is not None:
            raise self.error
        return self.refused


def limited(key: str | None = "ada", *args: Any, **options: Any) -> Delivery:
    message = message_of(*args, **options)
    if key is not None:
        message = replace(message, headers=message.headers[:-1] + f',"umbel_limit":"{key}"}}'.encode())
        assert read_headers(message).umbel_limit == key
    return delivery_of(message)


def test_what_may_start_is_received_and_what_waits_is_not() -> None:
    recorded = Recorded(rules=LIMITED)
    asked = Asked(recorded, {"second": ""})
    second = replace(limited(), tag="second")
    (started,) = admit(recorded, limited(), second)
    assert started.delivery.tag == TAG
    assert asked.asked == [Permit(tag, "t", f"{TASK}:ada", Terms(1)) for tag in (TAG, "second")]
    assert recorded.counted == {"received": 2, "parked": 1}
    recorded.task_events.started(started, 1.0)
    assert told(recorded) == ["task-received", "task-started"]
    assert recorded.sink.verdicts == []


def test_tasks_without_a_limit_ask_for_nothing() -> None:
    recorded = Recorded()
    asked = Asked(recorded)
    assert len(admit(recorded, delivery_of())) == 1
    assert asked.asked == []


def test_a_task_that_has_no_limit_any_more_keeps_nobody_waiting() -> None:
    recorded = Recorded()
    asked = Asked(recorded)
    assert len(admit(recorded, limited())) == 1
    assert asked.asked == [Permit(TAG, "t", f"{TASK}:ada", Terms(), ends=True)]
    recorded = Recorded()
    recorded.broker.capabilities = SimpleNamespace(unique=True, limits=False)  # as on RabbitMQ
    asked = Asked(recorded)
    assert len(admit(recorded, limited())) == 1
    assert asked.asked == []


def test_a_message_that_names_no_key_gets_it_from_its_arguments_or_is_given_up() -> None:
    recorded = Recorded(rules=LIMITED)
    asked = Asked(recorded)
    assert len(admit(recorded, limited(None, "bob"))) == 1
    assert [one.bucket for one in asked.asked] == [f"{TASK}:bob"]
    asked.asked.clear()
    unread = replace(
        limited(None), message=replace(limited(None).message, content_type="application/x-python")
    )
    assert admit(recorded, limited(None), unread) == []
    first, second = (one.reason for one in recorded.sink.verdicts if isinstance(one, Bury))
    assert "needs 'customer' for its key" in first
    assert "its arguments cannot be read here" in second
    assert asked.asked == []


def test_one_that_is_refused_passes_its_turn_on() -> None:
    recorded = Recorded(rules=LIMITED)
    asked = Asked(recorded)
    assert admit(recorded, limited(expires=-100.0), limited(None, expires=-100.0)) == []
    assert asked.asked == [Permit(TAG, "t", f"{TASK}:ada", Terms(), ends=True)]
    assert recorded.counted["revoked"] == 2


def test_a_broker_that_is_away_gets_them_back_and_one_that_refuses_ends_them() -> None:
    for error, kind in ((BrokerUnavailable("away"), Return), (BrokerRefused("a key of another type"), Bury)):
        recorded = Recorded(rules=LIMITED)
        Asked(recorded).error = error
        assert admit(recorded, limited()) == []
        (verdict,) = recorded.sink.verdicts
        assert isinstance(verdict, kind)
        assert told(recorded) == (["task-received", "task-failed"] if kind is Bury else [])
        sent_again = Outgoing(QUEUE, limited().message)
        assert [one for one in recorded.sink.kept if kind is Return] == [sent_again] * (kind is Return)
    recorded = Recorded(rules=LIMITED)
    Asked(recorded, {TAG: "broken key"})
    assert admit(recorded, limited()) == []
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Bury)
    assert "so it was not run: broken key" in verdict.reason


def test_one_whose_claim_has_ended_is_given_back_for_the_case_that_nobody_else_has_it() -> None:
    recorded = Recorded(rules=LIMITED)
    Asked(recorded, {TAG: None})
    again = replace(limited(), redelivered=True)
    assert admit(recorded, again) == []
    assert recorded.sink.verdicts == [Return(TAG)]
    assert recorded.sink.kept == [Outgoing(QUEUE, again.message, redelivered=True)]
    assert recorded.counted == {"received": 1}


def test_a_permit_of_a_rate_ends_a_second_after_it_was_asked_for() -> None:
    paced = LIMITED.replaced(limit=LIMIT.replaced(terms=Rate("5/m").terms))
    asked_at = monotonic()
    for rules in (LIMITED, paced, paced.replaced(acks_early=True)):
        recorded = Recorded(rules=rules)
        Asked(recorded)
        (started,) = admit(recorded, limited())
        if rules is not paced:  # a slot is held as long as it takes; what is acknowledged cannot go back
            assert job_of(started).start_by == 0.0
            continue
        assert asked_at + START_WITHIN_S <= job_of(started).start_by <= monotonic() + START_WITHIN_S
        recorded.endings.settle(started, Outcome(started.number, "late", 1.0, 0.0))
        assert recorded.sink.verdicts == [Return(TAG)]
        assert recorded.counted == {"received": 1}
        assert told(recorded) == []


def test_a_task_that_was_handed_over_and_came_too_late_is_not_shown_as_running() -> None:
    recorded = Recorded(rules=LIMITED.replaced(limit=LIMIT.replaced(terms=Rate("5/m").terms)))
    Asked(recorded)
    (started,) = admit(recorded, limited())
    recorded.task_events.started(started, 1.0)
    recorded.endings.settle(started, Outcome(started.number, "late", 1.0, 0.0))
    assert recorded.sink.verdicts == [Return(TAG)]
    assert told(recorded) == ["task-received", "task-started", "task-rejected"]
