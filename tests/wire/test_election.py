"""Elections as commands and events: what goes out comes in, and nonsense is refused, never raised."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.errors import WireError
from umbel.protocol.election.classic import AckReceived, Candidate, ElectReceived, PublishAck, PublishElect
from umbel.protocol.election.events import ClosedReceived, ElectedReceived, Phase, PublishElected
from umbel.protocol.leadership.coordination import ElectionRequest, ElectionState, Policy
from umbel.wire import coordination as wire
from umbel.wire.event import decode_events, encode_event

STAMP: dict[str, Any] = {"hostname": "ada@host", "pid": 7, "clock": 26, "timestamp": 5.0}
REQUEST = ElectionRequest("e", "task", b'{"task":"t","args":[1]}', Policy.AT_LEAST_ONCE, 12.5, 60.0)
# What Celery's monitors set as attributes of a worker and cannot bear.
FORBIDDEN = {"id", "alive", "event", "update", "heartbeats", "heartbeat_expires", "status_string"}

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def sent(event_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The event as another node decodes it."""
    (event,) = decode_events(encode_event({"type": event_type, **STAMP, **fields}))
    return event


@given(names, names, st.sampled_from(Policy), st.floats(0, 1e10), st.floats(0.1, 1e4))
def test_a_request_survives_the_command(
    election_id: str, topic: str, policy: Policy, asked_at: float, expires_s: float
) -> None:
    request = ElectionRequest(election_id, topic, b'{"n":[1,2.5,null]}', policy, asked_at, expires_s)
    arguments = wire.request_arguments(request)
    assert not wire.is_classic(arguments)
    assert wire.request_from(arguments, now=0.0) == request


def test_a_command_of_a_celery_client_is_known_by_what_it_lacks() -> None:
    arguments = {"id": "e", "topic": "task", "action": {"task": "t"}}
    assert wire.is_classic(arguments)
    assert wire.called_from(arguments).action == b'{"task":"t"}'
    assert wire.request_from(arguments, now=9.0).asked_at == 9.0


def test_an_elected_event_carries_its_request() -> None:
    tell = PublishElected(
        Phase.ELECTED, "e", "task", Policy.AT_LEAST_ONCE, "ada@host.7.1", 9, 2, request=REQUEST
    )
    fields = wire.elected_fields(tell)
    assert FORBIDDEN.isdisjoint(fields)
    assert wire.elected_from(sent(wire.ELECTED, fields)) == ElectedReceived(
        "e", "ada@host.7.1", 9, 2, REQUEST
    )


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.FAILED, Phase.EXPIRED])
def test_a_closing_event_says_how_it_ended(phase: Phase) -> None:
    tell = PublishElected(phase, "e", "task", Policy.AT_MOST_ONCE, "", 0, 0, "deadline")
    assert wire.elected_from(sent(wire.ELECTED, wire.elected_fields(tell))) == ClosedReceived("e", phase)


def test_a_request_too_large_for_an_event_is_left_out() -> None:
    large = ElectionRequest("e", "task", b'"' + b"x" * 64 * 1024 + b'"', Policy.AT_MOST_ONCE, 0.0)
    tell = PublishElected(Phase.ELECTED, "e", "task", Policy.AT_MOST_ONCE, "w", 9, 1, request=large)
    event = sent(wire.ELECTED, wire.elected_fields(tell))
    assert len(encode_event(event)) < wire.ELECTED_BYTES_MAX
    heard = wire.elected_from(event)
    assert isinstance(heard, ElectedReceived) and heard.request is None


def test_a_candidacy_survives_the_wire_with_the_clock_it_asks_for() -> None:
    fields = wire.elect_fields(PublishElect("e", "task", b'{"task":"t"}', clock=1), version=2)
    heard = ElectReceived("e", "task", b'{"task":"t"}', "ada@host", 7, 1, 2)
    assert wire.elect_from(sent(wire.ELECT, fields)) == heard


def test_a_captured_candidacy_of_a_celery_worker_is_read() -> None:
    event = {
        "hostname": "w1@vm",
        "utcoffset": 0.0,
        "pid": 331,
        "clock": 26,
        "id": "elec-1",
        "topic": "task",
        "action": {"task": "wapp.add", "args": [40, 2], "kwargs": {}, "options": {}},
        "cver": 1,
        "timestamp": 1794703243.2089493,
        "type": "worker-elect",
    }
    assert wire.elect_from(event).candidate == Candidate(26, "w1@vm.331")
    ack = {"hostname": "w1@vm", "pid": 331, "clock": 27, "id": "elec-1", "type": "worker-elect-ack"}
    assert wire.ack_from(ack) == AckReceived("elec-1", "w1@vm")


def test_our_acks_tell_the_lowest_candidate() -> None:
    fields = wire.ack_fields(PublishAck("e", Candidate(3, "bob@host.2")))
    assert wire.ack_from(sent(wire.ELECT_ACK, fields)).lowest == Candidate(3, "bob@host.2")


FIELDS = ["id", "eid", "topic", "action", "phase", "winner", "term", "policy", "ts", "lowest", "cver"]
READERS: list[Callable[[dict[str, Any]], object]] = [
    lambda fields: wire.request_from(fields, now=0.0),
    wire.called_from,
    wire.elected_from,
    wire.elect_from,
    wire.ack_from,
    wire.is_classic,
]


@given(st.dictionaries(st.sampled_from(FIELDS), anything))
def test_nonsense_is_refused_in_our_own_words(fields: dict[str, Any]) -> None:
    for read in READERS:
        with suppress(WireError):
            read({**STAMP, **fields})


def test_a_handler_that_failed_is_shown_as_failed() -> None:
    assert wire.shown_outcome(ElectionState.DONE, "error: ValueError('x')") == "failed"
    assert wire.shown_outcome(ElectionState.DONE, "ok") == "done"
