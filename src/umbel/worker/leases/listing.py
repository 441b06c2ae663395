"""The leases of a cluster as its store has them, as a worker reports them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from umbel.brokers.interface import ClusterRecord
from umbel.protocol.membership.mode import OBSERVER_LEASES
from umbel.worker.user_code.foreign_scheduler import FOREIGN_LEASE

OF_THE_CLUSTER = ("scheduler", FOREIGN_LEASE, "recorder", "coord-sweeper", *OBSERVER_LEASES)
READ_S = 5.0


async def look_at_leases(
    broker: ClusterRecord, owner: str, names: Sequence[str], *, also: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """One row for each lease that was named, or for each of the cluster's own (and `also`) that is held.

    A lease that an app holds is known by its name only: the store keeps no list of them.
    """
    if not broker.capabilities.leases:
        return []
    store = broker.coordination
    rows = []
    async with asyncio.timeout(READ_S):
        for name in names or (*OF_THE_CLUSTER, *also):
            found = await store.read_lease(name)
            if found.holder or names:
                is_mine = found.holder == owner or found.holder.startswith(f"{owner}.")
                left_s = round(max(0.0, found.left_s), 1)
                rows.append(
                    {
                        "name": name,
                        "holder": found.holder,
                        "term": found.term,
                        "left_s": left_s,
                        "mine": is_mine,
                    }
                )
    return rows
