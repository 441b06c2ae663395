"""asgi(): the dashboard as an ASGI application, for a server of its own or mounted in another application.

    app.mount("/umbel", umbel.web.asgi(tasks.app))                           # FastAPI, Starlette
    umbel.web.asgi(tasks.app, authenticate=lambda scope: ("ann", "operator"))   # who asks is known already

Who may look is asked here too when it is mounted: by tokens, by a trusted proxy, or by `authenticate`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from umbel.app.app import App
from umbel.errors import BrokerError, ConfigurationError
from umbel.web import api, flower, metrics, pages
from umbel.web.dashboard import Dashboard
from umbel.web.gate import Gate
from umbel.web.problems import Problem, Refused, answer
from umbel.web.settings import WebSettings, check
from umbel.web.site import path_to
from umbel.web.visitors import end_cookie


def asgi(app: App, **options: Any) -> ASGIApp:
    """The dashboard of the app's cluster. The options are the fields of `WebSettings`."""
    try:
        settings = msgspec.structs.replace(WebSettings(), **options)
    except TypeError:
        known = ", ".join(WebSettings.__struct_fields__)
        raise ConfigurationError(f"unknown option among {', '.join(options)}; known: {known}") from None
    if settings.is_open:
        raise ConfigurationError(
            "login=False would let in everyone who reaches your site; identify users with authenticate="
        )
    return application(Dashboard(app, settings))


def application(dashboard: Dashboard) -> ASGIApp:
    check(dashboard.settings, named_tokens=len(dashboard.journal.tokens()))

    @asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        await dashboard.start()
        yield
        await dashboard.stop()

    found: list[BaseRoute] = [
        *api.routes(dashboard.hub),
        *flower.routes(dashboard),
        *metrics.routes(dashboard),
        *_sessions(dashboard),
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


def _sessions(dashboard: Dashboard) -> list[BaseRoute]:
    async def begin(request: Request) -> Response:
        is_form = request.method == "POST"
        text = (await request.body() if is_form else request.scope["query_string"]).decode(errors="replace")
        (token,) = parse_qs(text).get("token", [""])[:1]
        try:
            number, session = await dashboard.visitors.log_in(token, request.scope)
        except Refused as refused:
            if refused.problem.status in {401, 429} and "text/html" in request.headers.get("accept", ""):
                return RedirectResponse(path_to(request, "/login?failed"), 303)
            raise
        cookie = dashboard.visitors.set_cookie(number, session, request.scope)
        return RedirectResponse(path_to(request, "/"), 303, headers={"Set-Cookie": cookie})

    async def end(request: Request) -> Response:
        dashboard.visitors.log_out(request.scope)
        headers = {"Set-Cookie": end_cookie(request.scope)}
        return RedirectResponse(path_to(request, "/login"), 303, headers=headers)

    return [
        Route("/session", begin, methods=["GET", "POST"]),
        Route("/session/end", end, methods=["POST"]),
    ]


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
    """The server logs the error; who asks learns no more than that there was one."""
    return answer(Problem(title="Internal error", status=500, detail="the dashboard's log says more"))
