"""Inbox: what was sent and has not run. A test looks at it, then runs it."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from umbel.app.task import Task
from umbel.errors import TaskError
from umbel.protocol.delivery.states import FAILURE
from umbel.testing.calls import SentCall, name_of
from umbel.testing.stage import Stage

SHOWN_MAX = 20

AnyTask = Task[Any, Any] | str


class Inbox:
    """The calls that wait, in the order of sending: `len(inbox)`, `inbox[0]`, `for call in inbox`.

    Everything that the app's tasks, signatures and `send_task` send is here, from any thread and from async
    code, and nothing runs before `run`.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __len__(self) -> int:
        return len(self._stage.waiting)

    def __iter__(self) -> Iterator[SentCall]:
        return iter(self._stage.waiting)

    def __getitem__(self, place: int) -> SentCall:
        return self._stage.waiting[place]

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task | str) and bool(self.of(task))

    def of(self, task: AnyTask) -> list[SentCall]:
        """Those of one task."""
        return [call for call in self._stage.waiting if call.is_of(task)]

    @property
    def sent(self) -> list[SentCall]:
        """Everything that was sent, whether it has run or not."""
        return list(self._stage.calls)

    # -- assertions ------------------------------------------------------------------------------

    def assert_sent(self, task: AnyTask, /, *args: Any, **kwargs: Any) -> SentCall:
        """That it was sent, with these arguments if any are given; the first such call, run or not.

        `unittest.mock.ANY` stands for any value.
        """
        __tracebackhide__ = True
        return self._matching(task, args, kwargs)[0]

    def assert_sent_once(self, task: AnyTask, /, *args: Any, **kwargs: Any) -> SentCall:
        """That it was sent once, with these arguments if any are given. A retry does not count."""
        __tracebackhide__ = True
        found = self._matching(task, args, kwargs)
        first = [call for call in found if not call.retries] or found
        if len(first) > 1:
            raise AssertionError(
                f"{_call(task, args, kwargs)} was sent {len(first)} times, not once:\n{_listed(first)}"
            )
        return first[0]

    def assert_not_sent(self, task: AnyTask, /, *args: Any, **kwargs: Any) -> None:
        """That it was not sent; with arguments: not with these."""
        __tracebackhide__ = True
        found = self._found(task, args, kwargs)
        if found:
            raise AssertionError(
                f"{_call(task, args, kwargs)} was sent, against what the test expects:\n{_listed(found)}"
            )

    def assert_empty(self) -> None:
        """That nothing waits to be run."""
        __tracebackhide__ = True
        if waiting := self._stage.waiting:
            raise AssertionError(
                f"umbel_inbox is not empty, {len(waiting)} calls have not run:\n{_listed(waiting)}"
            )

    # -- running ---------------------------------------------------------------------------------

    def run(self, *tasks: AnyTask, propagate: bool = True) -> list[SentCall]:
        """Run what is due, and what that sends, until nothing is; those that ran.

        With `tasks`: calls of these alone. The results are then those of the calls. If one failed, its
        exception is raised when all have run; `propagate=False`: it is not.
        """
        ran = self._stage.run_waiting(self._chosen(tasks))
        if propagate:
            _raise_first(ran)
        return ran

    async def arun(self, *tasks: AnyTask, propagate: bool = True) -> list[SentCall]:
        """The same in a thread, for tests whose event loop the tasks must not block."""
        return await asyncio.to_thread(self.run, *tasks, propagate=propagate)

    def run_next(self, *tasks: AnyTask, propagate: bool = True) -> SentCall:
        """Run the first that is due, and nothing of what it sends."""
        ran = self._stage.run_first(self._chosen(tasks))
        if ran is None:
            raise AssertionError(f"no call is due in umbel_inbox; waiting:\n{_listed(self._stage.waiting)}")
        if propagate:
            _raise_first([ran])
        return ran

    def clear(self) -> None:
        """Forget everything that was sent."""
        self._stage.forget()

    def __repr__(self) -> str:
        return f"<umbel_inbox with {len(self)} calls>\n{_listed(self._stage.waiting)}"

    def _chosen(self, tasks: tuple[AnyTask, ...]) -> Callable[[SentCall], bool]:
        names = {name_of(task) for task in tasks}
        return lambda call: self._stage.is_due(call) and (not names or call.task in names)

    def _found(self, task: AnyTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SentCall]:
        of_task = [call for call in self._stage.calls if call.is_of(task)]
        if not args and not kwargs:
            return of_task
        return [call for call in of_task if call.matches(args, kwargs)]

    def _matching(self, task: AnyTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SentCall]:
        __tracebackhide__ = True
        found = self._found(task, args, kwargs)
        if not found:
            raise AssertionError(f"{_call(task, args, kwargs)} was not sent; {self._instead(task)}")
        return found

    def _instead(self, task: AnyTask) -> str:
        others = [call for call in self._stage.calls if call.is_of(task)]
        if others:
            return f"with other arguments:\n{_listed(others)}"
        if self._stage.calls:
            return f"other tasks were:\n{_listed(self._stage.calls)}"
        return "nothing was"


def _call(task: AnyTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if not args and not kwargs:
        return name_of(task)
    shown = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{name_of(task)}({', '.join(shown)})"


def _listed(calls: list[SentCall]) -> str:
    lines = [f"  {call!r}" for call in calls[:SHOWN_MAX]]
    if len(calls) > SHOWN_MAX:
        lines.append(f"  and {len(calls) - SHOWN_MAX} more")
    return "\n".join(lines) or "  nothing"


def _raise_first(ran: list[SentCall]) -> None:
    for call in ran:
        if not call.error:
            continue
        if call.result.state == FAILURE:
            call.result.get()
        raise TaskError(f"{call!r}: {call.error}")  # of which no result is stored
