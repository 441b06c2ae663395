"""asgi(): the dashboard as an ASGI application, for its own server or mounted in another application.

    app.mount("/umbel", umbel.web.asgi(tasks.app))                           # FastAPI, Starlette
    umbel.web.asgi(tasks.app, authenticate=lambda scope: ...)

The gate wraps the whole application, so no handler can forget to authenticate a request, to refuse it, or to
add the security headers. Where the dashboard is mounted, visitors are identified by tokens, by a trusted
proxy, or by `authenticate`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from umbel.app.app import App
from umbel.errors import BrokerError, ConfigurationError
from umbel.web import api, exporters, pages
from umbel.web.credentials import path_of
from umbel.web.dashboard import Dashboard
from umbel.web.http import Refused
from umbel.web.oidc import BEGIN, CALLBACK
from umbel.web.pages import login
from umbel.web.settings import WebSettings, check
from umbel.web.visitors import SAFE

# ---- gate ------------------------------------------------------------------------------------------

BODY_MAX = 1_000_000
BODY_S = 60.0
LENGTH_DIGITS_MAX = 20  # Python refuses to read very long numbers
PUBLIC = ("/login", BEGIN, CALLBACK, "/session", "/healthcheck")
PUBLIC_BELOW = "/static/"
HSTS = "max-age=31536000"  # without includeSubDomains: other hosts below this name are not ours
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Gate:
    """Wraps the application: authenticates each request, limits its body, adds security headers."""

    def __init__(self, app: ASGIApp, dashboard: Dashboard) -> None:
        self._app, self._dashboard = app, dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if self._dashboard.visitors.is_secure(scope):
                    headers["Strict-Transport-Security"] = HSTS
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        response: Response | None = None
        try:
            await self._dashboard.start()
            response = await self._admitted(scope, _limited(scope, receive), send_with_headers)
        except Refused as refused:
            response = refused.response()
        except ClientDisconnect:
            return  # the client closed the connection before its request was complete
        if response is not None and not started:
            await response(scope, receive, send_with_headers)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """Pass an admitted request on to the application; return the response to any other request."""
        path = path_of(scope)
        is_public = path in PUBLIC or path.startswith(PUBLIC_BELOW)
        if is_public and scope["method"] not in SAFE:
            # Anyone can send an incomplete body: until it is complete, the request costs no more than this
            # wait.
            receive = await _complete(scope, receive)
        visitors = self._dashboard.visitors
        visitor = await visitors.judge(scope)
        if visitor is None and not is_public:
            return _unknown(scope)
        if visitor is not None:
            scope["umbel.visitor"] = visitor
            scope["umbel.sessions"] = partial(visitors.sessions_of, dict(scope))
            scope["umbel.still_known"] = partial(visitors.still_knows, visitor, dict(scope))
        await self._app(scope, receive, send)
        return None


def _unknown(scope: Scope) -> Response:
    """Redirect a browser to the login; answer a program with 401."""
    wants_page = "text/html" in Headers(scope=scope).get("accept", "") and scope["method"] == "GET"
    if wants_page:
        return RedirectResponse(f"{scope.get('root_path', '')}/login", 303)
    detail = "log in first, or send a token: Authorization: Bearer TOKEN (umbel web token add NAME)"
    return Refused(401, "Unauthorized", detail, www_authenticate='Bearer realm="umbel"').response()


def _limited(scope: Scope, receive: Receive) -> Receive:
    """Limit the request's body to BODY_MAX bytes, received within BODY_S."""
    length = Headers(scope=scope).get("content-length", "0")
    if not length.isdecimal() or len(length) > LENGTH_DIGITS_MAX or int(length) > BODY_MAX:
        raise _too_large()
    size, is_complete, ends = 0, False, asyncio.get_running_loop().time() + BODY_S

    async def receive_in_time() -> Message:
        nonlocal size, is_complete
        try:
            async with asyncio.timeout_at(None if is_complete else ends):
                message = await receive()
        except TimeoutError:
            detail = f"the request took longer than {BODY_S:g} s to arrive"
            raise Refused(408, "Request Timeout", detail) from None
        size += len(message.get("body", b""))
        is_complete = not message.get("more_body", False)
        if size > BODY_MAX:
            raise _too_large()
        return message

    return receive_in_time


def _too_large() -> Refused:
    return Refused(413, "Content Too Large", f"a request may have {BODY_MAX:,} bytes at most")


async def _complete(scope: Scope, receive: Receive) -> Receive:
    """Wait for the whole body, and return a `receive` that has it at once."""
    body = await Request(scope, receive).body()
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


# ---- asgi() ----------------------------------------------------------------------------------------


def asgi(app: App, **options: Any) -> ASGIApp:
    """Return the dashboard of the app's cluster; the options are the fields of `WebSettings`."""
    try:
        settings = msgspec.structs.replace(WebSettings(), **options)
    except TypeError:
        known = WebSettings.__struct_fields__
        unknown = ", ".join(name for name in options if name not in known)
        raise ConfigurationError(f"asgi(): unknown option {unknown}; use one of {', '.join(known)}") from None
    if settings.is_open:
        raise ConfigurationError(
            "login=False would let in everyone who reaches your site; identify users with authenticate="
        )
    return application(Dashboard(app, settings))


def application(dashboard: Dashboard) -> ASGIApp:
    """Return the ASGI application of a dashboard; ConfigurationError for settings that are not safe."""
    check(dashboard.settings, named_tokens=len(dashboard.journal.tokens()))

    @asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        await dashboard.start()
        yield
        await dashboard.stop()

    routes = [
        Route("/healthcheck", _healthcheck),
        *login.routes(dashboard),
        *api.routes(),
        *exporters.routes(dashboard),
        *pages.routes(),
    ]
    errors = (HTTPException, Refused, BrokerError, ConfigurationError, Exception)
    starlette = Starlette(routes=routes, lifespan=life, exception_handlers=dict.fromkeys(errors, _problem))
    starlette.state.dashboard = dashboard
    return Gate(starlette, dashboard)


async def _healthcheck(_request: Request) -> Response:
    return PlainTextResponse("OK")


async def _problem(_request: Request, error: Exception) -> Response:
    """Return an error as a problem document."""
    match error:
        case HTTPException():
            refused = Refused(error.status_code, error.detail, **(error.headers or {}))
        case Refused():
            refused = error
        case BrokerError():
            refused = Refused(503, "Broker unavailable", str(error))
        case ConfigurationError():
            refused = Refused(400, "Bad request", str(error))
        case _:  # the server logs the error; the response does not disclose it
            refused = Refused(500, "Internal error", "the dashboard's log says more")
    return refused.response()
