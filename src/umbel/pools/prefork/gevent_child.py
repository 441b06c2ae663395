"""A green child: runs many jobs at once, each in a greenlet, in one process whose modules gevent has patched.

The patch has two parts. Names that an app may import (sockets, locks, `sleep`, `Popen`) are patched in the
fork server before the app is loaded, because patching them in the child would be too late. Functions that the
server itself needs unpatched (`fork`, `waitpid`, signals) are patched in the child.

An exception for a job is thrown into its greenlet while the greenlet waits inside a guarded call. Elsewhere
it would break Umbel's own code, so it is delayed. A greenlet that never waits cannot be interrupted: the main
process notices that this child does not respond, and kills it.
"""

import contextlib
import os
import socket
import warnings
from time import time
from typing import Any

import gevent
from gevent import monkey

from umbel.errors import SoftTimeLimitExceeded, TaskCancelled
from umbel.pools.guard import in_one_line, is_guarded, soft_limit_reached, worker_stops
from umbel.pools.interface import Job, Outcome, Runner, UserEvent
from umbel.pools.prefork.messages import EndJob, NoOutcome, ToChild, no_outcome
from umbel.wire.frames import (
    Cancel,
    FrameReader,
    JobBatch,
    Outcomes,
    Ready,
    SoftLimit,
    StopChild,
    encode_frame,
    encode_frame_or,
)

_READ_BYTES = 64 * 1024
_AGAIN_S = 0.01  # between attempts to interrupt a job


GreenToChild = ToChild | EndJob


class _Ended(BaseException):
    """Ends a greenlet. It is a BaseException, so that a task does not catch it by accident."""


def patch_before_loading() -> None:
    """Patch, in the fork server, the modules from which an app may import names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gevent warns about unpatched signals, which the child patches
        monkey.patch_all(os=False, signal=False)


def patch_the_rest() -> None:
    """Patch, in the child, what the fork server needs unpatched: fork, waitpid and signals."""
    gevent.reinit()
    monkey.patch_os()
    monkey.patch_signal()


def _call(runner: Runner, job: Job) -> Outcome:
    return runner(job)


class GreenChild:
    """Reads jobs from its socket and runs each in a greenlet."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel  # patched by gevent, so a read blocks only one greenlet
        self._reader: FrameReader[Any] = FrameReader(GreenToChild)
        self._jobs: dict[int, gevent.Greenlet] = {}
        self._pid = os.getpid()
        self._raised_at_limit: type[Exception] = SoftTimeLimitExceeded
        self._outbox: list[bytearray] = []
        self._writing = False

    def serve(self, runner: Runner, soft_limit: type[Exception] = SoftTimeLimitExceeded) -> None:
        """Run jobs until a Stop arrives or the main process ends."""
        self._raised_at_limit = soft_limit
        self._send(encode_frame(Ready(self._pid)))
        while True:
            try:
                data = self._channel.recv(_READ_BYTES)
            except ConnectionError:
                return
            if not data:
                return
            for message in self._reader.feed(data):
                if isinstance(message, StopChild):
                    gevent.joinall(list(self._jobs.values()))
                    return
                self._do(message, runner)

    def tell(self, told: UserEvent) -> None:
        """Send an event of a running task to the main process."""
        self._send(encode_frame(told))

    def _do(self, message: Any, runner: Runner) -> None:
        match message:
            case JobBatch(_, jobs):
                for job in jobs:
                    self._jobs[job.number] = gevent.spawn(self._run, job, runner)
            case SoftLimit(job, stopping):
                error = worker_stops()
                self._throw(job, error if stopping else soft_limit_reached(self._raised_at_limit))
            case Cancel(job):
                self._throw(job, TaskCancelled("cancelled"))
            case EndJob(job):
                self._throw(job, _Ended())
                self._send(encode_frame(Ready(self._pid)))

    def _run(self, job: Job, runner: Runner) -> None:
        started_at = time()
        try:
            outcome = _call(runner, job)
        except SystemExit:  # the runner raises this when the process has to end
            raise
        except BaseException as error:  # a task may raise anything, and other jobs run in this process
            frame = _frame_of_error(error, job, started_at)
        else:
            frame = _outcome_frame(outcome)
        finally:
            del self._jobs[job.number]
            if os.getpid() != self._pid:
                os._exit(0)  # the task forked, and its copy returned to this point
        self._send(frame)

    def _throw(self, number: int, error: BaseException) -> None:
        """Raise the error in the job at the hub's next iteration, or when the job may be interrupted."""
        gevent.get_hub().loop.run_callback(self._throw_now, number, error)

    def _throw_now(self, number: int, error: BaseException) -> None:
        greenlet = self._jobs.get(number)
        if greenlet is None:
            return
        if is_guarded(greenlet.gr_frame, within=_call.__code__):
            greenlet.throw(error)
        else:
            gevent.spawn_later(_AGAIN_S, self._throw, number, error)

    def _send(self, frame: bytearray) -> None:
        """Write whole frames in order: one greenlet at a time writes the frames of all greenlets."""
        self._outbox.append(frame)
        if self._writing:
            return
        self._writing = True
        try:
            while self._outbox:
                frames, self._outbox = self._outbox, []
                with contextlib.suppress(ConnectionError):  # the reader notices it
                    self._channel.sendall(b"".join(frames))
        finally:
            self._writing = False


def _frame_of_error(error: BaseException, job: Job, started_at: float) -> bytearray:
    runtime_s = time() - started_at
    match error:
        case _Ended():
            return _outcome_frame(Outcome(job.number, "cancelled", started_at, runtime_s))
        case Exception():  # interrupted while it was ending: the job has to run again
            summary = in_one_line(error)
            return _outcome_frame(Outcome(job.number, "requeued", started_at, runtime_s, summary=summary))
        case _:  # the task killed its own greenlet, or raised another BaseException
            return encode_frame(NoOutcome(job.number, f"the runner of the task failed: {in_one_line(error)}"))


def _outcome_frame(outcome: Outcome) -> bytearray:
    return encode_frame_or(Outcomes((outcome,)), lambda error: no_outcome(outcome, error))
