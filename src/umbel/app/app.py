"""App: what a user makes first. It holds the settings and the tasks, sends calls, and opens broker and result
backend when they are first needed, so that importing a module with an app touches nothing.

A call becomes a message (`sending/preparation.py`), and the producer of the broker puts it into its queue. In
eager mode the task runs at once; in an outbox block the message is written for a relay (`outbox/`). While the
broker is unavailable, the sender retries for `publish_timeout_s` (`sending/publication.py`). The methods for
async code are in `async_sending.py`.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from functools import cached_property
from os import getpid
from pathlib import Path
from sys import modules
from threading import Lock
from time import time
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload

from umbel.app.async_sending import AsyncSending
from umbel.app.canvas.group import builtin_functions
from umbel.app.canvas.signature import Signature, prepare_many, signature_from
from umbel.app.cluster.commands import AT_MOST_ONCE, HandlerT, Topics
from umbel.app.definition import Discovery, Packages, define, directory_of
from umbel.app.interfaces import RunningApp
from umbel.app.options import Router, SendOptions, TaskKeywords, TaskOptions, check_options
from umbel.app.request import CURRENT_REQUEST, Request
from umbel.app.results import AsyncResult, SavedGroups
from umbel.app.running.child_logs import redirect_streams, set_up_child_logging
from umbel.app.running.eager import EagerBackend, EagerMode, EagerRunner
from umbel.app.running.tracer import Tracer
from umbel.app.sending.preparation import (
    KnownCluster,
    Prepared,
    SendDefaults,
    is_unique,
    origin,
    prepare,
    queue_of,
)
from umbel.app.sending.publication import SentEvents, announce, publish, send_unique
from umbel.app.settings import Settings, assemble
from umbel.app.signals import Signals, Steps
from umbel.app.task import AsyncTask, BoundTaskDecorator, Task, TaskDecorator
from umbel.app.waiting import patiently, warn_on_loop
from umbel.backends.interface import Backend
from umbel.backends.registry import open_backend
from umbel.brokers.interface import BrokerSettings, Producer
from umbel.brokers.registry import open_producer, refuse_reserved_on
from umbel.clock import cluster_now
from umbel.control.panel import UsersPanel
from umbel.logs import tell_left_out
from umbel.outbox.current import OPEN, open_block
from umbel.pools.interface import ChildContext, Runner
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke
from umbel.wire.signing import Signer

if TYPE_CHECKING:
    from umbel.app.cluster.control import Control
    from umbel.app.cluster.elections import HeldLease
    from umbel.app.cluster.periodic import Periodic, Timetable
    from umbel.outbox.block import Block


# ---- which tracer a child gets ---------------------------------------------------------------------
#
# One that awaits the tasks of its event loop, if it has one.


def make_tracer(app: RunningApp, context: ChildContext) -> Tracer:
    """The tracer for a child: one that awaits tasks on the child's event loop, if it has one."""
    if not context.on_loop:
        return Tracer(app, hostname=context.node, tell=context.tell)
    from umbel.app.running.async_tracer import AsyncTracer  # brings asyncio along, which few children need

    return AsyncTracer(app, hostname=context.node, tell=context.tell)


# ---- app -------------------------------------------------------------------------------------------
#
# What a user makes first. It holds the settings and the tasks, sends calls, and opens broker and result
# backend when they are first needed, so that importing a module with an app touches nothing.
#
# A call becomes a message (`sending/preparation.py`), and the producer of the broker puts it into its
# queue. In eager mode the task runs at once instead; in an outbox block the message is written for a relay
# (`outbox/`). While the broker is unavailable, the sender retries for `publish_timeout_s`
# (`sending/publication.py`). The methods for async code are in `async_sending.py`.

P = ParamSpec("P")
R = TypeVar("R")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_AWAITED = "await task.adelay(...), or aapply_async, asend_task, asend_many"


