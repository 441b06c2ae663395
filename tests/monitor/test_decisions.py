"""What the monitor makes of what it heard: rates, stories, workflows, elections, leases, health."""

from typing import Any

import pytest

from umbel.events.meters import NAMES_MAX as METERED_MAX
from umbel.events.state import TEXT_MAX, ClusterState
from umbel.events.types import Event, TaskEvent
from umbel.events.view import EventReader
from umbel.monitor import coordination
from umbel.monitor.cluster import health_of
from umbel.monitor.coordination import CANDIDATES_MAX, ELECTIONS_MAX, ElectionBook, LeaseBook, node_of
from umbel.monitor.model import NAMES_MAX, Changes, ClusterModel
from umbel.monitor.rates import (
    STEP_S,
    STEPS_MAX,
    RateBook,
    Step,
    added,
    bucket_of,
    oldest_waiting,
    percentile,
)
from umbel.monitor.records import Node, TaskFilter
from umbel.monitor.tasks import admits_of, story_of, workflow_of
from umbel.wire.control import LeaseRow, is_member
from umbel.wire.event import encode_events

NOW = 1_000_000.0
READER = EventReader()


def told(type_name: str, at: float = NOW, clock: int = 1, node: str = "w@h", **fields: Any) -> dict[str, Any]:
    return {"type": type_name, "hostname": node, "pid": 1, "clock": clock, "timestamp": at, **fields}


def task(type_name: str, at: float, clock: int, node: str = "w@h", **fields: Any) -> TaskEvent:
    read = READER.read(told(type_name, at, clock, node, **{"uuid": "t", "retries": 0, **fields}))
    assert isinstance(read, TaskEvent)
    return read


def other(type_name: str, **fields: Any) -> Event:
    read = READER.read(told(type_name, **fields))
    assert read is not None
    return read


def test_percentiles_are_right_to_five_percent() -> None:
    book = RateBook()
    for number in range(1, 1001):
        book.waited(number / 100, NOW)
    (step,) = book.steps
    for share in (0.5, 0.95):
        found = percentile(step.wait, share)
        assert found is not None and abs(found / (share * 10) - 1) < 0.06
    assert percentile({}, 0.5) is None
    assert added([{1: 2}, {1: 3, 2: 1}]) == {1: 5, 2: 1}
    assert bucket_of(-5.0) == bucket_of(0.0) and bucket_of(1e12) == bucket_of(1e9)


def test_an_hour_of_steps_is_kept_and_restored_without_counting_twice() -> None:
    book = RateBook()
    for number in range(STEPS_MAX + 10):
        book.count("task-succeeded", NOW + number * STEP_S)
    assert len(book.steps) == STEPS_MAX and book.steps[0].at == NOW + 10 * STEP_S
    newest = book.steps[-1].at
    book.restore([Step(int(NOW), done=7), Step(newest, done=100)])
    assert book.steps[-1].done == 1 and len(book.steps) == STEPS_MAX


def test_a_redelivered_task_shows_both_runs_and_why() -> None:
    events = [
        task("task-sent", NOW, 0, "gen@c", name="pay", queue="q"),
        task("task-received", NOW + 1, 5, "a@h", name="pay"),
        task("task-started", NOW + 2, 6, "a@h"),
        task("task-received", NOW + 9, 20, "b@h", name="pay"),
        task("task-started", NOW + 10, 21, "b@h"),
        task("task-succeeded", NOW + 12, 22, "b@h", runtime=2.0, result="1"),
    ]
    dots, edges, attempts = story_of(events)
    assert [dot.process for dot in dots][:2] == ["client gen@c", "a@h"]
    assert [(dot.delivery, dot.repeat) for dot in dots] == [
        *[(0, ""), (1, ""), (1, "")],
        *[(2, "redelivered")] * 3,
    ]
    assert edges == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    first, second = attempts
    assert (first.node, first.state, first.ended_at, first.wait_s) == ("a@h", "INTERRUPTED", None, 2.0)
    assert (second.node, second.state, second.run_s, second.repeat) == ("b@h", "SUCCESS", 2.0, "redelivered")


