"""A tiny app for pool tests: the body of a message is a JSON command, `[verb, argument]`.

`load` is the loader of a HostSpec; its target is a comma-separated list of quirks that the
"app" shows while it is imported or while a child starts.
"""

import ctypes
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pools.coroutines import COROUTINES
from tests.pools.hostile import HOSTILE
from tests.waiting import wait_until
from umbel.errors import SoftTimeLimitExceeded
from umbel.pools.guard import Raised, Returned, await_guarded, call_guarded
from umbel.pools.interface import ChildContext, HostSpec, Job, Outcome, Runner
from umbel.wire.message import Message, StoredResult

IMPORTED_IN = os.getpid()
_left_behind: list[object] = []  # what an app keeps alive after it was imported


def spec(*quirks: str) -> HostSpec:
    root = str(Path(__file__).resolve().parents[2])
    return HostSpec(loader=f"{__name__}:load", target=",".join(quirks), search_path=(root,))


def make_job(number: int, verb: str = "return", argument: Any = None, **fields: Any) -> Job:
    body = json.dumps([verb, argument]).encode()
    fields.setdefault("task", verb)
    return Job(number=number, task_id=f"id-{number}", queue="q", message=Message(b"{}", body), **fields)


def value_of(outcome: Outcome) -> Any:
    (result,) = outcome.results
    return json.loads(result.payload)


def load(target: str) -> "TestHost":
    quirks = target.split(",") if target else []
    if "import-error" in quirks:
        raise ImportError("no module named 'flux_capacitor'")
    if "thread" in quirks:
        threading.Thread(target=threading.Event().wait, name="left-behind", daemon=True).start()
    if "socket" in quirks:
        _left_behind.append(socket.socketpair())
    if "signals" in quirks:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("the app's own handler"))
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for quirk in quirks:
        if quirk.startswith("version-in=") and "broken" in _version(quirk):
            raise ValueError("broken")
    for quirk in quirks:
        if quirk.startswith("dies-loading="):
            _die_while_some_are_left(Path(quirk.partition("=")[2]))
    if "load-forever" in quirks:
        threading.Event().wait()
    return OwnWaysHost(quirks) if any(one.startswith("own-ways-in=") for one in quirks) else TestHost(quirks)


class TestHost:
    __test__ = False  # for pytest, which would take it for a test class

    def __init__(self, quirks: list[str]) -> None:
        self._quirks = quirks
        self._loaded_in = os.getpid()
        self.journal: tuple[int, int] | None = None  # the process and its file
        self.version = "".join(_version(quirk) for quirk in quirks if quirk.startswith("version-in="))
        self._context: ChildContext | None = None

    def start_child(self, context: ChildContext) -> Runner:
        if "start-error" in self._quirks:
            raise RuntimeError("the database is not there")
        if "start-crash" in self._quirks:
            os._exit(9)
        self._context = context
        return AsyncTestRunner(self) if context.on_loop else self._run

    def stop_child(self) -> None:
        for quirk in self._quirks:
            if quirk.startswith("say-goodbye-in="):
                assert self._context is not None
                folder = quirk.partition("=")[2]
                with open(f"{folder}/goodbye-{self._context.child}", "w", encoding="utf-8"):
                    pass

    def _run(self, job: Job) -> Outcome:
        started_at, clock = time.time(), time.perf_counter()
        verb, argument = json.loads(job.message.body)
        if verb in HOSTILE:
            return _outcome(job, call_guarded(HOSTILE[verb], argument), started_at, clock)
        return _outcome(job, call_guarded(_VERBS[verb], argument, self), started_at, clock)

    def facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "loaded_in": self._loaded_in,
            "imported_in": IMPORTED_IN,
            "child": self._context.child if self._context else None,
            "stdin": os.readlink("/proc/self/fd/0"),
            "sockets": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in _open_fds()),
        }


class OwnLimit(Exception):
    """What a soft limit is to some apps."""


class OwnWaysHost(TestHost):
    """It has another class for soft limits, and writes down where it was made ready."""

    soft_limit_error = OwnLimit

    def before_children(self, node: str, *, forks: bool) -> None:
        folder = next(one.partition("=")[2] for one in self._quirks if one.startswith("own-ways-in="))
        with open(f"{folder}/{os.getpid()}", "a", encoding="utf-8") as file:
            file.write(f"{node} {'forks' if forks else 'runs'}\n")


class AsyncTestRunner:
    """Runs the verbs that have a coroutine, where the job does not ask for the plain function."""

    def __init__(self, host: TestHost) -> None:
        self._host = host

    def __call__(self, job: Job) -> Outcome:
        return self._host._run(job)

    def is_async(self, task: str) -> bool:
        return task in COROUTINES

    async def run(self, job: Job) -> Outcome:
        started_at, clock = time.time(), time.perf_counter()
        verb, argument = json.loads(job.message.body)
        return _outcome(job, await await_guarded(COROUTINES[verb], argument), started_at, clock)


