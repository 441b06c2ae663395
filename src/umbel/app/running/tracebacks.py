"""Tracebacks: how a task failed, as text that is short enough to store and send.

The frames above a task's own say nothing to its author: ours, and those of the loop that awaits it,
are left out, also in the errors that caused it. Of a text that is too long the end is kept, because
there the error stands. What is secret is struck out before anything is cut, so that no half of it stays.
"""

import contextlib
from pathlib import Path
from traceback import StackSummary, TracebackException

from umbel.pools.guard import Returned, call_guarded
from umbel.protocol.delivery.sensitive import Secrets

CUT = "…"
CHAIN_MAX = 20
UNWRITTEN = "(its traceback cannot be written)\n"


def traceback_text(error: BaseException, *, max_bytes: int, secrets: Secrets | None = None) -> str:
    written = call_guarded(_written, error)
    text = written.value if isinstance(written, Returned) else f"{type(error).__name__} {UNWRITTEN}"
    if secrets:
        text = secrets.strike(text)
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    return CUT + data[len(CUT.encode()) - max_bytes :].decode("utf-8", "ignore")


def _written(error: BaseException) -> str:
    """May raise anything: it reads what users' classes say, and source from their loaders."""
    found = TracebackException.from_exception(error)
    _without_ours(found, CHAIN_MAX)
    return "".join(found.format())


def _without_ours(found: TracebackException | None, left: int) -> None:
    """Each of a chain of errors begins at the first frame that is not ours; if all are, at the last."""
    if found is None or not left:
        return
    frames = list(found.stack)
    while len(frames) > 1 and frames[0].filename.startswith(_OURS):
        del frames[0]
    found.stack = StackSummary.from_list(frames)
    _without_ours(found.__cause__, left - 1)
    _without_ours(found.__context__, left - 1)
    for one in getattr(found, "exceptions", None) or ():
        _without_ours(one, left - 1)


_LIBRARY = Path(contextlib.__file__).parent  # not by importing them: few children need asyncio
_OURS = (
    f"{Path(__file__).parents[2]}/",
    f"{_LIBRARY}/asyncio/",
    f"{_LIBRARY}/concurrent/",
    contextlib.__file__,
    "<frozen ",
)
