"""Sending on commit: whether a message waits until the database transaction that surrounds its call is done.

The message is made where it is sent, so that wrong arguments are refused there, it carries what they are at
that moment, and the caller has the task's id. Only handing it to the broker waits; after a rollback nobody
does that. Django says when: a rollback to a savepoint drops what was sent since, and what is sent outside a
transaction goes at once.

Where it stops being right: a process that dies between the commit and the send loses the message, and so
does an unavailable broker. Then all others are tried, each that is lost is logged, and the first error is
raised where the transaction ends. Where that must not be, the message has to be written in
the transaction itself, into an outbox.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from umbel.text import one_line

# The database that a block of code named; None: what it sends goes at once. "": as the settings say.
_asked: ContextVar[str | None] = ContextVar("umbel_send_on_commit", default="")
# Errors of the sends of the commit that is being done here.
_failed: ContextVar[list[Exception] | None] = ContextVar("umbel_failed_on_commit", default=None)
Call = tuple[str, str]  # name and id of a task
log = logging.getLogger("umbel.publishing")


@contextmanager
def waiting_for(database: str | None) -> Iterator[None]:
    token = _asked.set(database)
    try:
        yield
    finally:
        _asked.reset(token)


def waits_for(configured: str | None) -> str | None:
    """The database whose transaction a send waits for here and now; None: it goes at once."""
    database = _database(configured)
    return database if database is not None and _in_transaction(database) else None


async def awaits_for(configured: str | None) -> str | None:
    """The same in async code, whose transactions are in the thread that Django has for it."""
    return None if _database(configured) is None else await sync_to_async(waits_for)(configured)


def on_commit(send: Callable[[], object], database: str, calls: Sequence[Call]) -> None:
    """`calls`: what is lost if that fails."""

    def send_now() -> None:
        try:
            with waiting_for(None):
                send()
        except Exception as error:
            for task, task_id in calls:
                # All in the text: the format of the site's log is not ours.
                said = f"the transaction is committed, but its task {task} ({task_id}) was not sent: {error}"
                log.error(one_line(said))
            if (failed := _failed.get()) is None:  # not by a commit: a test runs what would wait for it
                raise
            failed.append(error)

    transaction.on_commit(send_now, using=database)
    _raise_after_all(connections[database])


async def aon_commit(send: Callable[[], object], database: str, calls: Sequence[Call]) -> None:
    await sync_to_async(on_commit)(send, database, calls)


def _raise_after_all(connection: BaseDatabaseWrapper) -> None:
    """Let the first failed send raise after all that waits for the commit has run, others' hooks too.

    Django stops at the first hook that raises, and has nothing that runs after all of them; so the method
    that runs them is wrapped, on this connection.
    """
    run_all = connection.run_and_clear_commit_hooks
    if isinstance(run_all, _RunAll):
        return
    connection.run_and_clear_commit_hooks = _RunAll(run_all)


@dataclass(frozen=True, slots=True)
class _RunAll:
    run: Callable[[], None]

    def __call__(self) -> None:
        failed: list[Exception] = []
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
