"""ObserverCandidate: this node's part in the three leases whose holders hear everybody's heartbeats.

Eight nodes are candidates for each lease, chosen by their names, so that a large cluster does not
ask the store all the time. The others look at one of the leases every minute or two and stand for it
when it is free, in case every candidate is gone and nobody is left to notice.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count

from umbel.brokers.coordination import CoordinationStore
from umbel.chance import choice, uniform
from umbel.coordination.lease_keeper import Change, LeaseKeeper
from umbel.errors import BrokerError
from umbel.protocol.leadership.lease import Acquired
from umbel.protocol.membership.mode import CANDIDATES, OBSERVER_LEASES, is_among_lowest

log = logging.getLogger("umbel.worker.gossip")

LOOK_S = (60.0, 120.0)
ASK_S = 2.0


class ObserverCandidate:
    """`changed(observes)` is called on the loop when this node gets or loses a lease."""

    def __init__(
        self, store: CoordinationStore, node: str, owner: str, changed: Callable[[bool], None]
    ) -> None:
        self.observes = False
        self._store = store
        self._node = node
        self._owner = owner
        self._changed = changed
        self._keeper: LeaseKeeper | None = None
        self._campaign: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._look_at = 0.0

    async def review(self, group: asyncio.TaskGroup, nodes: Sequence[str]) -> None:
        """Stand for a lease or withdraw, by the nodes that are online now."""
        if self.observes:
            return
        lease = await self._wanted(nodes)
        if self._keeper is not None and self._keeper.name != lease:
            await self.leave()
        if lease and self._keeper is None:
            holder = f"{self._owner}.{next(self._numbers)}"  # each campaign has a new name
            self._keeper = LeaseKeeper(self._store, lease, holder, changed=self._lease_changed)
            self._campaign = group.create_task(self._keeper.run(), name=f"umbel-{lease}")

    async def leave(self) -> None:
        """Withdraw, and release the lease if this node has it."""
        keeper, campaign = self._keeper, self._campaign
        self._keeper = self._campaign = None
        if keeper is None or campaign is None:
            return
        campaign.cancel()
        await asyncio.wait([campaign])
        await keeper.stop()

    async def _wanted(self, nodes: Sequence[str]) -> str:
        """The lease to stand for: one that is free rather than one that another holds."""
        standing = self._keeper.name if self._keeper else ""
        now = asyncio.get_running_loop().time()
        mine = [one for one in OBSERVER_LEASES if is_among_lowest(one, self._node, nodes, CANDIDATES)]
        if not mine and now >= self._look_at:
            self._look_at = now + uniform(*LOOK_S)
            lease = choice(OBSERVER_LEASES)
            return lease if await self._is_free(lease) else ""
        if self._keeper is not None and (not mine or not self._keeper.leader):
            return standing
        for lease in mine:
            if lease != standing and await self._is_free(lease):
                return lease
        return standing if standing in mine else next(iter(mine), "")

    async def _is_free(self, lease: str) -> bool:
        try:
            async with asyncio.timeout(ASK_S):
                return not (await self._store.read_lease(lease)).holder
        except (BrokerError, TimeoutError) as error:
            log.debug(
                "cannot read which nodes watch the others (gossip observers); retrying",
                extra={"why": str(error)},
            )
            return False

    def _lease_changed(self, change: Change) -> None:
        observes = isinstance(change, Acquired)
        if observes != self.observes:
            self.observes = observes
            self._changed(observes)
