"""Block: `with app.outbox(connection):`, inside which tasks are written instead of sent.

A block belongs to the context it was opened in (contextvars): to that thread, or that asyncio task and those
started inside it, and to one app. Other threads and other apps send as ever. A block that has ended is no
block any more, also for who inherited it.
"""

from collections.abc import Sequence
from contextlib import suppress
from contextvars import Token
from typing import Any, Self

from umbel.errors import OutboxError
from umbel.outbox.connections import target_of
from umbel.outbox.current import OPEN, OpenBlock, open_block
from umbel.outbox.rows import encode_rows
from umbel.wire.message import Outgoing


class Block:
    def __init__(self, app: object, connection: Any, table: str) -> None:
        self.app = app
        self.outer: OpenBlock | None = None
        self.is_open = False
        self._target = target_of(connection, table)
        self._token: Token[OpenBlock | None] | None = None

    def write(self, batch: Sequence[Outgoing]) -> None:
        if self._target.is_async:
            raise OutboxError(
                "the connection of this outbox block is asynchronous: use await task.adelay(...), "
                "aapply_async, asend_task or asend_many in it"
            )
        if batch:
            self._target.write(encode_rows(batch))

    async def awrite(self, batch: Sequence[Outgoing]) -> None:
        if batch:
            await self._target.awrite(encode_rows(batch))

    def __enter__(self) -> Self:
        if self._target.is_async:
            raise OutboxError("this connection is asynchronous: write `async with app.outbox(connection):`")
        self._begin()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._end()

    def _begin(self) -> None:
        if self.is_open or open_block(self.app) is not None:
            raise OutboxError("an outbox block of this app is already open here: send tasks in that one")
        self._target.check()
        self.outer, self.is_open = OPEN.get(), True
        self._token = OPEN.set(self)

    def _end(self) -> None:
        self.is_open = False
        token, self._token = self._token, None
        if token is not None:
            with suppress(ValueError):  # left in another context, as generators may: it is no block any more
                OPEN.reset(token)
