"""Which tracer a child gets: one that awaits the tasks of its event loop, if it has one."""

from umbel.app.interfaces import RunningApp
from umbel.app.running.tracer import Tracer
from umbel.pools.interface import ChildContext


def make_tracer(app: RunningApp, context: ChildContext) -> Tracer:
    if not context.on_loop:
        return Tracer(app, hostname=context.node, tell=context.tell)
    from umbel.app.running.async_tracer import AsyncTracer  # brings asyncio along, which few children need

    return AsyncTracer(app, hostname=context.node, tell=context.tell)
