"""DjangoApp: the app of a Django project, with its settings, its tasks and their discovery.

Settings are the dict `UMBEL` in Django's settings. Their names are those of docs/settings.md, in lower case,
or in upper case as Django writes its settings. An unknown or invalid setting is refused when Django starts,
not when the first task is sent. Tasks are found in the module `tasks` of each installed app, after Django is
set up.
"""

import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import iscoroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

import django
from django.apps import apps
from django.conf import ENVIRONMENT_VARIABLE, settings
from django.db import connections

from umbel.app.app import App
from umbel.app.definition import Discovery, TaskDecorator
from umbel.app.options import SendOptions, TaskKeywords
from umbel.app.request import current_request
from umbel.app.results import AsyncResult
from umbel.app.sending.preparation import Prepared
from umbel.app.sending.publication import UniqueCall, unique_call
from umbel.app.settings import Settings, with_others
from umbel.app.task import AsyncTask, Task
from umbel.contrib.django.connections import (
    after_task,
    aon_commit,
    awaits_for,
    before_task,
    close_all,
    close_opened_since,
    in_own_thread,
    leave_to_parent,
    on_commit,
    open_now,
    waiting_for,
    waits_for,
)
from umbel.errors import BadSetting, ConfigurationError, UnknownSetting
from umbel.outbox import open_block
from umbel.pools.interface import ChildContext, Runner

if TYPE_CHECKING:
    from umbel.app.definition import BoundTaskDecorator
    from umbel.outbox.block import Block


# ---- settings --------------------------------------------------------------------------------------

DEFAULT_DATABASE = "default"
SEND_ON_COMMIT = "send_on_commit"
SOURCE = "UMBEL of Django's settings"
_KNOWN = (*Settings.__struct_fields__, SEND_ON_COMMIT)


@dataclass(frozen=True, slots=True)
class DjangoSettings:
    """The settings of the app. With `send_on_commit`, sends wait for the transactions of that database."""

    name: str
    directory: Path | None
    send_on_commit: str | None
    of_app: Mapping[str, Any]


def read_settings() -> DjangoSettings:
    """The settings of the project's app; ConfigurationError if Django has none, or one of them is invalid."""
    if not settings.configured and not os.environ.get(ENVIRONMENT_VARIABLE):
        raise ConfigurationError(
            "umbel.contrib.django finds no settings of Django: run `python manage.py umbel ...`, "
            f"or set {ENVIRONMENT_VARIABLE}"
        )
    module = getattr(settings, "SETTINGS_MODULE", None) or "django"
    given = _named(getattr(settings, "UMBEL", {}))
    return DjangoSettings(
        name=module.partition(".")[0],
        directory=_directory(getattr(settings, "BASE_DIR", None)),
        send_on_commit=_database(given.pop(SEND_ON_COMMIT, False)),
        of_app=given,
    )


def _named(given: object) -> dict[str, Any]:
    """The validated settings, by the names that an app uses."""
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            # Not its value, which may hold a password.
            f'{SOURCE} is of type {type(given).__name__}: it must be a dict, such as {{"BROKER": "redis://..."}}'
        )
    named: dict[str, Any] = {}
    for written, value in given.items():
        name = str(written).lower()
        if name not in _KNOWN:
            raise UnknownSetting(
                written,
                [known.upper() if str(written).isupper() else known for known in _KNOWN],
                source=SOURCE,
            )
        if name in named:
            raise ConfigurationError(f"{SOURCE} has {name!r} twice, in upper and lower case; keep one")
        named[name] = value
    with_others(
        Settings(), {name: value for name, value in named.items() if name != SEND_ON_COMMIT}, source=SOURCE
    )
    return named


def _database(asked: object) -> str | None:
    if asked is False or asked is None:
        return None
    database = DEFAULT_DATABASE if asked is True else asked
    if isinstance(database, str) and database in settings.DATABASES:
        return database
    known = ", ".join(map(repr, settings.DATABASES))
    raise BadSetting(
        "SEND_ON_COMMIT", asked, f"it must be True, False or one of DATABASES: {known}", source=SOURCE
    )


def _directory(base: object) -> Path | None:
    """The project's folder. The embedded broker `umbel.db` is there, wherever a process is started."""
    return Path(base) if isinstance(base, str | Path) and Path(base).is_dir() else None


# ---- tasks -----------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")


class DjangoTask(Task[P, R]):
    """A task of a Django project. It can be sent on commit, and a coroutine gets separate connections."""

    def __init__(self, *definition: Any) -> None:
        super().__init__(*definition)
        self.entry = self._with_own_thread(self.entry)

    def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send the call once the surrounding transaction is committed; at once if there is none."""
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        using: str = DEFAULT_DATABASE,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[R]:
        """As `delay_on_commit`, with options; `using` names the database, as in `transaction.on_commit`."""
        with waiting_for(using):
            return self.apply_async(args, kwargs, **options)

    def _with_own_thread(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def entry(*args: Any, **kwargs: Any) -> Any:
            value = run(*args, **kwargs)
            # In eager mode the connections belong to the caller, which still runs.
            return in_own_thread(value) if iscoroutine(value) and not self.request.is_eager else value

        return entry


class AsyncDjangoTask(AsyncTask[P, R], DjangoTask[P, R]):
    """A DjangoTask whose function is an `async def`."""


if TYPE_CHECKING:

    class DjangoTaskDecorator(TaskDecorator):
        """The decorator that `@app.task(...)` returns."""

        @overload
        def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncDjangoTask[P, R]: ...
        @overload
        def __call__(self, function: Callable[P, R], /) -> DjangoTask[P, R]: ...
        def __call__(self, function: Any, /) -> Any:
            """Register the function as a task."""

    class BoundDjangoTaskDecorator(BoundTaskDecorator):
        """The decorator of `@app.task(bind=True)`: callers do not see the function's first parameter."""

        @overload
        def __call__(
            self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
        ) -> AsyncDjangoTask[P, R]: ...
        @overload
        def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> DjangoTask[P, R]: ...
        def __call__(self, function: Any, /) -> Any:
            """Register the function as a task."""


