"""Isolation: reads of a lake in processes with a limit of memory, CPU and time, killed at the limit.

DuckDB counts the memory that it manages itself, and can be interrupted between rows. One call of a function
on text (`levenshtein`, `lpad`) escapes both: it computes for minutes and takes all memory of the machine. So
a query that people write runs in a process that the kernel limits.

A `QueryProcess` starts a server once, which has loaded what reads need and forks a process for each: that
takes some milliseconds. The server ends with its creator, or after IDLE_S without a read. The result comes
back as JSON and is checked against the type that the caller states.
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
GRACE_S = 1.0  # after the limit of time: a query that can be interrupted ends by itself
START_S = 30.0
IDLE_S = 300.0
# Each thread takes address space, whether it works or not.
FEW_THREADS = {"OMP_NUM_THREADS": THREADS, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
_LENGTH = struct.Struct("!Q")
T = TypeVar("T")
Work = Callable[[Tables], Any]


class _Job(msgspec.Struct, frozen=True):
    """A read for the server. `reads`: the lake and the function, pickled by the process that starts the
    server.
    """

    reads: bytes
    timeout_s: float
    answer_max_bytes: int


class _Reply(msgspec.Struct, frozen=True):
    """The result, or the class of an error with its text."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    why: str = ""


class QueryProcess:
    """Runs reads in limited processes, one at a time; a read blocks its caller. `close` works from any
    thread.
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
        """Run `work`, a function that can be pickled, on the newest tables, and return its result.

        Raises what `query.read` raises, and SlowQuery or BadQuery when a limit has killed the process.
        """
        job = _Job(pickle.dumps((lake, work)), timeout_s, answer_max_bytes)
        reply = self._asked(job) or self._asked(job)  # an idle server may have ended meanwhile
        if reply is None:
            raise HistoryError(
                f"the process for queries ended at its start; check that {sys.executable!r} starts Python"
            )
        if not reply.error:
            return msgspec.json.decode(reply.result, type=kind)
        if reply.error == NothingBuilt.__name__:
            raise NothingBuilt(lake)
        raise _ERRORS.get(reply.error, HistoryError)(reply.why)

    def close(self) -> None:
        """Kill the server and its running read; later reads are refused."""
        self._is_closed = True
        self._end()

    def _asked(self, job: _Job) -> _Reply | None:
        """The reply; None from a server that ended without one."""
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


# ---- the server ------------------------------------------------------------------------------------


def serve(link: socket.socket) -> None:
    """Answer reads until the other side closes, or for IDLE_S no read has come."""
    with suppress(ImportError):
        import duckdb  # noqa: F401  # loaded once, before processes are forked
    with suppress(OSError, EOFError):
        while True:
            job = msgspec.msgpack.decode(_received(link, IDLE_S), type=_Job)
            _send(link, _isolated(job, link))


def _isolated(job: _Job, creator: socket.socket) -> bytes:
    """The reply of a process that is forked for this read, or why it has none."""
    lake, work = pickle.loads(job.reads)  # noqa: S301  # the creator's; its modules stay loaded here
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
            pass  # its exit code says why
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if reply is not None:
        return reply
    if code == -signal.SIGXCPU:
        return _refusal(_slow(job))
    if code < 0:
        return _refusal(_large())
    return _refusal(HistoryError("the process for queries failed; please report what it wrote to stderr"))


def _read_and_exit(lake: Where, work: Work, job: _Job, room: str, link: socket.socket) -> NoReturn:
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
        os._exit(1)  # not back into the server


def _read(lake: Where, work: Work, job: _Job) -> bytes:
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
    return msgspec.json.encode(_Reply(error=type(error).__name__, why=str(error)))


def _slow(job: _Job) -> SlowQuery:
    return SlowQuery(f"the query took longer than {job.timeout_s:g} s; narrow it")


def _large() -> BadQuery:
    most = ADDRESS_SPACE_MAX_BYTES / 2**30
    return BadQuery(f"the query needs more than {most:g} GiB of memory; ask for less, or for shorter texts")


_ERRORS = {error.__name__: error for error in (BadQuery, SlowQuery, ConfigurationError)}


# ---- the link between them -------------------------------------------------------------------------


def _send(link: socket.socket, data: bytes) -> None:
    link.sendall(_LENGTH.pack(len(data)))
    link.sendall(data)


def _received(link: socket.socket, timeout_s: float, *, unless: socket.socket | None = None) -> bytes:
    """Receive one message; TimeoutError after the limit, EOFError when the other side has closed.

    ConnectionAbortedError when `unless` has data to read or is closed.
    """
    deadline = monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size, deadline, unless))
    return bytes(_exactly(link, length, deadline, unless))


def _exactly(link: socket.socket, length: int, deadline: float, unless: socket.socket | None) -> bytearray:
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
