"""Which tracer a child of a pool has: one that awaits, where the pool has a loop of its own."""

from typing import TYPE_CHECKING

from umbel.app.running.tracer import Tracer
from umbel.pools.interface import ChildContext

if TYPE_CHECKING:
    from umbel.app.interfaces import RunningApp


def make_tracer(app: "RunningApp", context: ChildContext) -> Tracer:
    if not context.on_loop:
        return Tracer(app, hostname=context.node, tell=context.tell)
    from umbel.app.running.async_tracer import AsyncTracer  # brings asyncio along, which few children need

    return AsyncTracer(app, hostname=context.node, tell=context.tell)
