"""Site: what handlers of pages and of the API get. They query the cluster, act on it, and know nothing below
it.

A page is a Starlette endpoint. `umbel.web.pages.routes()` returns the list of routes; the application adds
them after its own (`/api`, `/metrics`, `/healthcheck`, `/login`). What `Site` promises to pages is said at
the class.

Queries of the lake run in separate processes with limits of memory, CPU and time (`history/isolation.py`):
PROCESSES_MAX at once, and a bounded queue for each visitor. A page of another site must not start one:
browsers say which page sent a request; where they do not (plain HTTP from another machine), a query in an
address carries a proof. Free queries are for operators; a viewer sees the figures.
"""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil, floor
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from umbel.history.isolation import QueryProcess
from umbel.history.query import Answer, Tables, require_duckdb
from umbel.monitor.records import (
    DeadLetterRow,
    Election,
    Happening,
    Health,
    Lease,
    Node,
    Overview,
    Queue,
    Rates,
    Schedule,
    TaskDetail,
    TaskFilter,
    TaskPage,
    WaitingMessage,
    Worker,
    Workflow,
)
from umbel.stores.interface import Where
from umbel.web.actions import ActionResult, AnyAction, AuditEntry, SavedView
from umbel.web.lake import TIMEOUT_S, File, Recorded, RecordedCache, as_file, queried, recorded
from umbel.web.problems import Forbidden, Refused
from umbel.web.settings import Role

# ---- reads -----------------------------------------------------------------------------------------
#
# The processes that read history for one dashboard, and the visitors who wait for them.
#
# PROCESSES_MAX read at a time, each with limits of memory, CPU and time (`history/isolation.py`). For a
# visitor one reads and WAITING_MAX wait; more are refused. So no visitor holds up the others for long.

PROCESSES_MAX = 2
WAITING_MAX = 8
ANSWER_MAX_BYTES = 32 * 2**20
T = TypeVar("T")


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

        Raises HistoryError as `QueryProcess.read` does, and Refused if too many queries wait.
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


# ---- site ------------------------------------------------------------------------------------------
#
# What a page handler gets. Pages ask it, act through it, and know nothing below it.

PAGE_MAX = 1000


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated visitor. `csrf` is what each change must carry in the header `X-CSRF-Token`."""

    name: str
    role: Role
    csrf: str
    address: str


class Site(Protocol):
    """What a page may ask and change; async methods ask the broker, the nodes or a file.

    They raise BrokerError when the broker does not answer; the application turns that into a 503. Pages may
    rely on this:

    - Everything that the site returns is redacted and cut. It is text, and must be escaped like any text.
    - A request that reaches a page is authenticated, except for `/login` and below `/static`. Without a
      session a browser is sent to `/login`, whose form posts `token` to `/session`; the one-time URL is
      `/session?token=…`.
    - For each request that is not GET or HEAD the Origin is checked, and the header `X-CSRF-Token`, which
      must be `visitor.csrf` (`hx-headers`). So a page may have POST endpoints; it passes the visitor to
      `act`, which checks the role.
    - Every response has `Content-Security-Policy: default-src 'self'`: no inline script, style or event
      handler.
    - The application may be mounted below a path: links are made with `path_to(request, "/tasks")`.
    - Live data: `EventSource(path_to(request, "/api/v1/stream"))`, at most ten pushes a second. An
      event's name is a topic. Its data is JSON: `tasks`: {"count": n, "ids": [the newest, at most 100]};
      `nodes`, `queues`, `letters`, `elections`: {"names": […]}; `rates`: the newest `Figures`; `health`:
      `Health`; `audit`: {"ids": […]}; `reset`: too much was missed, reload. `?topics=tasks,rates` selects
      topics. `Last-Event-ID` resumes, and so does `?since=` for a first connection, with the
      `Site.pushed` of the moment when the page was rendered.
    """

    @property
    def title(self) -> str:
        """The app's name."""

    @property
    def badge(self) -> str:
        """The environment: production, staging; "" if none was given."""

    @property
    def broker(self) -> str:
        """The broker's URL, without the password."""

    @property
    def problem(self) -> str:
        """Why the site receives no events; "" if it does."""

    @property
    def pushed(self) -> int:
        """The number of the newest push to browsers; a page follows from there."""

    @property
    def lake(self) -> Where:
        """Where the history is recorded, if it is."""

    @property
    def reads(self) -> LakeReaders:
        """The processes that read the history."""

    @property
    def recollection(self) -> RecordedCache:
        """The cache of recorded changes for the time slider."""

    @property
    def task_names(self) -> Sequence[str]:
        """The names of the app's tasks and of those in memory, for suggestions."""

    def health(self) -> Health:
        """Return the state of the cluster in one sentence."""

    def overview(self) -> Overview:
        """Return the cluster at a glance."""

    def nodes(self) -> list[Node]:
        """Return all members of the cluster, by name."""

    def node(self, name: str) -> Node | None:
        """Return one member; None if it is unknown."""

    async def worker(self, name: str) -> Worker | None:
        """Ask a node to describe itself; None if it is unknown."""

    def happenings(self, *, since: float = 0.0) -> list[Happening]:
        """Return the changes of the last hour, oldest first."""

    def tasks(
        self, wanted: TaskFilter, *, limit: int = 50, cursor: str = "", order: str = "clock"
    ) -> TaskPage:
        """Return a page of the matching tasks, newest first by `clock` (Lamport) or by `time`."""

    def count(self, wanted: TaskFilter) -> int:
        """Return how many tasks match."""

    def task(self, task_id: str) -> TaskDetail | None:
        """Return everything known about a task; None if it is not in memory."""

    def workflow(self, task_id: str) -> Workflow | None:
        """Return the workflow that a task is part of; None if the task is unknown."""

    def queues(self) -> list[Queue]:
        """Return all queues, by name."""

    async def peek(self, queue: str, limit: int = 20) -> list[WaitingMessage]:
        """Return the next messages of a queue without taking them."""

    async def dead_letters(self, limit: int = 100) -> list[DeadLetterRow]:
        """Return the newest dead letters."""

    async def schedule(self) -> Schedule:
        """Return the periodic tasks and the node that sends them."""

    def elections(self) -> list[Election]:
        """Return all known elections, the newest first."""

    def leases(self) -> list[Lease]:
        """Return all known leases, by name."""

    def rates(self, *, last_s: float = 3600.0, step_s: int = 0) -> Rates:
        """Return the charts of the last seconds; `step_s` 0 chooses some 360 points."""

    async def views(self) -> list[SavedView]:
        """Return the saved views of the list of tasks, by name."""

    async def audit(self, *, limit: int = 100, before: int = 0) -> list[AuditEntry]:
        """Return entries of the audit, the newest first, older than `before`."""

    def queried(self, visitor: Visitor, sql: str) -> AbstractAsyncContextManager[Callable[[int], None]]:
        """Audit a query around its execution, as `Dashboard.queried` does."""

    async def act(self, visitor: Visitor, action: AnyAction) -> ActionResult:
        """Audit an action, perform it, and audit its result; `Forbidden` if the visitor's role may not."""
        ...


