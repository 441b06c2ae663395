"""TransactionalSending: the part of an App that sends in the caller's database transaction."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from umbel.outbox.current import open_block
from umbel.wire.message import Outgoing

if TYPE_CHECKING:
    from umbel.app.interfaces import AppBase
    from umbel.outbox.block import Block
else:
    AppBase = object


class TransactionalSending(AppBase):
    def outbox(self, connection: Any) -> "Block":
        """Inside this block tasks are sent if, and only if, the transaction of `connection` commits.

        `with app.outbox(connection):` takes a connection of sqlite3, psycopg, psycopg2 or Django, or a
        connection or session of SQLAlchemy; `async with` also an AsyncConnection of psycopg, or an
        AsyncConnection or AsyncSession of SQLAlchemy. The messages are written into a table; a worker with
        the setting `outbox` publishes them.
        """
        from umbel.outbox.block import Block  # few apps need it

        return Block(self, connection, self.settings.outbox_table)

    def written_in_block(self, batch: Sequence[Outgoing]) -> bool:
        """Whether a block is open here, which has taken them."""
        block = open_block(self)
        if block is None:
            return False
        block.write(batch)
        return True

    async def awritten_in_block(self, batch: Sequence[Outgoing]) -> bool:
        block = open_block(self)
        if block is None:
            return False
        await block.awrite(batch)
        return True
