"""Drawings are pure: what they show is what they were given, as text and never as markup."""

import re
from html import unescape
from typing import Literal
from xml.etree import ElementTree

import pytest

from umbel.history.markup import Markup
from umbel.monitor.records import Happening, Node, NodeState, StoryEvent
from umbel.web.pages.cluster import views
from umbel.web.pages.drawings import DRAWN_MAX, PLACES, Member, Step, heat_map, ring, shade, ticks, workflow
from umbel.web.pages.labels import LOOKS, state
from umbel.web.pages.spacetime import Hop, Lane, spacetime, story_of

HOSTILE = '<script>alert(1)</script> \x1b[31m \u202e "quoted" \u05d0\u05d1'


def elements(drawn: Markup, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawn).iter(name))


def words(drawn: Markup) -> str:
    return " ".join(unescape(text) for text in ElementTree.fromstring(drawn).itertext())


def event(kind: str, node: str, clock: int, **more: object) -> StoryEvent:
    process = node if kind != "task-sent" else f"client {node}"
    fields = {"type": kind, "at": 100.0 + clock, "clock": clock, "node": node, "pid": 1, "process": process}
    return StoryEvent(**(fields | more))  # type: ignore[arg-type]


def node(name: str, state_: NodeState = "alive", **more: object) -> Node:
    return Node(node=name, state=state_, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "drawn",
    [
        ring([Member(HOSTILE, "alive", (HOSTILE,), HOSTILE, "/x")]),
        workflow([Step(HOSTILE, HOSTILE, "SUCCESS", note=HOSTILE, link="/x")], [HOSTILE], HOSTILE),
        spacetime(story_of([event("task-received", HOSTILE, 3, detail=HOSTILE)], HOSTILE)),
        heat_map(HOSTILE, [(HOSTILE, [1.0])], [HOSTILE], str),
        ticks([Happening(at=5.0, kind="lost", subject=HOSTILE)], 0.0, 10.0),
    ],
    ids=["ring", "workflow", "spacetime", "heat", "ticks"],
)
def test_hostile_text_stays_text(drawn: Markup) -> None:
    assert not elements(drawn, "script")
    assert "\x1b" not in drawn and "\u202e" not in drawn
    assert "<script>alert(1)</script>" in words(drawn)
    assert "style=" not in drawn, "inline styles are refused by the content security policy"


def test_every_state_is_said_by_a_sign_and_a_word() -> None:
    for name, look in LOOKS.items():
        label = state(name)
        assert look.word in label and "<path" in label
    assert "progress" in state("PROGRESS")


def test_the_ring_has_a_floret_for_each_node_and_a_crown_for_who_leads() -> None:
    drawn = ring([Member("a", "alive", ("schedule",)), Member("b", "suspect"), Member("c", "lost")])
    florets = [one for one in elements(drawn, "circle") if "floret" in one.get("class", "")]
    assert len(florets) == 3
    assert drawn.count('class="crown"') == 1
    assert "1 alive, 1 suspect, 1 lost" in drawn
    assert "1 of 3" in words(drawn)


def test_a_thousand_nodes_are_counted_and_a_bounded_number_drawn() -> None:
    drawn = ring([Member(f"n{number}", "alive") for number in range(1000)])
    assert drawn.count("floret") == DRAWN_MAX
    assert "1000 alive" in drawn and len(drawn) < 100_000


def test_a_redelivered_task_shows_both_runs_and_the_cause() -> None:
    story = story_of(
        [
            event("task-sent", "web", 0),
            event("task-received", "w1", 10, delivery=1),
            event("task-started", "w1", 11, delivery=1),
            event("task-received", "w2", 30, delivery=2, repeat="redelivered"),
            event("task-started", "w2", 31, delivery=2, repeat="redelivered"),
            event("task-succeeded", "w2", 40, delivery=2, repeat="redelivered"),
        ],
        "default",
        {"w1": "lost", "w2": "alive"},
    )
    kinds = [(lane.kind, lane.name) for lane in story.lanes]
    assert kinds == [
        ("client", "web"),
        ("broker", "default"),
        ("worker", "w1"),
        ("child", "of w1"),
        ("worker", "w2"),
        ("child", "of w2"),
    ]
    assert len(story.runs) == 2
    [again] = [dot for dot in story.dots if dot.cause]
    assert again.cause == "redelivered: w1 was lost" and again.lane.kind == "broker"
    assert [dot.clock for dot in story.dots if dot.clock] == [10, 11, 30, 31, 40]
    assert any(hop.again for hop in story.hops) and not story.hops[0].again
    drawn = spacetime(story)
    assert "redelivered: w1 was lost" in words(drawn)
    assert drawn.count('class="lane-line run"') == 1 and drawn.count('class="lane-line run again"') == 1


