"""Gossip: worker events of the wire as what the membership machine understands (wire 4).

Whatever a peer sends, nothing is raised: a field of the wrong type is taken for missing, and an
event that does not say who sent it is not about a node.
"""

from collections.abc import Mapping
from typing import Any

from umbel.protocol.clock import CLOCK_MAX
from umbel.protocol.membership.events import (
    Accused,
    Condemned,
    Event,
    Heard,
    Introduced,
    Kind,
    Member,
    TellView,
    Viewed,
)
from umbel.protocol.membership.views import VIEW_MAX

NODE_BYTES_MAX = 240  # RabbitMQ names its mailbox "<node>.celery.pidbox", in at most 255
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
    """What an event says: that its sender lives, and perhaps that another does not."""
    node = _node(event.get("hostname"))
    if node is None or not str(event.get("type", "")).startswith("worker-"):
        return []
    ident = event.get("sw_ident")
    told: list[Event] = [
        Heard(
            node,
            _whole(event.get("inc")),
            _whole(event.get("pid")),
            _KINDS.get(event["type"], Kind.OTHER),
            clock=_whole(event.get("clock")),
            sent_at=_number(event.get("timestamp")) or 0.0,
            freq_s=_number(event.get("freq")),
            software=_SOFTWARE.get(ident, ident[:50]) if isinstance(ident, str) else "",
            observed=event.get("gossip") == OBSERVED,
        )
    ]
    subject = _node(event.get("subject"))
    run = (_whole(event.get("subject_inc")), _whole(event.get("subject_pid")))
    if subject is not None and event["type"] == SUSPECT:
        told.append(Accused(subject, *run, by=node))
    if subject is not None and event["type"] == LOST:
        reason = str(event.get("reason", ""))[:REASON_CHARACTERS_MAX]
        told.append(Condemned(subject, *run, by=node, reason=reason))
    if event["type"] == VIEW and (view := _read_view(event, node)) is not None:
        told.append(view)
    return told


def subject_fields(member: Member) -> dict[str, Any]:
    """Whom a `worker-suspect` or `worker-lost` is about; its `hostname` is who says so."""
    return {"subject": member.node, "subject_inc": member.inc, "subject_pid": member.pid}


def view_fields(view: TellView) -> dict[str, Any]:
    """Whom a `worker-view` names: as `hello` does, but for the part of all names that it is about."""
    runs = [[run.node, run.inc, run.pid, run.clock, run.freq_s, run.software] for run in view.runs]
    return {"after": view.after, "until": view.until, "runs": runs}


def introduction(member: Member) -> list[Any]:
    """A member as an answer to `hello` names it."""
    return [member.node, member.inc, member.pid, member.clock, member.freq_s, member.software]


def describe(member: Member, now: float) -> dict[str, Any]:
    """A member as the command `members` shows it; times as ages, because clocks differ."""
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
    if not isinstance(named, list) or len(named) < 6:
        return None
    node = _node(named[0])
    if node is None:
        return None
    software = named[5][:50] if isinstance(named[5], str) else ""
    return Introduced(node, _whole(named[1]), _whole(named[2]), _whole(named[3]), _number(named[4]), software)


def _read_view(event: Mapping[str, Any], by: str) -> Viewed | None:
    """None where a name in it cannot be read: what is left would seem to leave that node out."""
    after, until, runs = event.get("after"), event.get("until"), event.get("runs")
    if not (isinstance(after, str) and isinstance(until, str) and isinstance(runs, list)):
        return None
    named = [read_introduction(run) for run in runs[: VIEW_MAX + 1]]
    if len(named) > VIEW_MAX or None in named:
        return None
    return Viewed(by, after, until, tuple(run for run in named if run is not None))


def _node(name: object) -> str | None:
    return name if isinstance(name, str) and 0 < len(name.encode()) <= NODE_BYTES_MAX else None


def _whole(value: object) -> int:
    return value if type(value) is int and 0 < value <= CLOCK_MAX else 0


def _number(value: object) -> float | None:
    # bool is an int, and NaN and infinity are floats: none of them is a number here.
    if type(value) is float or type(value) is int:
        return float(value) if abs(value) <= CLOCK_MAX else None
    return None
