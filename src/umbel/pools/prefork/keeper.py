"""The keeper: parent of the fork server, which outlives it and leaves none of its descendants behind.

A process that a task started in a session of its own belongs, when its parents die, to the nearest
ancestor that adopts orphans. That is the fork server; but it can be killed too, alone or together
with the main process. Then the orphans come to the keeper, which kills them and ends as the fork
server did, so that the main process learns how that was. It does nothing else, and parts from the
fork server before that has imported anything, so it costs little memory.

It stops being right if main process, fork server and keeper are killed in one moment.
"""

import contextlib
import os
import select
import signal
import sys
import time
from typing import NoReturn

from setproctitle import setproctitle

from umbel.pools.prefork import kernel

_PATIENCE_S = 3.0  # for the fork server to end by itself when the main process has
_CLEAN_UP_S = 10.0  # a process in an uninterruptible wait can survive SIGKILL for a while
_CLEAN_UP_STEP_S = 0.005


def part_from_keeper(node: str, control: int) -> None:
    """Return in a new process, the fork server to be; the one that called this stays as its keeper."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return  # there is nobody who adopts orphans, so there is nothing to keep
    keeper = os.getpid()
    server = os.fork()
    if server:
        _keep(node, server, control)
    os.setsid()  # as if it had been started by the main process
    kernel.die_with_parent()
    if os.getppid() != keeper:
        os._exit(1)


def kill_descendants() -> None:
    """Orphans come to us as their parents die, until none is left. For a process that adopts them."""
    give_up_at = time.monotonic() + _CLEAN_UP_S
    while time.monotonic() < give_up_at:
        for pid in kernel.children_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_CLEAN_UP_STEP_S)


def _keep(node: str, server: int, control: int) -> NoReturn:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    setproctitle(f"umbel: {node} keeper")
    kernel.adopt_orphans()
    status = _await_end(server, control)
    kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _await_end(server: int, control: int) -> int:
    """How the fork server ended; it is ended if the main process is gone and it does not notice."""
    ended = os.pidfd_open(server)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, 0)  # nothing is read here: only that the other end is closed shows
    if all(descriptor != ended for descriptor, _ in poll.poll()):
        poll.unregister(control)
        if not poll.poll(_PATIENCE_S * 1000):
            os.kill(server, signal.SIGKILL)
    return os.waitpid(server, 0)[1]


def main(node: str, setup: str, control: str) -> NoReturn:
    os.set_inheritable(int(control), False)
    part_from_keeper(node, int(control))
    from umbel.pools.prefork.forkserver import serve  # only now: the keeper needs nothing of it

    serve(setup, int(control))


if __name__ == "__main__":
    main(*sys.argv[1:])
