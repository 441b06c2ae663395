"""Elections and gossip on the wire: the command `election`, and the worker events of both."""

from collections.abc import Mapping
from typing import Any

from umbel.errors import BadMessage
from umbel.protocol.clock import CLOCK_MAX
from umbel.protocol.election.classic import (
    CLASSIC_VERSION,
    AckReceived,
    Candidate,
    ClassicRequest,
    ElectReceived,
    PublishAck,
    PublishElect,
)
from umbel.protocol.election.events import (
    ERROR_PREFIX,
    ClosedReceived,
    ElectedReceived,
    Phase,
    PublishElected,
)
from umbel.protocol.leadership.coordination import EXPIRES_S, ElectionRequest, ElectionState, Policy
from umbel.protocol.membership.members import (
    Accused,
    BroadcastView,
    Condemned,
    Event,
    Introduced,
    Kind,
    Member,
    NodeEvent,
    Viewed,
)
from umbel.protocol.membership.observers import VIEW_MAX
from umbel.wire.show import brief
from umbel.wire.values import decode_json, encode_json

# ---- elections on the wire -------------------------------------------------------------------------
#
# The command has Celery's three arguments, and in Umbel's form also `cver`, `policy`, `ts` and `expires`,
# which Celery's workers ignore. Worker events never use field names that break Celery's monitors (such as
# `id` and `alive`), except where Celery does so itself.

VERSION = 2
ELECTED_BYTES_MAX = 64 * 1024
NAME_MAX = 512
NUMBER_MAX = 1e12  # seconds
ELECTED, ELECT, ELECT_ACK = "worker-elected", "worker-elect", "worker-elect-ack"


# ---- the command -----------------------------------------------------------------------------------


def is_classic(arguments: Mapping[str, Any]) -> bool:
    """Return whether the command has the classic form of a Celery client."""
    version = arguments.get("cver", CLASSIC_VERSION)
    return type(version) is not int or version < VERSION


def request_arguments(request: ElectionRequest) -> dict[str, Any]:
    """Return the arguments of the command in Umbel's form."""
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
    """Read a command in Umbel's form; if `ts` is missing, its time is `now`. Raises WireError."""
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


def called_from(arguments: Mapping[str, Any]) -> ClassicRequest:
    """Read a command in the classic form. Raises WireError."""
    action = encode_json(arguments.get("action"), root="action")
    return ClassicRequest(_text(arguments, "id"), _text(arguments, "topic"), action)


# ---- worker-elected --------------------------------------------------------------------------------


def elected_fields(tell: PublishElected) -> dict[str, Any]:
    """Return the fields of `worker-elected`; a request that would make it too large is omitted."""
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


def elected_from(event: Mapping[str, Any]) -> ElectedReceived | ClosedReceived:
    """Read `worker-elected`. Raises WireError."""
    election_id, phase = _text(event, "eid"), event.get("phase")
    if phase not in list(Phase):
        raise BadMessage(f"election phase {brief(phase)} is unknown; it must be one of {', '.join(Phase)}")
    if phase != Phase.ELECTED:
        return ClosedReceived(election_id, Phase(phase))
    request = event.get("request")
    if request is not None and not isinstance(request, Mapping):
        raise BadMessage(f"event {ELECTED} carries the request {brief(request)}; its sender must send a map")
    return ElectedReceived(
        election_id=election_id,
        winner=_text(event, "winner"),
        term=_whole(event, "term"),
        attempt=_whole(event, "attempt"),
        request=None if request is None else request_from(request, now=_number(event, "timestamp", 0.0)),
    )


# ---- worker-elect and worker-elect-ack -------------------------------------------------------------


def elect_fields(elect: PublishElect, *, version: int) -> dict[str, Any]:
    """Return the fields of `worker-elect`."""
    fields: dict[str, Any] = {
        "id": elect.election_id,
        "topic": elect.topic,
        "action": decode_json(elect.action),
        "cver": version,
    }
    if elect.clock is not None:
        fields["clock"] = elect.clock
    return fields


def elect_from(event: Mapping[str, Any]) -> ElectReceived:
    """Read `worker-elect`. Raises WireError."""
    version = event.get("cver", CLASSIC_VERSION)
    return ElectReceived(
        election_id=_text(event, "id"),
        topic=_text(event, "topic"),
        action=encode_json(event.get("action"), root="action"),
        node=_text(event, "hostname"),
        pid=_whole(event, "pid"),
        clock=_whole(event, "clock"),
        version=version if type(version) is int else CLASSIC_VERSION,
    )


def ack_fields(ack: PublishAck) -> dict[str, Any]:
    """Return the fields of `worker-elect-ack`."""
    lowest = ack.lowest
    known = {} if lowest is None else {"lowest": [lowest.clock, lowest.name]}
    return {"id": ack.election_id, **known}


def ack_from(event: Mapping[str, Any]) -> AckReceived:
    """Read `worker-elect-ack`. Raises WireError."""
    lowest = None
    match event.get("lowest"):
        case [int(clock), str(name)] if 0 <= clock <= CLOCK_MAX and len(name) <= NAME_MAX:
            lowest = Candidate(clock, name)
    return AckReceived(_text(event, "id"), _text(event, "hostname"), lowest)


