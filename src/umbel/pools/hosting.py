"""Find the app by its HostSpec, and say in one line why it cannot be loaded."""

import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import cast

from umbel.errors import SoftTimeLimitExceeded, WorkerStopping
from umbel.pools.interface import Host, HostSpec, LimitedHost, PreparedHost
from umbel.text import leaving

_LINE_MAX_CHARS = 2000
_OUR_OWN = str(Path(__file__).parent)


def load_host(spec: HostSpec, node: str, *, forks: bool) -> Host:
    """The app, ready for children. Runs what the user wrote, so it may raise anything; call it guarded."""
    for entry in reversed(spec.search_path):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    module, _, name = spec.loader.partition(":")
    loader = getattr(import_module(module), name)
    host = cast(Host, loader(spec.target))
    if isinstance(host, PreparedHost):
        host.before_children(node, forks=forks)
    return host


def soft_limit_of(host: Host) -> type[Exception]:
    """What a soft limit raises in its tasks."""
    return host.soft_limit_error if isinstance(host, LimitedHost) else SoftTimeLimitExceeded


def soft_limit_reached(kind: type[Exception]) -> Exception:
    return kind("soft time limit exceeded") if kind is SoftTimeLimitExceeded else kind()


def worker_stops() -> Exception:
    return WorkerStopping("the worker is shutting down; the task returns to its queue")


def in_one_line(error: BaseException) -> str:
    """The last line of the traceback, and where in the user's code it arose; short."""
    line = _in_one_line(error)
    if len(line) > _LINE_MAX_CHARS:
        line = f"{line[:_LINE_MAX_CHARS]}... ({len(line) - _LINE_MAX_CHARS} characters left out)"
    return leaving(line)


def _in_one_line(error: BaseException) -> str:
    what = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{what} ({error.filename}, line {error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", _OUR_OWN)) and "importlib" not in frame.filename
    ]
    return f"{what} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else what
