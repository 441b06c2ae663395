"""DjangoApp: the app of a Django project."""

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload

from django.db import connections

from umbel.app.app import App
from umbel.app.options import TaskKeywords
from umbel.app.results import AsyncResult
from umbel.app.running.request import current_request
from umbel.app.sending.options import SendOptions
from umbel.app.sending.prepare import Prepared, is_unique
from umbel.app.sending.uniqueness import UniqueCall, send_call, unique_call
from umbel.contrib.django.commits import aon_commit, awaits_for, on_commit, waiting_for, waits_for
from umbel.contrib.django.configuration import DEFAULT_DATABASE, DjangoSettings
from umbel.contrib.django.connections import after_task, before_task, close_all, leave_to_parent
from umbel.contrib.django.discovery import DjangoDiscovery
from umbel.contrib.django.tasks import (
    AsyncDjangoTask,
    BoundDjangoTaskDecorator,
    DjangoTask,
    DjangoTaskDecorator,
)
from umbel.outbox.current import open_block
from umbel.pools.interface import ChildContext, Runner

if TYPE_CHECKING:
    from umbel.outbox.block import Block

P = ParamSpec("P")
R = TypeVar("R")


class DjangoApp(App):
    Task = DjangoTask

    def __init__(self, given: DjangoSettings) -> None:
        super().__init__(given.name, directory=given.directory, **given.of_app)
        self.discovery = DjangoDiscovery()
        self._send_on_commit = given.send_on_commit
        self.signals.task_prerun.connect(_before)
        self.signals.task_postrun.connect(_after)

    if TYPE_CHECKING:  # at run time `Task` above says it all

        @overload
        def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncDjangoTask[P, R]: ...
        @overload
        def task(self, function: Callable[P, R], /) -> DjangoTask[P, R]: ...
        @overload
        def task(
            self, function: None = None, /, *, bind: Literal[True], **options: Unpack[TaskKeywords]
        ) -> BoundDjangoTaskDecorator: ...
        @overload
        def task(
            self, function: None = None, /, *, bind: Literal[False] = False, **options: Unpack[TaskKeywords]
        ) -> DjangoTaskDecorator: ...
        def task(self, function: Any = None, /, *, bind: bool = False, **options: Any) -> Any: ...

    # -- sending ---------------------------------------------------------------------------------

    def send_on_commit(self, using: str = DEFAULT_DATABASE) -> AbstractContextManager[None]:
        """What is sent inside this block waits for the commit: chains and groups too."""
        return waiting_for(using)

    def send_at_once(self) -> AbstractContextManager[None]:
        """What is sent inside this block goes at once, whatever SEND_ON_COMMIT says."""
        return waiting_for(None)

    def outbox(self, connection: Any = None, *, using: str = DEFAULT_DATABASE) -> "Block":
        """As `App.outbox`; without a connection in that of the database `using`, inside `atomic()`.

        What is sent inside is written in the transaction itself, so it waits for nothing.
        """
        return super().outbox(connections[using] if connection is None else connection)

    def publish(self, prepared: Sequence[Prepared]) -> None:
        database = None if open_block(self) else waits_for(self._send_on_commit)
        if database is None:
            super().publish(prepared)
        else:
            on_commit(lambda: self.publish(prepared), database, _calls(prepared))

    async def apublish(self, prepared: Sequence[Prepared], ends: float) -> None:
        database = None if open_block(self) else await awaits_for(self._send_on_commit)
        if database is None:
            await super().apublish(prepared, ends)
        else:
            await aon_commit(lambda: self.publish(prepared), database, _calls(prepared))

    # A rollback could not give back the key of a unique task: it is taken when the call is sent.

    def send(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        known = self.tasks.get(name)
        if not is_unique(known.options if known else None, options):
            return super().send(name, args, kwargs, options)
        database = None if open_block(self) else waits_for(self._send_on_commit)
        if database is None:
            return super().send(name, args, kwargs, options)
        sending = _UniqueSend(self, unique_call(self, name, args, kwargs, options))
        on_commit(sending, database, [(name, sending.result.id)])
        return sending.result

    async def asend_unique(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        database = None if open_block(self) else await awaits_for(self._send_on_commit)
        if database is None:
            return await super().asend_unique(name, args, kwargs, options)
        make = partial(unique_call, self, name, args, kwargs, options)
        sending = _UniqueSend(self, await self.aprepare(make, self.send_ends()))
        await aon_commit(sending, database, [(name, sending.result.id)])
        return sending.result

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside this block tasks run in this process, at once, whatever SEND_ON_COMMIT says."""
        with self.send_at_once(), super().eager():
            yield

    # -- in a worker -----------------------------------------------------------------------------

    def before_children(self, node: str, *, forks: bool) -> None:
        if forks:
            leave_to_parent()

    def start_child(self, context: ChildContext) -> Runner:
        if context.is_process:
            leave_to_parent()
        return super().start_child(context)

    def stop_child(self) -> None:
        super().stop_child()
        close_all()


class _UniqueSend:
    """Sends a call on commit. Its result is then that of the call which waits already, if there is one."""

    def __init__(self, app: App, call: UniqueCall) -> None:
        self._app, self._call = app, call
        self.result = call.result

    def __call__(self) -> None:
        self.result.id = send_call(self._app, self._call).id


def _calls(prepared: Sequence[Prepared]) -> list[tuple[str, str]]:
    return [(one.task, one.task_id) for one in prepared]


def _before(task: DjangoTask[Any, Any], **_context: object) -> None:
    if _has_thread(task):
        before_task()


def _after(task: DjangoTask[Any, Any], **_context: object) -> None:
    if _has_thread(task):
        after_task()


def _has_thread(task: DjangoTask[Any, Any]) -> bool:
    """Whether this thread is the task's. Not in eager mode, and not where a loop runs coroutines."""
    request = current_request()
    return request is not None and not request.is_eager and not task.is_async