def site_of(request: Request) -> Site:
    """Return the site that serves the request."""
    site: Site = request.app.state.site
    return site


def visitor_of(request: Request) -> Visitor:
    """Return the visitor of an authenticated request."""
    visitor: Visitor = request.scope["umbel.visitor"]
    return visitor


def path_to(request: Request, path: str) -> str:
    """Return a path of the dashboard, wherever it is mounted."""
    return f"{request.scope.get('root_path', '')}{path}"


# ---- looking back ----------------------------------------------------------------------------------
#
# Questions to the lake's tables, for the history page and the API.
#
# A page of another site starts none: browsers say which page sent a request. Where they do not say it
# (plain HTTP from another machine), a query in an address carries a proof that a page of the dashboard made
# it.
#
# Texts are redacted like everywhere, but a query can take a text to pieces that no pattern knows. So free
# queries are for operators; a viewer sees the figures.

ROWS_MAX = 1000
MINUTE_S = 60
OWN_PAGES = ("same-origin", "none")  # none: the address bar, or a bookmark


class Caller(NamedTuple):
    """The visitor of a request, and its Sec-Fetch-Site header; "" if the browser sent none."""

    site: Site
    visitor: Visitor
    page: str


def caller_of(request: Request) -> Caller:
    """Return the caller of an authenticated request."""
    return Caller(site_of(request), visitor_of(request), request.headers.get("sec-fetch-site", ""))


async def read_lake(caller: Caller, work: Callable[[Tables], Any], kind: type[T]) -> T:
    """Run `work`, which must be picklable, over the lake's tables in a separate process; return its result.

    Raises HistoryError for what cannot be answered, ConfigurationError for a missing installation, and
    Refused for a page of another site and if too many queries wait.
    """
    require_duckdb()
    if caller.page not in ("", *OWN_PAGES):
        raise Forbidden("the request comes from another site; open the history from the dashboard's menu")
    return await caller.site.reads.read(caller.visitor.name, caller.site.lake, work, kind)


async def recorded_between(caller: Caller, since: float, until: float) -> Recorded:
    """Return the recorded changes of a period.

    It is rounded to whole minutes, so that a period that ends now is read once a minute.
    """
    first, last = floor(since / MINUTE_S) * MINUTE_S, ceil(until / MINUTE_S) * MINUTE_S

    def asked() -> Awaitable[Recorded]:
        return read_lake(caller, partial(recorded, since=first, until=last), Recorded)

    return await caller.site.recollection.recall(first, last, asked)


def may_query(visitor: Visitor) -> bool:
    """Return whether the visitor's role allows SQL queries."""
    return visitor.role.may(Role.OPERATOR)


async def query_lake(caller: Caller, sql: str, limit: int) -> Answer:
    """Return the rows of a query, audited. Raises `Forbidden` as the role demands, else as `look_back`."""
    async with caller.site.queried(caller.visitor, sql) as counted:
        found = await read_lake(caller, partial(queried, sql=sql, limit=limit), Answer)
        counted(len(found.rows))
    return found


async def query_lake_as_file(caller: Caller, sql: str, limit: int, form: str) -> bytes:
    """Return the rows of a query as a file of this format, audited. Raises as `ask`."""
    async with caller.site.queried(caller.visitor, sql) as counted:
        found = await read_lake(caller, partial(as_file, sql=sql, limit=limit, form=form), File)
        counted(found.rows)
    return found.content


def is_own(caller: Caller, proof: str) -> bool:
    """Return whether a query in an address was made by a page of the dashboard for this visitor."""
    if not caller.visitor.csrf or caller.page in OWN_PAGES:  # a visitor without csrf is not a browser
        return True
    return hmac.compare_digest(proof.encode(errors="replace"), page_proof(caller.visitor).encode())


def page_proof(visitor: Visitor) -> str:
    """Return the proof that pages of the dashboard add to addresses with queries, for this visitor."""
    return hmac.new(visitor.csrf.encode(), b"history query", hashlib.sha256).hexdigest()
