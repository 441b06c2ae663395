"""When a node beats, how its interval grows with the cluster, and what tells that it is slow."""

import pytest

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick
from umbel.protocol.membership.heartbeat import (
    Beat,
    BeatKind,
    BeatNow,
    BeginBeats,
    Echoed,
    EndBeats,
    Heartbeat,
    Lagged,
    Resized,
    interval_s,
)
from umbel.protocol.membership.observers import GossipMode, is_among_lowest, mode_for, patterns_for


def at(seconds: float) -> Instant:
    return Instant(seconds, 1000.0 + seconds)


@pytest.fixture
def heart() -> Heartbeat:
    return Heartbeat(2.0, lambda _low, high: high)


def test_a_node_comes_online_beats_and_says_goodbye(heart: Heartbeat) -> None:
    assert heart.step(BeginBeats(), at(0)) == [Beat(BeatKind.ONLINE, 2.0)]
    assert heart.deadline == 2.0
    assert heart.step(Tick(), at(1.9)) == []
    assert heart.step(Tick(), at(2.0)) == [Beat(BeatKind.BEAT, 2.0)]
    assert heart.step(EndBeats(), at(3.0)) == [Beat(BeatKind.OFFLINE, 2.0)]
    assert (
        heart.step(EndBeats(), at(3.0)) == heart.step(BeatNow(), at(3.0)) == heart.step(Tick(), at(9.0)) == []
    )


def test_a_beat_that_is_wanted_goes_out_at_once_and_counts_as_the_next(heart: Heartbeat) -> None:
    heart.step(BeginBeats(), at(0))
    assert heart.step(BeatNow(), at(1.5)) == [Beat(BeatKind.BEAT, 2.0)]
    assert heart.deadline == 3.5


def test_a_flood_of_requests_is_no_flood_of_beats(heart: Heartbeat) -> None:
    """N1; a node that others gave up comes online again all the same."""
    heart.step(BeginBeats(), at(0))
    assert [heart.step(BeatNow(), at(0.001 * number)) for number in range(100)] == [[]] * 100
    assert heart.step(BeginBeats(), at(0.09)) == [] and heart.deadline == 0.1
    assert heart.step(Tick(), at(0.1)) == [Beat(BeatKind.ONLINE, 2.0)]
    assert heart.step(BeatNow(), at(0.3)) == [Beat(BeatKind.BEAT, 2.0)]


def test_nodes_that_started_together_do_not_beat_together() -> None:
    early = Heartbeat(2.0, lambda low, _high: low)
    early.step(BeginBeats(), at(0))
    assert early.deadline == 1.8


@pytest.mark.parametrize(
    ("nodes", "least_s", "wanted"),
    [
        (1, 2.0, 2.0),
        (400, 2.0, 2.0),
        (1000, 2.0, 5.0),
        (3000, 2.0, 15.0),
        (50_000, 2.0, 15.0),
        (5, 30.0, 30.0),
    ],
)
def test_the_interval_grows_with_the_cluster(nodes: int, least_s: float, wanted: float) -> None:
    assert interval_s(nodes, least_s) == wanted


def test_a_longer_interval_is_told_before_it_is_kept(heart: Heartbeat) -> None:
    heart.step(BeginBeats(), at(0))
    heart.step(Resized(1000), at(1.0))
    assert heart.deadline == 2.0
    assert heart.step(Tick(), at(2.0)) == [Beat(BeatKind.BEAT, 5.0)]
    assert heart.deadline == 7.0


def test_a_beat_that_is_late_or_comes_back_late_tells_that_this_node_is_slow(heart: Heartbeat) -> None:
    heart.step(BeginBeats(), at(0))
    lagged, beat = heart.step(Tick(), at(2.6))
    assert isinstance(lagged, Lagged) and beat == Beat(BeatKind.BEAT, 2.0)
    assert heart.step(Tick(), at(5.0)) == [Beat(BeatKind.BEAT, 2.0)]
    assert heart.step(Echoed(1004.0), at(6.0)) == []
    assert [type(effect) for effect in heart.step(Echoed(1003.9), at(6.0))] == [Lagged]


def test_the_mode_does_not_turn_back_and_forth() -> None:
    full, observed = GossipMode.FULL, GossipMode.OBSERVED
    for current in (full, observed):
        assert mode_for(GossipMode.AUTO, current, 32) is full
        assert mode_for(GossipMode.AUTO, current, 33) is current
        assert mode_for(GossipMode.AUTO, current, 40) is current
        assert mode_for(GossipMode.AUTO, current, 41) is observed
        assert mode_for(full, current, 1000) is full
        assert mode_for(observed, current, 1) is observed


def test_heartbeats_are_heard_by_those_who_must() -> None:
    assert patterns_for(GossipMode.FULL, observer=False) == ("worker.#",)
    assert "worker.heartbeat" in patterns_for(GossipMode.OBSERVED, observer=True)
    ordinary = patterns_for(GossipMode.OBSERVED, observer=False)
    assert "worker.heartbeat" not in ordinary and "worker.suspect" in ordinary


def test_nodes_that_see_the_same_members_choose_the_same_few() -> None:
    nodes = [f"w{number}@x" for number in range(50)]
    chosen = [node for node in nodes if is_among_lowest("new@x", node, nodes, 3)]
    assert len(chosen) == 3
    assert all(is_among_lowest("new@x", node, list(reversed(nodes)), 3) for node in chosen)
    assert chosen != [node for node in nodes if is_among_lowest("other@x", node, nodes, 3)]