def test_a_requeued_letter_tells_its_earlier_starts_also_where_nothing_else_is_known_of_them() -> None:
    events = [task("task-received", NOW, 1, name="pay", earlier_starts=3), task("task-started", NOW + 1, 2)]
    dots, _, (attempt,) = story_of(events)
    assert {dot.repeat for dot in dots} == {attempt.repeat} == {"requeued after 3 starts"}
    odd = [task("task-received", NOW, 1, name="pay", earlier_starts="many")]
    assert story_of(odd)[0][0].repeat == ""


def test_a_retry_is_told_from_a_redelivery() -> None:
    events = [
        task("task-received", NOW, 1, name="pay"),
        task("task-retried", NOW + 1, 2, exception="Timeout()"),
        task("task-received", NOW + 5, 3, retries=1, name="pay"),
        task("task-failed", NOW + 6, 4, retries=1, exception="ValueError()"),
    ]
    dots, _, attempts = story_of(events)
    assert dots[2].repeat == "retried" and dots[3].detail == "ValueError()"
    assert [(one.attempt, one.state, one.error) for one in attempts] == [
        (0, "RETRY", "Timeout()"),
        (1, "FAILURE", "ValueError()"),
    ]
    assert story_of([]) == ([], [], [])


def known(*events: dict[str, Any]) -> ClusterState:
    state = ClusterState()
    state.apply(list(events))
    return state


def ran(uuid: str, parent: str | None, start: float, end: float) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {"uuid": uuid, "retries": 0}
    described: dict[str, Any] = {"name": uuid, "root_id": "root", "parent_id": parent}
    return [
        told("task-received", NOW + start, 1, **shared, **described),
        told("task-started", NOW + start, 2, **shared),
        told("task-succeeded", NOW + end, 3, **shared),
    ]


def test_the_critical_path_ends_with_a_task_that_sent_no_other() -> None:
    """A busy worker may tell of the slow part's ending after another worker told of the body's."""
    state = known(*ran("slow", None, 0, 9.5), *ran("body", "slow", 8, 9))
    records = [one for name in ("body", "slow") if (one := state.task(name)) is not None]
    assert workflow_of("slow", records).critical == ["slow", "body"]


def test_the_critical_path_of_a_chord_runs_through_its_slowest_part() -> None:
    state = known(
        *ran("root", None, 0, 1),
        *ran("fast", "root", 1, 2),
        *ran("slow", "root", 1, 8),
        *ran("body", "slow", 8, 9),
    )
    records = [one for name in ("body", "fast", "root", "slow") if (one := state.task(name)) is not None]
    workflow = workflow_of("root", records)
    assert workflow.critical == ["root", "slow", "body"] and workflow.duration_s == 9.0
    assert workflow.edges == [("root", "fast"), ("root", "slow"), ("slow", "body")]
    assert [one.uuid for one in workflow.tasks if one.is_critical] == ["root", "slow", "body"]


def test_a_loop_of_parents_ends() -> None:
    state = known(
        *(
            told("task-received", uuid=one, parent_id=other, name="x", retries=0)
            for one, other in ("ab", "ba")
        ),
        told("task-succeeded", uuid="a", retries=0),
    )
    records = [one for name in "ab" if (one := state.task(name)) is not None]
    assert workflow_of("a", records).critical == ["b", "a"]


