"""The fork server: a single-threaded process that has loaded the app and forks children.

It is a new program, or a fork of the main process from a moment when that had no thread, lock or connection
(`server_process.py`). It runs no task and communicates only with the main process, over one control socket.
When that socket ends, the main process has ended. Then the server kills every descendant, including
grandchildren, which it inherits because it adopts orphans. If the server itself is killed, its guard does the
same (`child_guard.py`). The server is the parent of the children, so only it can signal them and learn how
they ended.

If importing the app left a thread or a socket behind, forking would be unsafe: a copy could contain locks
whose owner does not exist in it, or share a connection. Then children start as new programs and import the
app themselves.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

from umbel.errors import UmbelError
from umbel.pools.guard import Raised, call_guarded, in_one_line, load_host
from umbel.pools.interface import Host, HostSpec
from umbel.pools.prefork import kernel
from umbel.pools.prefork.child import run_child
from umbel.pools.prefork.child_guard_script import kill_descendants
from umbel.pools.prefork.kernel import note_calls
from umbel.pools.prefork.messages import (
    FDS_PER_FORK,
    Exited,
    Fork,
    Forked,
    FromServer,
    Loaded,
    NotForked,
    Setup,
    Signal,
    ToServer,
)
from umbel.wire.frames import FrameReader, Problem, encode_frame

_READ_BYTES = 64 * 1024
_FDS_PER_READ = 64


class ForkServer:
    """Loads the app, then forks, signals and reaps children as the main process requests."""

    def __init__(self, setup: Setup, control: socket.socket) -> None:
        self._setup = setup
        self._control = control
        self._reader: FrameReader[ToServer] = FrameReader(ToServer)
        self._fds: deque[int] = deque()  # in the order of the Fork messages that came with them
        self._pids: dict[int, int] = {}  # by the child's key, until it is reaped
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._host: Host | None = None
        self._spawn = False

    def run(self) -> NoReturn:
        """Load the app and serve the control socket; end the process afterwards."""
        ignore_signals()
        setproctitle(f"umbel: {self._setup.node} fork server")
        kernel.adopt_orphans()
        self._load()
        ignore_signals()  # again: the app may have changed the handlers while it was imported
        self._watch()
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                    self._reap()
                elif not self._read_control():
                    self._end()

    def _load(self) -> None:
        if self._setup.green:
            from umbel.pools.prefork.gevent_child import patch_before_loading

            patch_before_loading()
        note_calls()
        sockets = kernel.open_sockets()
        spec = HostSpec(self._setup.loader, self._setup.target, self._setup.search_path)
        loaded = call_guarded(load_host, spec, self._setup.node, forks=True)
        if isinstance(loaded, Raised):
            # an UmbelError explains itself and needs no traceback
            if not isinstance(loaded.error, UmbelError):
                traceback.print_exception(loaded.error)
            self._tell(Problem(in_one_line(loaded.error)))
            self._end(status=1)
        self._host = loaded.value
        because = self._reason_to_spawn(kernel.open_sockets() - sockets)
        self._spawn = bool(because)
        gc.collect()
        gc.freeze()  # keeps the garbage collector from copying pages that children share
        self._tell(Loaded(because, os.getpid()))

    def _reason_to_spawn(self, sockets: set[str]) -> str:
        match self._setup.child_start:
            case "fork":
                return ""
            case "spawn":
                return "child_start is spawn"
        threads = kernel.thread_count()
        if threads is None:
            return "forking without exec is not safe on this system"
        if threads > 1:
            names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
            return (
                f"importing the app left {threads - 1} threads running ({', '.join(names) or 'not Python'})"
            )
        if sockets:
            return f"importing the app left {len(sockets)} sockets open"
        return ""

    def _watch(self) -> None:
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only the byte in the wake-up socket matters
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)

    def _read_control(self) -> bool:
        """Process requests of the main process; return False if it has ended."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _READ_BYTES, _FDS_PER_READ)
        except ConnectionError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds.extend(fds)
        for message in self._reader.feed(data) if data else ():
            match message:
                case Fork(key, child):
                    self._make_child(key, child)
                case Signal(key, signum):
                    self._signal(key, signum)
        return bool(data)

    def _make_child(self, key: int, child: int) -> None:
        fds = [self._fds.popleft() for _ in range(FDS_PER_FORK)]
        try:
            pid = self._start_afresh(child, *fds) if self._spawn else self._fork(child, *fds)
        except OSError as error:  # no memory, or a limit on processes
            self._tell(NotForked(key, f"cannot create a child process: {error}"))
        else:
            with contextlib.suppress(OSError):  # the child does the same; one of the two calls succeeds
                os.setpgid(pid, pid)
            self._pids[key] = pid
            self._tell(Forked(key, pid))
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, child: int, channel: int, tokens: int) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for ours in (self._control, self._woken, self._waker, self._selector):
                ours.close()
            for fd in self._fds:  # of children that are not created yet
                os.close(fd)
            if self._setup.green:
                from umbel.pools.prefork.gevent_child import patch_the_rest

                patch_the_rest()
            run_child(
                self._setup, child, socket.socket(fileno=channel), tokens, parent=parent, host=self._host
            )
        return pid

    def _start_afresh(self, child: int, channel: int, tokens: int) -> int:
        setup = msgspec.json.encode(self._setup).decode()
        numbers = map(str, (child, channel, tokens, os.getpid()))
        command = [sys.executable, "-P", "-m", "umbel.pools.prefork.child", setup, *numbers]
        os.set_inheritable(channel, True)
        os.set_inheritable(tokens, True)
        return os.posix_spawn(sys.executable, command, os.environ, setpgroup=0)

    def _signal(self, key: int, signum: int) -> None:
        pid = self._pids.get(key)
        if pid is None:
            return
        if signum == signal.SIGKILL:
            _kill_group(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    def _reap(self) -> None:
        keys = {pid: key for key, pid in self._pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in keys:
                del self._pids[keys[pid]]
                if status != 0:
                    _kill_group(pid)  # processes that the crashed task had started
                self._tell(Exited(keys[pid], status))

    def _tell(self, message: FromServer) -> None:
        try:
            self._control.sendall(encode_frame(message))
        except ConnectionError:
            self._end()

    def _end(self, status: int = 0) -> NoReturn:
        """Exit after killing every descendant: this process adopts orphans as their parents die."""
        for pid in self._pids.values():
            _kill_group(pid)
        kill_descendants()
        os._exit(status)


def ignore_signals() -> None:
    """Ignore the signals that stop a worker: the server must not end before the main process."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def serve(setup: str, control: int) -> NoReturn:
    """Run the fork server with this setup (JSON) and the control socket of this descriptor."""
    ForkServer(msgspec.json.decode(setup, type=Setup), socket.socket(fileno=control)).run()
