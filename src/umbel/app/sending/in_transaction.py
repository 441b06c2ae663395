"""TransactionalSending: the part of an App that sends in the caller's database transaction."""

from typing import TYPE_CHECKING, Any

from umbel.app.configuration.settings import Settings

if TYPE_CHECKING:
    from umbel.outbox.block import Block


class TransactionalSending:
    settings: Settings

    def outbox(self, connection: Any) -> "Block":
        """Inside this block tasks are sent if, and only if, the transaction of `connection` commits.

        `with app.outbox(connection):` takes a connection of sqlite3, psycopg, psycopg2 or Django, or a
        connection or session of SQLAlchemy; `async with` also an AsyncConnection of psycopg, or an
        AsyncConnection or AsyncSession of SQLAlchemy. The messages are written into a table; a worker with
        the setting `outbox` publishes them.
        """
        from umbel.outbox.block import Block  # few apps need it

        return Block(self, connection, self.settings.outbox_table)
