"""Bootsteps: the parts a worker is built from, and the order they start in (S1).

Each step names the steps it requires; the order follows from that graph, and stopping is the
reverse. Steps that do not depend on one another start in the order they were given, so that the
order is the same every time.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, ClassVar

from umbel.errors import BadBootsteps


class Step:
    """One part of a worker. `start` returns when others may rely on it."""

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._background: list[asyncio.Task[None]] = []

    def adopt(self, group: asyncio.TaskGroup) -> None:
        """The worker's task group owns whatever this step runs in the background."""
        self._group = group

    async def start(self) -> None:
        """Begin."""

    async def stop(self) -> None:
        """End in good order; called once, also after a start that failed half-way."""
        await self.end_background()

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it until `stop`. An error in it stops the worker, which says so."""
        assert self._group is not None, "a step runs inside its worker"
        self._background.append(self._group.create_task(work, name=f"umbel-{self.name}"))

    async def end_background(self) -> None:
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        self._background.clear()


def starting_order(steps: Sequence[Step]) -> list[Step]:
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
