"""Joining: waiting for many results at once, from blocking and from async code alike."""

from collections.abc import Callable, Generator, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

from umbel.app.running.request import Request
from umbel.backends.interface import Backend
from umbel.errors import JoinWouldBlock, ResultTimeout
from umbel.wire.message import StoredResult
from umbel.wire.result import ResultMap

Callback = Callable[[str, Any], object]
"""Called with the id of a task and its value, as soon as it is known."""


class Joinable(Protocol):
    """One result of several: an AsyncResult."""

    id: str
    ignored: bool
    _final: ResultMap | None

    @property
    def _backend(self) -> Backend: ...
    def _refuse_join(self, allow_join: bool | None) -> None: ...
    def _keep(self, found: Mapping[str, StoredResult], timeout: float | None) -> None: ...
    def _value(self, *, propagate: bool) -> Any: ...


def refuse_join(request: Request, task_id: str, allowed: bool) -> None:
    """A task that waits for another one keeps a child from running it."""
    if request.is_eager or allowed:
        return
    raise JoinWouldBlock(
        f"task {request.task}[{request.id}] waits for the result of {task_id}. If every child waits, "
        "none is left to run the awaited tasks. Link the tasks instead (chain, link), "
        "or pass allow_join=True"
    )


Question = tuple[Backend, set[str], float | None]
"""Which of these tasks have a final state, waiting at most so long for one of them?"""


def join(
    results: Sequence[Joinable], timeout: float | None, *, propagate: bool, allow_join: bool | None
) -> list[Any]:
    """The values of all; the first that failed raises its exception here, as soon as it is known."""
    steps = _joining(results, timeout, propagate, allow_join)
    try:
        backend, task_ids, left_s = next(steps)
        while True:
            backend, task_ids, left_s = steps.send(backend.wait(task_ids, left_s))
    except StopIteration as end:
        values: list[Any] = end.value
        return values


async def join_async(
    results: Sequence[Joinable], timeout: float | None, *, propagate: bool, allow_join: bool | None
) -> list[Any]:
    """The same for async code."""
    steps = _joining(results, timeout, propagate, allow_join)
    try:
        backend, task_ids, left_s = next(steps)
        while True:
            backend, task_ids, left_s = steps.send(await backend.wait_async(task_ids, left_s))
    except StopIteration as end:
        values: list[Any] = end.value
        return values


def _joining(
    results: Sequence[Joinable], timeout: float | None, propagate: bool, allow_join: bool | None
) -> Generator[Question, Mapping[str, StoredResult], list[Any]]:
    """What `join` does, apart from how it waits: it asks, and is sent what was found."""
    deadline = None if timeout is None else monotonic() + timeout
    stored = [result for result in results if not result.ignored]
    if stored:
        stored[0]._refuse_join(allow_join)
    while True:
        if propagate:
            for result in stored:
                if result._final is not None:
                    result._value(propagate=True)
        waiting = [result for result in stored if result._final is None]
        if not waiting:
            return [None if result.ignored else result._value(propagate=propagate) for result in results]
        backend = waiting[0]._backend
        task_ids = {result.id for result in waiting if result._backend is backend}
        found = yield backend, task_ids, None if deadline is None else max(0.0, deadline - monotonic())
        if not found:
            raise ResultTimeout(
                f"{len(waiting)} of {len(results)} tasks had no result within {timeout} s; "
                "is a worker consuming their queue?"
            )
        for result in waiting:
            if result.id in found:
                result._keep(found, timeout)
