"""Each slot of a periodic task is sent once, whoever leads and whatever dies (E6)."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.leadership.schedule import (
    AHEAD_MAX_S,
    CATCH_UP_MAX,
    CatchUp,
    Effect,
    Entry,
    Event,
    Every,
    Follow,
    Lead,
    MarksRead,
    Missed,
    PausesRead,
    ReadMarks,
    ReadPauses,
    Schedule,
    SendSlots,
    Slot,
    SlotsRefused,
    SlotsSent,
    Unsure,
)
from umbel.protocol.machine import Tick

S = 1_000_000
BEAT = Entry("beat", Every(10 * S))


def at(seconds: float) -> Instant:
    return Instant(500.0 + seconds, seconds)


def sent(*slots_s: int, name: str = "beat", mark_s: int | None = None) -> SendSlots:
    mark = slots_s[-1] if mark_s is None else mark_s
    return SendSlots(tuple(Slot(name, one * S) for one in slots_s), {name: mark * S})


def leading(entry: Entry = BEAT, *, now_s: float = 1005.0, mark_s: int = 1000) -> Schedule:
    schedule = Schedule([entry])
    assert lead(schedule, {entry.name: mark_s * S}, now_s) == []
    return schedule


def lead(schedule: Schedule, marks: dict[str, int], now_s: float) -> list[Effect]:
    assert schedule.step(Lead(marks), at(now_s)) == [ReadPauses()]
    assert schedule.deadline is None
    return schedule.step(PausesRead(frozenset()), at(now_s))


def test_a_slot_is_sent_when_it_comes_and_marked_with_it() -> None:
    schedule = leading()
    assert schedule.deadline == pytest.approx(at(1010.0).boot_s)
    assert schedule.step(Tick(), at(1009.9)) == []
    assert schedule.step(Tick(), at(1010.0)) == [sent(1010)]
    assert schedule.deadline is None  # nothing more until that is answered
    assert schedule.step(SlotsSent(), at(1010.1)) == []
    assert schedule.step(Tick(), at(1010.2)) == []


def test_an_entry_that_is_new_begins_now_and_says_so_at_once() -> None:
    schedule = Schedule([BEAT])
    assert lead(schedule, {}, 1005.0) == [sent(mark_s=1005)]


def test_who_does_not_lead_sends_nothing() -> None:
    schedule = Schedule([BEAT])
    assert schedule.step(Tick(), at(1010.0)) == []
    led = leading()
    assert led.step(Follow(), at(1006.0)) == []
    assert led.step(Tick(), at(1010.0)) == []
    assert led.deadline is None


@pytest.mark.parametrize(
    ("catch_up", "wanted"),
    [
        (CatchUp.ALL, [sent(1010, 1020, 1030, 1040)]),
        (CatchUp.ONE, [Missed("beat", 3, 1040 * S), sent(1040)]),
        (CatchUp.NONE, [Missed("beat", 4, 1040 * S), sent(mark_s=1040)]),
    ],
)
def test_slots_that_passed_while_nobody_led(catch_up: CatchUp, wanted: list[Effect]) -> None:
    schedule = Schedule([Entry("beat", Every(10 * S), catch_up)])
    assert lead(schedule, {"beat": 1000 * S}, 1045.0) == wanted


def test_catching_up_has_a_limit() -> None:
    schedule = Schedule([Entry("beat", Every(S), CatchUp.ALL)])
    missed, send = lead(schedule, {"beat": 0}, 86_400.0)
    assert isinstance(missed, Missed) and isinstance(send, SendSlots)
    assert [slot.at_us for slot in send.slots] == [one * S for one in range(86_401 - CATCH_UP_MAX, 86_401)]


def test_a_leader_that_is_unsure_goes_by_what_was_kept() -> None:
    schedule = leading()
    assert schedule.step(Tick(), at(1010.0)) == [sent(1010)]
    assert schedule.step(Unsure(), at(1011.0)) == [ReadMarks()]
    assert schedule.step(Unsure(), at(1012.0)) == [ReadMarks()]
    assert schedule.step(MarksRead({"beat": 1000 * S}), at(1013.0)) == [sent(1010)]  # it was not
    assert schedule.step(Unsure(), at(1014.0)) == [ReadMarks()]
    assert schedule.step(MarksRead({"beat": 1010 * S}), at(1015.0)) == []  # it was


@pytest.mark.parametrize("answer", [SlotsSent(), SlotsRefused(), Unsure(), MarksRead({"beat": 1000 * S})])
def test_a_leader_that_lost_its_lease_while_it_sent_leaves_the_slot_to_the_next(answer: Event) -> None:
    schedule = leading()
    assert schedule.step(Tick(), at(1010.0)) == [sent(1010)]
    assert schedule.step(Follow(), at(1011.0)) == []
    assert schedule.step(answer, at(1012.0)) == []
    assert not schedule.leads and schedule.step(Tick(), at(1020.0)) == []


@pytest.mark.parametrize(("marked_s", "sends"), [(1000, [sent(1010)]), (1010, [])])
def test_one_that_leads_again_goes_by_the_marks_it_was_left(marked_s: int, sends: list[Effect]) -> None:
    schedule = leading()
    schedule.step(Tick(), at(1010.0))
    schedule.step(Follow(), at(1011.0))
    assert schedule.step(Lead({"beat": marked_s * S}), at(1012.0)) == [ReadPauses()]
    assert schedule.step(Unsure(), at(1013.0)) == []  # the answer to what was given up
    assert schedule.step(PausesRead(frozenset()), at(1014.0)) == sends


def test_a_send_that_was_refused_is_left_to_the_next_leader() -> None:
    schedule = leading()
    schedule.step(Tick(), at(1010.0))
    assert schedule.step(SlotsRefused(), at(1011.0)) == []
    assert not schedule.leads


def test_a_new_leader_sends_nothing_before_it_knows_what_is_paused() -> None:
    schedule = Schedule([BEAT])
    assert schedule.step(Lead({"beat": 1000 * S}), at(1011.0)) == [ReadPauses()]
    assert schedule.step(Tick(), at(1012.0)) == []
    assert schedule.step(PausesRead(frozenset({"beat"})), at(1012.0)) != [sent(1010)]


def test_a_paused_entry_lets_its_slots_pass() -> None:
    schedule = leading()
    assert schedule.step(PausesRead(frozenset({"beat"})), at(1006.0)) == []
    assert schedule.step(Tick(), at(1020.0)) == []
    assert schedule.step(PausesRead(frozenset()), at(1025.0)) == []
    assert schedule.step(Tick(), at(1030.0)) == [sent(1030)]


def test_a_mark_that_only_a_wrong_clock_makes_does_not_stop_an_entry() -> None:
    schedule = Schedule([BEAT])
    ahead = {"beat": int((1005 + AHEAD_MAX_S + 1) * S)}
    assert lead(schedule, ahead, 1005.0) == [sent(mark_s=1005)]


def test_a_clock_set_back_sends_nothing_twice() -> None:
    schedule = leading(now_s=1995.0, mark_s=2000)
    assert schedule.step(Tick(), at(2000.0)) == []
    assert schedule.step(Tick(), at(2010.0)) == [sent(2010)]


def test_what_nobody_knows_any_more_is_forgotten_in_a_week() -> None:
    schedule = Schedule([BEAT])
    week = 8 * 86_400
    (send,) = lead(schedule, {"beat": (week - 5) * S, "old": 1}, week + 4.0)
    assert send == sent(week)


class Store:
    """What a broker that publishes and marks in one step keeps."""

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}
        self.sent: list[Slot] = []
        self.leader = -1

    def take(self, node: int, send: SendSlots) -> bool:
        if node != self.leader:
            return False
        self.sent += send.slots
        self.marks = dict(send.marks)
        return True


@given(st.integers(0, 2**32 - 1))
def test_no_slot_is_sent_twice_and_none_is_left_out(seed: int) -> None:
    """Leaders die, are cut off, lose answers: with `all`, every slot is sent exactly once."""
    chance, store = random.Random(seed), Store()
    entries = [Entry("a", Every(S), CatchUp.ALL), Entry("b", Every(3 * S), CatchUp.ALL)]
    nodes = [Schedule(entries) for _ in range(3)]
    begin_s, now_s = 1000.0, 1000.0

    def perform(node: int, effects: list[Effect]) -> None:
        for effect in effects:
            chances = chance.random()
            if isinstance(effect, SendSlots):
                if chances < 0.1:  # it never arrives
                    answer: Event = Unsure()
                else:
                    taken = store.take(node, effect)
                    answer = Unsure() if chances < 0.25 else SlotsSent() if taken else Follow()
            elif isinstance(effect, ReadPauses):
                answer = PausesRead(frozenset())
            elif isinstance(effect, ReadMarks):
                answer = MarksRead(store.marks) if node == store.leader else Follow()
            else:
                continue
            if chances > 0.95:  # killed before it hears the answer
                nodes[node] = Schedule(entries)
                return
            perform(node, nodes[node].step(answer, at(now_s)))

    def promote(node: int) -> None:
        store.leader = node
        perform(node, nodes[node].step(Lead(store.marks), at(now_s)))

    promote(0)
    for _ in range(60):
        now_s += chance.uniform(0.0, 2.0)
        if chance.random() < 0.1:  # the old leader does not know it yet
            promote(chance.randrange(3))
        for node in range(3):
            perform(node, nodes[node].step(Tick(), at(now_s)))
    while not store.marks or not nodes[store.leader].leads or nodes[store.leader].deadline is None:
        promote(store.leader)
    for _ in range(20):
        perform(store.leader, nodes[store.leader].step(Tick(), at(now_s)))
        promote(store.leader)
    assert len(store.sent) == len(set(store.sent))
    first = min((slot.at_us for slot in store.sent if slot.name == "a"), default=0)
    if first:
        wanted = {Slot("a", one * S) for one in range(first // S, int(now_s) + 1)}
        assert {slot for slot in store.sent if slot.name == "a"} == wanted
        assert first <= int((begin_s + 60) * S)


@given(st.integers(0, 2**32 - 1))
def test_where_that_is_no_single_step_no_slot_is_left_out_and_each_repeat_says_so(seed: int) -> None:
    """As on RabbitMQ: a note that slots are sent, their messages, the marks; leaders die in between."""
    chance, marks, sent = random.Random(seed), dict[str, int](), list[tuple[Slot, bool]]()
    entries = [Entry("a", Every(S), CatchUp.ALL), Entry("b", Every(3 * S), CatchUp.ALL)]
    now_s, is_sending = 1000.0, False
    for _ in range(60):
        now_s += chance.uniform(0.0, 3.0)
        leader = Schedule(entries)
        asked = lead(leader, marks, now_s)
        if not asked:
            continue
        (send,) = asked
        assert isinstance(send, SendSlots)
        is_repeat, is_sending = is_sending, is_sending or bool(send.slots)
        if chance.random() < 0.2:
            continue
        sent += [(slot, is_repeat) for slot in send.slots]
        if chance.random() < 0.2:
            continue
        marks, is_sending = dict(send.marks), False
        assert leader.step(SlotsSent(), at(now_s)) == []
    for name, interval in (("a", 1), ("b", 3)):
        slots = sorted({slot.at_us // S for slot, _ in sent if slot.name == name})
        assert slots == list(range(slots[0], slots[-1] + 1, interval)) if slots else True
    first = [slot for slot, is_repeat in sent if not is_repeat]
    assert len(first) == len(set(first))
