"""A moment that is over is made from what happened: pure, and alike for what was heard and what was read."""

import pytest

from umbel.monitor.records import Happening, Lease, Node, NodeState
from umbel.web.pages.cluster import (
    HOUR_S,
    Period,
    Replay,
    around,
    change_log_of,
    complete_since,
    moment_of,
    nodes_at,
    period_of,
)
from umbel.web.pages.labels import long_ago

NOW = 1_800_000_000.0


def node(name: str, state: NodeState = "alive") -> Node:
    return Node(node=name, state=state)


def happened(*told: tuple[float, str, str]) -> list[Happening]:
    return [Happening(at=at, kind=kind, subject=one, node=one) for at, kind, one in told]  # type: ignore[arg-type]


def lease(at: float, holder: str, term: int) -> Happening:
    return Happening(at=at, kind="lease", subject="scheduler", node=holder, term=term)


def test_membership_is_replayed_from_what_happened() -> None:
    nodes = [node("a"), node("b", "lost"), node("c")]
    told = happened((10.0, "joined", "a"), (20.0, "joined", "b"), (30.0, "suspect", "b"), (40.0, "lost", "b"))

    def then(at: float) -> dict[str, str]:
        return {one.node: one.state for one in nodes_at(nodes, told, at)}

    assert then(5.0) == {"c": "alive"}, "who was there before the first thing that happened"
    assert then(15.0) == {"a": "alive", "c": "alive"}
    assert then(25.0) == {"a": "alive", "b": "alive", "c": "alive"}
    assert then(35.0)["b"] == "suspect"
    assert then(45.0) == {"a": "alive", "b": "lost", "c": "alive"}


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        ("joined", None),
        ("returned", None),
        ("suspect", "alive"),
        ("alive", "suspect"),
        ("lost", "alive"),
        ("left", "alive"),
    ],
)
def test_what_a_node_was_before_its_first_change_follows_from_the_change(
    kind: str, before: str | None
) -> None:
    then = nodes_at([node("a")], happened((10.0, kind, "a")), 5.0)
    assert [one.state for one in then] == ([] if before is None else [before])


def test_who_led_is_replayed_too_also_nodes_and_leases_that_are_gone() -> None:
    told = [
        *happened((1.0, "joined", "a"), (2.0, "joined", "b")),
        lease(3.0, "a", 1),
        *happened((10.0, "left", "a")),
        lease(11.0, "b", 2),
        lease(20.0, "", 2),
    ]
    for reel in (
        change_log_of([], [], told),
        change_log_of([node("b")], [Lease(name="scheduler", holder="", term=2, left_s=0.0)], told),
    ):
        assert [(one.node, one.leads) for one in reel.nodes_at(5.0)] == [("a", ["scheduler"]), ("b", [])]
        assert [(one.node, one.state, one.leads) for one in reel.nodes_at(15.0)] == [
            ("a", "left", []),
            ("b", "alive", ["scheduler"]),
        ]
        assert [(one.holder, one.term) for one in reel.leases_at(15.0)] == [("b", 2)]
        assert [one.holder for one in reel.leases_at(25.0)] == [""]
        assert reel.leases_at(2.5) == [], "nobody is said to lead before it was told"


def test_a_period_is_the_last_hour_unless_another_is_asked_for() -> None:
    assert period_of({"period": "century"}, NOW) == Period("hour", NOW - HOUR_S, NOW)
    week = period_of({"period": "week"}, NOW)
    assert (week.length_s, week.step_s, dict(week.asked)) == (604_800, 840, {"period": "week"})
    chosen = period_of({"since": "2026-11-15T09:00", "until": "1794740000"}, NOW)
    assert (chosen.since, chosen.until, chosen.ends_now) == (1_794_733_200.0, 1_794_740_000.0, False)
    assert period_of({"since": "2026-11-15T09:00", "until": "9999-01-01T00:00"}, NOW).until == NOW
    for wrong in ({"since": "soon"}, {"since": "2026-11-15T09:00", "until": "2026-11-14T09:00"}):
        with pytest.raises(ValueError, match=r"write it like|exchange its two times"):
            period_of(wrong, NOW)


@pytest.mark.parametrize(
    ("given", "at"),
    [
        ({}, None),
        ({"ago": "0"}, None),
        ({"ago": "60"}, NOW - 60),
        ({"ago": "1e9"}, None),
        ({"at": f"{NOW - 5:.1f}"}, NOW - 5),
        ({"at": "7"}, NOW - HOUR_S),
        ({"at": "nan", "ago": "-3"}, None),
    ],
)
def test_a_moment_lies_within_its_period(given: dict[str, str], at: float | None) -> None:
    assert moment_of(given, period_of({}, NOW)) == at


def test_what_is_older_is_read_and_what_nobody_knows_is_said() -> None:
    day = period_of({"period": "day"}, NOW)
    new = happened((NOW - 600, "joined", "b"))
    old = happened((NOW - 80_000, "joined", "a"), (NOW - 50_000, "lost", "a"), (NOW - 300, "joined", "b"))
    replay = Replay(
        day, change_log_of([node("b")], [], new), NOW - 600, change_log_of([], [], old), NOW - 40_000
    )
    assert [one.at for one in replay.happened] == [NOW - 80_000, NOW - 50_000, NOW - 600], "each once"
    assert [one.node for one in replay.log_at(NOW - 60_000).nodes_at(NOW - 60_000)] == ["a"]
    assert [one.node for one in replay.log_at(NOW - 10).nodes_at(NOW - 10)] == ["b"]
    assert replay.gap == (NOW - 40_000, NOW - 600)
    assert not replay.is_known(NOW - 20_000) and replay.is_known(NOW - 60_000) and replay.is_known(NOW - 1)
    assert around(replay.happened, day, NOW - 50_000) == (int(NOW - 80_000), int(NOW - 600))
    assert around(replay.happened, day, None) == (int(NOW - 600), None)


def test_since_when_the_dashboard_listens_is_seen_by_who_came() -> None:
    came = happened((NOW - 600, "joined", "a"))
    assert complete_since([node("a")], came, NOW) == NOW - 600, "it found it when it started"
    assert complete_since([node("a"), node("b")], came, NOW) == NOW - HOUR_S, "b was there for longer"
    assert complete_since([], [], NOW) == NOW


def test_how_long_ago_is_said_in_two_units() -> None:
    assert [long_ago(one) for one in (0, 59, 60, 3661, 90_000, 604_800)] == [
        "0 s ago",
        "59 s ago",
        "1 min ago",
        "1 h 1 min ago",
        "1 d 1 h ago",
        "7 d ago",
    ]
