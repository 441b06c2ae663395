"""asgi(): the dashboard as an ASGI application, for a separate server or mounted in another application.

    app.mount("/umbel", umbel.web.asgi(tasks.app))                           # FastAPI, Starlette
    umbel.web.asgi(tasks.app, authenticate=lambda scope: ...)

The gate wraps all of it, so no handler can forget to authenticate a request, to refuse it, or to send the
security headers.

Where it is mounted, visitors are known by tokens, by a trusted proxy, or by `authenticate`.
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
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from umbel.app.app import App
from umbel.errors import BrokerError, ConfigurationError
from umbel.web import api, exporters, pages
from umbel.web.dashboard import Dashboard
from umbel.web.oidc import BEGIN, CALLBACK
from umbel.web.pages import login
from umbel.web.problems import Problem, Refused, answer
from umbel.web.settings import WebSettings, check

# ---- gate ------------------------------------------------------------------------------------------
#
# Everything that comes in passes here: who asks, what is refused, and what every answer says.
#
# It wraps the whole application, so no handler can forget it.

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

    def __init__(self, app: ASGIApp, dashboard: "Dashboard") -> None:
        self._app, self._dashboard = app, dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        started = False

        async def dressed(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if self._dashboard.visitors.is_secure(scope):
                    headers["Strict-Transport-Security"] = HSTS
                if "cache-control" not in headers:
                    headers["Cache-Control"] = "no-store"
            await send(message)

        response: Response | None = None
        try:
            await self._dashboard.start()
            response = await self._admitted(scope, _limited(scope, receive), dressed)
        except Refused as refused:
            response = answer(refused.problem, refused.headers)
        except ClientDisconnect:
            return  # the client left before its request was complete
        if response is not None and not started:
            await response(scope, receive, dressed)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        is_public = path in PUBLIC or path.startswith(PUBLIC_BELOW)
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
    return answer(
        Problem(title="Unauthorized", status=401, detail=detail), {"WWW-Authenticate": 'Bearer realm="umbel"'}
    )


def _limited(scope: Scope, receive: Receive) -> Receive:
    """Limit the request's body to BODY_MAX bytes, received within BODY_S."""
    length = Headers(scope=scope).get("content-length", "0")
    if not length.isdecimal() or len(length) > LENGTH_DIGITS_MAX or int(length) > BODY_MAX:
        raise Refused(413, "Content Too Large", f"a request may have {BODY_MAX:,} bytes at most")
    size, is_whole, ends = 0, False, asyncio.get_running_loop().time() + BODY_S

    async def counted() -> Message:
        nonlocal size, is_whole
        try:
            async with asyncio.timeout_at(None if is_whole else ends):
                message = await receive()
        except TimeoutError:
            raise Refused(
                408, "Request Timeout", f"the request took longer than {BODY_S:g} s to arrive"
            ) from None
        size += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if size > BODY_MAX:
            raise Refused(413, "Content Too Large", f"a request may have {BODY_MAX:,} bytes at most")
        return message

    return counted


# ---- asgi() ----------------------------------------------------------------------------------------
#
# The dashboard as an ASGI application, for a separate server or mounted in another application.


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

    found: list[BaseRoute] = [
        *api.routes(dashboard.hub),
        *exporters.flower_routes(dashboard),
        *exporters.metrics_routes(dashboard),
        *login.routes(dashboard),
        Route("/healthcheck", _healthcheck, methods=["GET"]),
        *pages.routes(),
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _as_problem,
        Refused: _refused,
        BrokerError: _unavailable,
        ConfigurationError: _bad_request,
        Exception: _fault,
    }
    served = Starlette(routes=found, lifespan=life, exception_handlers=handlers)
    served.state.site = dashboard
    return Gate(served, dashboard)


async def _healthcheck(_request: Request) -> Response:
    return PlainTextResponse("OK")


async def _as_problem(_request: Request, error: HTTPException) -> Response:
    return answer(Problem(title=error.detail, status=error.status_code), dict(error.headers or {}))


async def _refused(_request: Request, error: Refused) -> Response:
    return answer(error.problem, error.headers)


async def _unavailable(_request: Request, error: BrokerError) -> Response:
    return answer(Problem(title="Broker unavailable", status=503, detail=str(error)))


async def _bad_request(_request: Request, error: ConfigurationError) -> Response:
    return answer(Problem(title="Bad request", status=400, detail=str(error)))


async def _fault(_request: Request, _error: Exception) -> Response:
    """The server logs the error; the response does not disclose it."""
    return answer(Problem(title="Internal error", status=500, detail="the dashboard's log says more"))
