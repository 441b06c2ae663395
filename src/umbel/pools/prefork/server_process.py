"""Starting a fork server: as a new program, or as a fork of the main process.

A new program shares nothing with the main process: no threads, locks or connections. It imports the app
itself.

A fork shares the memory pages of the interpreter, of Umbel and of the app with the main process, and nothing
is imported twice. This saves memory and half of a worker's start time. It is safe only at one moment: when
the app has been imported and there is no event loop, no thread and no connection yet. `ForkPoint` records the
open sockets before the import. If the import left a thread or a socket behind, it does not fork, and the
server is started as a new program. Every later server is a new program too: after a reload, and when a server
has died.

A forked server first drops what a new program would not have: the main process's signal handlers, log and
standard input, and inherited descriptors.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import msgspec

from umbel.files import opened
from umbel.pools.prefork import kernel
from umbel.pools.prefork.child_guard import split_from_guard
from umbel.pools.prefork.forkserver import ForkServer, ignore_signals
from umbel.pools.prefork.kernel import note_calls
from umbel.pools.prefork.messages import Setup

if TYPE_CHECKING:
    import subprocess

# ---- server process --------------------------------------------------------------------------------


class StartedServer(msgspec.Struct, frozen=True):
    """A running fork server, the setup it was started with, and the control socket to it."""

    setup: Setup
    control: socket.socket
    process: "subprocess.Popen[bytes] | ForkedProcess"  # the guard, if there is one

    def discard(self) -> None:
        """End a server that has no children yet; may be called twice."""
        self.control.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class ForkedProcess:
    """A process that this one forked, with the methods of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the return code of an ended process, otherwise None; does not wait."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the process and return its return code."""
        code = self._wait(0)
        assert code is not None, "a blocking wait returns a code"
        return code

    def kill(self) -> None:
        """Send SIGKILL if the process has not ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # other code has reaped it, or SIGCHLD is ignored
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def spawn_server(setup: Setup) -> StartedServer:
    """Start an interpreter that loads the app itself; raise OSError if the system refuses."""
    import subprocess  # imported here: children share this module and start no programs

    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "umbel.pools.prefork.child_guard", setup.node]
    try:
        with theirs:
            process = subprocess.Popen(
                [*command, msgspec.json.encode(setup).decode(), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # only the main process handles Ctrl-C in the terminal
            )
    except OSError:
        ours.close()
        raise
    return StartedServer(setup, ours, process)


# ---- the first fork server -------------------------------------------------------------------------

_STATUS_BROKEN = 70  # EX_SOFTWARE of sysexits.h
_STANDARD = {0, 1, 2}


class ForkPoint:
    """The state of the main process before the app is imported. Must be created before the import."""

    def __init__(self) -> None:
        note_calls()
        self._inherited = opened() - _STANDARD
        self._sockets = kernel.open_sockets()

    def can_fork(self, setup: Setup) -> bool:
        """Return whether a fork of this process is as safe as a server that has imported the app itself."""
        if setup.child_start == "spawn" or setup.green:  # gevent patches modules before the app is imported
            return False
        return kernel.thread_count() == 1 and kernel.open_sockets() <= self._sockets

    def fork(self, setup: Setup, forget: Callable[[], None]) -> StartedServer:
        """Fork the server. `forget` is called in it, to remove what belongs to the main process."""
        ours, theirs = socket.socketpair()
        gc.collect()
        gc.freeze()  # keeps the garbage collector from copying shared pages
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with _signals_held_back() as mask, theirs:
                pid = os.fork()
                if pid == 0:
                    gc.enable()  # the main process enables it when it has started
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
        os.setsid()  # only the main process handles Ctrl-C in the terminal
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
    """Block signals until the server has set its handlers; the main process gets them after the fork.

    Yields the previous mask.
    """
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield set(before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