@pytest.mark.parametrize(
    ("kind", "at", "cause"),
    [
        ("lost", 125.0, "w1 was lost"),
        ("lost", 135.0, "w1 was lost"),  # found after the message was delivered again
        ("left", 125.0, "w1 left"),
        ("lost", 105.0, "w1 did not finish it"),  # before it received the message
        ("left", 1000.0, "w1 did not finish it"),  # long after
        ("suspect", 125.0, "w1 did not finish it"),
    ],
)
def test_why_a_node_did_not_finish_is_known_when_it_is_back(
    kind: Literal["lost", "left", "suspect"], at: float, cause: str
) -> None:
    events = [
        event("task-received", "w1", 10, delivery=1),
        event("task-received", "w2", 30, delivery=2, repeat="redelivered"),
    ]
    happened = [
        Happening(at=at - 1, kind="lost", subject="w3", node="w3"),
        Happening(at=at, kind=kind, subject="w1", node="w1"),
        Happening(at=at + 5, kind="returned", subject="w1", node="w1"),
    ]
    story = story_of(events, "default", {"w1": "alive"}, happened)
    assert [dot.cause for dot in story.dots if dot.cause] == [f"redelivered: {cause}"]


def test_a_cause_is_always_above_its_effect() -> None:
    story = story_of(
        [event("task-received", "w1", 4), event("task-started", "w1", 5), event("task-failed", "w1", 6)]
    )
    assert story.lanes[0] == Lane("broker", "queue"), "its sending was not told, and the broker held it"
    assert Hop(0, 1) in story.hops
    assert all(hop.before < hop.after for hop in story.hops)


def test_the_critical_path_is_marked_on_boxes_and_edges() -> None:
    steps = [
        Step("a", "first", "SUCCESS"),
        Step("b", "slow", "SUCCESS", ("a",)),
        Step("c", "quick", "SUCCESS", ("a",)),
    ]
    drawn = workflow(steps, ["a", "b"])
    assert len(re.findall(r'class="box good critical"', drawn)) == 2
    assert len(re.findall(r'class="edge critical"', drawn)) == 1
    assert "critical path: first then slow" in drawn


def test_a_workflow_in_a_circle_is_drawn_all_the_same() -> None:
    assert (
        workflow([Step("a", "a", "SUCCESS", ("b",)), Step("b", "b", "SUCCESS", ("a",))]).count("<rect") == 2
    )


def test_shades_grow_with_the_value() -> None:
    shades = [shade(value, 1000.0) for value in (None, 0.0, 1.0, 40.0, 200.0, 1000.0)]
    assert shades == sorted(shades) and shades[0] == 0 and shades[-1] == 5


def test_nodes_that_disagree_are_two_groups() -> None:
    nodes = [node("a"), node("b"), node("c", differs={"b": "lost"})]
    [(most, agreed), (few, other)] = views(nodes)
    assert most == ["a", "c"] and few == ["b"]
    assert agreed["c"] == "alive" and other["c"] == "lost"
    assert len(views([node("a"), node("b")])) == 1


def test_nodes_that_agree_are_shown_as_the_dashboard_knows_them_by_now() -> None:
    """The nodes were asked before the loss: their answer is old, and the same."""
    [(_, seen)] = views([node("a"), node("b"), node("c", "lost", differs={"a": "alive", "b": "alive"})])
    assert seen["c"] == "lost"


def test_a_strip_of_ticks_is_bounded_and_shows_the_worst_of_what_falls_together() -> None:
    many = [Happening(at=float(at), kind="joined", subject="a") for at in range(10_000)]
    drawn = ticks([*many, Happening(at=5_000.0, kind="lost", subject="b")], 0.0, 10_000.0, (20.0, 30.0))
    classes = [one.get("class") for one in elements(drawn, "rect")]
    assert len(classes) == PLACES + 1
    assert classes.count("tick bad") == 1 and classes.count("tick gap") == 1
