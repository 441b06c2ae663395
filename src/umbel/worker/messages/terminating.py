"""Terminator: ends tasks that run, and only those: the task is asked first, then its process is ended.

A message that is claimed has a number of its own for each attempt, and the pool knows jobs by that
number: what comes late finds nobody.
"""

import asyncio
from collections.abc import Callable, Sequence
from signal import Signals

from umbel.worker.context import WorkerContext
from umbel.worker.messages.claimed import Claimed
from umbel.worker.messages.requests import Requests
from umbel.worker.steps.tasks import Tasks

GENTLE_SIGNAL = "SIGTERM"  # what callers send who did not choose: the task is asked first
AGAIN_S = (0.1, 0.5)  # it is asked again, in case the first time came before it could be interrupted
CANCEL_GRACE_S, TERMINATE_GRACE_S = 2.0, 5.0


class Terminator:
    def __init__(self, context: WorkerContext, tasks: Tasks, requests: Requests) -> None:
        self._pool = context.pool
        self._tasks = tasks
        self._requests = requests

    def terminate(self, task_ids: Sequence[str], signal: str) -> list[str]:
        """Which of these tasks run here and are being ended."""
        ended: list[str] = []
        for claimed in self._requests.running(task_ids):
            claimed.terminated_by = signal
            if (signal == GENTLE_SIGNAL and self._cancel(claimed)) or self._signal(claimed, signal):
                ended.append(claimed.headers.id)
            else:
                claimed.terminated_by = ""
        return ended

    def _cancel(self, claimed: Claimed) -> bool:
        """Ask the task itself to end; its process is signalled only if it does not."""
        if not self._pool.cancel_job(claimed.number):
            return False
        loop = asyncio.get_running_loop()
        for after_s in AGAIN_S:
            loop.call_later(after_s, self._if_running, claimed, self._pool.cancel_job, claimed.number)
        loop.call_later(CANCEL_GRACE_S, self._if_running, claimed, self._signal, claimed, GENTLE_SIGNAL)
        return True

    def _signal(self, claimed: Claimed, signal: str) -> bool:
        """Signal its process. A task may catch that; the last one cannot be caught."""
        terminate, loop = self._pool.terminate_job, asyncio.get_running_loop()
        if not terminate(claimed.number, Signals[signal]):
            return False
        loop.call_later(
            TERMINATE_GRACE_S, self._if_running, claimed, terminate, claimed.number, Signals.SIGKILL
        )
        return True

    def _if_running(self, claimed: Claimed, do: Callable[..., object], *arguments: object) -> None:
        if self._tasks.is_holding(claimed):
            do(*arguments)
