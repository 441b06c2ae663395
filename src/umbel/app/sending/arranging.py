"""Arranging: what the result backend must know before the messages of a canvas are sent.

A chord is announced to the backend while its messages are made. Blocking code does that on the spot; async
code collects the steps and has them done off the loop, before it publishes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from umbel.app.results import StoringApp
from umbel.backends.interface import Backend

Step = Callable[[Backend], None]
_later: ContextVar[list[Step] | None] = ContextVar("umbel_arranged_later", default=None)


def arrange(app: StoringApp, step: Step) -> None:
    later = _later.get()
    if later is None:
        step(app.backend)
    else:
        later.append(step)


@contextmanager
def arranged_later() -> Iterator[list[Step]]:
    """The steps of what is prepared in this block, which are not done yet."""
    steps: list[Step] = []
    token = _later.set(steps)
    try:
        yield steps
    finally:
        _later.reset(token)
