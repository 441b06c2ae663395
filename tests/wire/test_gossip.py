"""Worker events as the membership machine understands them; whatever a peer sends raises nothing."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.membership.members import (
    Accused,
    BroadcastView,
    Condemned,
    Introduced,
    Kind,
    Member,
    MemberState,
    NodeEvent,
    Viewed,
)
from umbel.wire.coordination import (
    introduction,
    read_introduction,
    read_worker_event,
    subject_fields,
    view_fields,
)

# As captured from Celery 5.7.
CELERYS = {
    "hostname": "w1@vm",
    "utcoffset": 0.0,
    "pid": 30756,
    "clock": 2,
    "freq": 2.0,
    "active": 0,
    "processed": 0,
    "loadavg": [2.18, 1.55, 0.71],
    "sw_ident": "py-celery",
    "sw_ver": "5.7.0",
    "sw_sys": "Linux",
    "timestamp": 1794703091.5,
    "type": "worker-heartbeat",
}
MEMBER = Member("a@x", 100, 7, MemberState.ALIVE, "umbel", 5, 2.0, 0.0, 0.0)


def test_celerys_heartbeat_is_a_sign_of_life() -> None:
    heard = NodeEvent("w1@vm", 0, 30756, Kind.BEAT, 2, 1794703091.5, 2.0, "celery")
    assert read_worker_event(CELERYS) == [heard]


def test_an_event_about_another_node_is_a_sign_of_life_of_its_sender_too() -> None:
    base = {"hostname": "b@x", "pid": 1, "inc": 9, **subject_fields(MEMBER)}
    heard = NodeEvent("b@x", 9, 1, Kind.OTHER)
    assert read_worker_event({**base, "type": "worker-suspect"}) == [heard, Accused("a@x", 100, 7, "b@x")]
    assert read_worker_event({**base, "type": "worker-lost", "reason": "silent"}) == [
        heard,
        Condemned("a@x", 100, 7, "b@x", "silent"),
    ]


def test_what_is_not_about_a_node_is_nothing() -> None:
    assert read_worker_event({"type": "worker-heartbeat"}) == []
    assert read_worker_event({"type": "task-sent", "hostname": "a@x"}) == []
    assert read_worker_event({"type": "worker-online", "hostname": "x" * 5000}) == []


def test_a_member_can_be_introduced() -> None:
    assert read_introduction(introduction(MEMBER)) == Introduced("a@x", 100, 7, 5, 2.0, "umbel")


def test_a_view_comes_back_as_it_was_told_or_not_at_all() -> None:
    """With a name missing it would seem to leave that node out."""
    runs = (Introduced("a@x", 100, 7, 5, 2.0, "umbel"), Introduced("b@x", 9, 1))
    told: dict[str, Any] = {"type": "worker-view", "hostname": "b@x", "pid": 1, "inc": 9}
    told |= view_fields(BroadcastView("", "m@x", runs))
    heard = NodeEvent("b@x", 9, 1, Kind.OTHER)
    assert read_worker_event(told) == [heard, Viewed("b@x", "", "m@x", runs)]
    for wrong in ({"runs": [*told["runs"], ["c@x"]]}, {"until": 5}, {"runs": told["runs"] * 60}):
        assert read_worker_event(told | wrong) == [heard]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    *CELERYS,
    "inc",
    "subject",
    "subject_inc",
    "subject_pid",
    "reason",
    "gossip",
    "after",
    "until",
    "runs",
]


@given(st.dictionaries(st.sampled_from(FIELDS), anything), anything)
def test_whatever_a_peer_sends_nothing_is_raised(fields: dict[str, Any], named: object) -> None:
    for kind in ("worker-lost", "worker-view"):
        for told in read_worker_event({**CELERYS, **fields, "type": kind}):
            assert hash(told) is not None
    read_introduction(named)
