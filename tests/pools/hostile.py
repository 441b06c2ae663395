"""What a task can do to its process and to the pool around it, as verbs for `host.py`."""

import os
import resource
import signal
from collections.abc import Callable
from typing import Any, NoReturn


class OddError(Exception):
    """Its repr is text that UTF-8 cannot say."""

    def __repr__(self) -> str:
        return "OddError(\udcff)"


class NoOrdinaryError(BaseException):
    pass


def _raise(error: BaseException) -> NoReturn:
    raise error


def _write(data: str) -> None:
    """To the socket that belongs to the child itself."""
    for fd in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            os.write(int(fd), bytes.fromhex(data))


def _lower(name: str) -> None:
    """Half of what it may use, as far as there is an end to that."""
    kind = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (2**40 if soft == resource.RLIM_INFINITY else soft // 2, hard))


def _ignore_signals() -> None:
    for signum in (signal.SIGURG, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "odd-error": lambda _: _raise(OddError()),
    "keyboard-interrupt": lambda _: _raise(KeyboardInterrupt()),
    "no-ordinary-error": lambda _: _raise(NoOrdinaryError("of no ordinary kind")),
    "write": _write,
    "lower": _lower,
    "ignore-signals": lambda _: _ignore_signals(),
}
