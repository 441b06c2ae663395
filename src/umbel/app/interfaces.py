"""What the parts of an app see of it, and of its tasks. At run time it is always the App, and a Task.

The app imports all of its parts, so none of them can name it: each names the Protocol here that has what
it uses. What results need of their app is in `results.py`, what a message is made of in `sending/prepare.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, Unpack

from umbel.app.options import TaskOptions
from umbel.app.results import AsyncResult, ResultApp
from umbel.app.running.hooks import Hooks
from umbel.app.running.request import Request
from umbel.app.sending.options import SendOptions
from umbel.app.sending.prepare import Prepared
from umbel.app.signals import Signals
from umbel.brokers.interface import BrokerSettings, Producer
from umbel.wire.message import Outgoing

T = TypeVar("T")


class KnownTask(Protocol):
    """A task to who sends it: what its calls look like."""

    @property
    def options(self) -> TaskOptions: ...
    @property
    def check_arguments(self) -> Callable[[Sequence[Any], Mapping[str, Any]], None]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class RunnableTask(KnownTask, Protocol):
    """A task to the tracer, which runs it."""

    @property
    def name(self) -> str: ...
    @property
    def entry(self) -> Callable[..., Any]:
        """What runs it."""
        ...

    @property
    def hooks(self) -> Hooks | None: ...
    @property
    def is_async(self) -> bool: ...


class PreparingApp(Protocol):
    """Turns calls into messages."""

    def prepare(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: SendOptions,
        *,
        sender: Request | None = None,
        task_id: str = "",
    ) -> Prepared: ...


class AwaitedApp(Protocol):
    """Sends without blocking the event loop."""

    async def asend(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]: ...
    async def asend_unique(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]: ...
    def send_ends(self) -> float:
        """When a send that begins now must have ended, of the monotonic clock."""
        ...

    async def aprepare(self, make: Callable[[], T], ends: float) -> T: ...
    async def apublish(self, prepared: Sequence[Prepared], ends: float) -> None: ...


class SendingApp(ResultApp, PreparingApp, AwaitedApp, Protocol):
    """Knows tasks and sends calls of them: what signatures and tasks need."""

    @property
    def tasks(self) -> Mapping[str, KnownTask]: ...
    @property
    def signals(self) -> Signals: ...
    @property
    def producer(self) -> Producer: ...
    def find_task(self, name: str) -> KnownTask | None: ...
    def ignores_result(self, name: str, options: SendOptions) -> bool: ...
    def publish(self, prepared: Sequence[Prepared]) -> None: ...
    def send(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]: ...
    def eager(self) -> AbstractContextManager[None]: ...

    # Users' code reaches these through `task.app` and `signature.app`.
    def send_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]: ...
    def AsyncResult(self, task_id: str) -> AsyncResult[Any]: ...  # noqa: N802 (the name users know)


class Runner(Protocol):
    """Runs messages where they are sent (eager mode)."""

    def run(self, batch: Iterable[Outgoing]) -> None: ...


class AppBase(SendingApp, Protocol):
    """What the awaited client of an app shares with the blocking one."""

    @property
    def eager_runner(self) -> Runner | None: ...
    def result_of(self, prepared: Prepared) -> AsyncResult[Any]: ...
    def begin_publishing(self, prepared: Sequence[Prepared]) -> list[Outgoing]: ...
    def end_publishing(self, prepared: Sequence[Prepared]) -> None: ...
    def tell_sent(self, sent: Sequence[tuple[Sequence[Outgoing], float]]) -> None: ...
    def broker_settings(self) -> BrokerSettings: ...
    def close(self) -> None: ...


class RunningApp(SendingApp, Protocol):
    """Runs calls of its tasks: what the tracer needs."""

    @property
    def tasks(self) -> Mapping[str, RunnableTask]: ...
    def find_task(self, name: str) -> RunnableTask | None: ...


class DefiningApp(SendingApp, Protocol):
    """Makes tasks of functions."""

    def task(self, function: Callable[..., Any], /) -> Any: ...
