"""The child guard: parent of the fork server, which outlives it and leaves none of its descendants behind.

A process that a task started in a new session belongs, when its parents die, to the nearest ancestor that
adopts orphans. That is the fork server. But it can be killed too, alone or together with the main process.
Then the orphans come to the guard, which kills them and exits with the status of the fork server, so that the
main process learns it. The guard does nothing else. It splits from the fork server before anything else is
imported, and continues as a small script (`child_guard_script.py`): a process that adopts orphans still does
so after it has executed another program.

It stops being right if main process, fork server and guard are killed at the same moment.
"""

import os
import signal
import sys
from typing import NoReturn

from umbel.pools.prefork import child_guard_script, kernel


def split_from_guard(node: str, control: int) -> None:
    """Return in a new process, the future fork server; the calling process stays as its guard."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return  # no process adopts orphans here, so a guard could do nothing
    guard = os.getpid()
    kernel.adopt_orphans()
    server = os.fork()
    if server:
        _keep(node, server, control)
    os.setsid()  # as if it had been started by the main process
    kernel.die_with_parent()
    if os.getppid() != guard:
        os._exit(1)


def _keep(node: str, server: int, control: int) -> NoReturn:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # still ignored after exec
    os.set_inheritable(control, True)
    arguments = [
        str(server),
        str(control),
        f"child guard of {node}",
    ]  # the last is shown in process listings
    os.execv(sys.executable, [sys.executable, "-I", "-S", child_guard_script.__file__, *arguments])


def main(node: str, setup: str, control: str) -> NoReturn:
    """Split from the guard and run the fork server; `setup` is JSON, `control` the number of its socket."""
    os.set_inheritable(int(control), False)
    split_from_guard(node, int(control))
    from umbel.pools.prefork.forkserver import serve  # imported here, after the guard has split off

    serve(setup, int(control))


if __name__ == "__main__":
    main(*sys.argv[1:])