def test_elections_are_kept_with_their_candidates_and_broken_promises() -> None:
    book = ElectionBook()
    for node, clock in (("b@h", 7), ("a@h", 9)):
        assert book.take(other("worker-elect", id="e1", topic="task", clock=clock, node=node)) == "e1"
    v2 = {"eid": "e2", "topic": "job", "policy": "at_most_once"}
    book.take(other("worker-elected", **v2, phase="elected", winner="a@h", term=5, attempt=1, at=NOW + 1))
    book.take(other("worker-elected", **v2, phase="done", winner="a@h", term=5, at=NOW + 3))
    book.take(other("worker-elected", **v2, phase="elected", winner="a@h", term=5, attempt=1, at=NOW + 1))
    second, first = book.all()
    assert (first.winner, first.protocol, [one.node for one in first.candidates]) == (
        "b@h",
        "v1",
        ["b@h", "a@h"],
    )
    assert (second.winner, second.phase, second.duration_s, second.violations) == ("a@h", "done", 2.0, [])
    won = [(one.at, one.subject, one.node, one.text) for one in book.decided(NOW)]
    assert won == [
        (NOW, "e1", "b@h", "b@h was elected for task"),
        (NOW + 3, "e2", "a@h", "a@h was elected for job"),
    ]
    assert [one.subject for one in book.decided(NOW + 1)] == ["e2"]
    book.take(other("worker-elected", **v2, phase="elected", winner="b@h", term=5))
    assert book.all()[0].violations == ["two winners in one term"]
    for number in range(ELECTIONS_MAX + 5):
        book.take(other("worker-elect", id=f"x{number}"))
    assert len(book.all()) == ELECTIONS_MAX
    assert book.take(other("worker-heartbeat")) == ""


def test_the_oldest_elections_go_where_many_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "NODES_MAX", 100)
    book = ElectionBook()
    for number in range(20):
        for node in range(5):
            book.take(other("worker-elect", id=f"v1 {number}", hostname=f"w{node}@h"))
            book.take(
                other("worker-elected", eid=f"v2 {number}", phase="elected", winner=f"w{node}@h", term=node)
            )
    shown = {election.id for election in book.all()}
    assert shown == {f"{version} {number}" for number in range(14, 20) for version in ("v1", "v2")} | {
        "v2 13"
    }


def test_a_lease_changes_hands_with_a_higher_term_only() -> None:
    book = LeaseBook()
    held = book.take(other("worker-leader", lease="scheduler", leader="a@h.7.9", term=2, phase="acquired"))
    assert held is not None and (held.holder, held.since) == ("a@h", NOW)
    assert book.answered([LeaseRow("scheduler", "a@h.7.9", 2, 9.0)], NOW + 5) == []
    assert book.all()[0].left_s == 9.0 and book.all()[0].since == NOW
    late = other("worker-leader", lease="scheduler", leader="b@h.1.1", term=1, phase="acquired")
    assert book.take(late) is None and book.held_by("a@h") == ["scheduler"]
    (taken,) = book.answered([LeaseRow("scheduler", "b.x@h.1.1", 3)], NOW + 9)
    assert taken.holder == "b.x@h" and book.held_by("a@h") == []
    assert book.take(other("worker-leader", lease=5, leader="x", term="y")) is None
    assert node_of("app") == "app"


def node(name: str, state: Any = "alive", silent_s: float = 0.0) -> Node:
    return Node(node=name, state=state, silent_s=silent_s)


def test_health_is_one_sentence_in_plain_words() -> None:
    suspect = [node("w1"), node("w2"), node("w3"), node("w4", "suspect", 41.2)]
    found = health_of(suspect, "")
    assert (found.level, found.sentence) == (
        "warning",
        "3 of 4 workers answer; w4 silent for 41 s, suspect.",
    )
    assert health_of([node("w1"), node("w2"), node("w3", "left")], "").sentence == "All 2 workers answer."
    assert health_of([node("w1", "lost", 9)], "").level == "bad"
    many = health_of([node("w0"), *(node(f"w{n}", "lost", 9) for n in range(1, 6))], "")
    assert many.sentence.endswith("; and 2 more.")
    assert health_of([], "", waiting=3).level == "bad"
    assert "3 messages wait" in health_of([], "", waiting=3).sentence
    assert health_of([node("w1")], "", done=1, failed=30).level == "warning"
    assert health_of([node("w1")], "no route to broker").level == "bad"


