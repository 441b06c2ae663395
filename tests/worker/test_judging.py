"""What admission does with each message, without a broker: which run, which wait, and what is counted."""

import asyncio
from time import time
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.worker.recorded import QUEUE, TAG, TASK, Recorded, delivery_of, message_of
from umbel.brokers.interface import Ack, Bury, Delivery, Return, Settled, Started
from umbel.errors import BrokerUnavailable
from umbel.pools.abilities import Abilities
from umbel.protocol.delivery.delivery import AdmissionPolicy, Admit, TaskRules
from umbel.protocol.delivery.limits import ClusterLimit, Terms
from umbel.protocol.delivery.sensitive import Sensitive
from umbel.wire.retried import requeued
from umbel.worker.delivery.claimed import Claimed

RATED = TaskRules(rate_per_second=0.001)
EARLY = TaskRules(acks_early=True)


def admit(recorded: Recorded, *deliveries: Delivery) -> list[Claimed]:
    return asyncio.run(recorded.admission.admit(deliveries))


def told(recorded: Recorded) -> list[str]:
    return [event["type"] for event in recorded.told]


def test_a_message_that_may_run_is_received_and_handed_on() -> None:
    recorded = Recorded()
    first, second = admit(recorded, delivery_of(), delivery_of())
    assert (first.headers.task, first.headers.id, first.run) == (TASK, "t", Admit(TaskRules()))
    assert first.number != second.number  # by which the pool knows them
    assert recorded.counted == {"received": 2}
    assert told(recorded) == []
    assert (recorded.sink.verdicts, recorded.broker.settled) == ([], [])


def test_a_message_is_received_when_something_comes_of_it_with_the_time_of_its_claim() -> None:
    """One that goes back unstarted was delivered to nobody, and must not be counted as a delivery."""
    recorded = Recorded()
    first, second = admit(recorded, delivery_of(), delivery_of(message_of(task_id="other")))
    recorded.endings.give_back(second, ran=False)
    recorded.task_events.started(first, time() + 60)
    assert [(event["type"], event["uuid"]) for event in recorded.told] == [
        ("task-received", "t"),
        ("task-started", "t"),
    ]
    received, started = recorded.told
    assert received["clock"] < started["clock"]
    assert received["timestamp"] <= time()


def test_a_message_before_its_time_is_parked_and_shown_as_scheduled() -> None:
    recorded, due = Recorded(), round(time()) + 600.0
    assert admit(recorded, delivery_of(message_of(countdown=600))) == []
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Return) and abs(verdict.not_before - due) < 5
    assert verdict == Return(TAG, not_before=verdict.not_before)
    assert [(until, claimed.headers.id) for until, claimed in recorded.admission.scheduled] == [
        (verdict.not_before, "t")
    ]
    assert recorded.counted == {"received": 1, "parked": 1}
    assert told(recorded) == []  # it is received when it may run


def test_a_message_over_its_rate_is_parked_and_not_shown_as_scheduled() -> None:
    """It has no time at which it was meant to run, only its turn."""
    recorded = Recorded(rules=RATED)
    assert len(admit(recorded, delivery_of(), delivery_of(message_of()))) == 1
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Return) and verdict.not_before > time() + 500
    assert list(recorded.admission.scheduled) == []
    assert recorded.counted == {"received": 2, "parked": 1}


def test_what_is_due_and_over_its_rate_is_not_scheduled_either() -> None:
    recorded = Recorded(rules=RATED)
    past = message_of(countdown=-60)
    assert len(admit(recorded, delivery_of(past), delivery_of(past))) == 1
    assert list(recorded.admission.scheduled) == []


def test_a_revoked_message_is_received_and_refused() -> None:
    recorded = Recorded()
    recorded.revoked.add("t", time() + 60)
    assert admit(recorded, delivery_of()) == []
    assert recorded.counted == {"received": 1, "revoked": 1}
    assert told(recorded) == ["task-received", "task-revoked"]


