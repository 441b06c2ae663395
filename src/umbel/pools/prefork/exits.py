"""How a process ended, in words and in a word.

Five kinds are told apart: it was asked to end and did (`asked`), it exited by itself (`exit`), this
worker killed it (`killed`), the kernel did for want of memory (`out-of-memory`), or a signal of somebody
else or of its own making (`signal`).
"""

import os
import signal
from dataclasses import dataclass
from typing import Literal

ExitKind = Literal["asked", "exit", "killed", "out-of-memory", "signal"]


@dataclass(frozen=True, slots=True)
class Exit:
    kind: ExitKind
    reason: str


def exit_of(pid: int, status: int, *, dismissed: str, killed: str, out_of_memory: bool) -> Exit:
    """`status` as waitpid gave it; `dismissed` and `killed` are why we asked it to end, or ended it."""
    if killed:
        return Exit("killed", f"process {pid} was killed by this worker: {killed}")
    if dismissed and status == 0:
        return Exit("asked", f"process {pid} exited ({dismissed})")
    code = os.waitstatus_to_exitcode(status)
    if -code == signal.SIGKILL and out_of_memory:
        return Exit("out-of-memory", f"process {pid} was killed by SIGKILL: the system ran out of memory")
    return Exit("exit" if code >= 0 else "signal", exit_reason(pid, status))


def exit_reason(pid: int, status: int) -> str:
    """`status` as waitpid gave it: "process 4711 was killed by SIGSEGV"."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"process {pid} exited with status {code}"
    if -code == signal.SIGKILL:
        return f"process {pid} was killed by SIGKILL, not by this worker"
    return f"process {pid} was killed by {_name(-code)}"


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"  # real-time signals have no names
