"""Django's database connections around tasks, and sending on commit.

Django has a connection for each thread and closes it at the end of a request, or after CONN_MAX_AGE. A worker
has no requests, so each task counts as one. A plain task runs in one thread, in every pool. A coroutine uses
the database through threads: it gets a separate thread, as a request under ASGI does, so that the
transactions of two tasks never mix. A forked process must neither use nor close the connections of its
parent: both would write to one socket.

A message that is sent on commit waits until the database transaction around the call is committed. The
message is made at the call, so invalid arguments are refused there, the message has the arguments of that
moment, and the caller has the task's id. Only the publishing waits; after a rollback it never happens. Django
decides when: a rollback to a savepoint drops the messages sent since the savepoint, and outside a transaction
a message is sent at once.

Limit: if the process dies between the commit and the send, or the broker is unavailable, the message is lost.
All other messages are still sent, each lost one is logged, and the first error is raised where the
transaction ends. If no message may be lost, use an outbox, which writes messages in the transaction itself.
"""

import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core.cache import close_caches
from django.db import close_old_connections, connections, reset_queries, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from umbel.app.sending.preparation import Prepared
from umbel.pools.guard import Raised, call_guarded
from umbel.text import one_line

# ---- connections around tasks ----------------------------------------------------------------------

R = TypeVar("R")


def before_task() -> None:
    """Prepare this thread's connections, as Django does before a request."""
    reset_queries()
    close_old_connections()


def after_task() -> None:
    """Close expired connections, as Django does after a request; in gevent children close all."""
    if _threads_are_greenlets():
        close_all()  # the greenlet ends with its task, and nothing else would close its connections
    else:
        close_old_connections()
    close_caches()


async def in_own_thread(coroutine: Coroutine[Any, Any, R]) -> R:
    """Await the coroutine; its database calls run in a thread that ends with it, as do its connections."""
    async with ThreadSensitiveContext():
        try:
            return await coroutine
        finally:
            await sync_to_async(_end_of_thread)()


def close_all() -> None:
    """Close the connections of this thread, and Django's connection pools."""
    for connection in connections.all(initialized_only=True):
        connection.close()
        close_pool = getattr(connection, "close_pool", None)  # PostgreSQL's, if OPTIONS ask for a pool
        if close_pool is not None:
            close_pool()


def open_now() -> set[str]:
    """The aliases of the connections that this thread has open."""
    return {
        connection.alias
        for connection in connections.all(initialized_only=True)
        if connection.connection is not None
    }


def close_opened_since(before: set[str]) -> None:
    """Close the connections that were opened after `open_now` returned `before`."""
    for alias in open_now() - before:
        connections[alias].close()


def leave_to_parent() -> None:
    """In a forked process: forget the connections of the parent without closing their sockets."""
    if os.getpid() == _PROCESS:
        close_all()
        return
    for alias in open_now():
        # Referenced here, because a garbage-collected connection would end the parent's session on its
        # socket.
        _parents.append(connections[alias])
        del connections[alias]


def _end_of_thread() -> None:
    close_all()
    close_caches()


def _threads_are_greenlets() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


_PROCESS = os.getpid()  # the process that imported the project
_parents: list[Any] = []  # the parent's connections: at most one for each database


# ---- sending on commit -----------------------------------------------------------------------------

# The database that a surrounding block names. None: send at once. "": follow the settings.
_asked: ContextVar[str | None] = ContextVar("umbel_send_on_commit", default="")
# Errors of the sends of the commit that runs in this context.
_failed: ContextVar[list[BaseException] | None] = ContextVar("umbel_failed_on_commit", default=None)
log = logging.getLogger("umbel.publishing")


@contextmanager
def waiting_for(database: str | None) -> Iterator[None]:
    """Inside this block sends wait for the transactions of this database; None: they do not wait."""
    token = _asked.set(database)
    try:
        yield
    finally:
        _asked.reset(token)


def waits_for(configured: str | None) -> str | None:
    """The database whose open transaction a send waits for; None: it is sent at once."""
    database = _database(configured)
    return database if database is not None and _in_transaction(database) else None


async def awaits_for(configured: str | None) -> str | None:
    """As `waits_for` in async code, whose transactions are in Django's thread for async code."""
    return None if _database(configured) is None else await sync_to_async(waits_for)(configured)


def on_commit(send: Callable[[], object], database: str, batch: Sequence[Prepared]) -> None:
    """Call `send` once the transaction is committed. `batch`: the calls that are lost if that fails."""

    def send_now() -> None:
        with waiting_for(None):
            done = call_guarded(send)
        if isinstance(done, Raised):
            _not_sent(batch, done.error)

    transaction.on_commit(send_now, using=database)
    _raise_after_all(connections[database])


async def aon_commit(send: Callable[[], object], database: str, batch: Sequence[Prepared]) -> None:
    """As `on_commit`, in async code."""
    await sync_to_async(on_commit)(send, database, batch)


def _not_sent(batch: Sequence[Prepared], error: BaseException) -> None:
    for prepared in batch:
        # The facts are in the text, because the site's log format may not show fields.
        task = f"{prepared.task} ({prepared.task_id})"
        text = f"the transaction is committed, but its task {task} was not sent: {error}"
        log.error(one_line(text))
    failed = _failed.get()
    if failed is None:  # not in a commit: a test runs the hooks itself
        raise error
    failed.append(error)


def _raise_after_all(connection: BaseDatabaseWrapper) -> None:
    """Raise the error of the first failed send after all hooks of the commit have run.

    Django stops at the first hook that raises, and offers nothing that runs after the last hook. So the
    method of the connection that runs the hooks is wrapped.
    """
    run_all = connection.run_and_clear_commit_hooks
    if isinstance(run_all, _RunAll):
        return
    connection.run_and_clear_commit_hooks = _RunAll(run_all)


@dataclass(frozen=True, slots=True)
class _RunAll:
    run: Callable[[], None]

    def __call__(self) -> None:
        failed: list[BaseException] = []
        token = _failed.set(failed)
        try:
            self.run()
        finally:
            _failed.reset(token)
        if failed:
            raise failed[0]


def _database(configured: str | None) -> str | None:
    asked = _asked.get()
    return configured if asked == "" else asked


def _in_transaction(database: str) -> bool:
    connection = connections[database]
    # A connection that is not open has no transaction, and asking Django would open it.
    is_open = connection.connection is not None
    return connection.in_atomic_block or (is_open and not connection.autocommit)
