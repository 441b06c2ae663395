"""UserStep: a bootstep that users wrote (`app.steps`), among the worker's own.

A class with a `name`, the steps it `requires`, and `start(worker)` and `stop(worker)`, each of which may
be missing. It takes its place in the graph as every step does. Its methods are users' code: they run
in threads, for up to `worker_hook_timeout_s`; what they raise is logged, and the worker goes on. A
step whose `start` raised or did not return is not stopped.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from umbel.control.state import ControlState
from umbel.control.step_description import described
from umbel.pools.guard import Raised, call_guarded
from umbel.worker.bootsteps import Step
from umbel.worker.user_code.hooks import HookRun

log = logging.getLogger("umbel.worker.steps")


class UserStep(Step):
    def __init__(
        self, kind: type[Any], worker: ControlState, *, timeout_s: float, wait_for: "Callable[[HookRun], Any]"
    ) -> None:
        super().__init__()
        self.name, self.requires = described(kind)  # type: ignore[misc]
        self._kind = kind
        self._worker = worker
        self._timeout_s = timeout_s
        self._wait_for = wait_for
        self._made: Any = None
        self._started = False

    async def start(self) -> None:
        await self._run("start", self._start)

    async def stop(self) -> None:
        if self._started:
            await self._run("stop", self._stop)

    async def _run(self, what: str, work: Callable[[], None]) -> None:
        name = f"{self.name}.{what}"
        await self._wait_for(HookRun(name, work, timeout_s=self._timeout_s))

    def _start(self) -> None:
        made = call_guarded(self._kind)
        if isinstance(made, Raised):
            self._complain("cannot be created", made.error)
            return
        self._made = made.value
        self._started = self._call("start")

    def _stop(self) -> None:
        self._call("stop")

    def _call(self, method: str) -> bool:
        happened = call_guarded(getattr(self._made, method, _nothing), self._worker)
        if isinstance(happened, Raised):
            self._complain(f"raised an exception in {method}()", happened.error)
        return not isinstance(happened, Raised)

    def _complain(self, problem: str, error: BaseException) -> None:
        text = "bootstep %s; worker continues without it"
        log.error(text, problem, extra={"step": self.name}, exc_info=error)


def graph(steps: Sequence[Step]) -> dict[str, list[str]]:
    """The steps in the order in which they start, each with what it requires."""
    return {step.name: list(step.requires) for step in steps}


def _nothing(_: object) -> None:
    return None
