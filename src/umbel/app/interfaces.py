"""The Protocols by which the parts of an app know it, and its tasks. At run time it is always the App, and a
Task.

The app imports all of its parts, so none of them can import it: each names the Protocol here that has what it
uses. What results need of their app is in `results.py`, what a message is made of in
`sending/preparation.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, Unpack

from umbel.app.options import SendOptions, TaskOptions
from umbel.app.request import Request
from umbel.app.results import AsyncResult, ResultApp
from umbel.app.sending.preparation import KnownCluster, Prepared
from umbel.app.signals import Signals
from umbel.app.task import Hooks
from umbel.brokers.interface import BrokerSettings, Producer
from umbel.wire.message import Outgoing
from umbel.wire.signing import Signer

T = TypeVar("T")


class KnownTask(Protocol):
    """A task as senders know it: what its calls look like."""

    @property
    def options(self) -> TaskOptions:
        """The options of its definition."""

    @property
    def check_arguments(self) -> Callable[[Sequence[Any], Mapping[str, Any]], None]:
        """Raises TypeError for arguments that the function does not take."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class RunnableTask(KnownTask, Protocol):
    """A task as the tracer knows it, which runs it."""

    @property
    def name(self) -> str:
        """The name by which messages call the task."""

    @property
    def entry(self) -> Callable[..., Any]:
        """The callable that a run calls: the function, or the `__call__` of a base class."""
        ...

    @property
    def hooks(self) -> Hooks | None:
        """The hooks of its class and definition; None without any."""

    @property
    def is_async(self) -> bool:
        """Whether the function is `async def`."""


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
    ) -> Prepared:
        """Return the message of a call of the named task."""


class AwaitedApp(Protocol):
    """Sends without blocking the event loop."""

    async def asend(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """Send a call and return its result handle."""

    async def asend_unique(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """Send a call unless its key is held; return the result of the task that holds the key."""

    def send_ends(self) -> float:
        """The deadline of a send that begins now, on the monotonic clock."""
        ...

    async def aprepare(self, make: Callable[[], T], ends: float) -> T:
        """Build the messages; work that the result backend must do first runs in a thread."""

    async def apublish(self, prepared: Sequence[Prepared], ends: float) -> None:
        """Publish prepared messages before the deadline."""


class SendingApp(ResultApp, PreparingApp, AwaitedApp, Protocol):
    """Knows tasks and sends calls of them: what signatures and tasks need."""

    @property
    def tasks(self) -> Mapping[str, KnownTask]:
        """The app's own tasks, by name."""

    @property
    def signals(self) -> Signals:
        """The signals that users' receivers are connected to."""

    @property
    def producer(self) -> Producer:
        """The blocking producer, opened when it is first needed."""

    @property
    def signing_cluster(self) -> KnownCluster:
        """The cluster id that messages are signed for."""

    def signer(self) -> Signer | None:
        """What this process signs with; None without keys."""

    def find_task(self, name: str) -> KnownTask | None:
        """A task of the app, or one that every app has; None if the name is unknown here."""

    def ignores_result(self, name: str, options: SendOptions) -> bool:
        """Whether the result of this call is not stored."""

    def publish(self, prepared: Sequence[Prepared]) -> None:
        """Publish prepared messages, all in one step of the broker."""

    def send(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """Send a call and return its result handle."""

    def eager(self) -> AbstractContextManager[None]:
        """A block in which tasks run in this process, at once."""

    # Users' code reaches these through `task.app` and `signature.app`.
    def send_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]:
        """Send a task by its name, which need not be known in this process."""

    def AsyncResult(self, task_id: str) -> AsyncResult[Any]:  # noqa: N802 (the name users know)
        """The result handle of a task id."""


class Runner(Protocol):
    """Runs messages where they are sent (eager mode)."""

    def run(self, batch: Iterable[Outgoing]) -> None:
        """Run these messages and what follows from them."""


class AppBase(SendingApp, Protocol):
    """What the awaited half of an app uses of the blocking one."""

    @property
    def eager_runner(self) -> Runner | None:
        """Runs what is sent in this process; None where messages go to the broker."""

    def result_of(self, prepared: Prepared) -> AsyncResult[Any]:
        """The result handle of a prepared call."""

    def check_queues(self, outgoing: Sequence[Outgoing]) -> None:
        """Raise BrokerRefused for a queue whose name the broker would refuse."""

    def begin_publishing(self, prepared: Sequence[Prepared]) -> list[Outgoing]:
        """Record the tasks as children of the running task; return the messages to publish."""

    def end_publishing(self, prepared: Sequence[Prepared]) -> None:
        """Send the signal `after_task_publish` for each message."""

    def tell_sent(self, sent: Sequence[tuple[Sequence[Outgoing], float]]) -> None:
        """Send the events `task-sent` for batches, each with the time at which its sending began."""

    def broker_settings(self) -> BrokerSettings:
        """The settings with which the broker is opened."""

    def close(self) -> None:
        """Close the blocking connections."""


class RunningApp(SendingApp, Protocol):
    """Runs calls of its tasks: what the tracer needs."""

    @property
    def tasks(self) -> Mapping[str, RunnableTask]:
        """The app's own tasks, by name."""

    def find_task(self, name: str) -> RunnableTask | None:
        """A task of the app, or one that every app has; None if the name is unknown here."""


class DefiningApp(SendingApp, Protocol):
    """Makes tasks of functions."""

    def task(self, function: Callable[..., Any], /) -> Any:
        """Register a function as a task."""