# ---- for people ------------------------------------------------------------------------------------


def shown_outcome(state: ElectionState, outcome: str) -> str:
    """Return one word for the end of an election: a failed handler is stored as done, with its error."""
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


# ---- gossip ----------------------------------------------------------------------------------------
#
# Whatever a peer sends, reading never raises: a field of the wrong type counts as missing, and an event
# without a valid sender is ignored.

NODE_BYTES_MAX = 240  # the mailbox in RabbitMQ is "<node>.celery.pidbox", with at most 255 bytes
REASON_CHARACTERS_MAX = 200
SUSPECT, LOST, VIEW = "worker-suspect", "worker-lost", "worker-view"
OBSERVED = "observed"
_KINDS = {
    "worker-online": Kind.ONLINE,
    "worker-heartbeat": Kind.BEAT,
    "worker-offline": Kind.OFFLINE,
}
_SOFTWARE = {"py-celery": "celery"}


def read_worker_event(event: Mapping[str, Any]) -> list[Event]:
    """Return what an event proves: that its sender is alive, and perhaps that another node is not."""
    node = _node(event.get("hostname"))
    if node is None or not str(event.get("type", "")).startswith("worker-"):
        return []
    ident = event.get("sw_ident")
    events: list[Event] = [
        NodeEvent(
            node,
            _whole_gossip(event.get("inc")),
            _whole_gossip(event.get("pid")),
            _KINDS.get(event["type"], Kind.OTHER),
            clock=_whole_gossip(event.get("clock")),
            sent_at=_number_gossip(event.get("timestamp")) or 0.0,
            freq_s=_number_gossip(event.get("freq")),
            software=_SOFTWARE.get(ident, ident[:50]) if isinstance(ident, str) else "",
            observed=event.get("gossip") == OBSERVED,
        )
    ]
    subject = _node(event.get("subject"))
    run = (_whole_gossip(event.get("subject_inc")), _whole_gossip(event.get("subject_pid")))
    if subject is not None and event["type"] == SUSPECT:
        events.append(Accused(subject, *run, by=node))
    if subject is not None and event["type"] == LOST:
        reason = str(event.get("reason", ""))[:REASON_CHARACTERS_MAX]
        events.append(Condemned(subject, *run, by=node, reason=reason))
    if event["type"] == VIEW and (view := _read_view(event, node)) is not None:
        events.append(view)
    return events


def subject_fields(member: Member) -> dict[str, Any]:
    """Return the fields that name the subject of a `worker-suspect` or `worker-lost`; `hostname` is the
    sender.
    """
    return {"subject": member.node, "subject_inc": member.inc, "subject_pid": member.pid}


def view_fields(view: BroadcastView) -> dict[str, Any]:
    """Return the fields of a `worker-view`: nodes as in `hello`, and the range of names that it covers."""
    runs = [[run.node, run.inc, run.pid, run.clock, run.freq_s, run.software] for run in view.runs]
    return {"after": view.after, "until": view.until, "runs": runs}


def introduction(member: Member) -> list[Any]:
    """Return a member in the form of a reply to `hello`."""
    return [member.node, member.inc, member.pid, member.clock, member.freq_s, member.software]


def describe(member: Member, now: float) -> dict[str, Any]:
    """Return a member in the form of the command `members`, with ages instead of times, because clocks
    differ.
    """
    return {
        "node": member.node,
        "state": member.state.value,
        "software": member.software or "unknown",
        "pid": member.pid,
        "incarnation": member.inc,
        "clock": member.clock,
        "freq_s": member.freq_s,
        "silent_s": round(max(0.0, now - member.last_heard), 1),
        "since_s": round(max(0.0, now - member.since), 1),
        "reason": member.reason,
    }


def read_introduction(named: object) -> Introduced | None:
    """Read a member that a peer names; None if it cannot be read."""
    if not isinstance(named, list) or len(named) < 6:
        return None
    node = _node(named[0])
    if node is None:
        return None
    software = named[5][:50] if isinstance(named[5], str) else ""
    return Introduced(
        node,
        _whole_gossip(named[1]),
        _whole_gossip(named[2]),
        _whole_gossip(named[3]),
        _number_gossip(named[4]),
        software,
    )


def _read_view(event: Mapping[str, Any], by: str) -> Viewed | None:
    """Read a view; return None if a name in it is unreadable, because that node would seem to be missing."""
    after, until, runs = event.get("after"), event.get("until"), event.get("runs")
    if not (isinstance(after, str) and isinstance(until, str) and isinstance(runs, list)):
        return None
    named = [read_introduction(run) for run in runs[: VIEW_MAX + 1]]
    if len(named) > VIEW_MAX or None in named:
        return None
    return Viewed(by, after, until, tuple(run for run in named if run is not None))


def _node(name: object) -> str | None:
    return name if isinstance(name, str) and 0 < len(name.encode()) <= NODE_BYTES_MAX else None


def _whole_gossip(value: object) -> int:
    return value if type(value) is int and 0 < value <= CLOCK_MAX else 0


def _number_gossip(value: object) -> float | None:
    # bool is an int, and NaN and infinity are floats: none of them counts as a number here.
    if type(value) is float or type(value) is int:
        return float(value) if abs(value) <= CLOCK_MAX else None
    return None