def test_filters_find_by_state_queue_root_time_and_text_but_no_secret() -> None:
    state = known(
        told("task-sent", uuid="aa", name="pay", queue="q1", args="('blue', 'hush')", root_id="r", retries=0),
        told("task-failed", NOW + 50, 9, uuid="bb", exception="ValueError('red')", retries=0),
    )

    def found(**wanted: Any) -> list[str]:
        admits = admits_of(TaskFilter(**wanted), lambda text: text.replace("hush", "***"))
        return sorted(one.uuid for one in state.tracked() if admits is None or admits(one))

    assert found() == ["aa", "bb"]
    assert found(state="failure,success") == ["bb"] and found(queue="q1") == ["aa"]
    assert found(root="r") == ["aa"] and found(root="bb") == ["bb"]
    assert found(since=NOW + 10) == ["bb"] and found(until=NOW + 10) == ["aa"]
    assert found(text="BLUE") == ["aa"] and found(text="red") == ["bb"] and found(text="hush") == []
    assert found(text="bb") == ["bb"] and found(state="failure", text="pay") == []


def test_the_oldest_that_waits_is_known_by_queue() -> None:
    state = known(
        told("task-sent", NOW - 50, uuid="old", queue="q", retries=0),
        told("task-sent", NOW - 10, uuid="new", queue="q", retries=0),
        told("task-sent", NOW - 90, uuid="due later", queue="q", eta="2030-01-01T00:00:00", retries=0),
        told("task-sent", NOW - 99, uuid="taken", queue="q", retries=0),
        told("task-received", NOW - 98, uuid="taken", retries=0),
    )
    assert oldest_waiting(state, NOW) == {"q": NOW - 50}


def test_changes_keep_the_newest_names_and_count_all() -> None:
    changes = Changes()
    for number in range(5 * NAMES_MAX):
        changes.note("tasks", f"t{number}")
    changes.note("tasks", "t0")
    (found,) = changes.drain().values()
    assert found.count == 5 * NAMES_MAX + 1 and len(found.names) == NAMES_MAX
    assert found.names[:2] == ["t0", f"t{5 * NAMES_MAX - 1}"] and changes.drain() == {}
    assert found.joined(found).count == 2 * found.count


def test_a_new_version_of_a_node_is_a_mark_and_metered_names_are_bounded() -> None:
    model = ClusterModel()
    for clock, version in enumerate(("1.0", "1.0", "1.1")):
        model.take(encode_events([told("worker-heartbeat", clock=clock, sw_ver=version)]), NOW)
    assert [(one.kind, one.text) for one in model.marks] == [("version", "w@h: 1.0 → 1.1")]
    flood = [told("task-received", uuid=f"t{n}", name=f"task{n}", retries=0) for n in range(METERED_MAX + 50)]
    model.take(encode_events(flood), NOW)
    assert len({name for _, _, name in model.meters.by_node}) == METERED_MAX + 1


def test_a_row_about_a_member_with_numbers_beyond_all_bounds_is_not_believed() -> None:
    row = {"node": "w@h", "state": "alive", "software": "umbel", "pid": 1, "incarnation": 5, "clock": 1}
    row |= {"freq_s": 2.0, "silent_s": 0.0}
    assert is_member(row)
    for name, value in (("incarnation", 2**200), ("clock", -1), ("pid", 2**63), ("freq_s", 1e300)):
        assert not is_member(row | {name: value}), name
    assert not is_member(row | {"node": "n" * 5000})


def test_an_election_keeps_no_more_than_its_limits() -> None:
    book = ElectionBook()
    for term in range(CANDIDATES_MAX + 50):
        told_by = {"eid": "e", "winner": f"w{term}@h", "term": term, "outcome": "x" * 5000}
        book.take(other("worker-elected", phase="elected", **told_by))
        book.take(other("worker-elected", phase="done", **told_by))
    (election,) = book.all()
    assert len(election.candidates) == CANDIDATES_MAX and len(election.outcome) < 5000
    assert election.violations == ["done by more than one winner"]
    assert len(book.take(other("worker-elect", id="i" * 5000))) < 5000


