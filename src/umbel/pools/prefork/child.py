"""A child process: takes jobs from its socket one at a time, runs them, and reports each outcome at once.

Before it starts a job it takes a token from its pipe. The main process may take tokens back: if the child
finds no token, or one of a later batch, the rest of this batch no longer belongs to it.

An outcome is sent as soon as its job ends, not with the batch. The next job may run for an hour, and if it
crashes the process, the outcomes sent before are safe.

Soft limits: the main process sends a SoftLimit frame and then SIGUSR1. The handler raises only if a frame
that names the running job has arrived, so a late signal cannot hit another job. It also raises only inside a
guarded call, where the exception is caught, so it cannot break the code around the task. A signal that
arrives too early is repeated. The handler is installed at the first job with a soft limit and stays; the main
process sends no signal before the child reports that.

Shutdown and cancel requests interrupt a job in the same way. Cancels use a Cancel frame and another signal:
SIGURG, because it has no effect where there is no handler.

A task may leave its process in a bad state for the next task. If it lowered a kernel limit, the child reports
that, starts no other job and waits to be replaced. Handlers of Umbel's signals are restored. The child checks
this after a task that called `resource.setrlimit`, before it waits, and otherwise at most every `_LOOK_S`.
"""

import contextlib
import os
import random
import resource
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec
from setproctitle import setproctitle

from umbel.errors import SoftTimeLimitExceeded, TaskCancelled
from umbel.pools.guard import (
    in_one_line,
    interrupt_here,
    is_guarded,
    load_host,
    soft_limit_of,
    soft_limit_reached,
    worker_stops,
)
from umbel.pools.interface import ChildContext, Host, HostSpec, Job, Outcome, Runner, UserEvent
from umbel.pools.prefork import kernel
from umbel.pools.prefork.kernel import LIMITS, Limits, note_calls, offer_stacks
from umbel.pools.prefork.messages import Setup, Spoiled, ToChild, no_outcome
from umbel.wire.frames import (
    Armed,
    Cancel,
    FrameReader,
    JobBatch,
    Outcomes,
    Problem,
    Ready,
    SoftLimit,
    StopChild,
    encode_frame,
    encode_frame_or,
)

if TYPE_CHECKING:
    from umbel.pools.prefork.gevent_child import GreenChild

STATUS_BROKEN = 70  # an error in the child's own code; EX_SOFTWARE of sysexits.h

INTERRUPT = signal.SIGURG
_LOOK_S = 0.001
# signal.getsignal() tries to convert the handler to an enum, which takes 9 µs instead of 0.2 µs.
_handler_of: Callable[[int], object] = import_module("_signal").getsignal
_READ_BYTES = 64 * 1024
_DEFAULT_SIGNALS = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGUSR1,
    signal.SIGCHLD,
)


def run_child(
    setup: Setup, number: int, channel: socket.socket, tokens: int, *, parent: int, host: Host | None
) -> NoReturn:
    """Run as a child and end the process. `host` is None in a child that has to load the app itself."""
    status = STATUS_BROKEN
    child = _make_child(setup, channel, tokens)
    try:
        _settle_in(setup, number, parent)
        if host is None:
            spec = HostSpec(setup.loader, setup.target, setup.search_path)
            host = load_host(spec, setup.node, forks=False)
        logs = (setup.loglevel, setup.logfile, setup.log_json)
        context = ChildContext(setup.node, number, *logs, is_process=True, tell=child.tell)
        child.serve(host.start_child(context), soft_limit_of(host))
        host.stop_child()
        status = 0
    finally:
        # Whatever the error is, a forked child must not return into the fork server's stack.
        error = sys.exc_info()[1]
        if error is not None:
            traceback.print_exception(error)
            status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else status
            with contextlib.suppress(OSError):
                channel.sendall(encode_frame(Problem(in_one_line(error))))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _make_child(setup: Setup, channel: socket.socket, tokens: int) -> "Child | GreenChild":
    if not setup.green:
        return Child(channel, tokens)
    from umbel.pools.prefork.gevent_child import GreenChild

    return GreenChild(channel)


def _settle_in(setup: Setup, number: int, parent: int) -> None:
    signal.set_wakeup_fd(-1)
    kernel.die_with_parent()
    if os.getppid() != parent:  # the parent ended before die_with_parent() took effect
        os._exit(STATUS_BROKEN)
    with contextlib.suppress(PermissionError):  # already done for a child that was started as a new program
        os.setpgid(0, 0)
    for signum in _DEFAULT_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    offer_stacks()
    setproctitle(f"umbel: {setup.node} child {number}")
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


