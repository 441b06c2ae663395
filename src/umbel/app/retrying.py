"""RetryableResult: a failed task is sent again from its result, as a new task with a result of its own."""

from typing import TYPE_CHECKING, Any, Self

from umbel.app.types.call_types import ResultTypes
from umbel.backends.interface import Addressed, Backend
from umbel.errors import NotKept

WAIT_S = 10.0  # for the broker


class RetryableResult:
    __slots__ = ()

    if TYPE_CHECKING:  # of AsyncResult

        def __init__(self, task_id: str, *, app: Any, types: ResultTypes | None = None) -> None: ...

        id: str
        app: Any
        _eager: Backend | None
        _types: ResultTypes | None

    def retry(self, *, timeout: float = WAIT_S) -> Self:
        """Send the failed task again, with its arguments, as a new task; the result of that.

        This result stays as it is. NotKept: the task did not fail, was retried, or its message is not kept.
        """
        if self._eager is not None:  # it never was a message
            raise NotKept.of(self.id)
        backend = self.app.backend
        reply_to = backend.reply_to if isinstance(backend, Addressed) else None
        new_id = self.app.control.retry(self.id, reply_to=reply_to, timeout=timeout)
        return type(self)(new_id, app=self.app, types=self._types)

    async def aretry(self, *, timeout: float = WAIT_S) -> Self:
        """The same as `retry` for async code."""
        retried: Self = await self.app.abeside(lambda: self.retry(timeout=timeout))
        return retried
