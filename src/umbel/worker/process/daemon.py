"""The process of a worker as an init system sees it: detached, with a pid file, as another user.

The options and what they mean are those of `celery worker`, so that service files need not change.
"""

import grp
import os
import pwd
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from umbel.errors import BadSetting

SOURCE = "the command line"
_DETACH = ("-D", "--detach")


@contextmanager
def pid_file(path: str | None) -> Iterator[None]:
    """Holds this process's id while the worker runs; refused while the process in it lives."""
    if path is None:
        yield
        return
    file = Path(path).absolute()
    refuse_if_running(path)
    file.unlink(missing_ok=True)  # of a process that is gone
    try:
        with file.open("x", encoding="ascii") as opened:
            opened.write(f"{os.getpid()}\n")
    except OSError as error:
        raise BadSetting("--pidfile", path, str(error), source=SOURCE) from None
    try:
        yield
    finally:
        if _pid_in(file) == os.getpid():
            with suppress(OSError):
                file.unlink()


def refuse_if_running(path: str | None) -> None:
    pid = _pid_in(Path(path)) if path else None
    if pid is not None and pid != os.getpid() and _lives(pid):
        raise BadSetting(
            "--pidfile", path, f"process {pid} in it is running; stop it, or use another file", source=SOURCE
        )


def refuse_unwritable(logfile: str | None) -> None:
    """Once it is detached, a process that cannot log can say nothing."""
    if logfile is None:
        return
    try:
        with Path(logfile).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise BadSetting("--logfile", logfile, str(error), source=SOURCE) from None


def detach(executable: str | None, arguments: Sequence[str]) -> None:
    """Go on as a process of its own session, without a terminal; the one that was called ends with 0.

    `executable`: the Python that takes over, with the same arguments.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)  # so that no terminal can become this process's own
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if nothing > 2:
        os.close(nothing)
    if executable is not None:
        os.execv(executable, [executable, "-m", "umbel", *without_detaching(arguments)])


def without_detaching(arguments: Sequence[str]) -> list[str]:
    """The same command for the process that is detached already."""
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word == "--executable":
            next(rest, None)
        elif word not in _DETACH and not word.startswith("--executable="):
            kept.append(word)
    return kept


def become(user: str | None, group: str | None, umask: str | None) -> None:
    """Only root may become someone else; the group goes first, or there is no right to it any more."""
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
    """Octal where it begins with 0, as in Celery."""
    try:
        mask = int(given, 8 if given.startswith("0") else 10)
    except ValueError:
        mask = -1
    if not 0 <= mask <= 0o777:
        raise BadSetting("--umask", given, "write it in octal, as 022", source=SOURCE)
    return mask


def _pid_in(file: Path) -> int | None:
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
        return sys.maxsize > pid  # someone else's
    return pid > 0
