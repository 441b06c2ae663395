"""What every pool does alike when it is resized and when it stops."""

import asyncio
from collections.abc import Callable

from umbel.errors import PoolError


def resized(size: int, by: int) -> int:
    if size + by < 1:
        raise PoolError(f"a pool of {size} cannot shrink by {-by}: at least 1 must remain")
    return size + by


async def until_idle(is_busy: Callable[[], object], changed: asyncio.Event) -> None:
    """`changed` is set whenever less may be left to do. The caller sets the limit."""
    while is_busy():
        changed.clear()
        await changed.wait()
