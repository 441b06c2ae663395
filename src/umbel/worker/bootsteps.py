"""Bootsteps: the parts a worker is built from, Umbel's and users', and the order they start in (S1).

Each step names the steps it requires; the order follows from that graph, and stopping is the reverse. Steps
that do not depend on one another start in the order in which they were given, so the order is always the
same.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, ClassVar

from umbel.control.panel import describe_step
from umbel.errors import BadBootsteps
from umbel.worker.user_code import HookRun

if TYPE_CHECKING:
    from umbel.worker.context import WorkerContext
    from umbel.worker.remote.view import WorkerView

log = logging.getLogger("umbel.worker.steps")

# ---- steps -----------------------------------------------------------------------------------------


class Step:
    """One part of a worker. `start` returns when other steps may rely on it."""

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: "WorkerContext") -> None:
        self._context = context
        self._group: asyncio.TaskGroup | None = None
        self._background: list[asyncio.Task[None]] = []

    def adopt(self, group: asyncio.TaskGroup) -> None:
        """Give the step the worker's task group, which owns its background work."""
        self._group = group

    async def start(self) -> None:
        """Begin to work; the worker awaits this before it starts the next step."""

    async def stop(self) -> None:
        """End the step's work; called once, also after a start that failed half-way."""
        await self.end_background()

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work until `stop`. An error in it stops the worker."""
        assert self._group is not None, "a step runs inside its worker"
        self._background.append(self._group.create_task(work, name=f"umbel-{self.name}"))

    async def end_background(self) -> None:
        """Cancel the background work and wait until it has ended."""
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        self._background.clear()


def starting_order(steps: Sequence[Step]) -> list[Step]:
    """Return the steps in the order in which they start; raises BadBootsteps for unknown or circular ones."""
    by_name: dict[str, Step] = {}
    for step in steps:
        if step.name in by_name:
            raise BadBootsteps(f"two bootsteps are named {step.name!r}; rename one")
        by_name[step.name] = step
    for step in steps:
        for required in step.requires:
            if required not in by_name:
                raise BadBootsteps(
                    f"bootstep {step.name!r} requires {required!r}, which is not among {sorted(by_name)}"
                )
    sorter = TopologicalSorter({step.name: step.requires for step in steps})
    try:
        sorter.prepare()
    except CycleError as error:
        raise BadBootsteps(
            f"bootsteps require one another in a circle: {' -> '.join(error.args[1])}"
        ) from None
    position = {step.name: place for place, step in enumerate(steps)}
    order: list[Step] = []
    ready = list(sorter.get_ready())
    while ready:
        ready.sort(key=position.__getitem__)
        name = ready.pop(0)
        order.append(by_name[name])
        sorter.done(name)
        ready += sorter.get_ready()
    return order


# ---- steps of users --------------------------------------------------------------------------------


class UserStep(Step):
    """A bootstep that users wrote (`app.steps`).

    It is a class with a `name`, the steps it `requires`, and the methods `start(worker)` and `stop(worker)`,
    each of which may be missing. The methods run in threads, for up to `worker_hook_timeout_s`. What they
    raise is logged, and the worker continues. A step whose `start` raised or did not return is not stopped.
    """

    def __init__(
        self,
        kind: type[Any],
        context: "WorkerContext",
        worker: "WorkerView",
        wait_for: Callable[[HookRun], Awaitable[None]],
    ) -> None:
        super().__init__(context)
        self.name, self.requires = describe_step(kind)  # type: ignore[misc]
        self._kind = kind
        self._worker = worker
        self._wait_for = wait_for
        self._made: Any = None
        self._started = False

    async def start(self) -> None:
        """Create the user's step and call its `start`."""
        await self._run("start", self._start)

    async def stop(self) -> None:
        """Call `stop`, if `start` returned."""
        if self._started:
            await self._run("stop", self._stop)

    async def _run(self, what: str, work: Callable[[], None]) -> None:
        timeout_s = self._context.settings.hooks.timeout_s
        await self._wait_for(HookRun(f"{self.name}.{what}", work, timeout_s=timeout_s))

    def _start(self) -> None:
        try:
            self._made = self._kind()
        except (Exception, SystemExit) as error:  # of a class that users wrote
            self._log_error("cannot be created", error)
        else:
            self._started = self._call("start")

    def _stop(self) -> None:
        self._call("stop")

    def _call(self, method: str) -> bool:
        try:
            getattr(self._made, method, _nothing)(self._worker)
        except (Exception, SystemExit) as error:  # of a method that users wrote
            self._log_error(f"raised an exception in {method}()", error)
            return False
        return True

    def _log_error(self, problem: str, error: BaseException) -> None:
        text = "bootstep %s; worker continues without it"
        log.error(text, problem, extra={"step": self.name}, exc_info=error)


def _nothing(_: object) -> None:
    return None