class App(AsyncSending):
    """A set of tasks and where their messages and results go.

    Without `broker` everything is in one SQLite file, umbel.db, in the app's `directory`; without a
    directory, where `-A` finds the app, or the current directory. `umbel.app.settings` lists
    every setting and the places where it may be written.
    """

    signing_cluster: KnownCluster

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
        self.signing_cluster = KnownCluster()
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
        """Every task by name, built-in ones included; imports the modules that discovery names."""
        self.discovery.run()
        return self._builtins | self.tasks

    def task_queues(self) -> set[str]:
        """The queues that calls of its tasks go to when they name none."""
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

    def send_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]:
        """Send a task by its name, which need not be known in this process."""
        return self.send(name, args, kwargs or {}, options)

    def send(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """Send a call by the task's name, once at a time if it is unique; return its result handle."""
        known = self.tasks.get(name)
        if is_unique(known.options if known else None, options):
            return send_unique(self, name, args, kwargs, options)
        prepared = self.prepare(name, args, kwargs, options, sender=CURRENT_REQUEST.get())
        self.publish([prepared])
        return self.result_of(prepared)

    def result_of(self, prepared: Prepared) -> AsyncResult[Any]:
        """The result handle of a prepared call."""
        return AsyncResult(prepared.task_id, app=self, ignored=prepared.ignores_result, types=prepared.types)

    def ignores_result(self, name: str, options: SendOptions) -> bool:
        """Whether no worker will store the result of this call."""
        known = self.tasks.get(name)
        stated = (options.get("ignore_result"), known.options.ignore_result if known else None)
        return next((ignored for ignored in stated if ignored is not None), self.settings.task_ignore_result)

    def send_many(self, signatures: Iterable["Signature[Any]"]) -> list[AsyncResult[Any]]:
        """Send many calls in one step of the broker: all of them or none."""
        prepared, results = prepare_many(signatures)
        self.publish(prepared)
        return results

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
        """Make the message of a call, after receivers of `before_task_publish` have seen it."""
        known = self.tasks.get(name)
        defaults = known.options if known else None
        if self.signals.before_task_publish.receivers:
            options, task_id = announce(self, name, args, kwargs, options, defaults=defaults, task_id=task_id)
        return prepare(self, name, args, kwargs, options, defaults=defaults, sender=sender, task_id=task_id)

    def publish(self, prepared: Sequence[Prepared]) -> None:
        """Publish prepared messages: to the broker, into the open outbox block, or by running them (eager
        mode).
        """
        outgoing, began = self.begin_publishing(prepared), time()
        if (runner := self.eager_runner) is not None:
            runner.run(outgoing)
        elif OPEN.get() is not None and (block := open_block(self)) is not None:
            self.check_queues(outgoing)
            block.write(outgoing)
        else:
            asyncio = modules.get("asyncio")
            if asyncio is not None and asyncio._get_running_loop() is not None:  # a loop runs in few threads
                warn_on_loop("sending a task", _AWAITED)
            if publish(self.producer, outgoing, self.settings, CURRENT_REQUEST.get()):
                self.tell_sent([(outgoing, began)])
        self.end_publishing(prepared)

    def signer(self) -> Signer | None:
        """What this process signs with, and for which cluster; None without keys."""
        return self.signing_cluster.signer(self)

    def check_queues(self, outgoing: Sequence[Outgoing]) -> None:
        """Raise BrokerRefused for a queue whose name the broker would refuse; the broker is not asked."""
        for queue in {message.queue for message in outgoing if not message.exchange}:
            refuse_reserved_on(self.broker_settings(), queue)

    def begin_publishing(self, prepared: Sequence[Prepared]) -> list[Outgoing]:
        """Record the tasks as children of the running task; return the messages to publish."""
        request = CURRENT_REQUEST.get()
        if request is not None:
            request.sent(message.task_id for message in prepared)
        return [message.outgoing for message in prepared]

    def end_publishing(self, prepared: Sequence[Prepared]) -> None:
        """Send the signal `after_task_publish` for each message."""
        if self.signals.after_task_publish.receivers:
            for message in prepared:
                self.signals.after_task_publish.send(
                    task=message.task, task_id=message.task_id, queue=message.outgoing.queue
                )

    def tell_sent(self, sent: Sequence[tuple[Sequence[Outgoing], float]]) -> None:
        """Send the events `task-sent` for batches, each with the time at which its sending began."""
        if not self.settings.task_send_sent_event:
            return
        with self._opening:
            if self._sent_events is None or self._sent_events.pid != getpid():
                self._sent_events = SentEvents(origin())
            teller = self._sent_events
        teller.tell(self.producer, sent)

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
        """Record that these tasks must not start, for `revoke_retention_s` by default; also works while no
        worker is running.
        """
        now = cluster_now()
        if expires_at is None:
            expires_at = now + self.settings.revoke_retention_s
        revokes = [Revoke(task_id, now, expires_at) for task_id in task_ids]
        if (runner := self.eager_runner) is not None:
            runner.revoke(revokes)
        if not self.producer.capabilities.revokes:  # then only workers that run now are notified
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
        rule = {"every": every, "cron": cron, "tz": tz, "catch_up": catch_up, "name": name}
        return self._timetable.decorator(args, kwargs, options, **rule)

    @property
    def periodic_tasks(self) -> "Sequence[Periodic]":
        """The app's periodic tasks, in the order of their definition."""
        return list(self._timetable.entries.values()) if "_timetable" in vars(self) else []

    @cached_property
    def _timetable(self) -> "Timetable":
        from umbel.app.cluster.periodic import Timetable  # with a library that few apps need

        return Timetable(self)

    def lease(
        self, name: str, *, ttl: float = 15.0, timeout: float | None = None
    ) -> "AbstractAsyncContextManager[HeldLease]":
        """Hold a lease while the block runs: `async with app.lease("name") as lease:`."""
        from umbel.app.cluster.elections import hold_lease

        return hold_lease(self.broker_settings(), name, ttl=ttl, timeout=timeout)

    # -- the broker -------------------------------------------------------------------------------

    def broker_settings(self) -> BrokerSettings:
        """The settings with which every client of this app opens its broker."""
        return self.settings.for_broker()

    @property
    def producer(self) -> Producer:
        """The blocking producer, opened when it is first needed."""
        opened = self._producer  # usually it is open, and that check needs no lock
        if opened is not None:
            return opened
        with self._opening:
            if self._producer is None:
                self._producer = open_producer(self.broker_settings())
            return self._producer

    @property
    def eager_runner(self) -> EagerRunner | None:
        """Runs what is sent in this process; None where messages go to the broker."""
        mode = self.eager_mode
        return mode.runner if mode.was_entered or self.settings.task_always_eager else None

    @property
    def eager_backend(self) -> EagerBackend | None:
        """The in-memory result backend of eager mode; None where messages go to the broker."""
        runner = self.eager_runner
        return None if runner is None else runner.backend

    # -- results ---------------------------------------------------------------------------------

    def AsyncResult(self, task_id: str) -> AsyncResult[Any]:  # noqa: N802 (the name users know)
        """The result handle of a task id."""
        return AsyncResult(task_id, app=self)

    @property
    def GroupResult(self) -> SavedGroups:  # noqa: N802 (the name users know)
        """Makes the result of a group from its id and its results; `restore` finds one that was saved."""
        return SavedGroups(self)

    @property
    def backend(self) -> Backend:
        """The result backend, opened when it is first needed."""
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
        """A block in which tasks run in this process, at once, through the same path as in a worker."""
        return self.eager_mode.block()

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
