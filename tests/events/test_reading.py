"""Whatever a peer sends becomes a record or is counted; nothing it can send is an error."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.events.histories import EXAMPLES, Wire, event, histories
from umbel.events.merge import canonical, eid
from umbel.events.types import (
    KNOWN_TYPES,
    SLOTS,
    VOCABULARY,
    OtherEvent,
    TaskCustom,
    TaskReceived,
    TaskSent,
    WorkerHeartbeat,
)
from umbel.events.view import EventReader

CELERYS_HEARTBEAT = {
    "hostname": "w1@vm", "utcoffset": 0.0, "pid": 30756, "clock": 2, "freq": 2.0, "active": 0, "processed": 0,
    "loadavg": [2.18, 1.55, 0.71], "sw_ident": "py-celery", "sw_ver": "5.7.0", "sw_sys": "Linux",
    "timestamp": 1794703091.0064845, "type": "worker-heartbeat",
}  # fmt: skip

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_names = st.sampled_from(sorted({name for fields in VOCABULARY.values() for name in fields})) | st.text(
    max_size=4
)


def read(told: Wire) -> Any:
    return EventReader().read(told)


def test_an_event_of_celery_is_read_with_its_types() -> None:
    record = read(CELERYS_HEARTBEAT)
    assert isinstance(record, WorkerHeartbeat)
    assert (record.freq, record.sw_ident, record.extra) == (2.0, "py-celery", None)
    assert record.at_us == 1794703091006484


@given(
    st.sampled_from([*KNOWN_TYPES, "task-x", "worker-x", "", "task-"]) | _json, st.dictionaries(_names, _json)
)
def test_no_event_that_can_be_sent_is_an_error(kind: Any, fields: Wire) -> None:
    record = read({**fields, "type": kind})
    assert record is None or isinstance(eid(record), int)


def test_what_has_no_field_or_the_wrong_type_is_kept_aside() -> None:
    record = read(
        event("received", name=7, args="(1,)", stamps={"a": 1}, extra="own", retries="one", clock=-4)
    )
    assert isinstance(record, TaskReceived)
    assert (record.name, record.args, record.extra) == (
        None,
        "(1,)",
        {"name": 7, "stamps": {"a": 1}, "extra": "own"},
    )
    assert (record.retries, record.clock) == (None, 0)


def test_a_clock_or_time_beyond_belief_counts_as_none() -> None:
    record = read(event("started", clock=2**53, timestamp=1e300))
    assert (record.clock, record.at_us) == (0, 0)


def test_a_clients_clock_plays_no_part() -> None:
    record = read(event("sent", clock=77))
    assert isinstance(record, TaskSent)
    assert record.clock == 0


def test_other_types_are_kept_under_their_names() -> None:
    custom, other = read(event("progress", done=1)), read({"type": "worker-odd", "hostname": "h", "x": 1})
    assert isinstance(custom, TaskCustom)
    assert (custom.type_name, custom.extra) == ("task-progress", {"done": 1})
    assert isinstance(other, OtherEvent)
    assert (other.type_name, other.extra) == ("worker-odd", {"x": 1})


def test_every_type_of_task_event_has_a_register() -> None:
    assert len(SLOTS) == len(set(SLOTS)) == sum(name.startswith("task-") for name in KNOWN_TYPES) + 1


# ---- digests ---------------------------------------------------------------------------------------


def test_what_a_receiver_adds_is_no_part_of_an_event() -> None:
    plain = event("received", name="add")
    assert eid(read(plain)) == eid(
        read({**plain, "local_received": 5.0, "delivery_tag": "x", "archived_at": 1})
    )


def test_null_and_missing_and_the_order_of_keys_make_no_difference() -> None:
    told = event("received", name="add", args="()")
    turned = dict(reversed([*told.items(), ("eta", None), ("odd", None)]))
    assert eid(read(told)) == eid(read(turned))


@settings(max_examples=EXAMPLES)
@given(histories())
def test_different_events_have_different_digests(events: list[Wire]) -> None:
    records = [record for one in events if (record := read(one)) is not None]
    texts = {repr(sorted(canonical(record).items())) for record in records}
    assert len({eid(record) for record in records}) == len(texts)


def test_a_digest_is_the_same_for_everybody_and_for_ever() -> None:
    """Digests are stored beside events: another way to compute them would double every event."""
    assert eid(read(event("succeeded", result="5", runtime=0.5, retries=0))) == DIGEST


DIGEST = 6142023272569736027
