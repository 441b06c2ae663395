"""AsyncTracer: runs calls of `async def` tasks on the caller's event loop.

Pools that run an event loop use it in addition to the plain tracer. Whatever would block that loop runs in a
thread: storing the state STARTED, counting the parts of a chord, errbacks. Receivers of signals run on the
loop, as the task does.
"""

import asyncio
from typing import Any

from umbel.app.request import RequestScope
from umbel.app.running.awaiting import cancelled_from_within
from umbel.app.running.tracer import Run, Tracer
from umbel.errors import SoftTimeLimitExceeded, TaskCancelled, WorkerStopping
from umbel.pools.guard import Raised, await_guarded
from umbel.pools.interface import Job, Outcome

_MEANINGS = (WorkerStopping, SoftTimeLimitExceeded, TaskCancelled)  # subclasses before their bases


class AsyncTracer(Tracer):
    """A tracer whose `run` awaits the task on the running event loop."""

    def is_async(self, task: str) -> bool:
        """Whether the named task is an `async def` task, which `run` takes."""
        found = self._app.find_task(task)
        return found is not None and found.is_async

    async def run(self, job: Job) -> Outcome:
        """Run one job on this loop and return how it ended."""
        run = self._open(job)
        if isinstance(run, Outcome):
            return run
        with RequestScope(run.request):
            if self._app.signals.task_prerun.receivers:
                self._send_prerun(run)
            if run.task.options.track_started:
                await asyncio.to_thread(self._store_started, run.request)
            happened = await await_guarded(_await, run)
            embed = run.call.embed
            if embed.chord is not None or embed.chain or (embed.errbacks and isinstance(happened, Raised)):
                return await asyncio.to_thread(self._ended, run, happened)
            return self._ended(run, happened)


async def _await(run: Run) -> Any:
    try:
        run.begin()
        return await run.task.entry(*run.call.args, **run.call.kwargs)
    except asyncio.CancelledError as error:
        # The pool's exceptions are cancellations too, so that groups and timeouts in the task clean up. From
        # here on they are plain exceptions with their own meaning.
        for meaning in _MEANINGS:
            if isinstance(error, meaning):
                raise meaning(*error.args).with_traceback(error.__traceback__) from None
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise  # the pool ends it
        raise cancelled_from_within() from error
