"""RevokeRecord: what this worker has read of the broker's record of revokes, and learned from it."""

from umbel.brokers.interface import Claim, Messages
from umbel.clock import cluster_now
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.wire.revoke import Revoke
from umbel.worker.context import WorkerContext


class RevokeRecord:
    """`cursor`: how far it was read."""

    def __init__(self, context: WorkerContext, revoked: RevokedTasks) -> None:
        self.cursor = 0
        self._revoked = revoked
        self._broker: Messages = context.broker
        self._owner, self._queues = context.identity.owner, context.settings.queues

    async def read(self) -> None:
        """Read all of it, and take nothing."""
        read = -1
        while read != self.cursor:
            read = self.cursor
            claim = await self._broker.claim(self._owner, self._queues, 0, revoked_after=read)
            self.learn(claim, after=read)

    def read_again(self) -> None:
        """Read from the start: the record was replaced. Known revokes stay in force here."""
        self.cursor = 0

    def learn(self, claim: Claim, *, after: int) -> None:
        for revoke in claim.revokes:
            if revoke.takes_back:
                self.take_back(revoke)
            elif revoke.task_id:
                self._revoked.add(revoke.task_id, revoke.expires_at, revoke.recorded_at)
            elif revoke.header:
                self._revoked.add_header(revoke.header, revoke.expires_at)
        if self.cursor == after:  # else the record was replaced meanwhile
            self.cursor = claim.revoked_cursor

    def take_back(self, revoke: Revoke) -> None:
        """Forget a revoke, by the record or by a command."""
        if revoke.header:
            self._revoked.take_back_header(revoke.header)
        else:
            self._revoked.take_back(revoke.task_id, cluster_now())
