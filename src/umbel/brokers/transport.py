"""What a transport can do for Umbel, and why not where it cannot; shown to users."""

from collections.abc import Mapping

import msgspec

_MISSING = {"fanout": "no fan-out"}


class Capabilities(msgspec.Struct, frozen=True):
    """What this transport supports; where something is missing, `reasons` says why."""

    transport: str
    atomic_settle: bool
    stores_results: bool  # results may ride in settle(), next to their acks
    fanout: bool
    leases: bool
    delayed: bool
    event_log: bool
    priorities: str  # "0 first" or "9 first"
    # How events of workers that keep no log of their own (Celery's) come into the event log: "log":
    # the broker puts them there; "fan-out": somebody has to listen and write them; "none": there are none.
    events_of_others: str = "none"
    unique: bool = False  # it can hold the keys of unique tasks
    limits: bool = False  # it can keep limits for the whole cluster
    idle_wait_s: float = 1.0  # an idle worker claims so often, whatever the broker tells of changes
    events: bool = True  # nodes and monitors hear one another's events
    revokes: bool = True  # it keeps a record of revoked tasks, which every claim reads
    depths: bool = True  # it tells how many messages wait
    pauses: bool = True  # queues can be paused
    failures: bool = True  # it keeps the messages of failed tasks
    signatures: bool = True  # it knows which signatures were used
    marks: bool = True  # it knows which nodes are alive
    reasons: Mapping[str, str] = {}

    def why_not(self, ability: str) -> str:
        """Why something is off that needs the ability, in the transport's own words if it has any."""
        missing = _MISSING.get(ability, f"no {ability.replace('_', ' ')}")
        return self.reasons.get(ability) or f"transport {self.transport} has {missing}"

    def why_no_events(self) -> str:
        """Why nodes do not hear one another's events; empty where they do."""
        missing = [ability for ability in ("fanout", "events") if not getattr(self, ability)]
        return self.why_not(missing[0]) if missing else ""
