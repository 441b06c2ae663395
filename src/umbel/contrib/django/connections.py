"""Connections of Django around tasks: as fresh as around requests, and never those of another process.

Django keeps a connection for each thread and closes it at the end of a request, or after CONN_MAX_AGE. A
worker has no requests, so each task counts as one. A plain task runs in one thread, in every pool. A
coroutine reaches the database through threads: it gets one of its own, as a request under ASGI does, so that
the transactions of two never mix.

A forked process must not use, nor even close, what its parent had open: both would speak on one socket.
"""

import os
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core.cache import close_caches
from django.db import close_old_connections, connections, reset_queries

R = TypeVar("R")


def before_task() -> None:
    reset_queries()
    close_old_connections()


def after_task() -> None:
    if _threads_are_greenlets():
        close_all()  # this one ends with its task, and nobody would find its connections
    else:
        close_old_connections()
    close_caches()


async def in_own_thread(coroutine: Coroutine[Any, Any, R]) -> R:
    """Await it; what it asks of the database runs in a thread that ends with it, with its connections."""
    async with ThreadSensitiveContext():
        try:
            return await coroutine
        finally:
            await sync_to_async(_end_of_thread)()


def close_all() -> None:
    """What this thread has opened, and what Django's pools have."""
    for connection in connections.all(initialized_only=True):
        connection.close()
        close_pool = getattr(connection, "close_pool", None)  # PostgreSQL's, if OPTIONS ask for a pool
        if close_pool is not None:
            close_pool()


def open_now() -> set[str]:
    return {one.alias for one in connections.all(initialized_only=True) if one.connection is not None}


def close_opened_since(before: set[str]) -> None:
    for alias in open_now() - before:
        connections[alias].close()


def leave_to_parent() -> None:
    """In a forked process: forget what the process before it had open, and leave the sockets alone."""
    if os.getpid() == _PROCESS:
        close_all()
        return
    for alias in open_now():
        # Kept, because an object that nobody holds says goodbye to the server, on the parent's socket.
        _parents.append(connections[alias])
        del connections[alias]


def _end_of_thread() -> None:
    close_all()
    close_caches()


def _threads_are_greenlets() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


_PROCESS = os.getpid()  # that imported the project
_parents: list[Any] = []  # at most one for each database
