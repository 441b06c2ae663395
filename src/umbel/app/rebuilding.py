"""Rebuilding: an exception as its task raised it, from what its result says."""

import sys
from typing import Any

from umbel.app.types.call_types import ResultTypes
from umbel.errors import RemoteError
from umbel.pools.guard import Returned, call_guarded
from umbel.protocol.delivery.states import SUCCESS
from umbel.wire.result import CELERY_ERRORS, ResultMap

_OURS = {described: kind for kind, described in CELERY_ERRORS.items()}


_WITH_EXCEPTION = frozenset({"FAILURE", "RETRY", "REVOKED"})


def shown_result(found: ResultMap | None, types: ResultTypes | None) -> Any:
    """What a result holds: the return value, the exception, or what `update_state` stored."""
    if found is None:
        return None
    if found.status in _WITH_EXCEPTION:
        return rebuild_exception(found.result)
    return found.result if types is None or found.status != SUCCESS else types.parse_result(found.result)


def rebuild_exception(described: Any) -> Exception:
    """The exception a worker described; a stand-in when its class is not known in this process.

    Only classes of modules that are already imported are used: a result is data, and data
    must not make this process import code.
    """
    if not isinstance(described, dict) or "exc_type" not in described:
        return RemoteError(
            "the task failed, but its stored error cannot be read; see the log of the worker that ran it",
            described,
        )
    name = str(described["exc_type"])
    message = described.get("exc_message") or []
    args = tuple(message) if isinstance(message, list | tuple) else (message,)
    found = _find_class(str(described.get("exc_module")), name)
    if found is None:
        return RemoteError(name, *args)
    made = call_guarded(found, *args)  # its constructor may want other arguments
    if isinstance(made, Returned) and isinstance(made.value, Exception):
        return made.value
    return RemoteError(name, *args)


def _find_class(module: str, name: str) -> type[Exception] | None:
    ours = _OURS.get((module, name))
    if ours is not None:
        module, name = ours.__module__, ours.__qualname__
    found: object = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr: a module may import on access, as our own does.
        found = getattr(found, "__dict__", {}).get(part)
    # SystemExit and its like would end the process that asks for a result.
    return found if isinstance(found, type) and issubclass(found, Exception) else None
