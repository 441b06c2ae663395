"""How a process ended, in words."""

import os
import signal


def exit_reason(pid: int, status: int) -> str:
    """`status` as waitpid gave it: "process 4711 was killed by SIGSEGV"."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"process {pid} exited with status {code}"
    if -code == signal.SIGKILL:
        return f"process {pid} was killed by SIGKILL (out of memory?)"
    return f"process {pid} was killed by {_name(-code)}"


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"  # real-time signals have no names
