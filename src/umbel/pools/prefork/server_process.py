"""A fork server's process, and the main process's end of the control socket to it.

What is started here is a new program, so nothing of the main process (threads, locks, connections) is in it.
The other way, a fork of the main process, is in `first_server.py`.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Protocol

import msgspec

from umbel.pools.prefork.messages import Setup


class ServerProcess(Protocol):
    """What `subprocess.Popen` has, of the process that is the server's guard where there is one."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None:
        """The negative number of the signal that ended it; None until `poll` has seen its end."""
        ...

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class StartedServer(msgspec.Struct, frozen=True):
    setup: Setup
    control: socket.socket
    process: ServerProcess

    def discard(self) -> None:
        """End a server that has no children yet; nothing where that has happened already."""
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
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None, "it was waited for"
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # somebody else has taken its status, or it is not kept
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def spawn_server(setup: Setup) -> StartedServer:
    """Start an interpreter that loads the app itself."""
    import subprocess  # the children, who share this module, start none

    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "umbel.pools.prefork.child_guard", setup.node]
    try:
        with theirs:
            process = subprocess.Popen(
                [*command, msgspec.json.encode(setup).decode(), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # only the main process handles Ctrl-C at the terminal
            )
    except OSError:
        ours.close()
        raise
    return StartedServer(setup, ours, process)
