"""The membership machine: every transition, as coordination.md 8 has it (S4, S5)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick
from umbel.protocol.membership.gossip import GONE_KEPT_S, Membership
from umbel.protocol.membership.members import (
    ASKED_PER_S,
    KEPT_S,
    LATE_MAX_S,
    NEWCOMERS_MAX,
    Accuse,
    Accused,
    Answered,
    BroadcastView,
    Condemn,
    Condemned,
    Degraded,
    Effect,
    Event,
    Introduced,
    Joined,
    Kind,
    Left,
    Looks,
    Lost,
    MemberState,
    Namesake,
    NodeEvent,
    Observe,
    Probe,
    Probed,
    Refute,
    Restored,
    Strained,
    Suspected,
    Viewed,
)
from umbel.protocol.membership.observers import SETTLED_S, UNNAMED_MAX_S, VIEW_MAX

H = 2.0
ME = ("me@x", 500, 1)
ALIVE, SUSPECT, LOST, LEFT = MemberState
A = NodeEvent("a@x", 100, 7, Kind.BEAT, clock=10, sent_at=1000.0, freq_s=H, software="umbel")
B = A.replaced(node="b@x")
OBSERVER_O, OBSERVER_P = A.replaced(node="o@x", freq_s=600.0), A.replaced(node="p@x", freq_s=600.0)
CELERY = A.replaced(node="c@x", inc=0, pid=33, software="celery")


class Observer:
    """A membership machine and its time; effects are compared by their kind and their node.

    `trusting`: its broker knows every newcomer, and says so at once.
    """

    def __init__(
        self,
        *,
        observing: bool = True,
        members_max: int = 100,
        trusting: bool = True,
        interval_s: float = 0.0,
        phase: float = 0.0,
    ) -> None:
        self._trusting = trusting
        self.machine = Membership(
            *ME,
            lambda low, high: low + phase * (high - low),
            observing=observing,
            interval_s=interval_s,
            members_max=members_max,
        )
        self.now = 1000.0
        self.effects: list[Effect] = []

    def at(self, seconds: float) -> "Observer":
        """Let time pass, with a Tick at every deadline on the way."""
        ends = 1000.0 + seconds
        while (due := self.machine.deadline) is not None and due <= ends:
            self.now = max(self.now, due)
            self.take(Tick())
        self.now = ends
        return self

    def oversleep(self, seconds: float) -> None:
        """Let time pass unnoticed; then Ticks come until nothing is due, which must be soon."""
        self.now += seconds
        for _ in range(100):
            due = self.machine.deadline
            if due is None or due > self.now:
                return
            self.take(Tick())
        raise AssertionError("it is always due")

    def take(self, *events: Event | Tick) -> list[Effect]:
        found: list[Effect] = []
        for event in events:
            effects = self.machine.step(event, Instant(self.now, 5000.0 + self.now))
            match effects:
                case [Probe(member, ping=False)] if self._trusting and isinstance(event, NodeEvent):
                    run = (member.node, member.inc, member.pid)
                    effects = self.machine.step(Probed(*run, "alive"), Instant(self.now, 5000.0 + self.now))
            found += effects
        self.effects += found
        return found

    def state(self, node: str = "a@x") -> MemberState | None:
        member = self.machine.member(node)
        return member.state if member else None

    def count(self, kind: type[Effect]) -> int:
        return sum(isinstance(effect, kind) for effect in self.effects)


def beat(heard: NodeEvent, *, clock: int, sent_at: float | None = None) -> NodeEvent:
    return heard.replaced(clock=clock, sent_at=1000.0 + clock if sent_at is None else sent_at)


def kinds(effects: Sequence[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


@pytest.fixture
def observer() -> Observer:
    return Observer()


def test_the_first_event_of_a_node_makes_it_a_member(observer: Observer) -> None:
    (joined,) = observer.take(A)
    assert isinstance(joined, Joined) and not joined.returned
    member = joined.member
    assert (member.node, member.inc, member.pid, member.state) == ("a@x", 100, 7, ALIVE)
    assert (member.software, member.clock, member.freq_s) == ("umbel", 10, H)
    assert member.holder == "a@x.7.100"
    assert observer.take(beat(A, clock=11)) == []
    assert observer.machine.nodes == 2


def test_a_node_that_says_goodbye_has_left_once(observer: Observer) -> None:
    observer.take(A)
    goodbye = A.replaced(kind=Kind.OFFLINE, clock=12)
    assert kinds(observer.take(goodbye, goodbye)) == ["Left"]
    assert observer.state() is LEFT and observer.machine.nodes == 1


def test_what_was_on_its_way_behind_a_goodbye_does_not_bring_the_node_back(observer: Observer) -> None:
    observer.take(A, A.replaced(kind=Kind.OFFLINE, clock=12))
    assert observer.take(beat(A, clock=11), beat(A, clock=20)) == []
    assert observer.state() is LEFT


def test_a_goodbye_of_a_stranger_is_no_news(observer: Observer) -> None:
    assert observer.take(A.replaced(kind=Kind.OFFLINE)) == []
    assert observer.state() is None


def test_silence_of_two_intervals_makes_a_suspect_that_is_asked_for(observer: Observer) -> None:
    observer.take(A)
    observer.at(2 * H - 0.1)
    assert observer.state() is ALIVE
    observer.at(2 * H)
    assert kinds(observer.effects) == ["Joined", "Suspected", "Accuse", "Probe"]
    assert observer.effects[-1] == Probe(observer.machine.member("a@x"), ping=True)  # type: ignore[arg-type]


def test_the_interval_is_the_senders_own(observer: Observer) -> None:
    observer.take(A.replaced(freq_s=10.0))
    assert observer.at(19.0).state() is ALIVE
    assert observer.at(20.0).state() is SUSPECT


@pytest.mark.parametrize("freq", [None, -1.0, 0.0, float("nan")])
def test_a_node_that_tells_no_believable_interval_gets_celerys_minute(
    observer: Observer, freq: float | None
) -> None:
    observer.take(A.replaced(freq_s=freq))
    assert observer.at(119.0).state() is ALIVE
    assert observer.at(120.0).state() is SUSPECT


def test_a_silent_node_is_lost_once_and_everybody_is_told(observer: Observer) -> None:
    observer.take(A)
    observer.at(2 * H + 6 * H - 0.1)
    assert observer.state() is SUSPECT
    observer.at(1000.0)
    assert (observer.count(Suspected), observer.count(Lost), observer.count(Condemn)) == (1, 1, 1)
    lost = next(effect for effect in observer.effects if isinstance(effect, Lost))
    assert lost.by == "me@x" and lost.member.reason == "silent for 16.0 s"


def test_a_suspect_that_beats_is_cleared_and_then_has_its_whole_time_again(observer: Observer) -> None:
    observer.take(A)
    observer.at(5.0)
    assert kinds(observer.take(beat(A, clock=11))) == ["Cleared"]
    assert observer.at(8.9).state() is ALIVE
    assert observer.at(9.0).state() is SUSPECT


def test_a_suspect_that_answers_a_ping_is_cleared(observer: Observer) -> None:
    observer.take(A)
    observer.at(5.0)
    assert kinds(observer.take(Answered("a@x"))) == ["Cleared"]
    assert observer.take(Answered("a@x"), Answered("nobody@x")) == []


def test_each_that_agrees_shortens_a_suspects_time(observer: Observer) -> None:
    observer.take(A)
    observer.at(4.0)
    accusation = Accused("a@x", 100, 7, by="b@x")
    observer.take(accusation, accusation)  # one voice, however often
    observer.take(Accused("a@x", 100, 7, by="me@x"))  # and our own does not count
    assert observer.at(4.0 + H * (6 - 5 * 0.64)).state() is SUSPECT  # log 2 / log 3 = 0.631
    assert observer.at(4.0 + H * (6 - 5 * 0.63)).state() is LOST


def test_when_all_agree_one_interval_is_left(observer: Observer) -> None:
    observer.take(A, Accused("a@x", 100, 7, by="b@x"), Accused("a@x", 100, 7, by="c@x"))
    observer.at(4.0)
    assert observer.count(Accuse) == 0  # enough have said so
    assert observer.at(4.0 + H - 0.1).state() is SUSPECT
    assert observer.at(4.0 + H).state() is LOST


def test_an_accusation_of_another_run_says_nothing_of_this_one(observer: Observer) -> None:
    observer.take(A, *(Accused("a@x", 99, 7, by=f"{who}@x") for who in "bcd"))
    assert observer.at(4.0 + 6 * H - 0.1).state() is SUSPECT


def test_a_sign_of_life_takes_the_accusations_away(observer: Observer) -> None:
    observer.take(A, Accused("a@x", 100, 7, by="b@x"), Accused("a@x", 100, 7, by="c@x"))
    observer.take(beat(A, clock=11))
    assert observer.at(4.0 + 6 * H - 0.1).state() is SUSPECT


def test_a_suspect_whose_connection_has_ended_is_lost_at_once(observer: Observer) -> None:
    observer.take(A)
    observer.at(4.0)
    effects = observer.take(Probed("a@x", 100, 7, "gone"))
    assert kinds(effects) == ["Lost", "Condemn"]
    assert observer.machine.member("a@x").reason == "its connection ended"  # type: ignore[union-attr]


def test_what_the_broker_knows_counts_of_suspects_only(observer: Observer) -> None:
    observer.take(A)
    assert observer.take(Probed("a@x", 100, 7, "gone"), Probed("a@x", 99, 7, "gone")) == []
    assert observer.state() is ALIVE


def test_a_missing_mark_is_one_voice_but_not_of_nodes_that_leave_none(observer: Observer) -> None:
    observer.take(A, CELERY, *(A.replaced(node=f"n{number}@x", freq_s=99.0) for number in range(9)))
    observer.at(4.0)
    observer.take(Probed("a@x", 100, 7, "unknown"), Probed("c@x", 0, 33, "unknown"))
    observer.at(4.0 + H * (6 - 5 * 0.63) + 0.1)
    assert (observer.state("a@x"), observer.state("c@x")) == (LOST, SUSPECT)


def test_a_suspect_is_asked_for_again_each_interval(observer: Observer) -> None:
    observer.take(A)
    observer.at(4.0 + 2 * H)
    asked = [effect.ping for effect in observer.effects if isinstance(effect, Probe)]
    assert asked == [True, False, False]


def test_who_is_accused_beats_at_once_and_who_is_given_up_comes_online_again(observer: Observer) -> None:
    assert observer.take(Accused("me@x", 500, 1, by="b@x")) == [Refute(lost=False)]
    assert observer.take(Condemned("me@x", 500, 1, by="b@x")) == [Refute(lost=True)]
    assert observer.take(Accused("me@x", 400, 1, by="b@x"), Condemned("me@x", 400, 1, by="b@x")) == []


def test_an_observer_that_hears_a_node_does_not_believe_that_it_is_lost(observer: Observer) -> None:
    observer.take(A)
    assert observer.take(Condemned("a@x", 100, 7, by="b@x")) == []
    assert observer.state() is ALIVE


def test_an_observer_believes_it_of_a_suspect_and_says_no_more(observer: Observer) -> None:
    observer.take(A, OBSERVER_O)
    observer.at(4.0)
    assert observer.take(Condemned("a@x", 100, 7, by="stranger@x")) == []
    assert kinds(observer.take(Condemned("a@x", 100, 7, by="o@x", reason="silent"))) == ["Lost"]


def test_a_node_that_hears_no_beats_believes_what_observers_say() -> None:
    observer = Observer(observing=False)
    observer.take(A, B)
    observer.at(900.0)
    assert observer.state() is ALIVE
    (lost,) = observer.take(Condemned("a@x", 100, 7, by="b@x", reason="silent"))
    assert isinstance(lost, Lost) and (lost.by, lost.member.reason) == ("b@x", "silent")
    assert observer.take(Condemned("a@x", 100, 7, by="c@x")) == []


def test_who_hears_no_beats_joins_whom_a_view_names() -> None:
    observer = Observer(observing=False)
    observer.take(A, OBSERVER_O)
    named = (Introduced("a@x", 200, 8), Introduced("b@x", 5, 1), Introduced("me@x", 500, 1))
    assert observer.at(50.0).take(Viewed("stranger@x", "", "", named)) == []
    effects = observer.take(Viewed("o@x", "", "", named))
    assert kinds(effects) == ["Lost", "Joined", "Joined"]  # a was restarted, b is new, this node is itself
    assert observer.take(Viewed("o@x", "", "", named)) == []


def test_who_was_taken_for_lost_returns_when_a_view_names_it_and_who_left_does_not() -> None:
    observer = Observer(observing=False)
    left = A.replaced(node="l@x")
    observer.take(
        B, OBSERVER_O, A, left, left.replaced(kind=Kind.OFFLINE), Condemned("a@x", 100, 7, by="b@x")
    )
    view = Viewed("o@x", "", "", (Introduced("a@x", 100, 7), Introduced("l@x", 100, 7)))
    assert observer.at(1.0).take(view) == []  # it may be older than that
    (joined,) = observer.at(SETTLED_S).take(view)
    assert isinstance(joined, Joined) and joined.returned and joined.member.node == "a@x"


def test_whom_no_view_names_for_a_minute_is_lost_unless_one_names_it_meanwhile() -> None:
    observer = Observer(observing=False)
    observer.take(OBSERVER_O, OBSERVER_P, A, A.replaced(node="z@x"))
    without = Viewed("o@x", "", "m@x", ())  # says nothing of z
    observer.at(30.0).take(without)
    assert observer.at(90.0).take(without, Viewed("p@x", "", "", (Introduced("a@x", 100, 7),))) == []
    assert observer.at(120.0).take(without) == []
    (lost,) = observer.at(120.0 + UNNAMED_MAX_S).take(without)
    assert isinstance(lost, Lost) and lost.member.node == "a@x"
    assert kinds(Observer().take(A, without, without)) == ["Joined"]  # who hears for itself believes its ears


def test_an_observer_tells_all_names_in_parts() -> None:
    observer = Observer(members_max=1000)
    nodes = [A.replaced(node=f"n{number:03}@x", freq_s=15.0) for number in range(VIEW_MAX + 20)]
    observer.take(*(Introduced(node.node, node.inc, node.pid, freq_s=15.0) for node in nodes))
    observer.take(Observe(on=True, tells=True))
    for seconds in (25.0, 50.0, 75.0, 100.0):
        observer.at(seconds).take(*nodes)
    views = [one for one in observer.effects if isinstance(one, BroadcastView)]
    assert [(one.after, one.until, len(one.runs)) for one in views] == [
        ("", "n098@x", VIEW_MAX),  # this node is one of them
        ("n098@x", "", 21),
        ("", "n098@x", VIEW_MAX),
    ]
    observer.take(Observe(on=True))
    observer.at(200.0)
    assert observer.count(BroadcastView) == len(views)


def test_who_begins_to_observe_gives_everybody_their_whole_time() -> None:
    observer = Observer(observing=False)
    observer.take(A)
    observer.at(100.0).take(Observe(on=True))
    assert observer.at(103.9).state() is ALIVE
    assert observer.at(104.0).state() is SUSPECT
    observer.take(Observe(on=False))
    assert observer.at(900.0).state() is ALIVE


def test_a_lost_node_that_speaks_again_returns(observer: Observer) -> None:
    observer.take(A)
    observer.at(100.0)
    (joined,) = observer.take(beat(A, clock=11))
    assert isinstance(joined, Joined) and joined.returned
    assert observer.state() is ALIVE


def test_an_event_sent_before_the_last_one_heard_does_not_bring_a_lost_node_back(observer: Observer) -> None:
    observer.take(A)
    observer.at(100.0)
    assert observer.take(A.replaced(clock=9, sent_at=999.0)) == []


def test_a_new_run_of_a_node_replaces_the_old_one(observer: Observer) -> None:
    observer.take(A)
    effects = observer.take(A.replaced(inc=200, pid=8))
    assert kinds(effects) == ["Lost", "Joined"]
    assert effects[0].member.inc == 100 and effects[0].member.reason == "restarted"  # type: ignore[union-attr]
    assert observer.take(A, A.replaced(kind=Kind.OFFLINE)) == []  # the old one is ignored
    assert observer.state() is ALIVE and observer.machine.nodes == 2


def test_after_a_goodbye_a_new_run_just_joins(observer: Observer) -> None:
    observer.take(A, A.replaced(kind=Kind.OFFLINE))
    assert kinds(observer.take(A.replaced(inc=200))) == ["Joined"]


def test_a_clock_that_was_set_back_hides_a_node_for_a_minute_at_most(observer: Observer) -> None:
    observer.take(A, A.replaced(kind=Kind.OFFLINE))
    again = A.replaced(inc=50, kind=Kind.ONLINE)
    assert observer.at(LATE_MAX_S - 1).take(again) == []
    assert kinds(observer.at(LATE_MAX_S + 1).take(again)) == ["Joined"]


def test_celerys_nodes_leave_and_return_with_their_connection(observer: Observer) -> None:
    observer.take(CELERY, CELERY.replaced(kind=Kind.OFFLINE, sent_at=1001.0))
    assert observer.take(CELERY.replaced(sent_at=1000.5)) == []
    (joined,) = observer.take(CELERY.replaced(kind=Kind.ONLINE, sent_at=1002.0))
    assert isinstance(joined, Joined) and joined.returned


def test_celerys_runs_are_told_apart_by_process_id(observer: Observer) -> None:
    observer.take(CELERY)
    assert kinds(observer.take(CELERY.replaced(pid=34, sent_at=1001.0))) == ["Lost", "Joined"]
    assert observer.take(CELERY.replaced(sent_at=1000.5)) == []


def test_in_a_container_where_every_process_id_is_1_the_clock_tells(observer: Observer) -> None:
    observer.take(CELERY.replaced(clock=500))
    online = CELERY.replaced(kind=Kind.ONLINE, clock=3, sent_at=1003.0)
    assert kinds(observer.take(online)) == ["Lost", "Joined"]
    assert observer.take(online) == []


def test_a_slow_observer_gives_others_more_time(observer: Observer) -> None:
    observer.take(Strained("lag"), A)
    assert observer.machine.health.level == 2
    assert observer.at(7.9).state() is ALIVE
    assert observer.at(8.0).state() is SUSPECT


def test_health_that_recovers_does_not_look_like_having_slept(observer: Observer) -> None:
    observer.take(*[Strained("lag")] * 7, A.replaced(freq_s=20.0))
    observer.at(1000.0)
    assert (observer.machine.health.level, observer.count(Suspected)) == (1, 1)


def test_with_an_interval_silence_is_found_at_the_next_look() -> None:
    """S5: missed heartbeats, found by a periodic check; without an interval suspect at 4 s, lost at 16."""
    observer = Observer(interval_s=5.0)
    observer.take(A)
    assert observer.at(4.9).state() is ALIVE
    assert observer.at(5.0).state() is SUSPECT
    assert observer.at(19.9).state() is SUSPECT
    assert observer.at(20.0).state() is LOST  # its 12 s were over at 17


def test_looks_of_observers_are_not_all_at_one_moment() -> None:
    observer = Observer(interval_s=5.0, phase=0.5)
    observer.take(A)
    assert observer.at(7.4).state() is ALIVE  # due at 4.25, with the jitter of this observer
    assert observer.at(7.5).state() is SUSPECT


def test_what_becomes_due_between_two_looks_is_judged_together() -> None:
    observer = Observer(interval_s=10.0)
    for number in range(5):
        observer.at(number).take(
            A.replaced(node=f"n{number}@x"), A.replaced(node=f"h{number}@x", freq_s=60.0)
        )
    observer.at(9.9)
    assert observer.count(Suspected) == 0
    observer.at(10.0)
    assert observer.count(Suspected) == 5


def test_who_is_heard_before_the_look_was_never_silent() -> None:
    observer = Observer(interval_s=10.0)
    observer.take(A)
    observer.at(9.0).take(beat(A, clock=11))
    assert observer.at(19.9).count(Suspected) == 0
    assert observer.at(20.0).state() is SUSPECT


def test_to_wait_for_a_look_is_not_to_sleep_and_other_deadlines_do_not_wait() -> None:
    observer = Observer(interval_s=100.0)
    observer.take(A, Strained("lag"))
    observer.at(99.0)
    assert observer.machine.health.level == 1  # after a clean minute
    observer.at(100.0)
    assert (observer.state(), observer.machine.health.level) == (SUSPECT, 1)
    observer.oversleep(150.0)
    assert (observer.state(), observer.machine.health.level) == (SUSPECT, 2)


def test_what_others_tell_does_not_wait_for_a_look() -> None:
    observer = Observer(interval_s=5.0)
    observer.take(A)
    observer.at(5.0)
    assert kinds(observer.take(Probed("a@x", 100, 7, "gone"))) == ["Lost", "Condemn"]


@pytest.mark.parametrize("interval_s", [0.1, 0.3, 0.7])
def test_a_look_is_never_before_what_it_is_for(interval_s: float) -> None:
    """Or it would find nothing to do, again and again."""
    looks = Looks(interval_s, phase_s=0.01)
    for number in range(1000):
        due_s = number * 0.1
        assert due_s <= looks.after(due_s) <= due_s + interval_s + 1e-9
    assert looks.after(inf) == inf


def test_an_accusation_that_comes_late_ends_a_suspects_time_at_once(observer: Observer) -> None:
    observer.take(A)
    observer.at(11.0)
    observer.take(Accused("a@x", 100, 7, by="b@x"))
    assert observer.at(11.0).state() is LOST


def test_an_observer_that_stood_still_blames_nobody(observer: Observer) -> None:
    observer.take(A)
    observer.at(3.0).oversleep(97.0)
    assert (observer.state(), observer.machine.health.level) == (ALIVE, 2)
    assert observer.at(102.0).state() is ALIVE  # an interval to hear what was sent meanwhile
    observer.take(beat(A, clock=11))
    assert observer.at(109.9).state() is ALIVE
    assert observer.at(110.0).state() is SUSPECT
    observer.oversleep(90.0)
    assert observer.state() is SUSPECT
    observer.at(120.0 + 90.0 + 6 * H)
    assert (observer.state(), observer.count(Lost)) == (LOST, 1)


@pytest.mark.parametrize("first_due", ["left", "forgotten"])
def test_an_observer_that_stood_still_blames_nobody_whoever_was_due_first(first_due: str) -> None:
    observer = Observer(members_max=2)
    observer.take(B)
    observer.at(1.0).take(A, B.replaced(kind=Kind.OFFLINE, clock=11, sent_at=1001.0))
    if first_due == "forgotten":
        observer.take(CELERY)
    assert (observer.state("b@x") is None) == (first_due == "forgotten")
    observer.oversleep(97.0)
    assert (observer.state(), observer.machine.health.level) == (ALIVE, 2)


def test_local_health_has_a_floor_and_recovers_by_clean_minutes(observer: Observer) -> None:
    observer.take(*[Strained("lag")] * 20)
    assert observer.machine.health.level == 8
    observer.at(60.0)
    assert observer.machine.health.level == 7
    observer.at(600.0)
    assert observer.machine.health.level == 1


def test_when_most_fall_silent_at_once_nobody_is_given_up_for_a_while(observer: Observer) -> None:
    observer.take(*(A.replaced(node=f"n{number}@x") for number in range(4)))
    observer.at(4.0)
    assert [effect for effect in observer.effects if isinstance(effect, Degraded)] == [Degraded(3, 5)]
    assert observer.take(Probed("n0@x", 100, 7, "gone")) == []
    assert observer.take(Condemned("n1@x", 100, 7, by="b@x")) == []
    observer.at(4.0 + 6 * H - 0.1)
    assert observer.count(Lost) == 0
    observer.at(4.0 + 6 * H)
    assert (observer.count(Restored), observer.count(Lost)) == (1, 4)


def test_nodes_that_fall_silent_one_after_the_other_are_no_sign_of_a_cut(observer: Observer) -> None:
    for number in range(4):
        observer.at(5.0 * number).take(A.replaced(node=f"n{number}@x"))
    observer.at(100.0)
    assert (observer.count(Degraded), observer.count(Lost)) == (0, 4)


def test_half_of_the_cluster_is_not_most_of_it(observer: Observer) -> None:
    observer.take(A)  # one of two
    observer.at(900.0)
    assert (observer.count(Degraded), observer.count(Lost)) == (0, 1)


def test_another_process_under_our_name_is_reported_once(observer: Observer) -> None:
    mine = A.replaced(node="me@x", inc=500, pid=1)
    assert observer.take(mine) == []
    assert observer.take(mine.replaced(inc=400, pid=2)) == []  # a former run of ours
    assert observer.take(mine.replaced(inc=600, pid=2), mine.replaced(inc=600, pid=2)) == [Namesake(2, 600)]
    assert observer.take(mine.replaced(inc=0, pid=9)) == [Namesake(9, 0)]
    assert observer.machine.members() == ()


def test_a_peer_introduces_those_it_knows_but_not_the_gone(observer: Observer) -> None:
    named = Introduced("a@x", 100, 7, 10, H, "umbel")
    assert kinds(observer.take(named, named, A)) == ["Joined"]
    observer.take(A.replaced(kind=Kind.OFFLINE))
    assert observer.take(named, Introduced("me@x", 1, 1)) == []
    assert kinds(observer.take(named.replaced(inc=101))) == ["Joined"]


def test_the_gone_are_forgotten_after_an_hour(observer: Observer) -> None:
    observer.take(A, A.replaced(kind=Kind.OFFLINE))
    assert observer.at(GONE_KEPT_S - 1).state() is LEFT
    assert observer.at(GONE_KEPT_S).state() is None


def test_a_full_table_forgets_the_gone_first_and_then_the_longest_unheard() -> None:
    observer = Observer(members_max=3)
    a, b, c, d, e = (A.replaced(node=f"{name}@x") for name in "abcde")
    observer.take(a, b, c, b.replaced(kind=Kind.OFFLINE), d)
    assert [member.node for member in observer.machine.members()] == ["a@x", "c@x", "d@x"]
    observer.take(beat(a, clock=11), e)
    assert [member.node for member in observer.machine.members()] == ["d@x", "a@x", "e@x"]
    assert observer.machine.evicted == 2


# ---- newcomers (N1) ----------------------------------------------------------------------------------


def ghost(number: int) -> NodeEvent:
    return A.replaced(node=f"ghost{number}@nowhere", inc=number + 1)


def test_a_name_that_was_heard_once_is_asked_for_and_is_no_member() -> None:
    observer = Observer(trusting=False)
    (probe,) = observer.take(A)
    assert isinstance(probe, Probe) and not probe.ping and probe.member.node == "a@x"
    assert observer.take(A, Probed("a@x", 100, 7, "unknown"), Probed("a@x", 100, 7, "gone")) == []
    assert observer.at(1000.0).state() is None and observer.machine.nodes == 1
    assert kinds(observer.effects) == ["Probe"]


def test_whom_the_broker_knows_is_a_member_at_once() -> None:
    observer = Observer(trusting=False)
    observer.take(A)
    assert observer.take(Probed("a@x", 101, 7, "alive")) == []  # another run
    assert kinds(observer.take(Probed("a@x", 100, 7, "alive"))) == ["Joined"]
    assert observer.take(Probed("a@x", 100, 7, "alive")) == []


@pytest.mark.parametrize("node", [A, CELERY])
def test_a_second_sign_that_was_sent_later_makes_a_member(node: NodeEvent) -> None:
    observer = Observer(trusting=False)
    observer.take(node)
    assert observer.at(H / 2 - 0.1).take(beat(node, clock=11)) == []  # too soon: a burst is one sign
    assert observer.at(H).take(node) == []  # a copy of the first
    assert kinds(observer.take(beat(node, clock=11))) == ["Joined"]


def test_a_second_sign_counts_only_while_the_first_is_remembered() -> None:
    observer = Observer(trusting=False)
    observer.take(A)
    assert kinds(observer.at(KEPT_S + 1).take(beat(A, clock=11))) == ["Probe"]
    assert kinds(observer.at(KEPT_S + 1 + H).take(beat(A, clock=12))) == ["Joined"]


def test_a_newcomer_that_says_goodbye_is_forgotten() -> None:
    observer = Observer(trusting=False)
    observer.take(A, A.replaced(kind=Kind.OFFLINE))
    assert kinds(observer.at(H).take(beat(A, clock=11))) == ["Probe"]


def test_a_new_run_takes_the_place_of_the_old_one_when_it_is_proven() -> None:
    observer = Observer()
    observer.take(A)
    observer._trusting = False
    newer = A.replaced(inc=200, pid=8, clock=20, sent_at=1020.0)
    assert kinds(observer.take(newer)) == ["Probe"]
    assert observer.take(beat(A, clock=21)) == [] and observer.state() is ALIVE
    assert kinds(observer.at(H).take(beat(newer, clock=22))) == ["Lost", "Joined"]


def test_a_flood_of_names_lists_nobody_and_takes_no_place_from_members() -> None:
    observer = Observer(members_max=3, trusting=False)
    for node in (A, B):
        observer.take(node, Probed(node.node, node.inc, node.pid, "alive"))
    before = observer.machine.members()
    for number in range(NEWCOMERS_MAX + 1000):
        observer.take(ghost(number))
    assert len(observer.machine._newcomers) == NEWCOMERS_MAX
    assert observer.machine.members() == before and observer.machine.evicted == 0
    assert observer.count(Probe) == ASKED_PER_S and observer.count(Joined) == 2
    observer.take(CELERY)
    observer.at(H - 0.1).take(beat(A, clock=11), beat(B, clock=11), beat(CELERY, clock=11))
    assert {one.node for one in observer.machine.members()} == {"a@x", "b@x", "c@x"}
    observer.at(KEPT_S + 1).take(A.replaced(node="d@x"))
    assert len(observer.machine._newcomers) == 1


# ---- random lives ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slept:
    """Time passes, and this node notices nothing of it."""

    seconds: float


nodes = st.sampled_from(["a@x", "b@x", "c@x", "me@x"])
incs = st.sampled_from([0, 100, 200])
heard = st.builds(
    NodeEvent,
    nodes,
    incs,
    st.sampled_from([7, 8]),
    st.sampled_from(Kind),
    st.integers(0, 50),
    st.floats(0, 50),
    st.sampled_from([None, 0.5, 2.0]),
)
events = st.one_of(
    heard,
    st.builds(Accused, nodes, incs, st.sampled_from([7, 8]), nodes),
    st.builds(Condemned, nodes, incs, st.sampled_from([7, 8]), nodes),
    st.builds(Answered, nodes),
    st.builds(Probed, nodes, incs, st.sampled_from([7, 8]), st.sampled_from(["alive", "gone", "unknown"])),
    st.builds(Introduced, nodes, incs, st.sampled_from([7, 8])),
    st.builds(Observe, st.booleans()),
    st.just(Strained("lag")),
    st.floats(0.1, 500.0),  # time that passes
    st.builds(Slept, st.floats(0.1, 5000.0)),
)


@settings(max_examples=300 if os.environ.get("UMBEL_SOAK") else 100)
@given(st.lists(events, max_size=60), st.booleans(), st.sampled_from([0.0, 5.0]))
def test_whatever_happens_effects_tell_the_table_and_nothing_twice(
    happenings: list[Event | float | Slept],
    trusting: bool,
    interval_s: float,
) -> None:
    observer = Observer(members_max=2, trusting=trusting, interval_s=interval_s)
    present: dict[str, tuple[int, int]] = {}
    elapsed, seen = 0.0, 0
    for happening in happenings:
        if isinstance(happening, float):
            elapsed += happening
            observer.at(elapsed)
        elif isinstance(happening, Slept):
            elapsed += happening.seconds
            observer.oversleep(happening.seconds)
        else:
            observer.take(happening)
        for effect in observer.effects[seen:]:
            if isinstance(effect, Joined):
                assert present.get(effect.member.node) is None, "joined twice without leaving"
                present[effect.member.node] = (effect.member.inc, effect.member.pid)
            if isinstance(effect, Left | Lost):
                assert present.pop(effect.member.node) == (effect.member.inc, effect.member.pid)
        seen = len(observer.effects)
        known = {member.node: member for member in observer.machine.members()}
        there = {node for node, member in known.items() if member.state in (ALIVE, SUSPECT)}
        assert there <= set(present)
        for forgotten in set(present) - there:  # evicted from a full table
            assert observer.machine.evicted
            del present[forgotten]
        assert len(known) <= 2 and "me@x" not in known
        assert observer.machine.nodes == 1 + len(there)
        deadline = observer.machine.deadline
        assert deadline is None or deadline >= observer.now