@pytest.mark.parametrize(
    ("fields", "repeated"),
    [({}, 0), ({"redelivered": True}, 1), ({"starts": 1}, 1), ({"starts": 2, "redelivered": True}, 1)],
)
def test_a_message_that_may_have_run_before_is_counted_as_a_repeat(
    fields: dict[str, Any], repeated: int
) -> None:
    recorded = Recorded()
    assert len(admit(recorded, delivery_of(**fields))) == 1
    assert recorded.context.counters.repeated == repeated


def test_the_receipt_of_a_requeued_letter_tells_how_often_it_had_started() -> None:
    recorded = Recorded()
    sent = requeued(QUEUE, message_of(), starts=3, stored="", signer=None, now=time())
    (claimed,) = admit(recorded, delivery_of(sent.message, redelivered=True))
    assert claimed.run == Admit(TaskRules(), alone=True, count_start=True)
    recorded.task_events.started(claimed, time())
    event, _ = recorded.told
    assert (event["type"], event["uuid"], event["earlier_starts"]) == ("task-received", "t", 3)


def test_a_message_larger_than_the_limit_is_buried_and_its_size_named() -> None:
    """N1. The limit is of body and headers together, and itself allowed."""
    message = message_of("x" * 100)
    size = len(message.body) + len(message.headers)
    exactly, less = Recorded(message_max_bytes=size), Recorded(message_max_bytes=size - 1)
    assert len(admit(exactly, delivery_of(message))) == 1
    assert admit(less, delivery_of(message)) == []
    (verdict,) = less.sink.verdicts
    assert isinstance(verdict, Bury) and f"{size} bytes" in verdict.reason
    assert less.counted == {"received": 1, "buried": 1}


def test_an_unreadable_message_is_buried_and_its_neighbours_run() -> None:
    recorded = Recorded()
    broken = Delivery(8, QUEUE, replace(message_of(), headers=b"{"))
    (claimed,) = admit(recorded, broken, delivery_of())
    assert claimed.delivery.tag == TAG
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Bury) and verdict.tag == 8


@pytest.mark.parametrize(("pool", "runs"), [("prefork", True), ("threads", False), ("asyncio", True)])
def test_a_message_whose_limit_the_pool_cannot_enforce_is_buried(pool: str, runs: bool) -> None:
    """A limit that the message brings; the app's own are refused when the worker starts."""
    recorded = Recorded(rules=TaskRules(is_async=True), pool=pool)
    assert bool(admit(recorded, delivery_of(message_of(time_limit=5.0)))) is runs
    buried = [one.reason for one in recorded.sink.verdicts if isinstance(one, Bury)]
    assert len(buried) == (0 if runs else 1)
    assert all("time limit" in reason for reason in buried)
    assert not any(one.charged for one in recorded.sink.verdicts if isinstance(one, Bury))
    assert recorded.context.counters.buried == len(buried)


@pytest.mark.parametrize("acks_early", [False, True])
@pytest.mark.parametrize(("is_async", "runs"), [(True, False), (False, True)])
def test_an_async_task_is_buried_by_a_pool_without_a_loop(
    is_async: bool, runs: bool, acks_early: bool
) -> None:
    recorded = Recorded(rules=TaskRules(is_async=is_async, acks_early=acks_early), pool="gevent")
    assert bool(admit(recorded, delivery_of())) is runs
    buried = [one.reason for one in recorded.sink.verdicts if isinstance(one, Bury)]
    assert ["async def" in reason for reason in buried] == ([] if runs else [True])
    assert recorded.broker.settled == ([Ack(TAG)] if runs and acks_early else [])


def test_of_two_limits_each_is_asked_of_the_pool() -> None:
    """Threads can raise a soft limit, and cannot end a task at a hard one."""
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"soft_time_limit": 5.0}, True),
        ({"time_limit": 5.0}, False),
        ({}, True),
    ]
    for options, runs in cases:
        recorded = Recorded(pool="threads")
        assert bool(admit(recorded, delivery_of(message_of(**options)))) is runs


def test_a_soft_limit_is_asked_of_a_pool_that_has_none() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"soft_time_limit": 5.0}, False),
        ({"time_limit": 5.0}, True),
    ]
    for options, runs in cases:
        recorded = Recorded()
        cast("Any", recorded.context.pool).abilities = Abilities(soft_limits="no clock")
        assert bool(admit(recorded, delivery_of(message_of(**options)))) is runs


