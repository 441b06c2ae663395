"""A lease whose changes are announced to the cluster, and whose release by another node is heard.

So followers need not wait until a lease that was given back would have ended.
"""

from collections.abc import Callable, Mapping
from typing import Any

from umbel.coordination.lease_keeper import Change, LeaseKeeper
from umbel.protocol.leadership.lease import Acquired, LeaseSettings, Lost, Released
from umbel.worker.context import WorkerContext
from umbel.worker.steps.events import Events
from umbel.worker.steps.gossip import Gossip

LEADER = "worker-leader"
PHASES = {Acquired: "acquired", Lost: "lost", Released: "released"}


def announced_lease(
    context: WorkerContext,
    events: Events,
    gossip: Gossip,
    name: str,
    *,
    settings: LeaseSettings | None = None,
    changed: Callable[[Change], None],
) -> LeaseKeeper:
    """This node's campaign for it; to be run by the caller."""
    owner, freq_s = context.identity.owner, context.settings.heartbeat_interval_s

    def tell(change: Change) -> None:
        changed(change)
        phase = PHASES[type(change)]
        events.tell(LEADER, lease=name, leader=owner, term=change.term, phase=phase, freq=freq_s)

    keeper = LeaseKeeper(context.broker.coordination, name, owner, settings=settings, changed=tell)

    def heard(event: Mapping[str, Any]) -> None:
        if event.get("lease") == name and event.get("phase") == PHASES[Released]:
            keeper.release_heard()

    gossip.listen(LEADER, heard)
    return keeper
