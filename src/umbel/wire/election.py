"""Elections on the wire: the control command `election`, and the events that tell of one.

The command has Celery's three arguments, and in our own form `cver`, `policy`, `ts` and `expires`
besides, which Celery's workers pass over. Events of workers never use the names that Celery's
monitors cannot bear (`id` and `alive` among them), except where Celery itself does.
"""

from collections.abc import Mapping
from typing import Any

from umbel.errors import BadMessage
from umbel.protocol.clock import CLOCK_MAX
from umbel.protocol.compat.election_v1_events import (
    AckHeard,
    Called,
    Candidate,
    ElectHeard,
    PublishAck,
    PublishElect,
)
from umbel.protocol.election.events import ERROR_PREFIX, ClosedHeard, ElectedHeard, Phase, Tell
from umbel.protocol.leadership.coordination import EXPIRES_S, ElectionRequest, ElectionState, Policy
from umbel.wire.show import brief
from umbel.wire.values import decode_json, encode_json

VERSION = 2
CLASSIC_VERSION = 1
ELECTED_BYTES_MAX = 64 * 1024
NAME_MAX = 512
NUMBER_MAX = 1e12  # seconds
ELECTED, ELECT, ELECT_ACK = "worker-elected", "worker-elect", "worker-elect-ack"


# ---- the command -----------------------------------------------------------------------------------


def is_classic(arguments: Mapping[str, Any]) -> bool:
    """Whether the command comes in the old form, from a Celery client."""
    version = arguments.get("cver", CLASSIC_VERSION)
    return type(version) is not int or version < VERSION


def request_arguments(request: ElectionRequest) -> dict[str, Any]:
    return {
        "id": request.election_id,
        "topic": request.topic,
        "action": decode_json(request.action),
        "cver": VERSION,
        "policy": str(request.policy),
        "ts": request.asked_at,
        "expires": request.expires_s,
    }


def request_from(arguments: Mapping[str, Any], *, now: float) -> ElectionRequest:
    """The request of a command in our form; without `ts` it was asked when it was first seen."""
    policy = arguments.get("policy", str(Policy.AT_MOST_ONCE))
    if policy not in list(Policy):
        raise BadMessage(f"election policy {brief(policy)} is unknown; it must be one of {', '.join(Policy)}")
    return ElectionRequest(
        election_id=_text(arguments, "id"),
        topic=_text(arguments, "topic"),
        action=encode_json(arguments.get("action"), root="action"),
        policy=Policy(policy),
        asked_at=_number(arguments, "ts", now),
        expires_s=_number(arguments, "expires", EXPIRES_S),
    )


def called_from(arguments: Mapping[str, Any]) -> Called:
    action = encode_json(arguments.get("action"), root="action")
    return Called(_text(arguments, "id"), _text(arguments, "topic"), action)


# ---- worker-elected --------------------------------------------------------------------------------


def elected_fields(tell: Tell) -> dict[str, Any]:
    """The event's fields; a request that would make it too large is left out."""
    fields: dict[str, Any] = {
        "eid": tell.election_id,
        "topic": tell.topic,
        "phase": str(tell.phase),
        "winner": tell.winner,
        "term": tell.term,
        "attempt": tell.attempt,
        "policy": str(tell.policy),
        "outcome": tell.outcome,
        "cver": VERSION,
    }
    if tell.request is not None and len(tell.request.action) < ELECTED_BYTES_MAX - 4096:
        fields["request"] = request_arguments(tell.request)
    return fields


def elected_from(event: Mapping[str, Any]) -> ElectedHeard | ClosedHeard:
    election_id, phase = _text(event, "eid"), event.get("phase")
    if phase not in list(Phase):
        raise BadMessage(f"election phase {brief(phase)} is unknown; it must be one of {', '.join(Phase)}")
    if phase != Phase.ELECTED:
        return ClosedHeard(election_id, Phase(phase))
    request = event.get("request")
    if request is not None and not isinstance(request, Mapping):
        raise BadMessage(f"event {ELECTED} carries the request {brief(request)}; its sender must send a map")
    return ElectedHeard(
        election_id=election_id,
        winner=_text(event, "winner"),
        term=_whole(event, "term"),
        attempt=_whole(event, "attempt"),
        request=None if request is None else request_from(request, now=_number(event, "timestamp", 0.0)),
    )


# ---- worker-elect and worker-elect-ack -------------------------------------------------------------


def elect_fields(elect: PublishElect, *, version: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": elect.election_id,
        "topic": elect.topic,
        "action": decode_json(elect.action),
        "cver": version,
    }
    if elect.clock is not None:
        fields["clock"] = elect.clock
    return fields


def elect_from(event: Mapping[str, Any]) -> ElectHeard:
    version = event.get("cver", CLASSIC_VERSION)
    return ElectHeard(
        election_id=_text(event, "id"),
        topic=_text(event, "topic"),
        action=encode_json(event.get("action"), root="action"),
        node=_text(event, "hostname"),
        pid=_whole(event, "pid"),
        clock=_whole(event, "clock"),
        version=version if type(version) is int else CLASSIC_VERSION,
    )


def ack_fields(ack: PublishAck) -> dict[str, Any]:
    lowest = ack.lowest
    known = {} if lowest is None else {"lowest": [lowest.clock, lowest.name]}
    return {"id": ack.election_id, **known}


def ack_from(event: Mapping[str, Any]) -> AckHeard:
    lowest = None
    match event.get("lowest"):
        case [int(clock), str(name)] if 0 <= clock <= CLOCK_MAX and len(name) <= NAME_MAX:
            lowest = Candidate(clock, name)
    return AckHeard(_text(event, "id"), _text(event, "hostname"), lowest)


# ---- what a person sees ----------------------------------------------------------------------------


def shown_outcome(state: ElectionState, outcome: str) -> str:
    """One word for how it ended: a handler that failed is stored as done, with its error."""
    failed = state is ElectionState.DONE and outcome.startswith(ERROR_PREFIX)
    return "failed" if failed else str(state)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= NAME_MAX:
        raise BadMessage(
            f"{name} of an election is {brief(value)}; it must be text of 1 to {NAME_MAX} characters"
        )
    return value


def _whole(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= CLOCK_MAX:
        raise BadMessage(f"{name} of an election is {brief(value)}; it must be a whole number")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= NUMBER_MAX:
        raise BadMessage(f"{name} of an election is {brief(value)}; it must be a number")
    return float(value)
