"""What this node and the others know of one another (`control.state.ClusterSection`)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import time
from typing import Any

from umbel.clock import cluster_now
from umbel.control.panel import NO_ANSWER
from umbel.errors import BrokerError
from umbel.events.stamp import SOFTWARE
from umbel.protocol.pidbox import Known
from umbel.wire.gossip import describe
from umbel.worker.leases.listing import look_at_leases
from umbel.worker.remote.parts import WorkerNode

SETTLED_BEATS = 4


class WorkerCluster(WorkerNode):
    async def hello(self, said: Mapping[str, Any]) -> Any:
        asker = str(said.get("from_node"))
        if asker == self.node:
            return None  # as Celery's nodes do: who has heard itself knows that its mailbox works
        if not self._parts.gossip.should_answer(asker):
            return NO_ANSWER
        return await self._parts.mingle.answer(said)

    def members(self) -> Sequence[Mapping[str, Any]]:
        return [describe(one, time()) for one in self._parts.gossip.members()]

    def known(self) -> Sequence[Known]:
        """The members as a caller of remote control wants them; none while this node is too new.

        A node that has just started, or has no gossip, has not heard from everyone, and callers would not
        wait for those that it leaves out.
        """
        now = cluster_now()
        if not self._parts.gossip.is_on:
            return ()
        if self.uptime_s < SETTLED_BEATS * self._context.settings.heartbeat_interval_s:
            return ()
        return [
            Known(one.node, one.state.value, max(0.0, now - one.last_heard), one.software == SOFTWARE)
            for one in self._parts.gossip.members()
        ]

    def elect(self, request: Mapping[str, Any]) -> str:
        return self._parts.elect(request)

    async def leases(self, names: Sequence[str]) -> list[dict[str, Any]]:
        outbox, owner = self._context.settings.outbox, self._context.identity.owner
        return await look_at_leases(
            self._context.broker, owner, names, also=outbox.leases if outbox is not None else ()
        )

    def enable_task_events(self) -> bool:
        return self._parts.events.enable_task_events()

    def disable_task_events(self) -> bool:
        return self._parts.events.disable_task_events()

    async def look_for_recorders(self) -> None:
        with suppress(BrokerError):  # the step looks again by itself
            await self._parts.events.look_for_recorders()

    def beat(self) -> None:
        self._parts.heart.beat()
