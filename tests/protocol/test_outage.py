from umbel.protocol.machine import Tick
from umbel.protocol.shutdown import (
    SHORT_S,
    CallFailed,
    CallWorked,
    Closed,
    LinkLost,
    LinkRestored,
    Outage,
    OutageBegan,
    OutageEffect,
    OutageEnded,
    OutageEvent,
    Reconciling,
)

SETTLE_S = 5.0


def test_a_link_that_is_closed_and_made_again_at_once_is_told_after_a_moment_of_quiet() -> None:
    outage = Outage(settle_s=SETTLE_S)
    assert outage.step(LinkLost("main", "closed"), 10.0) == [OutageBegan("main", "closed")]
    assert outage.began is not None
    assert _end(outage, LinkRestored("main"), 10.5) == [OutageEnded(0.5, (("main", 1),), 0)]
    assert outage.reconnects == {"main": 1}
    assert outage.is_linked


def test_what_else_fails_meanwhile_is_the_same_outage() -> None:
    outage = Outage(settle_s=SETTLE_S)
    assert outage.step(CallFailed("tasks", "no answer"), 0.0) == [OutageBegan("tasks", "no answer")]
    for event in (CallFailed("tasks", "again"), LinkLost("main", "late"), LinkLost("mailbox", "late")):
        assert outage.step(event, 0.1) == []
    assert outage.step(LinkRestored("main"), 0.2) == []
    assert outage.step(LinkRestored("mailbox"), 0.3) == []
    assert outage.is_failing("tasks")
    assert _end(outage, CallWorked("tasks"), 0.4) == [OutageEnded(0.4, (("mailbox", 1), ("main", 1)), 2)]


def test_the_end_of_a_long_one_is_told_when_it_has_been_quiet() -> None:
    outage = Outage(settle_s=SETTLE_S)
    outage.step(LinkLost("main", "late"), 0.0)
    assert outage.step(LinkRestored("main"), 20.0) == []
    assert _due(outage) == 25.0
    assert outage.step(LinkLost("events", "late"), 22.0) == []  # it found out when all was well again
    assert _due(outage) is None
    assert outage.step(LinkRestored("events"), 23.0) == []
    assert outage.step(Tick(), 27.9) == []
    assert outage.step(Tick(), 28.0) == [OutageEnded(23.0, (("events", 1), ("main", 1)), 0)]
    assert _due(outage) is None and outage.began is None


def test_of_two_links_with_one_name_both_must_be_there() -> None:
    outage = Outage(settle_s=SETTLE_S)
    outage.step(LinkLost("events", "x"), 0.0)
    outage.step(LinkLost("events", "x"), 0.0)
    assert outage.step(LinkRestored("events"), 0.1) == []
    assert _end(outage, Closed("events"), 0.2) == [OutageEnded(0.2, (("events", 1),), 0)]


def test_a_part_that_stops_calling_does_not_keep_the_outage_going() -> None:
    outage = Outage(settle_s=SETTLE_S)
    outage.step(CallFailed("gossip", "x"), 0.0)
    assert _end(outage, Closed("gossip"), 0.1) == [OutageEnded(0.1, (), 1)]


def test_each_outage_counts_for_itself() -> None:
    outage = Outage(settle_s=SETTLE_S)
    for at in (0.0, 10.0):
        outage.step(LinkLost("main", "x"), at)
        outage.step(CallFailed("tasks", "x"), at)
        outage.step(CallWorked("tasks"), at)
        assert _end(outage, LinkRestored("main"), at + 0.5) == [OutageEnded(0.5, (("main", 1),), 1)]
    assert outage.reconnects == {"main": 2}


def test_good_news_without_an_outage_is_none() -> None:
    outage = Outage(settle_s=SETTLE_S)
    for event in (CallWorked("tasks"), Closed("gossip"), Tick()):
        assert outage.step(event, 0.0) == []


def test_a_part_that_has_to_reconcile_is_waited_for() -> None:
    outage = Outage(settle_s=SETTLE_S)
    assert outage.step(Reconciling("mingle"), 0.0) == []  # without an outage there is nothing to wait for
    assert not outage.is_failing("mingle")
    outage.step(LinkLost("main", "x"), 1.0)
    assert outage.step(Reconciling("mingle"), 1.0) == []
    assert outage.step(LinkRestored("main"), 1.1) == []
    assert _due(outage) is None
    assert outage.is_failing("mingle")
    assert _end(outage, CallWorked("mingle"), 1.5) == [OutageEnded(0.5, (("main", 1),), 0)]


def test_who_has_to_reconcile_while_the_end_is_near_puts_it_off() -> None:
    outage = Outage(settle_s=SETTLE_S)
    outage.step(LinkLost("main", "x"), 0.0)
    outage.step(LinkRestored("main"), 0.1)
    assert _due(outage) == 1.1
    assert outage.step(Reconciling("mingle"), 0.2) == []
    assert outage.step(Tick(), 9.0) == []
    outage.step(CallWorked("mingle"), 20.0)
    assert _due(outage) == 25.0


def _end(outage: Outage, last: OutageEvent, at: float) -> list[OutageEffect]:
    assert outage.step(last, at) == []
    assert outage.step(Tick(), at + SHORT_S - 0.01) == []
    return outage.step(Tick(), at + SHORT_S)


def _due(outage: Outage) -> float | None:
    return outage.deadline
