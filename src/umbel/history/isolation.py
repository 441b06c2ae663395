"""Isolation: run queries in processes with limits for memory, CPU and time.

DuckDB limits only the memory that it manages itself, and can be interrupted only between rows. A single call
of a text function (`levenshtein`, `lpad`) avoids both: it can run for minutes and use all memory of the
machine. Queries that users write therefore run in a process whose limits the kernel enforces.

A `QueryProcess` starts a server that imports all modules once and forks a process for each query, which
takes a few milliseconds. The server exits with its creator, or after IDLE_S without a query. The result is
sent as JSON and decoded as the type that the caller passes.
"""

import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from subprocess import DEVNULL, Popen
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, NoReturn, TypeVar

import msgspec

from umbel.errors import BadQuery, ConfigurationError, HistoryError, NothingBuilt, SlowQuery
from umbel.history.query import THREADS, Tables, read
from umbel.stores.interface import Where

ADDRESS_SPACE_MAX_BYTES = 3 * 2**30
ANSWER_MAX_BYTES = 256 * 2**20
GRACE_S = 1.0  # extra time after the limit, in which an interrupted query can end normally
START_S = 30.0
IDLE_S = 300.0
# Each thread uses address space, even if it is idle.
FEW_THREADS = {"OMP_NUM_THREADS": THREADS, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
_LENGTH = struct.Struct("!Q")
T = TypeVar("T")
Work = Callable[[Tables], Any]


class _Job(msgspec.Struct, frozen=True):
    """A query for the server. `reads` contains the lake and the function, pickled by the process that
    started the server.
    """

    reads: bytes
    timeout_s: float
    answer_max_bytes: int


class _Reply(msgspec.Struct, frozen=True):
    """The result, or the class and message of an error."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    why: str = ""


class QueryProcess:
    """Runs queries in limited processes, one at a time. `read` blocks the caller; `close` may be called from
    any thread.
    """

    def __init__(self) -> None:
        self._is_closed = False
        self._server: Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._room: TemporaryDirectory[str] | None = None

    def read(
        self,
        lake: Where,
        work: Work,
        kind: type[T],
        *,
        timeout_s: float,
        answer_max_bytes: int = ANSWER_MAX_BYTES,
    ) -> T:
        """Run `work` on the newest tables in a limited process, and return its result. `work` must be
        picklable.

        Raise the errors of `query.read`, and SlowQuery or BadQuery if the process was killed at a limit.
        """
        job = _Job(pickle.dumps((lake, work)), timeout_s, answer_max_bytes)
        reply = self._asked(job) or self._asked(job)  # an idle server may have exited in between
        if reply is None:
            raise HistoryError(
                f"the process for queries exited at its start; check that {sys.executable!r} starts Python"
            )
        if not reply.error:
            return msgspec.json.decode(reply.result, type=kind)
        if reply.error == NothingBuilt.__name__:
            raise NothingBuilt(lake)
        raise _ERRORS.get(reply.error, HistoryError)(reply.why)

    def close(self) -> None:
        """Kill the server and its running query. Later queries raise HistoryError."""
        self._is_closed = True
        self._end()

    def _asked(self, job: _Job) -> _Reply | None:
        """Send the job, and return the reply; None if the server exited without a reply."""
        link = self._started()
        try:
            _send(link, msgspec.msgpack.encode(job))
            return msgspec.json.decode(_received(link, START_S + job.timeout_s + GRACE_S), type=_Reply)
        except TimeoutError:
            self._end()
            raise _slow(job) from None
        except (OSError, EOFError):
            self._end()
            return None

    def _started(self) -> socket.socket:
        """Return the connection to the server, and start the server if it is not running."""
        if self._is_closed:
            raise HistoryError("the query was cancelled; its caller is shutting down")
        if self._link is not None and self._server is not None and self._server.poll() is None:
            return self._link
        self._end()
        link, theirs = socket.socketpair()
        self._link, self._room = link, TemporaryDirectory(prefix="umbel-history-")
        environment = os.environ | FEW_THREADS | {"TMPDIR": self._room.name}
        command = [sys.executable, "-P", "-m", "umbel.history.isolation"]
        with theirs:
            try:
                self._server = Popen(
                    command, stdin=theirs.fileno(), stdout=DEVNULL, env=environment, start_new_session=True
                )
            except OSError as error:
                self._end()
                raise HistoryError(f"cannot start a process for queries: {error}") from None
        return link

    def _end(self) -> None:
        """Kill the server and its children, and release its resources."""
        server, self._server = self._server, None
        link, self._link = self._link, None
        room, self._room = self._room, None
        if server is not None:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        if link is not None:
            link.close()
        if room is not None:
            room.cleanup()


# ---- server ----------------------------------------------------------------------------------------


def serve(link: socket.socket) -> None:
    """Answer queries until the other side closes, or until there is no query for IDLE_S."""
    with suppress(ImportError):
        import duckdb  # noqa: F401  # loaded once, before processes are forked
    with suppress(OSError, EOFError):
        while True:
            job = msgspec.msgpack.decode(_received(link, IDLE_S), type=_Job)
            _send(link, _isolated(job, link))


def _isolated(job: _Job, creator: socket.socket) -> bytes:
    """Run the job in a forked process, and return its reply, or an error if it was killed."""
    lake, work = pickle.loads(job.reads)  # noqa: S301  # sent by the creator; its modules stay loaded
    ours, theirs = socket.socketpair()
    with ours, TemporaryDirectory() as room:
        child = os.fork()
        if child == 0:
            ours.close()
            _read_and_exit(lake, work, job, room, theirs)
        theirs.close()
        reply = None
        try:
            reply = _received(ours, job.timeout_s + GRACE_S, unless=creator)
        except (TimeoutError, ConnectionAbortedError):
            os.kill(child, signal.SIGKILL)
            reply = _refusal(_slow(job))
        except (OSError, EOFError):
            pass  # the exit code below shows the reason
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if reply is not None:
        return reply
    if code == -signal.SIGXCPU:
        return _refusal(_slow(job))
    if code < 0:
        return _refusal(_large())
    return _refusal(HistoryError("the process for queries failed; please report its output on stderr"))


def _read_and_exit(lake: Where, work: Work, job: _Job, room: str, link: socket.socket) -> NoReturn:
    """Run a query in the forked process, send the reply, and exit.

    The kernel enforces the limits: SIGXCPU ends a process that uses too much CPU time, and allocations fail
    above the memory limit. The process never returns to the code of the server.
    """
    try:
        tempfile.tempdir = room
        cpu_s = ceil(int(THREADS) * (job.timeout_s + GRACE_S))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_MAX_BYTES, ADDRESS_SPACE_MAX_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _send(link, _read(lake, work, job))
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        os._exit(1)  # never return to the server's code


def _read(lake: Where, work: Work, job: _Job) -> bytes:
    """Run the query, and encode its result or its error as a reply."""
    try:
        result = msgspec.json.encode(read(lake, work, timeout_s=job.timeout_s))
        if len(result) > job.answer_max_bytes:
            most = job.answer_max_bytes
            raise BadQuery(f"the answer has more than {most:,} bytes; select fewer columns or rows")
        return msgspec.json.encode(_Reply(msgspec.Raw(result)))
    except (MemoryError, RecursionError):
        return _refusal(_large())
    except (HistoryError, ConfigurationError) as error:
        return _refusal(error)


def _refusal(error: HistoryError | ConfigurationError) -> bytes:
    """Encode an error as a reply."""
    return msgspec.json.encode(_Reply(error=type(error).__name__, why=str(error)))


def _slow(job: _Job) -> SlowQuery:
    """Return the error for a query that exceeded its time limit."""
    return SlowQuery(f"the query took longer than {job.timeout_s:g} s; select a shorter time or fewer rows")


def _large() -> BadQuery:
    """Return the error for a query that exceeded the memory limit."""
    most = ADDRESS_SPACE_MAX_BYTES / 2**30
    return BadQuery(f"the query needs more than {most:g} GiB of memory; select fewer rows, or shorter texts")


_ERRORS = {error.__name__: error for error in (BadQuery, SlowQuery, ConfigurationError)}


# ---- messages --------------------------------------------------------------------------------------


def _send(link: socket.socket, data: bytes) -> None:
    """Send a message with its length before it."""
    link.sendall(_LENGTH.pack(len(data)))
    link.sendall(data)


def _received(link: socket.socket, timeout_s: float, *, unless: socket.socket | None = None) -> bytes:
    """Receive one message. Raise TimeoutError after the limit, EOFError if the other side has closed.

    Raise ConnectionAbortedError if `unless` has data to read or is closed.
    """
    deadline = monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size, deadline, unless))
    return bytes(_exactly(link, length, deadline, unless))


def _exactly(link: socket.socket, length: int, deadline: float, unless: socket.socket | None) -> bytearray:
    """Receive exactly `length` bytes before the deadline."""
    data = bytearray()
    poll = select.poll()
    for watched in (link, unless):
        if watched is not None:
            poll.register(watched, select.POLLIN)
    while len(data) < length:
        ready = [file for file, _ in poll.poll(max(0.0, deadline - monotonic()) * 1000)]
        if not ready:
            raise TimeoutError
        if unless is not None and unless.fileno() in ready:
            raise ConnectionAbortedError
        part = link.recv(min(length - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return data


if __name__ == "__main__":
    serve(socket.socket(fileno=os.dup(0)))
