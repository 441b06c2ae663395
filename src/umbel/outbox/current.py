"""The outbox block that is open here. Every send asks, so the answer is one lookup of a context variable."""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol

from umbel.errors import OutboxError
from umbel.wire.message import Outgoing


class OpenBlock(Protocol):
    """`block.Block`, as senders know it."""

    app: object
    outer: "OpenBlock | None"  # that of another app, around it
    is_open: bool

    def write(self, batch: Sequence[Outgoing]) -> None:
        """Insert the messages in the caller's transaction."""

    async def awrite(self, batch: Sequence[Outgoing]) -> None:
        """Insert the messages in the caller's transaction, without blocking the loop."""


OPEN: ContextVar[OpenBlock | None] = ContextVar("umbel_outbox", default=None)


def open_block(app: object) -> OpenBlock | None:
    """The block of this app that is open in this context; None without one."""
    block = OPEN.get()
    while block is not None and not (block.is_open and block.app is app):
        block = block.outer
    return block


def refuse_unique(app: object, task: str) -> None:
    """Raise OutboxError in an open block: a unique task's key would stay held if the transaction is rolled
    back.
    """
    if open_block(app) is not None:
        raise OutboxError(
            f"task {task!r} is unique and cannot be sent in an outbox block: its key is taken in the broker, "
            "outside the transaction. Send it after the commit"
        )
