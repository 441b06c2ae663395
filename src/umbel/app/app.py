"""App: what a user makes first. It holds the settings and the tasks, and opens broker and backend
when they are first needed, so that importing a module with an app touches nothing."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload

from umbel.app.aio.sending import AsyncSending
from umbel.app.canvas.builtin_tasks import builtin_functions
from umbel.app.canvas.signature import Signature, signature_from
from umbel.app.cluster.topics import AT_MOST_ONCE, HandlerT, Topics
from umbel.app.configuration.settings import Settings, assemble
from umbel.app.definition import define
from umbel.app.discovery import Discovery, Packages
from umbel.app.naming import directory_of
from umbel.app.options import TaskKeywords, TaskOptions
from umbel.app.results import AsyncResult
from umbel.app.running.child_logs import redirect_streams, set_up_child_logging
from umbel.app.running.child_tracer import make_tracer
from umbel.app.running.eager import EagerMode
from umbel.app.running.tracer import Tracer
from umbel.app.saved_groups import SavedGroups
from umbel.app.sending.defaults import SendDefaults, queue_of
from umbel.app.sending.options import SendOptions, check_options
from umbel.app.sending.patience import patiently
from umbel.app.sending.routing import Router
from umbel.app.sending.sending import Sending
from umbel.app.sending.sent_events import SentEvents
from umbel.app.signals import Signals
from umbel.app.steps import Steps
from umbel.app.task import AsyncTask, BoundTaskDecorator, Task, TaskDecorator
from umbel.backends.interface import Backend
from umbel.backends.registry import open_backend
from umbel.brokers.interface import Producer
from umbel.clock import cluster_now
from umbel.control.panel import UsersPanel
from umbel.logs import tell_left_out
from umbel.pools.interface import ChildContext, Runner
from umbel.wire.revoke import Revoke

if TYPE_CHECKING:
    from umbel.app.cluster.control import Control
    from umbel.app.cluster.leases import HeldLease
    from umbel.app.cluster.periodic import Periodic, Timetable
    from umbel.outbox.block import Block

P = ParamSpec("P")
R = TypeVar("R")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class App(Sending, AsyncSending):
    """A set of tasks and where their messages and results go.

    Without `broker` everything lives in one SQLite file, umbel.db, in the app's `directory`: without one,
    where `-A` finds the app, or the current directory. `umbel.app.configuration.settings` lists every
    setting and the places where it may be written.
    """

    def __init__(
        self,
        name: str = "main",
        broker: str | None = None,
        backend: str | None = None,
        *,
        directory: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.name = name
        given = {"broker": broker, "backend": backend, **settings}
        self.settings: Settings = assemble(given, directory=directory_of(directory))
        self.router = Router(self.settings.task_routes)
        self.send_defaults: dict[str, SendDefaults] = {}  # by task, for `prepare`
        self.signals: Signals = Signals()
        self.tasks: dict[str, Task[Any, Any]] = {}
        self.panel = UsersPanel()
        self.steps = Steps()
        self.topics = Topics(self)
        self.discovery = Discovery()
        self._opening = Lock()
        self._producer: Producer | None = None
        self._backend: Backend | None = None
        self.eager_mode = EagerMode(self, name)
        self._sent_events: SentEvents | None = None
        self._tracer: Tracer | None = None
        self._node = ""
        self._builtins: dict[str, Task[Any, Any]] = {
            one: self.Task(self, one, run, TaskOptions()) for one, run in builtin_functions(self).items()
        }

    @cached_property
    def control(self) -> "Control":
        """Query workers, and send them commands."""
        from umbel.app.cluster.control import Control  # with an event loop, which few apps and no child need

        return Control(self)

    # -- defining tasks --------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self, function: None = None, /, *, bind: Literal[True], **options: Unpack[TaskKeywords]
    ) -> BoundTaskDecorator: ...
    @overload
    def task(
        self, function: None = None, /, *, bind: Literal[False] = False, **options: Unpack[TaskKeywords]
    ) -> TaskDecorator: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        bind: bool = False,
        **options: Any,
    ) -> Any:
        """Register a function as a task: `@app.task` or `@app.task(queue="slow", max_retries=5)`."""

        def register(function: Callable[..., Any]) -> Task[Any, Any]:
            made = define(self, self.name, self.tasks, function, options, bind=bind, above=self.Task)
            self.tasks[made.name] = made
            return made

        return register if function is None else register(function)

    def autodiscover_tasks(self, packages: Packages = None, related_name: str | None = "tasks") -> None:
        """Have the module `tasks` of each package imported when a worker or a command loads the app.

        Without packages those are the installed apps, in a process of Django.
        """
        self.discovery.add(packages, related_name)

    def find_task(self, name: str) -> Task[Any, Any] | None:
        """A task of this app, or one that every app has."""
        return self.tasks.get(name) or self._builtins.get(name)

    def all_tasks(self) -> dict[str, Task[Any, Any]]:
        self.discovery.run()
        return self._builtins | self.tasks

    def task_queues(self) -> set[str]:
        """Where calls of its tasks go that name no queue."""
        own = {queue_of(self, name, task.options) for name, task in self.tasks.items()}
        return own | {self.settings.task_default_queue}

    def signature(
        self,
        task: str | Mapping[str, Any] | Signature[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> Signature[Any]:
        """A call as a value: from a task's name, or from the map that travels in messages."""
        check_options(options)
        if isinstance(task, str):
            return Signature(task, args, kwargs, options, app=self)
        if isinstance(task, Mapping):
            check_options(task.get("options") or {})
        return signature_from(task, self).clone(args, kwargs, **options)

    # -- sending ---------------------------------------------------------------------------------

    def outbox(self, connection: Any) -> "Block":
        """Inside this block tasks are sent if, and only if, the transaction of `connection` commits.

        `with app.outbox(connection):` takes a connection of sqlite3, psycopg, psycopg2 or Django, or a
        connection or session of SQLAlchemy; `async with` also an AsyncConnection of psycopg, or an
        AsyncConnection or AsyncSession of SQLAlchemy. The messages are written into a table; a worker with
        the setting `outbox` publishes them.
        """
        from umbel.outbox.block import Block  # few apps need it

        return Block(self, connection, self.settings.outbox_table)

    def revoke(self, task_ids: Iterable[str], *, expires_at: float) -> None:
        """Record that these tasks must not start; also works while no worker is running."""
        now = cluster_now()
        revokes = [Revoke(one, now, expires_at) for one in task_ids]
        if (runner := self.eager_runner) is not None:
            runner.revoke(revokes)
        if not self.producer.capabilities.revokes:  # then it reaches those who hear it, and no others
            return
        patiently(lambda: self.producer.revoke(revokes), self.settings.publish_timeout_s)

    # -- who does it -----------------------------------------------------------------------------

    def election_handler(self, topic: str, *, policy: str = AT_MOST_ONCE) -> Callable[[HandlerT], HandlerT]:
        """Register a function that the elected worker calls: `handle(action, context)`.

        It runs in the worker's main process, in a thread. `policy` is the default for elections
        of the topic: `at_most_once`, or `at_least_once` if another worker may repeat it after its
        worker died.
        """
        return self.topics.handler(topic, policy)

    def periodic(
        self,
        *,
        every: float | timedelta | None = None,
        cron: str | None = None,
        tz: str = "UTC",
        catch_up: str = "one",
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> Callable[[FunctionT], FunctionT]:
        """Send a task periodically: `@app.periodic(every=30)` above `@app.task`.

        Slots lie at multiples of `every` (seconds) since 1970, or where `cron` in time zone `tz` says.
        One worker sends each slot, once. `catch_up` says what to send for slots that passed while
        no worker was running: `none`, `one` (the last) or `all`.
        """
        rule = {"every": every, "cron": cron, "tz": tz, "catch_up": catch_up, "name": name}
        return self._timetable.decorator(args, kwargs, options, **rule)

    @property
    def periodic_tasks(self) -> "Sequence[Periodic]":
        return list(self._timetable.entries.values()) if "_timetable" in vars(self) else []

    @cached_property
    def _timetable(self) -> "Timetable":
        from umbel.app.cluster.periodic import Timetable  # with a library that few apps need

        return Timetable(self)

    def lease(
        self, name: str, *, ttl: float = 15.0, timeout: float | None = None
    ) -> "AbstractAsyncContextManager[HeldLease]":
        """Hold a lease while the block runs: `async with app.lease("name") as lease:`."""
        from umbel.app.cluster.leases import hold_lease

        return hold_lease(self.broker_settings(), name, ttl=ttl, timeout=timeout)

    # -- results ---------------------------------------------------------------------------------

    def AsyncResult(self, task_id: str) -> AsyncResult[Any]:  # noqa: N802 (the name users know)
        return AsyncResult(task_id, app=self)

    @property
    def GroupResult(self) -> SavedGroups:  # noqa: N802 (the name users know)
        """Makes the result of a group from its id and its results; `restore` finds one that was saved."""
        return SavedGroups(self)

    @property
    def backend(self) -> Backend:
        if self.eager_backend is not None:
            return self.eager_backend
        with self._opening:
            if self._backend is None:
                self._backend = open_backend(self.settings.backend, self.broker_settings())
            return self._backend

    def close(self) -> None:
        """Close the connections; the app opens them again when they are needed."""
        if "control" in vars(self):
            self.control.close()
        if "clients" in vars(self):
            self.clients.close()
        with self._opening:
            for opened in (self._producer, self._backend):
                if opened is not None:
                    opened.close()
            self._producer = self._backend = None
        self.eager_mode.close()

    # -- eager mode ------------------------------------------------------------------------------

    def eager(self) -> AbstractContextManager[None]:
        """Inside this block tasks run in this process, at once, through the path a worker takes."""
        return self.eager_mode.block()

    # -- in a child of a pool (pools.interface.Host) ---------------------------------------------

    def start_child(self, context: ChildContext) -> Runner:
        set_up_child_logging(context)
        if context.is_process and self.settings.worker_redirect_stdouts:
            redirect_streams(self.settings.worker_redirect_stdouts_level)
        self._node = context.node
        self._tracer = make_tracer(self, context)
        self.signals.worker_process_init.send(node=context.node, child=context.child)
        return self._tracer

    def stop_child(self) -> None:
        self.signals.worker_process_shutdown.send(node=self._node)
        if self._tracer is not None:
            self._tracer.close()
        self.close()
        tell_left_out()

    Task: type[Any] = Task  # the base class of those for `@app.task(base=...)`

    def __repr__(self) -> str:
        return f"<App {self.name} with {len(self.tasks)} tasks>"
