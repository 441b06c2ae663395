"""The first fork server: a fork of the main process, which has loaded the app and done nothing else yet.

The two then share the pages of the interpreter, of Umbel and of the app, and nothing is imported twice: this
saves memory and half of a worker's start. It is right only at one moment, when the app has been imported and
there is no event loop, no thread and no connection. `ForkPoint` knows what was open before the import; if the
import left a thread or a socket behind, it does not fork, and the server is started as a new program
(`server_process.py`). So is every later one: after a reload, and when a server has died.

What the server would not have as a new program is taken from it first: the main process's signal handlers,
its log, its standard input and the descriptors that whoever started it left open.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from umbel.pools.prefork import kernel
from umbel.pools.prefork.child_guard import split_from_guard
from umbel.pools.prefork.forkserver import ForkServer, ignore_signals
from umbel.pools.prefork.limits import note_calls
from umbel.pools.prefork.messages import Setup
from umbel.pools.prefork.server_process import ForkedProcess, StartedServer

_STATUS_BROKEN = 70  # EX_SOFTWARE of sysexits.h
_STANDARD = {0, 1, 2}


class ForkPoint:
    """To be made before the app is imported."""

    def __init__(self) -> None:
        note_calls()
        self._inherited = kernel.open_descriptors() - _STANDARD
        self._sockets = kernel.open_sockets()

    def can_fork(self, setup: Setup) -> bool:
        """Whether a fork of this process would be like a server that has imported the app itself."""
        if setup.child_start == "spawn" or setup.green:  # gevent patches before the app is imported
            return False
        return kernel.thread_count() == 1 and kernel.open_sockets() <= self._sockets

    def fork(self, setup: Setup, forget: Callable[[], None]) -> StartedServer:
        """`forget` is called in the server: undo there what belongs to the main process."""
        ours, theirs = socket.socketpair()
        gc.collect()
        gc.freeze()  # the collector then leaves pages alone that both share
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with _signals_held_back() as mask, theirs:
                pid = os.fork()
                if pid == 0:
                    gc.enable()  # who forked does so when it has started
                    strangers = self._inherited | {ours.detach()}
                    _be_server(setup, theirs.detach(), strangers, mask, forget)
        except OSError:
            ours.close()
            raise
        return StartedServer(setup, ours, ForkedProcess(pid))


def _be_server(
    setup: Setup, control: int, strangers: set[int], mask: set[int], forget: Callable[[], None]
) -> NoReturn:
    try:
        ignore_signals()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()  # only the main process handles Ctrl-C at the terminal
        for descriptor in strangers:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        split_from_guard(setup.node, control)
        forget()
        ForkServer(setup, socket.socket(fileno=control)).run()
    finally:
        if (error := sys.exc_info()[1]) is not None:
            traceback.print_exception(error)
        os._exit(_STATUS_BROKEN)  # never return into the stack of the main process


@contextlib.contextmanager
def _signals_held_back() -> Iterator[set[int]]:
    """Until the server has said what becomes of them; the main process gets them when it has forked.

    Gives the mask as it was.
    """
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield set(before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