def test_texts_of_events_are_cut_before_they_are_kept() -> None:
    model = ClusterModel()
    long = told("task-failed", uuid="t", retries=0, exception="x" * 100_000, traceback="y" * 100_000)
    model.take(encode_events([long]), NOW)
    model.replay([encode_events([long | {"uuid": "u"}])], NOW)
    for uuid in ("t", "u"):
        found = model.state.task(uuid)
        assert found is not None and len(found.exception or "") == len(found.traceback or "") == TEXT_MAX + 1
        (kept,) = model.story(uuid)
        assert len(getattr(kept, "exception", "")) == TEXT_MAX + 1


def test_a_lease_that_nobody_holds_any_more_is_free() -> None:
    book = LeaseBook()
    book.answered([LeaseRow("scheduler", "a@h.7.9", 2, 9.0)], NOW)
    assert book.held() == {"scheduler"}
    (freed,) = book.answered([LeaseRow("scheduler", "", 2, 0.0)], NOW + 30)
    assert (freed.holder, freed.since, book.held()) == ("", NOW + 30, set())
    book.answered([LeaseRow("scheduler", "b@h.1.1", 3, 9.0)], NOW + 31)
    (emptied,) = book.answered([LeaseRow("scheduler", "", 0, 0.0)], NOW + 32)
    assert (emptied.holder, emptied.term) == ("", 3)
    book.answered([LeaseRow("scheduler", "b@h.1.1", 4, 9.0)], NOW + 33)
    assert (
        book.take(other("worker-leader", lease="scheduler", leader="a@h.7.9", term=2, phase="lost")) is None
    )
    assert book.held() == {"scheduler"}  # what is older than what is known says nothing


def test_a_retry_is_no_repeat() -> None:
    model, at = ClusterModel(), NOW
    for clock, retries in enumerate((0, 1, 2, 2, 0), start=1):
        heard = told("task-received", at + clock, clock, uuid="t", name="add", retries=retries)
        model.take(encode_events([heard]), at + clock)
    assert model.meters.repeats == {"add": 2}  # attempt 2 came twice, and attempt 0 again


def measured(*events: dict[str, Any]) -> ClusterModel:
    model = ClusterModel()
    for clock, event in enumerate(events, start=1):
        model.take(encode_events([event | {"clock": clock}]), NOW)
    return model


def test_what_waits_at_a_worker_is_measured_as_flower_does() -> None:
    names: dict[str, Any] = {"uuid": "a", "name": "add", "retries": 0}
    waiting = [told("task-received", NOW, **(names | {"uuid": one})) for one in ("a", "b", "c")]
    later = told("task-received", NOW, **(names | {"uuid": "later", "eta": "2030-01-01T00:00:00+00:00"}))
    begun = [*waiting, later, told("task-started", NOW + 4, **names)]
    found = measured(*begun).meters.flower
    assert (found.prefetched(), found.prefetch_s) == ({("w@h", "add"): 2}, {("w@h", "add"): 4.0})
    revoked = told("task-revoked", NOW + 5, **(names | {"uuid": "b"}))
    elsewhere = told("task-received", NOW + 6, node="v@h", **(names | {"uuid": "c"}))
    ended = told("task-succeeded", NOW + 7, runtime=3.0, **names)
    found = measured(*begun, revoked, elsewhere, ended).meters.flower
    assert found.prefetched() == {("w@h", "add"): 0, ("v@h", "add"): 1}
    assert found.prefetch_s == {("w@h", "add"): 0.0}
    assert dict(found.runtime["w@h", "add"].cumulative())["2.5"] == 0
    assert dict(found.runtime["w@h", "add"].cumulative())["5.0"] == 1
    found.forget({"w@h", "v@h"})
    assert (found.prefetched(), found.prefetch_s, found.runtime) == ({}, {}, {})
