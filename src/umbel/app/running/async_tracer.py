"""AsyncTracer: runs calls of `async def` tasks on the caller's event loop.

Pools that run an event loop use it in addition to the plain tracer. What would block that loop runs in a
thread: storing the state STARTED, counting the parts of a chord, errbacks. Receivers of signals run on the
loop, as the task does.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from umbel.app.request import Request, RequestScope, parse_arguments
from umbel.app.running.awaiting import cancelled_from_within
from umbel.app.running.tracer import Tracer
from umbel.errors import SoftTimeLimitExceeded, TaskCancelled, WorkerStopping
from umbel.pools.guard import Raised, await_guarded
from umbel.pools.interface import Job, Outcome
from umbel.wire.call import TaskCall

if TYPE_CHECKING:
    from umbel.app.task import Task


_MEANINGS = (WorkerStopping, SoftTimeLimitExceeded, TaskCancelled)  # subclasses before their bases


class AsyncTracer(Tracer):
    """A tracer whose `run` awaits the task on the running event loop."""

    def is_async(self, task: str) -> bool:
        """Whether the named task is an `async def` one, which `run` takes."""
        found = self._app.find_task(task)
        return found is not None and found.is_async

    async def run(self, job: Job) -> Outcome:
        """Run one job on this loop and return how it ended."""
        opened = self._open(job)
        if isinstance(opened, Outcome):
            return opened
        _, task, call, request = opened
        with RequestScope(request):
            if self._app.signals.task_prerun.receivers:
                self._tell_prerun(task, call, request)
            if task.options.track_started:
                await asyncio.to_thread(self._tell_started, request)
            happened = await await_guarded(_await, task, call, request)
            errbacks = call.embed.errbacks if isinstance(happened, Raised) else None
            if errbacks or call.embed.chord is not None or call.embed.chain:
                return await asyncio.to_thread(self._ended, opened, happened)
            return self._ended(opened, happened)


async def _await(task: "Task[Any, Any]", call: TaskCall, request: Request) -> Any:
    if task.options.types is not None:
        parse_arguments(task.options.types, call, request)
    try:
        if task.hooks is not None:
            task.hooks.before(request)
        return await task.entry(*call.args, **call.kwargs)
    except asyncio.CancelledError as error:
        # The pool's exceptions are cancellations as well, so that groups and timeouts in the task
        # clean up. From here on they are plain exceptions of their meaning.
        for meaning in _MEANINGS:
            if isinstance(error, meaning):
                raise meaning(*error.args).with_traceback(error.__traceback__) from None
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise  # the pool ends it
        raise cancelled_from_within() from error
