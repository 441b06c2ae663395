"""The child guard's program: it waits for the fork server, and kills the remaining descendants.

It runs as long as its worker, so its memory is needed once per worker. To keep that small, its interpreter
loads nothing else: no Umbel module, no library, no `site` (`child_guard.py` starts it).
"""

import os
import select
import signal
import sys
import time

_PATIENCE_S = 3.0  # time for the fork server to end by itself after the main process
_CLEAN_UP_S = 10.0  # a process in uninterruptible sleep can survive SIGKILL for a while
_CLEAN_UP_STEP_S = 0.005


def kill_descendants() -> None:
    """Kill all descendants. This process adopts orphans, so they become its children as their parents die."""
    give_up_at = time.monotonic() + _CLEAN_UP_S
    while time.monotonic() < give_up_at:
        for pid in children_of(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_CLEAN_UP_STEP_S)


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process; an empty list if there is no /proc."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            # The command in parentheses may contain anything; the format after the last parenthesis is fixed.
            with open(f"/proc/{entry}/stat", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # the process ended during the listing
        if int(fields[1]) == pid:
            found.append(int(entry))
    return found


def await_end(server: int, control: int) -> int:
    """Return the exit status of the fork server; kill it if the main process has ended and the server has
    not.
    """
    ended = os.pidfd_open(server)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, 0)  # nothing is read here; poll only reports that the other end is closed
    if all(descriptor != ended for descriptor, _ in poll.poll()):
        poll.unregister(control)
        if not poll.poll(_PATIENCE_S * 1000):
            os.kill(server, signal.SIGKILL)
    return os.waitpid(server, 0)[1]


def main(server: int, control: int) -> None:
    """Wait for the fork server, kill the remaining descendants, and exit with the server's status."""
    status = await_end(server, control)
    kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # end by the same signal
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if -code != signal.SIGKILL:  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
