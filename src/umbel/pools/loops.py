"""Which event loop a process or a thread gets."""

import asyncio
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed; it is an extra, not a need."""
    if find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
