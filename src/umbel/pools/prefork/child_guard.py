"""The child guard: the parent of the fork server, which outlives it and kills its remaining descendants.

When the parents of a process die, the process belongs to the nearest ancestor that adopts orphans, even if a
task started it in a new session. That is the fork server. But the fork server can be killed too, alone or
together with the main process. Then the guard adopts the orphans, kills them, and exits with the status of
the fork server, so that the main process learns it. The guard does nothing else.

The guard splits off before the fork server imports anything else, and continues as a small script
(`child_guard_script.py`): a process that adopts orphans still does so after exec.

Limit: orphans survive if the main process, the fork server and the guard are killed at the same moment.
"""

import os
import signal
import sys
from typing import NoReturn

from umbel.pools.prefork import child_guard_script, kernel


def split_from_guard(node: str, control: int) -> None:
    """Fork: return in the new process, which becomes the fork server; the calling process is its guard."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return  # without adoption of orphans, a guard could do nothing
    guard = os.getpid()
    kernel.adopt_orphans()
    server = os.fork()
    if server:
        _keep(node, server, control)
    os.setsid()  # as if the main process had started it
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
    ]  # the last argument is shown in process listings
    os.execv(sys.executable, [sys.executable, "-I", "-S", child_guard_script.__file__, *arguments])


def main(node: str, setup: str, control: str) -> NoReturn:
    """Split from the guard and run the fork server; `setup` is JSON, `control` a socket descriptor."""
    os.set_inheritable(int(control), False)
    split_from_guard(node, int(control))
    from umbel.pools.prefork.forkserver import serve  # imported here, after the guard has split off

    serve(setup, int(control))


if __name__ == "__main__":
    main(*sys.argv[1:])
