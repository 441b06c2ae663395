"""Server: the dashboard served by uvicorn, with a limit on its connections.

A connection that waits for its client costs a file descriptor and nothing else, so one client could open many
and send nothing. A connection waits while the head or the body of a request is incomplete, between requests,
and while the client does not read. When there are too many connections, those that have waited longest are
closed. So pages, `/metrics` and `/healthcheck` are answered while a client holds connections open.
"""

import asyncio
import logging
import select
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from itertools import islice
from socket import socket
from time import monotonic
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from umbel.app.app import App
from umbel.errors import ConfigurationError
from umbel.files import raise_limit
from umbel.web.application import application
from umbel.web.dashboard import Dashboard
from umbel.web.settings import WebSettings

# ---- connections -----------------------------------------------------------------------------------

log = logging.getLogger("umbel.web")
CONNECTIONS_MAX = 1500
WAITING_MAX = 100  # of one address; a browser has six
HEAD_S = 10.0
IDLE_S = 5.0  # between requests, before the next begins: uvicorn's own limit
CANDIDATES_MAX = 10  # how many of the connections that wait longest are checked for unread data
LOG_EVERY_S = 60.0
STATE = "umbel.connection"


class Connections:
    """An ASGI application around another one; `protocol` creates each connection for uvicorn.

    A waiting connection is closed if the head of its request takes longer than HEAD_S, or when room is
    needed: if more than WAITING_MAX of one address wait, the one of them that has waited longest; at the
    limit of all connections, the one of all that has waited longest. Connections whose request is being
    processed stay; if there are only such, a new connection is refused.

    While the process is busy many clients may connect at once. So a connection whose first bytes were not
    read yet stays, and a connection whose response was written starts to wait in the next turn of the loop,
    when the response has been sent.
    """

    def __init__(self, app: ASGIApp, *, most: int = CONNECTIONS_MAX) -> None:
        self._closed = 0
        self._logged_at = -LOG_EVERY_S
        self._app = app
        self._most = most
        self._all: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # the connection that waits longest comes first
        self._of_address: dict[str, dict[Connection, None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection | None = scope.get("state", {}).get(STATE)
        if connection is None:
            await self._app(scope, receive, send)
        else:
            await connection.answer(self._app, scope, receive, send)

    def protocol(self, **given: Any) -> asyncio.Protocol:
        """Return the protocol of a new connection; uvicorn calls this."""
        return Connection(self, **given)

    def admit(self, connection: "Connection") -> bool:
        """Return whether the connection may stay; at the limit the one that waits longest is closed for
        it.
        """
        if len(self._all) >= self._most:
            oldest = _oldest(self._waiting)
            if oldest is None:
                return False
            self.close(oldest)
        self._all.add(connection)
        return True

    def remove(self, connection: "Connection") -> None:
        """Forget a connection that has ended."""
        self._all.discard(connection)
        self.stop_waiting(connection)

    def start_waiting(self, connection: "Connection") -> None:
        """Note that the connection waits for its client; close the oldest of its address beyond the limit."""
        if connection not in self._all:
            return
        self._waiting[connection] = None
        of_address = self._of_address.setdefault(connection.address, {})
        of_address[connection] = None
        while len(of_address) > WAITING_MAX and (oldest := _oldest(of_address)) is not None:
            self.close(oldest)

    def stop_waiting(self, connection: "Connection") -> None:
        """Note that the connection no longer waits for its client."""
        self._waiting.pop(connection, None)
        of_address = self._of_address.get(connection.address, {})
        of_address.pop(connection, None)
        if not of_address:
            self._of_address.pop(connection.address, None)

    def close(self, connection: "Connection") -> None:
        """Close a waiting connection; logged at most once a minute."""
        self._closed += 1
        self.remove(connection)
        connection.abort()
        if (now := monotonic()) - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            fields = {"closed": self._closed, "address": connection.address, "open": len(self._all)}
            log.warning(
                "connections to the dashboard closed: their clients sent or read nothing", extra=fields
            )


def _oldest(waiting: Iterable["Connection"]) -> "Connection | None":
    """Return the connection that has waited longest, of those without unread data; None if there is none."""
    return next((found for found in islice(waiting, CANDIDATES_MAX) if not found.has_unread_data), None)


class Connection(asyncio.Protocol):
    """One connection: passes everything to uvicorn's protocol, and tracks whether it waits for its client."""

    def __init__(
        self,
        connections: Connections,
        *,
        app_state: MutableMapping[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        **given: Any,
    ) -> None:
        self.address = ""
        self._connections = connections
        self._is_new = True  # no data were read yet
        make: Callable[..., Any] = AutoHTTPProtocol
        self._http = make(app_state={**app_state, STATE: self}, _loop=_loop, **given)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answers = self._waits = 0
        self._unsent_bytes = 0

    # -- between the transport and uvicorn -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the transport to uvicorn, unless there is no room: then the connection is closed."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport has no base class
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._http.connection_made(transport)
        if not self._connections.admit(self):
            self.abort()
            return
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Pass received data to uvicorn."""
        self._is_new = False
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass the end of the client's data to uvicorn; return whether the connection stays open."""
        stays_open: bool | None = self._http.eof_received()
        return stays_open

    def pause_writing(self) -> None:
        """Pass to uvicorn that the client reads too slowly."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass to uvicorn that the client reads again."""
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's place, and pass its end to uvicorn."""
        self._end_timer()
        self._connections.remove(self)
        self._http.connection_lost(exc)

    # -- between uvicorn and the application ---------------------------------------------------------

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request; only its receive and send wait for the client."""
        has_body = True

        async def receive_body() -> Message:
            nonlocal has_body
            if not has_body:
                return await receive()  # which waits for the end of the connection
            with self._waiting():
                message = await receive()
            has_body = message.get("more_body", False)
            return message

        async def send_part(message: Message) -> None:
            with self._waiting():
                await send(message)

        self._answers += 1
        self._end_timer()
        self._connections.stop_waiting(self)
        try:
            await app(scope, receive_body, send_part)
        finally:
            self._answers -= 1
            if not self._answers:
                self._wait_for_head(more_s=IDLE_S)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the connection among those that wait for their clients, also while it sends and receives."""
        self._waits += 1
        if self._waits == 1:
            self._wait_soon()
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._connections.stop_waiting(self)

    def _wait_soon(self) -> None:
        """Start to wait in the next turn of the loop, because what was written in this turn is sent first."""
        asyncio.get_running_loop().call_soon(self._wait)

    def _wait(self) -> None:
        if self._waits or not self._answers:
            self._connections.start_waiting(self)

    # -- timeouts and closing ------------------------------------------------------------------------

    @property
    def has_unread_data(self) -> bool:
        """Whether the first bytes of the connection have arrived and were not read yet."""
        if not self._is_new or self._transport is None:
            return False
        found = select.poll()
        found.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(found.poll(0))

    def abort(self) -> None:
        """Close the connection at once; unsent data is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def _wait_for_head(self, *, more_s: float = 0.0) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._wait_soon()
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._end_timer()
        self._timer = asyncio.get_running_loop().call_later(HEAD_S + more_s, self._expire)

    def _expire(self) -> None:
        """Close the connection, unless its client is still reading the last response."""
        assert self._transport is not None
        if 0 < self._transport.get_write_buffer_size() < self._unsent_bytes:
            self._wait_for_head()
        else:
            self._connections.close(self)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# ---- server ----------------------------------------------------------------------------------------

STOP_S = 3
OTHER_FILES = 200  # files that are not connections
CONNECTIONS_MIN = 50


class Server(uvicorn.Server):
    """Serves the dashboard with uvicorn; calls `opened` with the first URL once it accepts connections."""

    def __init__(self, app: App, settings: WebSettings, opened: Callable[[str], None]) -> None:
        self._opened = opened
        self.dashboard = Dashboard(app, settings)
        connections = Connections(application(self.dashboard), most=_connections_max())
        http: Any = connections.protocol  # uvicorn calls it like its own protocol class
        config = uvicorn.Config(
            connections,
            http=http,
            ws="none",
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # `proxies` of the settings decides which proxies are trusted
            timeout_graceful_shutdown=STOP_S,
            lifespan="on",
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen; ConfigurationError if the address cannot be bound."""
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn exits if it cannot bind the address
            place = f"{self.config.host}:{self.config.port}"
            raise ConfigurationError(
                f"the dashboard cannot listen at {place}: the address is in use or not on this machine; "
                "choose another --port or --host"
            ) from None
        if self.started:
            self._opened(self.first_url)

    @property
    def address(self) -> str:
        """The URL where it listens; known once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def first_url(self) -> str:
        """The one-time URL, or the plain address if there is no such token."""
        token = self.dashboard.visitors.one_time
        return f"{self.address}/session?token={token}" if token else f"{self.address}/"


def _connections_max() -> int:
    """Return how many connections the limit of open files allows, which is raised if possible."""
    files = raise_limit(CONNECTIONS_MAX + OTHER_FILES)
    return (
        CONNECTIONS_MAX if files is None else min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, files - OTHER_FILES))
    )
