"""Which event loop a process or a thread gets: `worker_loop` of the settings.

`auto` is uvloop's where it is installed. It is an extra, not a need.
"""

import asyncio
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from umbel.errors import BadSetting
from umbel.pools.interface import LoopChoice


def loop_factory(choice: LoopChoice) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """None: asyncio's own."""
    is_installed = find_spec("uvloop") is not None
    if choice == "uvloop" and not is_installed:
        problem = "uvloop is not installed; run: pip install 'umbel[uvloop]'"
        raise BadSetting("worker_loop", choice, problem, source="the worker's settings")
    if choice == "asyncio" or not is_installed:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
