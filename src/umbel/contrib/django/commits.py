"""Sending on commit: whether a message waits until the database transaction that surrounds its call is done.

The message is made where it is sent, so that wrong arguments are refused there, it carries what they are at
that moment, and the caller has the task's id. Only handing it to the broker waits; after a rollback nobody
does that. Django says when: a rollback to a savepoint drops what was sent since, and what is sent outside a
transaction goes at once.

Where it stops being right: a process that dies between the commit and the send loses the message, and an
unavailable broker raises its error after the commit. Where that must not be, the message has to be written in
the transaction itself, into an outbox.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from asgiref.sync import sync_to_async
from django.db import connections, transaction

# The database that a block of code named; None: what it sends goes at once. "": as the settings say.
_asked: ContextVar[str | None] = ContextVar("umbel_send_on_commit", default="")


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


def on_commit(send: Callable[[], object], database: str) -> None:
    def send_now() -> None:
        with waiting_for(None):
            send()

    transaction.on_commit(send_now, using=database)


async def aon_commit(send: Callable[[], object], database: str) -> None:
    await sync_to_async(on_commit)(send, database)


def _database(configured: str | None) -> str | None:
    asked = _asked.get()
    return configured if asked == "" else asked


def _in_transaction(database: str) -> bool:
    connection = connections[database]
    # A connection that is not open has no transaction, and asking Django would open it.
    is_open = connection.connection is not None
    return connection.in_atomic_block or (is_open and not connection.autocommit)
