"""Testing: tools for the tests of a project. `plugin.py` has the fixtures, which pytest finds by itself.

Names are loaded when they are first used, because pytest imports the plugin in every environment that has
Umbel installed, also for projects that do not use it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.testing.bench import Clock
    from umbel.testing.inbox import Inbox, SentCall
    from umbel.testing.worker import EmbeddedWorker, embedded

_HOMES = {
    "embedded": "umbel.testing.worker",
    "Inbox": "umbel.testing.inbox",
    "SentCall": "umbel.testing.inbox",
    "Clock": "umbel.testing.bench",
    "EmbeddedWorker": "umbel.testing.worker",
}

__all__ = ["embedded", "Inbox", "SentCall", "Clock", "EmbeddedWorker"]


def _load(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'umbel.testing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


if not TYPE_CHECKING:  # a type checker must reject other names
    __getattr__ = _load
