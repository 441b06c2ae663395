"""App: what a user creates first. It holds the settings and the tasks, and sends calls of tasks.

Broker and result backend are opened when they are first needed, so importing a module with an app opens
nothing.

A call becomes a message (`sending/preparation.py`), and the producer of the broker puts it into a queue. In
eager mode the task runs at once instead; in an outbox block the message is written into the caller's database
(`outbox/`). While the broker is unavailable, the sender retries for `publish_timeout_s`. The methods for
async code begin with `a`; they use the connections of the running event loop (`sending/loop_client.py`).
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from sys import modules
from threading import Lock
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, Unpack, cast, overload

from umbel.app.canvas.group import builtin_functions
from umbel.app.canvas.signature import Signature, prepare_many, signature_from
from umbel.app.cluster.topics import AT_MOST_ONCE, HandlerT, Topics
from umbel.app.definition import Discovery, Packages, TaskDecorator, directory_of
from umbel.app.options import Router, SendOptions, TaskKeywords, TaskOptions, check_options
from umbel.app.request import CURRENT_REQUEST, Request
from umbel.app.results import AsyncResult, SavedGroups
from umbel.app.running.child_logs import redirect_streams, set_up_child_logging
from umbel.app.running.eager import EagerBackend, EagerMode, EagerRunner
from umbel.app.running.tracer import Tracer
from umbel.app.sending import preparation
from umbel.app.sending.preparation import Prepared, SendDefaults, is_unique, prepare, queue_of
from umbel.app.sending.publication import Publication, SentEvents, unique_call
from umbel.app.sending.signing import SigningCluster
from umbel.app.settings import Settings, assemble
from umbel.app.signals import Signals, Steps
from umbel.app.task import AsyncTask, Task
from umbel.app.waiting import Patience, patiently, retried, warn_on_loop
from umbel.backends.interface import Backend
from umbel.backends.registry import open_backend
from umbel.brokers.interface import BrokerSettings, Producer
from umbel.brokers.registry import open_producer, refuse_reserved_on
from umbel.clock import cluster_now
from umbel.control.panel import UsersPanel
from umbel.errors import BrokerUnavailable, ConfigurationError
from umbel.logs import tell_left_out
from umbel.outbox import OPEN, open_block
from umbel.pools.interface import ChildContext, Runner
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke

if TYPE_CHECKING:
    from umbel.app.cluster.control import Control
    from umbel.app.cluster.elections import HeldLease
    from umbel.app.cluster.periodic import Periodic
    from umbel.app.definition import BoundTaskDecorator
    from umbel.app.sending.loop_client import Clients
    from umbel.outbox.block import Block

P = ParamSpec("P")
R = TypeVar("R")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_AWAITED = "await task.adelay(...), or aapply_async, asend_task, asend_many"


class App:
    """A set of tasks and where their messages and results go.

    Without `broker` everything is in one SQLite file, umbel.db, in the app's `directory`; without a
    directory, where `-A` finds the app, or the current directory. `umbel.app.settings` lists
    every setting and the places where it may be written.
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
        self.signing_cluster = SigningCluster(self)
        self.sent_events = SentEvents(self)
        self.signals: Signals = Signals()
        self.tasks: dict[str, Task[Any, Any]] = {}
        self.panel = UsersPanel()
        self.steps = Steps()
        self.topics = Topics(self)
        self.discovery = Discovery()
        self._opening = Lock()
        self._producer: Producer | None = None
        self._backend: Backend | None = None
        self.eager_mode = EagerMode(self)
        self._periodic: dict[str, Periodic] = {}
        self._tracer: Tracer | None = None
        self._node = ""
        self._builtins: dict[str, Task[Any, Any]] = {
            builtin: self.Task(self, builtin, run, TaskOptions())
            for builtin, run in builtin_functions(self).items()
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
    ) -> "BoundTaskDecorator": ...
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
        decorator = TaskDecorator(self, options, bind=bind)
        return decorator if function is None else decorator(function)

    def autodiscover_tasks(self, packages: Packages = None, related_name: str | None = "tasks") -> None:
        """Have the module `tasks` of each package imported when a worker or a command loads the app.

        Without packages those are the installed apps, in a process of Django.
        """
        self.discovery.add(packages, related_name)

    def find_task(self, name: str) -> Task[Any, Any] | None:
        """The task of that name, which may be a task that every app has; None if it is unknown here."""
        return self.tasks.get(name) or self._builtins.get(name)

    def all_tasks(self) -> dict[str, Task[Any, Any]]:
        """Every task by name, built-in ones included; imports the modules that discovery names."""
        self.discovery.run()
        return self._builtins | self.tasks

    def task_queues(self) -> set[str]:
        """The queues that calls of its tasks go to when they name none."""
        queues = {queue_of(self, name, task.options) for name, task in self.tasks.items()}
        return queues | {self.settings.task_default_queue}

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

    def send_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]:
        """Send a task by its name, which need not be known in this process."""
        return self.send(name, args, kwargs or {}, options)

    async def asend_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]:
        """Send a task by its name, without blocking the event loop."""
        return await self.asend(name, args, kwargs or {}, options)

    def send_many(self, signatures: Iterable[Signature[Any]]) -> list[AsyncResult[Any]]:
        """Send many calls in one step of the broker: all of them or none."""
        batch, results = prepare_many(signatures)
        self.publish(batch)
        return results

    async def asend_many(self, signatures: Iterable[Signature[Any]]) -> list[AsyncResult[Any]]:
        """Send many calls in one step of the broker, all of them or none, without blocking the event loop."""
        deadline = self.send_deadline()
        batch, results = await self.clients.prepare(lambda: prepare_many(signatures), deadline)
        await self.apublish(batch, deadline)
        return results

    def send(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """Send a call by the task's name; return its result handle."""
        task = self.tasks.get(name)
        if is_unique(None if task is None else task.options, options):
            return self.send_unique(name, args, kwargs, options)
        prepared = prepare(self, name, args, kwargs, options, sender=CURRENT_REQUEST.get())
        self.publish([prepared])
        return prepared.result(self)

    async def asend(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """Send a call by the task's name, without blocking the event loop; return its result handle."""
        task = self.tasks.get(name)
        if is_unique(None if task is None else task.options, options):
            return await self.asend_unique(name, args, kwargs, options)
        sender, deadline = CURRENT_REQUEST.get(), self.send_deadline()
        prepared = await self.clients.prepare(
            lambda: prepare(self, name, args, kwargs, options, sender=sender), deadline
        )
        await self.apublish([prepared], deadline)
        return prepared.result(self)

    def send_unique(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """Send a call unless its key is taken; return the result of the task that holds the key."""
        return unique_call(self, name, args, kwargs, options).send()

    async def asend_unique(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """The same as `send_unique`, without blocking the event loop."""
        deadline = self.send_deadline()
        call = await self.clients.prepare(lambda: unique_call(self, name, args, kwargs, options), deadline)
        return await call.asend(deadline)

    def send_deadline(self) -> float:
        """The deadline of an awaited send that begins now, on the monotonic clock; all its steps share it."""
        return monotonic() + (self.settings.publish_timeout_s or self.settings.connect_timeout_s)

    prepare = preparation.prepare

    def publish(self, batch: Sequence[Prepared]) -> None:
        """Publish prepared calls: to the broker, into the open outbox block, or by running them in eager
        mode.
        """
        messages, request, began = self._begin_publishing(batch)
        if (runner := self.eager_runner) is not None:
            runner.run(messages)
        elif OPEN.get() is not None and (block := open_block(self)) is not None:
            self._check_queues(messages)
            block.write(messages)
        elif self._publish_to_broker(messages, request) and self.settings.task_send_sent_event:
            self.sent_events.send([(messages, began)])
        self._end_publishing(batch)

    async def apublish(self, batch: Sequence[Prepared], deadline: float) -> None:
        """The same as `publish`, without blocking the event loop.

        `SendUnknown` says that the outcome is unknown. The same ids can be sent again; except on RabbitMQ
        they run once.
        """
        messages, request, began = self._begin_publishing(batch)
        if (runner := self.eager_runner) is not None:
            from asyncio import to_thread

            await to_thread(runner.run, messages)
        elif OPEN.get() is not None and (block := open_block(self)) is not None:
            self._check_queues(messages)
            await block.awrite(messages)
        else:
            client = self.clients.here()
            if await client.publish(messages, request, deadline) and self.settings.task_send_sent_event:
                client.sent.add(messages, began)
        self._end_publishing(batch)

    def _begin_publishing(self, batch: Sequence[Prepared]) -> tuple[list[Outgoing], Request | None, float]:
        """Record the tasks as children of the running task; return the messages, that task and the time."""
        request = CURRENT_REQUEST.get()
        if request is not None:
            request.sent(prepared.task_id for prepared in batch)
        return [prepared.outgoing for prepared in batch], request, time()

    def _publish_to_broker(self, messages: Sequence[Outgoing], request: Request | None) -> bool:
        """Publish with retries. False: the messages are buffered until the running task ends."""
        asyncio = modules.get("asyncio")
        if asyncio is not None and asyncio._get_running_loop() is not None:  # a loop runs in few threads
            warn_on_loop("sending a task", _AWAITED)
        producer = self.producer
        if request is not None and not request.called_directly:
            return Publication(messages, self.settings, request).publish(producer)
        began = monotonic()
        try:
            producer.publish(messages)
        except BrokerUnavailable as error:
            patience = Patience(self.settings.publish_timeout_s, began=began)
            retried(lambda: producer.publish(messages), error, patience)
        return True

    def _end_publishing(self, batch: Sequence[Prepared]) -> None:
        """Send the signal `after_task_publish` for each call."""
        if self.signals.after_task_publish.receivers:
            for prepared in batch:
                self.signals.after_task_publish.send(
                    task=prepared.task, task_id=prepared.task_id, queue=prepared.outgoing.queue
                )

    def _check_queues(self, messages: Sequence[Outgoing]) -> None:
        """Raise BrokerRefused for a queue whose name the broker would refuse; the broker is not asked."""
        for queue in {message.queue for message in messages if not message.exchange}:
            refuse_reserved_on(self.broker_settings(), queue)

    def outbox(self, connection: Any) -> "Block":
        """A block in which tasks are sent if, and only if, the transaction of `connection` commits.

        `with app.outbox(connection):` takes a connection of sqlite3, psycopg, psycopg2 or Django, or a
        connection or session of SQLAlchemy; `async with` also an AsyncConnection of psycopg, or an
        AsyncConnection or AsyncSession of SQLAlchemy. The messages are written into a table; a worker with
        the setting `outbox` publishes them.
        """
        from umbel.outbox.block import Block  # few apps need it

        return Block(self, connection, self.settings.outbox_table)

    def revoke(self, task_ids: Iterable[str], *, expires_at: float | None = None) -> None:
        """Record that these tasks must not start, by default for `revoke_retention_s`; no worker need run."""
        now = cluster_now()
        if expires_at is None:
            expires_at = now + self.settings.revoke_retention_s
        revokes = [Revoke(task_id, now, expires_at) for task_id in task_ids]
        if (runner := self.eager_runner) is not None:
            runner.revoke(revokes)
        if not self.producer.capabilities.revokes:  # then only workers that are running now are notified
            return
        patiently(lambda: self.producer.revoke(revokes), self.settings.publish_timeout_s)

    # -- the cluster ----------------------------------------------------------------------------

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
        from umbel.app.cluster.periodic import make_periodic  # with a library that few apps need

        def register(function: FunctionT) -> FunctionT:
            task: Any = function if isinstance(function, Task) else self.task(function)
            entry = name or task.name
            if entry in self._periodic:
                raise ConfigurationError(f"two periodic tasks are named {entry!r}; give one another name=")
            signature: Signature[Any] = Signature(task.name, args, kwargs, options, app=self)
            self._periodic[entry] = make_periodic(
                entry, signature, every=every, cron=cron, tz=tz, catch_up=catch_up
            )
            return cast(FunctionT, task)

        return register

    @property
    def periodic_tasks(self) -> "Sequence[Periodic]":
        """The app's periodic tasks, in the order of their definition."""
        return list(self._periodic.values())

    def lease(
        self, name: str, *, ttl: float = 15.0, timeout: float | None = None
    ) -> "AbstractAsyncContextManager[HeldLease]":
        """Hold a lease while the block runs: `async with app.lease("name") as lease:`."""
        from umbel.app.cluster.elections import hold_lease

        return hold_lease(self.broker_settings(), name, ttl=ttl, timeout=timeout)

    # -- results ---------------------------------------------------------------------------------

    def AsyncResult(self, task_id: str) -> AsyncResult[Any]:  # noqa: N802 (the name users know)
        """The result handle of a task id."""
        return AsyncResult(task_id, app=self)

    @property
    def GroupResult(self) -> SavedGroups:  # noqa: N802 (the name users know)
        """Makes the result of a group from its id and its results; `restore` finds one that was saved."""
        return SavedGroups(self)

    # -- connections -----------------------------------------------------------------------------

    def broker_settings(self) -> BrokerSettings:
        """The settings with which every client of this app opens its broker."""
        return self.settings.for_broker()

    @property
    def producer(self) -> Producer:
        """The blocking producer, opened when it is first needed."""
        opened = self._producer  # usually it is open, and this check needs no lock
        if opened is not None:
            return opened
        with self._opening:
            if self._producer is None:
                self._producer = open_producer(self.broker_settings())
            return self._producer

    @property
    def backend(self) -> Backend:
        """The result backend, opened when it is first needed."""
        if self.eager_backend is not None:
            return self.eager_backend
        with self._opening:
            if self._backend is None:
                self._backend = open_backend(self.settings.backend, self.broker_settings())
            return self._backend

    @cached_property
    def clients(self) -> "Clients":
        """The connections that are open for each event loop."""
        from umbel.app.sending.loop_client import Clients  # with asyncio, which few apps and no child need

        return Clients(self)

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

    async def aclose(self) -> None:
        """Close what is open for this event loop; with the last loop, the blocking client's connections too.

        Those are shared: the result backend is one object for all loops.
        """
        await self.clients.close_here()
        if self.clients.are_open:
            return
        from asyncio import to_thread

        await to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        """Open the connections of this event loop now, so that the first send is fast."""
        if self.eager_backend is None:
            await self.clients.here().load()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    # -- eager mode ------------------------------------------------------------------------------

    def eager(self) -> AbstractContextManager[None]:
        """A block in which tasks run in this process, at once, through the same path as in a worker."""
        return self.eager_mode.block()

    @property
    def eager_runner(self) -> EagerRunner | None:
        """Runs the tasks that are sent here; None if their messages go to the broker."""
        mode = self.eager_mode
        return mode.runner if mode.was_entered or self.settings.task_always_eager else None

    @property
    def eager_backend(self) -> EagerBackend | None:
        """The in-memory result backend of eager mode; None if messages go to the broker."""
        runner = self.eager_runner
        return None if runner is None else runner.backend

    # -- in a child of a pool (pools.interface.Host) ---------------------------------------------

    def start_child(self, context: ChildContext) -> Runner:
        """Set up logging in a child of a pool, and return what runs its jobs."""
        set_up_child_logging(context)
        if context.is_process and self.settings.worker_redirect_stdouts:
            redirect_streams(self.settings.worker_redirect_stdouts_level)
        self._node = context.node
        self._tracer = make_tracer(self, context)
        self.signals.worker_process_init.send(node=context.node, child=context.child)
        return self._tracer

    def stop_child(self) -> None:
        """Send `worker_process_shutdown` and close what this child has open."""
        self.signals.worker_process_shutdown.send(node=self._node)
        if self._tracer is not None:
            self._tracer.close()
        self.close()
        tell_left_out()

    Task: type[Any] = Task  # the base of classes for `@app.task(base=...)`

    def __repr__(self) -> str:
        return f"<App {self.name} with {len(self.tasks)} tasks>"


def make_tracer(app: App, context: ChildContext) -> Tracer:
    """The tracer for a child: one that awaits tasks on the child's event loop, if it has one."""
    if not context.on_loop:
        return Tracer(app, hostname=context.node, send_event=context.tell)
    from umbel.app.running.async_tracer import AsyncTracer  # brings asyncio along, which few children need

    return AsyncTracer(app, hostname=context.node, send_event=context.tell)
