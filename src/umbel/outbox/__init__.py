"""Outbox: tasks that are sent in the caller's database transaction (`docs/outbox.md`).

Pure: `table.py` (the SQL statements, and the contents of a row). Shells: `block.py` writes rows in the
caller's transaction; `relay.py` publishes the committed rows; `database.py` has the address of the database
and the relay's connection.
"""

from contextvars import ContextVar
from typing import TYPE_CHECKING

from umbel.errors import OutboxError

if TYPE_CHECKING:
    from umbel.outbox.block import Block

# ---- the open block --------------------------------------------------------------------------------
#
# The outbox block that is open in this context. Every send looks it up: one read of a context variable.

OPEN: "ContextVar[Block | None]" = ContextVar("umbel_outbox", default=None)


def open_block(app: object) -> "Block | None":
    """Return the block of this app that is open in this context; None without one."""
    block = OPEN.get()
    while block is not None and not (block.is_open and block.app is app):
        block = block.outer
    return block


def refuse_unique(app: object, task: str) -> None:
    """Raise OutboxError in an open block: a rollback could not release the key of a unique task."""
    if open_block(app) is not None:
        raise OutboxError(
            f"task {task!r} is unique and cannot be sent in an outbox block: its key is taken in the broker, "
            "outside the transaction. Send it after the commit"
        )
