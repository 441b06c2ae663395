"""Outcomes that could not be settled with their claims, and messages that come back (adoption)."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tests.worker.recorded import FOLLOW_UP, QUEUE, Recorded, Sink, message_of, result_of
from umbel.brokers.interface import Ack, Delivery, Tag
from umbel.wire.call import read_headers
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.worker.delivery import claimed
from umbel.worker.delivery.admit import Adoption, arrival_of
from umbel.worker.delivery.claimed import RETAINED_S, Claimed, RetainedOutcomes, is_same_message

MESSAGE = message_of(1)
OUTCOME = Ack(1, [result_of("SUCCESS")], [FOLLOW_UP])


def delivered(
    tag: Tag, message: Message = MESSAGE, *, queue: str = QUEUE, redelivered: bool = True
) -> Delivery:
    return Delivery(tag, queue, message, redelivered=redelivered)


@dataclass
class Clock:
    now: float = 0.0
    kept: RetainedOutcomes = field(init=False)

    def __post_init__(self) -> None:
        self.kept = RetainedOutcomes(lambda: self.now)

    def end_late(self, tag: Tag, message: Message = MESSAGE, outcome: Ack = OUTCOME) -> None:
        """A task ends, and its claim has ended before."""
        ack = Ack(tag, outcome.results, outcome.follow_ups)
        assert self.kept.settled([(ack, delivered(tag, message))], {tag}) == {}


def test_an_outcome_whose_claim_had_ended_is_settled_once_with_the_claim_of_its_message() -> None:
    clock = Clock()
    clock.end_late(1)
    assert clock.kept.take(delivered(2)) == Ack(2, OUTCOME.results, OUTCOME.follow_ups)
    assert clock.kept.take(delivered(3)) is None


def test_what_was_settled_is_not_kept() -> None:
    kept = Clock().kept
    assert kept.settled([(OUTCOME, delivered(1))], {5}) == {}
    assert kept.take(delivered(2)) is None


def test_where_acks_are_not_confirmed_what_was_settled_is_acknowledged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimed, "SETTLED_MAX", 2)
    kept = RetainedOutcomes(lambda: 0.0, confirmed=False)
    messages = [message_of(task_id=f"t{number}") for number in range(3)]
    for number, message in enumerate(messages):
        kept.settled([(Ack(number, OUTCOME.results), delivered(number, message))], ())
    assert [kept.take(delivered(9, message)) for message in messages] == [None, Ack(9), Ack(9)]
    assert kept.take(delivered(9, messages[1], queue="another")) is None
    assert kept.take(delivered(9, message_of(1, task_id="t1"))) is None


@pytest.mark.parametrize(
    "other",
    [
        delivered(2, message_of(2)),
        delivered(2, message_of(1, retries=1)),
        delivered(2, message_of(1, task_id="another")),
        delivered(2, queue="another"),
    ],
)
def test_another_message_is_not_taken_for_it(other: Delivery) -> None:
    clock = Clock()
    clock.end_late(1)
    assert (clock.kept.take(other), is_same_message(delivered(9), other)) == (None, False)
    assert clock.kept.take(delivered(2)) is not None


def test_a_message_that_comes_back_before_its_outcome_was_refused_is_settled_next() -> None:
    kept = Clock().kept
    sink = Sink()
    sink._verdicts = [(Ack(9), delivered(9, message_of(2))), (OUTCOME, delivered(1))]
    assert sink.waiting_outcome(delivered(2)) == 1
    kept.came_back[1] = delivered(2)
    again = (Ack(2, OUTCOME.results, OUTCOME.follow_ups), delivered(2))
    assert kept.settled([(OUTCOME, delivered(1))], {1}) == {1: again}
    # That claim may end, too.
    assert kept.settled([again], {2}) == {}
    assert kept.take(delivered(3)) == Ack(3, OUTCOME.results, OUTCOME.follow_ups)


def test_what_was_applied_after_all_is_acknowledged_alone() -> None:
    kept = Clock().kept
    kept.came_back[1] = delivered(2)
    assert kept.settled([(OUTCOME, delivered(1))], ()) == {1: (Ack(2), delivered(2))}
    assert kept.came_back == {}


def test_outcomes_are_kept_for_some_time() -> None:
    clock = Clock()
    clock.end_late(1)
    clock.now = RETAINED_S - 0.1
    clock.end_late(2, message_of(2, task_id="later"))
    clock.now = RETAINED_S
    assert clock.kept.take(delivered(3)) is None
    assert clock.kept.take(delivered(4, message_of(2, task_id="later"))) is not None


def test_so_many_outcomes_are_kept_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimed, "RETAINED_MAX", 2)
    clock, messages = Clock(), [message_of(task_id=f"t{number}") for number in range(3)]
    for number, message in enumerate(messages):
        clock.end_late(number, message)
    found = [clock.kept.take(delivered(9, message)) is not None for message in messages]
    assert found == [False, True, True]


@pytest.mark.parametrize("where", ["result", "follow-up", "message"])
def test_so_many_bytes_are_kept(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimed, "RETAINED_MAX_BYTES", 20_000)
    large = message_of("x" * 15_000, task_id="large")
    outcome = {
        "result": Ack(0, [StoredResult("t", "SUCCESS", b"x" * 15_000)]),
        "follow-up": Ack(0, (), [Outgoing(QUEUE, large)]),
        "message": Ack(0),
    }[where]
    messages = [large if where == "message" else message_of(task_id="first"), message_of(task_id="second")]
    clock = Clock()
    clock.end_late(1, messages[0], outcome)
    clock.end_late(2, messages[1], Ack(0, [StoredResult("t", "SUCCESS", b"x" * 8_000)]))
    assert [clock.kept.take(delivered(9, message)) is not None for message in messages] == [False, True]
    clock.end_late(3, messages[0], outcome)  # what was taken or dropped takes no room
    assert clock.kept.take(delivered(9, messages[0])) is not None


@dataclass
class Worker:
    """Adoption with a settler that only notes, on a broker where these claims have ended."""

    ended: frozenset[Tag] = frozenset()
    clock: Clock = field(default_factory=Clock)
    sink: Sink = field(default_factory=Sink)
    recorded: Recorded = field(default_factory=Recorded)

    def __post_init__(self) -> None:
        async def ended(tags: list[Tag]) -> frozenset[Tag]:
            return self.ended & set(tags)

        cast("Any", self.recorded.broker).ended = ended
        self.sink.retained = self.clock.kept
        self.adoption = Adoption(self.recorded.context, self.sink)

    def rest(self, *deliveries: Delivery, held: tuple[Claimed, ...] = ()) -> list[Tag]:
        async def look() -> list[Tag]:
            left = await self.adoption.unadopted(deliveries, {one.number: one for one in held})
            return [one.tag for one in left]

        return asyncio.run(look())

    @property
    def adopted(self) -> int:
        return self.recorded.context.counters.adopted


def test_a_message_whose_task_has_ended_here_is_not_run_again() -> None:
    worker = Worker()
    worker.clock.end_late(1)
    others = delivered(3, message_of(2)), delivered(4, redelivered=False)
    assert worker.rest(delivered(2), *others) == [3, 4]
    assert worker.sink.verdicts == [Ack(2, OUTCOME.results, OUTCOME.follow_ups)]
    assert worker.adopted == 1


@pytest.mark.parametrize(("ended", "left"), [(frozenset({1}), []), (frozenset(), [2])])
def test_a_copy_of_a_message_whose_claim_stands_is_another_one(
    ended: frozenset[Tag], left: list[Tag]
) -> None:
    worker = Worker(ended)
    worker.sink._verdicts.append((OUTCOME, delivered(1)))
    assert worker.rest(delivered(2)) == left
    assert worker.sink.verdicts == []
    assert worker.clock.kept.came_back == ({} if left else {1: delivered(2)})


@pytest.mark.parametrize(("ended", "left"), [(frozenset({1}), []), (frozenset(), [2])])
def test_a_message_whose_task_runs_here_is_adopted(ended: frozenset[Tag], left: list[Tag]) -> None:
    worker, claimed = Worker(ended), delivered(1)
    headers = read_headers(MESSAGE)
    held = Claimed(7, claimed, MESSAGE, headers, arrival_of(claimed, headers))
    assert worker.rest(delivered(2), held=(held,)) == left
    assert held.delivery.tag == (1 if left else 2)
    assert worker.adopted == len(ended)
    assert worker.sink.verdicts == []


def test_what_was_acknowledged_before_it_ran_and_comes_back_is_acknowledged_again() -> None:
    worker, claimed = Worker(frozenset({1})), delivered(1)
    headers = read_headers(MESSAGE)
    held = Claimed(7, claimed, MESSAGE, headers, arrival_of(claimed, headers), acked=True)
    assert worker.rest(delivered(2), held=(held,)) == []
    assert worker.sink.verdicts == [Ack(2)]
