"""Umbel: a distributed task queue whose workers know one another.

The public API is what this module exports; everything else is internal. Names are loaded when they are first
used. Loading everything would slow down short commands such as `umbel health`.
"""

from typing import TYPE_CHECKING, Any

from umbel import version

__version__ = version.VERSION

if TYPE_CHECKING:
    from umbel import errors
    from umbel.app.app import App
    from umbel.app.canvas.chain import chain
    from umbel.app.canvas.group import chord, group
    from umbel.app.canvas.signature import Signature, StampingVisitor
    from umbel.app.results import AsyncResult, GroupResult
    from umbel.app.task import Task
    from umbel.coordination.election_context import ElectionContext
    from umbel.errors import Ignore, Reject, Retry
    from umbel.protocol.delivery.limits import Concurrency, Rate

_HOMES = {
    "App": "umbel.app.app",
    "Task": "umbel.app.task",
    "Signature": "umbel.app.canvas.signature",
    "StampingVisitor": "umbel.app.canvas.signature",
    "chain": "umbel.app.canvas.chain",
    "group": "umbel.app.canvas.group",
    "chord": "umbel.app.canvas.group",
    "AsyncResult": "umbel.app.results",
    "GroupResult": "umbel.app.results",
    "ElectionContext": "umbel.coordination.election_context",
    "Rate": "umbel.protocol.delivery.limits",
    "Concurrency": "umbel.protocol.delivery.limits",
    "Ignore": "umbel.errors",
    "Reject": "umbel.errors",
    "Retry": "umbel.errors",
}

__all__ = [
    "App",
    "Task",
    "Signature",
    "chain",
    "group",
    "chord",
    "AsyncResult",
    "GroupResult",
    "StampingVisitor",
    "ElectionContext",
    "Rate",
    "Concurrency",
    "Ignore",
    "Reject",
    "Retry",
    "errors",
    "__version__",
]


def _load(name: str) -> Any:
    from importlib import import_module

    if name == "errors":
        return import_module("umbel.errors")
    if name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'umbel' has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers report names that are not listed above
    __getattr__ = _load