class Child:
    """The process: reads batches of jobs from its socket and runs them in its main thread."""

    def __init__(self, channel: socket.socket, tokens: int) -> None:
        self._channel = channel
        self._tokens = tokens
        # a token of a later batch, read while looking for a token of this batch
        self._kept_token: int | None = None
        self._reader: FrameReader[ToChild] = FrameReader(ToChild)
        # limited: the main process sends at most two batches
        self._inbox: deque[JobBatch[Job] | StopChild] = deque()
        self._pid = os.getpid()
        self._sending = threading.Lock()  # a task may send events from its threads
        self._telling = False  # the main thread is writing: an exception now would leave half a frame
        self._handles_soft_limits = False
        self._armed: int | None = None  # the running job, while the handler may raise
        self._soft_limit: SoftLimit | None = None  # the last one received
        self._cancelled: int | None = None  # the job that the last Cancel frame named
        self._raised_at_limit: type[Exception] = SoftTimeLimitExceeded
        self._limits: Limits | None = None  # values before the first job
        self._looked_at = 0.0  # Unix time
        self._spoiled = False

    def serve(self, runner: Runner, soft_limit: type[Exception] = SoftTimeLimitExceeded) -> None:
        """Run jobs until a Stop arrives or the main process ends."""
        self._raised_at_limit = soft_limit
        signal.signal(INTERRUPT, self._on_soft_limit)
        self._limits = Limits([*map(resource.getrlimit, LIMITS)])
        self._channel.sendall(encode_frame(Ready(self._pid)))
        buffer = memoryview(bytearray(_READ_BYTES))
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                if isinstance(message, StopChild):
                    return
                self._run_batch(message, runner)
                if not self._inbox:
                    self._look()
            try:
                size = self._channel.recv_into(buffer)
            except ConnectionError:
                return
            if not size:
                return
            self._note(buffer[:size])

    def tell(self, told: UserEvent) -> None:
        """Send an event of the running task to the main process; do nothing in a process that the task
        forked.
        """
        if os.getpid() != self._pid:  # a process that the task forked: the channel belongs to its parent
            return
        frame = encode_frame(told)
        is_main = threading.current_thread() is threading.main_thread()
        try:
            self._telling = is_main or self._telling
            with self._sending:
                self._channel.sendall(frame)
        finally:
            self._telling = self._telling and not is_main

    def _note(self, data: bytes | memoryview) -> None:
        for message in self._reader.feed(data):
            if isinstance(message, SoftLimit):
                self._soft_limit = message
            elif isinstance(message, Cancel):
                self._cancelled = message.job
            else:
                self._inbox.append(message)

    def _run_batch(self, batch: JobBatch[Job], runner: Runner) -> None:
        for job in batch.jobs:
            # For the main process, a taken token means a started job.
            if self._spoiled and self._kept_token is None:
                return
            if not self._take_token(batch.number):
                return
            if job.soft_limit_s is not None:
                self._handle_soft_limits()
            self._armed = job.number
            outcome = runner(job)
            self._armed = None
            if os.getpid() != self._pid:
                # The task forked, and its copy returned to this point. The channel belongs to the original
                # process.
                os._exit(0)
            with self._sending:
                self._channel.sendall(_outcome_frame(outcome))
            ended_at = outcome.started_at + outcome.runtime_s
            if Limits.touched or abs(ended_at - self._looked_at) >= _LOOK_S:
                self._looked_at = ended_at
                self._look()

    def _look(self) -> None:
        """Check what the last task has changed in this process."""
        _catch(INTERRUPT, self._on_soft_limit)
        Limits.touched = False
        limits = [*map(resource.getrlimit, LIMITS)]
        if self._limits is None or limits == self._limits.known:
            return
        if lowered := self._limits.lowered(limits):
            self._spoiled = True
            with self._sending:
                self._channel.sendall(encode_frame(Spoiled(f"a task lowered its limits: {lowered}")))

    def _take_token(self, batch: int) -> bool:
        token = self._kept_token
        if token is None:
            try:
                data = os.read(self._tokens, 1)
            except BlockingIOError:
                return False
            if not data:
                return False
            token = data[0]
        mine = token == batch
        self._kept_token = None if mine else token
        return mine

    def _handle_soft_limits(self) -> None:
        _catch(signal.SIGUSR1, self._on_soft_limit)
        if not self._handles_soft_limits:
            self._handles_soft_limits = True
            self._channel.sendall(encode_frame(Armed()))

    def _on_soft_limit(self, signum: int, frame: FrameType | None) -> None:
        if self._telling:  # the main process repeats the signal
            return
        job, self._armed = self._armed, None  # so that a second signal changes nothing
        if job is None:
            return
        with contextlib.suppress(OSError):  # nothing to read, or the main process has ended
            self._note(self._channel.recv(_READ_BYTES, socket.MSG_DONTWAIT))
        limit = self._soft_limit
        if not is_guarded(frame):
            self._armed = job
            return
        if self._cancelled == job:
            interrupt_here(TaskCancelled("cancelled"))
        elif limit is not None and limit.job == job:
            interrupt_here(worker_stops() if limit.stopping else soft_limit_reached(self._raised_at_limit))
        else:
            self._armed = job


def _outcome_frame(outcome: Outcome) -> bytearray:
    return encode_frame_or(Outcomes((outcome,)), lambda error: no_outcome(outcome, error))


def _catch(signum: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
    if _handler_of(signum) != handler:  # not installed yet, or replaced by a task
        signal.signal(signum, handler)


def main(arguments: list[str]) -> NoReturn:
    """Run a child as a new program; its arguments are setup, slot, socket, token pipe and parent."""
    setup = msgspec.json.decode(arguments[0], type=Setup)
    number, channel, tokens, parent = map(int, arguments[1:])
    os.set_inheritable(channel, False)
    os.set_inheritable(tokens, False)
    note_calls()
    if setup.green:
        from umbel.pools.prefork.gevent_child import patch_before_loading, patch_the_rest

        patch_before_loading()
        patch_the_rest()
    run_child(setup, number, socket.socket(fileno=channel), tokens, parent=parent, host=None)


if __name__ == "__main__":
    main(sys.argv[1:])