class DjangoDiscovery(Discovery):
    """Imports the module `tasks` of each installed app, after Django is set up."""

    def __init__(self) -> None:
        super().__init__()
        self.add(_installed, "tasks")

    def run(self) -> None:
        """Import the modules, and close the connections that they open: a worker forks its children later."""
        before = open_now()
        super().run()
        close_opened_since(before)


def _installed() -> Iterable[str]:
    if not apps.ready:  # with `umbel worker -A umbel.contrib.django`; manage.py sets Django up itself
        django.setup()
    _enable_log()
    return [config.name for config in apps.get_app_configs()]


def _enable_log() -> None:
    """Enable Umbel's loggers again: by default, LOGGING of a project disables loggers that it does not
    name.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "umbel":
            logging.getLogger(name).disabled = False


# ---- app -------------------------------------------------------------------------------------------


class DjangoApp(App):
    """An App with the settings, transactions and connections of a Django project."""

    Task = DjangoTask

    def __init__(self, given: DjangoSettings) -> None:
        super().__init__(given.name, directory=given.directory, **given.of_app)
        self.discovery = DjangoDiscovery()
        self._send_on_commit = given.send_on_commit
        self.signals.task_prerun.connect(_before)
        self.signals.task_postrun.connect(_after)

    if TYPE_CHECKING:  # at run time `Task` above is enough

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
        def task(self, function: Any = None, /, *, bind: bool = False, **options: Any) -> Any:
            """As `App.task`; the tasks are DjangoTasks."""

    # -- sending ---------------------------------------------------------------------------------

    def send_on_commit(self, using: str = DEFAULT_DATABASE) -> AbstractContextManager[None]:
        """Send all calls of this block on commit, including chains and groups."""
        return waiting_for(using)

    def send_at_once(self) -> AbstractContextManager[None]:
        """Send all calls of this block at once, whatever SEND_ON_COMMIT says."""
        return waiting_for(None)

    def outbox(self, connection: Any = None, *, using: str = DEFAULT_DATABASE) -> "Block":
        """As `App.outbox`, with the connection of the database `using` if none is given, inside `atomic()`.

        Messages are written in the transaction itself, so they do not wait for the commit.
        """
        return super().outbox(connections[using] if connection is None else connection)

    def publish(self, batch: Sequence[Prepared]) -> None:
        """Publish prepared calls, on commit if the settings or a surrounding block ask for it."""
        database = None if open_block(self) else waits_for(self._send_on_commit)
        if database is None:
            super().publish(batch)
        else:
            on_commit(lambda: self.publish(batch), database, batch)

    async def apublish(self, batch: Sequence[Prepared], deadline: float) -> None:
        """As `publish`, in async code."""
        database = None if open_block(self) else await awaits_for(self._send_on_commit)
        if database is None:
            await super().apublish(batch, deadline)
        else:
            await aon_commit(lambda: self.publish(batch), database, batch)

    def send_unique(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """Send a unique call. Its key is also taken on commit, because a rollback could not release it."""
        database = None if open_block(self) else waits_for(self._send_on_commit)
        if database is None:
            return super().send_unique(name, args, kwargs, options)
        sending = _UniqueSend(unique_call(self, name, args, kwargs, options))
        on_commit(sending, database, [sending.call.prepared])
        return sending.result

    async def asend_unique(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        """As `send_unique`, in async code."""
        database = None if open_block(self) else await awaits_for(self._send_on_commit)
        if database is None:
            return await super().asend_unique(name, args, kwargs, options)
        make = partial(unique_call, self, name, args, kwargs, options)
        sending = _UniqueSend(await self.clients.prepare(make, self.send_deadline()))
        await aon_commit(sending, database, [sending.call.prepared])
        return sending.result

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run the tasks of this block in this process, at once, whatever SEND_ON_COMMIT says."""
        with self.send_at_once(), super().eager():
            yield

    # -- in a worker -----------------------------------------------------------------------------

    def before_children(self, node: str, *, forks: bool) -> None:
        """In the fork server, forget the connections that were opened while the project was loaded."""
        if forks:
            leave_to_parent()

    def start_child(self, context: ChildContext) -> Runner:
        """Forget inherited connections, then start the child as any app does."""
        if context.is_process:
            leave_to_parent()
        return super().start_child(context)

    def stop_child(self) -> None:
        """Stop the child as any app does, then close its connections."""
        super().stop_child()
        close_all()


class _UniqueSend:
    """Sends a unique call on commit. If the key is taken by then, the result is that of the key's holder."""

    def __init__(self, call: UniqueCall) -> None:
        self.call = call
        self.result = call.prepared.result(call.app)

    def __call__(self) -> None:
        self.result.id = self.call.send().id


def _before(task: DjangoTask[Any, Any], **_context: object) -> None:
    if _has_thread(task):
        before_task()


def _after(task: DjangoTask[Any, Any], **_context: object) -> None:
    if _has_thread(task):
        after_task()


def _has_thread(task: DjangoTask[Any, Any]) -> bool:
    """Whether this thread runs only this task: not in eager mode, and not for coroutines on a loop."""
    request = current_request()
    return request is not None and not request.is_eager and not task.is_async