def _outcome(job: Job, ran: Returned[Any] | Raised, started_at: float, clock: float) -> Outcome:
    runtime_s = time.perf_counter() - clock
    if isinstance(ran, Raised):
        if isinstance(ran.error, SystemExit):
            raise ran.error
        kind = "SoftTimeLimitExceeded" if isinstance(ran.error, SoftTimeLimitExceeded) else ""
        return Outcome(job.number, "failure", started_at, runtime_s, summary=kind or f"{ran.error!r}")
    result = StoredResult(job.task_id, "SUCCESS", json.dumps(ran.value).encode())
    return Outcome(job.number, "success", started_at, runtime_s, (result,))


def _open_fds() -> list[str]:
    fds = os.listdir("/proc/self/fd")
    return [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]


def _append(path: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write("ran\n")


def _crash_once(path: str) -> str:
    """The first to come here kills its process; the next one finds the file and lives."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "survived"
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _wait_for(path: str) -> str:
    """Say by a file that it runs, and run until there is another."""
    mark = f"{path}.{threading.get_native_id()}"
    with open(mark, "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    os.rename(mark, f"{path}.waiting")  # whoever sees it may interrupt: the file is closed
    wait_until(lambda: os.path.exists(path), deadline_s=600.0, what=path)
    return "released"


def _journal(host: "TestHost", folder: str, number: int, verb: str, argument: Any) -> Any:
    """Do something else, and write down before and after in a file of this process."""
    if host.journal is None or host.journal[0] != os.getpid():
        file = os.open(
            f"{folder}/{os.getpid()}.{time.time_ns()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        host.journal = (os.getpid(), file)
    os.write(host.journal[1], b"S%d\n" % number)
    value = _VERBS[verb](argument, host)
    os.write(host.journal[1], b"E%d\n" % number)
    return value


def _die_while_some_are_left(deaths: Path) -> None:
    """The file says how many processes die here."""
    if left := int(deaths.read_text()):
        deaths.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)


def _version(quirk: str) -> str:
    file = Path(quirk.partition("=")[2])
    return file.read_text() if file.exists() else ""


def _hold(mebibytes: int, path: str) -> str:
    """Hold so much memory while waiting."""
    held = bytearray(os.urandom(1024) * 1024 * mebibytes)
    released = _wait_for(path)
    return released if held else ""


def _leak(mebibytes: int) -> None:
    """Take more and more, for ever."""
    held = []
    while True:
        held.append(bytearray(os.urandom(1024) * 1024 * mebibytes))
        _linger(0.1)


def _linger(seconds: float) -> None:
    threading.Event().wait(seconds)


def _never_yield() -> None:
    """Never lets another greenlet have its turn."""
    while True:
        pass


def _fork_and_return(_: Any) -> int:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return pid


def _catch_soft_limit(path: str) -> str:
    try:
        return _wait_for(path)
    except SoftTimeLimitExceeded:
        return "cleaned up"


def _multiprocess(_: Any) -> int:
    process = multiprocessing.get_context("fork").Process(target=_linger, args=(1000,))
    process.start()
    return process.pid or 0


_VERBS: dict[str, Callable[[Any, TestHost], Any]] = {
    "return": lambda argument, host: argument,
    "facts": lambda argument, host: host.facts(),
    "divide": lambda argument, host: 1 / argument,
    "big": lambda size, host: "x" * size,
    "sleep": lambda seconds, host: _linger(seconds),
    "exit": lambda status, host: os._exit(status),
    "sys-exit": lambda status, host: sys.exit(status),
    "kill": lambda signum, host: os.kill(os.getpid(), signum),
    "segfault": lambda argument, host: ctypes.string_at(0),
    "kill-server": lambda argument, host: os.kill(os.getppid(), signal.SIGKILL),
    "append": lambda path, host: _append(path),
    "crash-once": lambda path, host: _crash_once(path),
    "wait-for": lambda path, host: _wait_for(path),
    "catch-soft": lambda path, host: _catch_soft_limit(path),
    "subprocess": lambda argument, host: subprocess.Popen(["sleep", "1000"]).pid,
    "daemon": lambda argument, host: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid,
    "multiprocess": lambda argument, host: _multiprocess(argument),
    "fork-and-return": lambda argument, host: _fork_and_return(argument),
    "close-fds": lambda argument, host: os.closerange(3, 1000),
    "journal": lambda argument, host: _journal(host, *argument),
    "hold": lambda argument, host: _hold(*argument),
    "leak": lambda mebibytes, host: _leak(mebibytes),
    "version": lambda argument, host: host.version,
    "never-yield": lambda argument, host: _never_yield(),
    "random": lambda argument, host: random.random(),
}
