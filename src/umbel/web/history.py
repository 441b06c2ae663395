"""History: reads the recorded history for pages and the API, in separate processes and with limits.

PROCESSES_MAX processes read at a time, each with limits of memory, CPU and time (`history/isolation.py`). One
query of a visitor runs and WAITING_MAX wait; more are refused, so no visitor blocks the others for long.

A page of another site must not start a query. Browsers report which page sends a request (`Sec-Fetch-Site`),
but not over plain HTTP from another machine; there a query in an address needs a proof that a page of the
dashboard made the address.

Texts are redacted, but an SQL query can split a text so that no pattern recognizes a secret in it. So SQL
queries are for operators, and they are audited; viewers see the figures.
"""

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil, floor
from time import monotonic
from typing import Any, TypeVar

from starlette.requests import Request

from umbel.history.isolation import QueryProcess
from umbel.history.query import Answer, Tables, require_duckdb
from umbel.stores.interface import Where
from umbel.web.http import Forbidden, Refused, Visitor, dashboard_of, visitor_of
from umbel.web.lake import TIMEOUT_S, File, Recorded, as_file, queried, recorded

T = TypeVar("T")

# ---- processes -------------------------------------------------------------------------------------

PROCESSES_MAX = 2
WAITING_MAX = 8
ANSWER_MAX_BYTES = 32 * 2**20


@dataclass(slots=True)
class _Line:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    length: int = 0  # queries that run or wait


class LakeReaders:
    """The processes that read the lake; visitors take turns, and each may wait with WAITING_MAX queries."""

    def __init__(self) -> None:
        self._free = [QueryProcess() for _ in range(PROCESSES_MAX)]
        self._turns = asyncio.Semaphore(PROCESSES_MAX)
        self._lines: dict[str, _Line] = {}

    async def read(self, visitor: str, lake: Where, work: Callable[[Tables], Any], kind: type[T]) -> T:
        """Return what `work` returns for the lake's tables, when it is this visitor's turn.

        Raises HistoryError like `QueryProcess.read`, and Refused if too many queries wait.
        """
        async with self._turn_of(visitor), self._turns:
            process = self._free.pop()
            reading = partial(
                process.read, lake, work, kind, timeout_s=TIMEOUT_S, answer_max_bytes=ANSWER_MAX_BYTES
            )
            try:
                return await asyncio.to_thread(reading)
            except asyncio.CancelledError:
                process.close()  # so that its thread ends
                process = QueryProcess()
                raise
            finally:
                self._free.append(process)

    def close(self) -> None:
        """End the idle processes."""
        for process in self._free:
            process.close()

    @asynccontextmanager
    async def _turn_of(self, visitor: str) -> AsyncIterator[None]:
        line = self._lines.setdefault(visitor, _Line())
        if line.length > WAITING_MAX:
            detail = f"{visitor} has {line.length} queries of the history in progress; wait for their answers"
            raise Refused(429, "Too Many Requests", detail, retry_after="10")
        line.length += 1
        try:
            async with line.lock:
                yield
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[visitor]


# ---- reads -----------------------------------------------------------------------------------------

ROWS_MAX = 1000
OWN_PAGES = ("same-origin", "none")  # none: the address bar, or a bookmark


async def read_lake(request: Request, work: Callable[[Tables], Any], kind: type[T]) -> T:
    """Run `work`, which must be picklable, on the lake's tables in a separate process; return its result.

    Raises HistoryError for what cannot be answered, ConfigurationError for a missing installation, and
    Refused for a page of another site or if too many queries wait.
    """
    require_duckdb()
    if request.headers.get("sec-fetch-site", "") not in ("", *OWN_PAGES):
        raise Forbidden("the request comes from another site; open the history from the dashboard's menu")
    dashboard = dashboard_of(request)
    lake = dashboard.app.settings.history_lake
    return await dashboard.readers.read(visitor_of(request).name, lake, work, kind)


async def query_lake(request: Request, sql: str, limit: int) -> Answer:
    """Return the rows of a query, audited. Forbidden as the role demands; else raises like `read_lake`."""
    async with dashboard_of(request).audit.query(visitor_of(request), sql) as count_rows:
        found = await read_lake(request, partial(queried, sql=sql, limit=limit), Answer)
        count_rows(len(found.rows))
    return found


async def query_lake_as_file(request: Request, sql: str, limit: int, form: str) -> bytes:
    """Return the rows of a query as a file of this format, audited. Raises like `query_lake`."""
    async with dashboard_of(request).audit.query(visitor_of(request), sql) as count_rows:
        found = await read_lake(request, partial(as_file, sql=sql, limit=limit, form=form), File)
        count_rows(found.rows)
    return found.content


def is_own_page(request: Request, proof: str) -> bool:
    """Return whether a page of the dashboard made the query in the request's address, for this visitor."""
    visitor = visitor_of(request)
    if not visitor.csrf or request.headers.get("sec-fetch-site", "") in OWN_PAGES:
        return True  # a visitor without a CSRF token uses a bearer token, which no browser sends by itself
    return hmac.compare_digest(proof.encode(errors="replace"), page_proof(visitor).encode())


def page_proof(visitor: Visitor) -> str:
    """Return the proof that pages of the dashboard add to addresses with queries, for this visitor."""
    return hmac.new(visitor.csrf.encode(), b"history query", hashlib.sha256).hexdigest()


# ---- recorded changes ------------------------------------------------------------------------------

MINUTE_S = 60
CACHED_S = 60.0
CACHED_MAX = 8


class RecordedCache:
    """A cache of recorded changes, because moving the time slider requests the same period many times."""

    def __init__(self) -> None:
        self._cached: OrderedDict[tuple[float, float], tuple[float, Recorded]] = OrderedDict()
        self._reading = asyncio.Lock()  # concurrent callers wait for the same answer

    async def get(self, since: float, until: float, read: Callable[[], Awaitable[Recorded]]) -> Recorded:
        """Return the cached changes of a period, or call `read`; concurrent callers share one read."""
        found = self._fresh(since, until)
        if found is not None:
            return found
        async with self._reading:
            found = self._fresh(since, until)
            if found is None:
                found = await read()
                self._cached[since, until] = monotonic(), found
                self._cached.move_to_end((since, until))
                if len(self._cached) > CACHED_MAX:
                    self._cached.popitem(last=False)
            return found

    def _fresh(self, since: float, until: float) -> Recorded | None:
        read_at, found = self._cached.get((since, until), (0.0, None))
        return found if monotonic() - read_at <= CACHED_S else None


async def recorded_between(request: Request, since: float, until: float) -> Recorded:
    """Return the recorded changes of a period, rounded to whole minutes so that it can be cached.

    Raises like `read_lake`.
    """
    first, last = floor(since / MINUTE_S) * MINUTE_S, ceil(until / MINUTE_S) * MINUTE_S
    read = partial(read_lake, request, partial(recorded, since=first, until=last), Recorded)
    return await dashboard_of(request).recorded.get(first, last, read)
