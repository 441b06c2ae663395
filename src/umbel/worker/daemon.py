"""The process of a worker for an init system or a shell: detached, with a pid file, as another user.

The options and their meaning are those of `celery worker`, so that service files need not change. SIGUSR1 to
the main process writes the stacks of the worker and of its children to the log.
"""

import grp
import logging
import os
import pwd
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from umbel.errors import BadSetting
from umbel.files import UntrustedFile, refuse_planted
from umbel.logs import own_log
from umbel.pools.interface import Pool
from umbel.pools.prefork.kernel import stacks_of

if TYPE_CHECKING:
    from asyncio import Task


# ---- daemon ----------------------------------------------------------------------------------------

SOURCE = "the command line"
_DETACH = ("-D", "--detach")


@contextmanager
def pid_file(path: str | None) -> Iterator[None]:
    """Hold this process's id in the file inside the `with`; refused while the process named there lives."""
    if path is None:
        yield
        return
    file = Path(path).absolute()
    refuse_if_running(path)
    try:
        file.unlink(missing_ok=True)  # of a process that is gone
        with file.open("x", encoding="ascii") as opened:
            opened.write(f"{os.getpid()}\n")
    except OSError as error:
        raise BadSetting("--pidfile", path, str(error), source=SOURCE) from None
    try:
        yield
    finally:
        with suppress(OSError):
            if _pid_in(file) == os.getpid():
                file.unlink()


def refuse_if_running(path: str | None) -> None:
    """Raise BadSetting if the process in the pid file lives, or another user could have written the file."""
    try:
        pid = _pid_in(Path(path)) if path else None
    except UntrustedFile as error:
        raise BadSetting("--pidfile", path, f"{error}; use another file", source=SOURCE) from None
    if pid is not None and pid != os.getpid() and _lives(pid):
        raise BadSetting(
            "--pidfile", path, f"process {pid} in it is running; stop it, or use another file", source=SOURCE
        )


def refuse_unwritable(logfile: str | None, node: str) -> None:
    """Raise BadSetting if the log file cannot be written: a detached process has no other output."""
    if logfile is None:
        return
    try:
        with Path(own_log(logfile, node, 0)).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise BadSetting("--logfile", logfile, str(error), source=SOURCE) from None


def detach(executable: str | None, arguments: Sequence[str]) -> None:
    """Continue as a process in a new session, without a terminal; the calling process exits with 0.

    `executable`: the Python that takes over, with the same arguments.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)  # a process that leads no session cannot get a terminal
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if nothing > 2:
        os.close(nothing)
    if executable is not None:
        os.execv(executable, [executable, "-m", "umbel", *without_detaching(arguments)])


def without_detaching(arguments: Sequence[str]) -> list[str]:
    """Return the command line without the options that detach."""
    remaining: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word == "--executable":
            next(rest, None)
        elif word not in _DETACH and not word.startswith("--executable="):
            remaining.append(word)
    return remaining


def switch_user(user: str | None, group: str | None, umask: str | None) -> None:
    """Change umask, group and user, in this order; only root may change the last two."""
    if umask is not None:
        os.umask(_umask(umask))
    if user is None and group is None:
        return
    entry = _user(user) if user is not None else None
    gid = _group(group) if group is not None else entry.pw_gid if entry else os.getgid()
    try:
        if entry is not None and os.getuid() == 0:
            os.initgroups(entry.pw_name, gid)
        os.setgid(gid)
        if entry is not None:
            os.setuid(entry.pw_uid)
    except PermissionError:
        raise BadSetting("--uid", user or group, "only root can become another user", source=SOURCE) from None


def _user(given: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(int(given)) if given.isdigit() else pwd.getpwnam(given)
    except KeyError:
        raise BadSetting("--uid", given, "there is no such user", source=SOURCE) from None


def _group(given: str) -> int:
    if given.isdigit():
        return int(given)
    try:
        return grp.getgrnam(given).gr_gid
    except KeyError:
        raise BadSetting("--gid", given, "there is no such group", source=SOURCE) from None


def _umask(given: str) -> int:
    """Return the mask; a text that begins with 0 is octal, as in Celery."""
    try:
        mask = int(given, 8 if given.startswith("0") else 10)
    except ValueError:
        mask = -1
    if not 0 <= mask <= 0o777:
        raise BadSetting("--umask", given, "write it in octal, as 022", source=SOURCE)
    return mask


def _pid_in(file: Path) -> int | None:
    refuse_planted(file)
    try:
        return int(file.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return sys.maxsize > pid  # a process of another user
    return pid > 0


# ---- stack dump ------------------------------------------------------------------------------------
#
# A thread examines the main process, because its event loop may be blocked, which is the usual reason for a
# dump. The children are asked on the loop (`pools/prefork/kernel.py`).

log = logging.getLogger("umbel.worker.stacks")
ASKING = signal.SIGUSR1


def receives_signals() -> bool:
    """Return whether this is the main thread, the only one that receives signals in Python."""
    return threading.current_thread() is threading.main_thread()


def log_own_stacks_on_signal() -> None:
    """From now on SIGUSR1 logs this process's stacks, instead of ending it."""
    signal.signal(ASKING, lambda _signum, _frame: _log_own_stacks_soon())


@contextmanager
def stacks_on_signal(pool: Pool) -> Iterator[None]:
    """Inside the `with`, SIGUSR1 logs the children's stacks too. Only one dump runs at a time."""
    if not receives_signals():
        yield
        return
    import asyncio  # not at the top: the process that forks children imports this, without asyncio

    loop = asyncio.get_running_loop()
    asked: set[Task[None]] = set()

    def ask_children() -> None:
        if not asked:
            task = loop.create_task(_log_children(pool), name="umbel-stacks")
            asked.add(task)
            task.add_done_callback(asked.discard)

    def handle(_signum: int, _frame: object) -> None:
        _log_own_stacks_soon()
        loop.call_soon_threadsafe(ask_children)

    before = signal.signal(ASKING, handle)
    try:
        yield
    finally:
        signal.signal(ASKING, before)
        for task in asked:
            task.cancel()


def _log_own_stacks_soon() -> None:
    # Not in the handler: the interrupted code may hold the lock of the log's stream.
    threading.Thread(target=_log_own_stacks, name="umbel-stacks", daemon=True).start()


def _log_own_stacks() -> None:
    """Log the stack of every thread except this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(number, number)} (innermost call last)\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
        if number != threading.get_ident()
    ]
    log.warning(
        "SIGUSR1: stack traces of the main process",
        extra={"pid": os.getpid(), "traceback": "\n".join(stacks)},
    )


async def _log_children(pool: Pool) -> None:
    import asyncio

    described = pool.describe()
    running = {pid: task_id for task_id, pid in described["running"].items()}
    children = described["processes"]
    for pid, stack in zip(children, await asyncio.gather(*map(stacks_of, children)), strict=True):
        if pid != os.getpid():  # a pool without child processes names the main process
            fields = {
                "pid": pid,
                "task_id": running.get(pid, ""),
                "traceback": stack or "no answer from the child process",
            }
            log.warning("SIGUSR1: stack traces of a child process", extra=fields)