def test_a_fault_in_judging_a_message_buries_it_and_its_neighbours_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = AdmissionPolicy.admit

    def sometimes(policy: AdmissionPolicy, arrival: Any, *args: Any) -> Any:
        if arrival.task == "bad":
            raise LookupError("no such rule")
        return judge(policy, arrival, *args)

    monkeypatch.setattr(AdmissionPolicy, "admit", sometimes)
    recorded = Recorded()
    (claimed,) = admit(recorded, delivery_of(message_of(task="bad")), delivery_of())
    assert claimed.headers.task == TASK
    (verdict,) = recorded.sink.verdicts
    assert isinstance(verdict, Bury) and "LookupError: no such rule" in verdict.reason
    assert recorded.counted == {"received": 2, "faults": 1, "buried": 1}


def test_a_message_of_a_task_with_secrets_hides_them() -> None:
    hides = Sensitive(positions=frozenset({0}), names=frozenset({"password"}))
    recorded = Recorded(rules=TaskRules(hides=hides))
    (claimed,) = admit(recorded, delivery_of(message_of("secret")))
    assert claimed.hides is hides
    recorded.task_events.started(claimed, 1.0)
    event, _ = recorded.told
    assert "secret" not in event["args"]


# ---- what must be in the broker before a task runs -------------------------------------------------


def test_an_early_ack_and_a_counted_start_are_settled_before_they_run() -> None:
    recorded = Recorded(rules=EARLY)
    recorded.policy.change("t.late", TaskRules())
    plain = Delivery(1, QUEUE, message_of(task="t.late"))
    suspect = Delivery(2, QUEUE, message_of(task="t.late"), redelivered=True)
    early = Delivery(3, QUEUE, message_of(), redelivered=True)
    admitted = admit(recorded, plain, suspect, early)
    assert [claimed.delivery.tag for claimed in admitted] == [1, 2, 3]
    assert recorded.broker.settled == [Started(2), Ack(3)]
    assert recorded.sink.verdicts == []


def test_what_needs_nothing_settled_first_runs_while_the_broker_is_away() -> None:
    recorded = Recorded()
    recorded.broker.error = BrokerUnavailable("away for a moment")
    assert len(admit(recorded, delivery_of())) == 1


def test_whose_claim_has_ended_meanwhile_does_not_run_here() -> None:
    recorded = Recorded(rules=EARLY)
    recorded.broker.conflicts = frozenset({8})
    admitted = admit(recorded, delivery_of(), Delivery(8, QUEUE, message_of()))
    assert [claimed.delivery.tag for claimed in admitted] == [TAG]
    assert recorded.context.counters.conflicts == 1


def test_without_its_early_ack_nothing_of_the_claim_runs_and_all_of_it_returns() -> None:
    recorded = Recorded(rules=EARLY)
    recorded.policy.change("t.late", TaskRules())
    recorded.broker.error = BrokerUnavailable("away for a moment")
    with pytest.raises(BrokerUnavailable):
        admit(recorded, delivery_of(), Delivery(8, QUEUE, message_of(task="t.late")))
    assert recorded.sink.verdicts == [Return(TAG), Return(8)]


def test_what_is_revoked_while_the_broker_is_asked_does_not_start() -> None:
    """Whether they may start under a limit, or whether it has their early acks."""
    for rules in (TaskRules(limit=ClusterLimit(TASK, "", (), Terms(1))), EARLY):
        recorded = Recorded(rules=rules)

        async def revoke_meanwhile(asked: Any, recorded: Recorded = recorded) -> Any:
            recorded.revoked.add("t", time() + 600)
            return Settled(len(asked)) if asked and isinstance(asked[0], Ack) else {}

        cast("Any", recorded.broker).permit = revoke_meanwhile
        cast("Any", recorded.broker).settle = revoke_meanwhile
        (other,) = admit(recorded, delivery_of(), delivery_of(message_of(task_id="other")))
        assert other.headers.id == "other"
        assert recorded.counted["revoked"] == 1
        assert told(recorded) == ["task-received", "task-revoked"]
        assert [status for _, status in recorded.ended] == ["REVOKED"]
