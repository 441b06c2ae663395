"""The outbox block that is open here: every send asks, so the answer is one look at a context variable."""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol

from umbel.errors import OutboxError
from umbel.wire.message import Outgoing


class OpenBlock(Protocol):
    """`block.Block`, to those who send."""

    app: object
    outer: "OpenBlock | None"  # that of another app, around it
    is_open: bool

    def write(self, batch: Sequence[Outgoing]) -> None: ...
    async def awrite(self, batch: Sequence[Outgoing]) -> None: ...


OPEN: ContextVar[OpenBlock | None] = ContextVar("umbel_outbox", default=None)


def open_block(app: object) -> OpenBlock | None:
    """The block of this app that is open in this context."""
    block = OPEN.get()
    while block is not None and not (block.is_open and block.app is app):
        block = block.outer
    return block


def refuse_unique(app: object, task: str) -> None:
    """Its key would be taken at once, and stay taken if the transaction is rolled back."""
    if open_block(app) is not None:
        raise OutboxError(
            f"task {task!r} is unique and cannot be sent in an outbox block: its key is taken in the broker, "
            "outside the transaction. Send it after the commit"
        )
