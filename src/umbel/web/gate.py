"""Gate: everything that comes in passes here: who asks, what is refused, and what every answer says.

It wraps the whole application, so no handler can forget it.
"""

from functools import partial
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from umbel.web.problems import Problem, Refused, answer

if TYPE_CHECKING:
    from umbel.web.dashboard import Dashboard

BODY_MAX = 1_000_000
LENGTH_DIGITS_MAX = 20  # Python refuses to read very long numbers
PUBLIC = ("/login", "/session", "/healthcheck")
PUBLIC_BELOW = "/static/"
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
                if "cache-control" not in headers:
                    headers["Cache-Control"] = "no-store"
            await send(message)

        response: Response | None = None
        try:
            await self._dashboard.start()
            response = await self._admitted(scope, _limited(scope, receive), dressed)
        except Refused as refused:
            response = answer(refused.problem, refused.headers)
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
            scope["umbel.still_known"] = partial(visitors.still_knows, visitor, dict(scope))
        await self._app(scope, receive, send)
        return None


def _unknown(scope: Scope) -> Response:
    """A browser is shown where to log in; a program is told."""
    wants_page = "text/html" in Headers(scope=scope).get("accept", "") and scope["method"] == "GET"
    if wants_page:
        return RedirectResponse(f"{scope.get('root_path', '')}/login", 303)
    detail = "log in first, or send a token: Authorization: Bearer TOKEN (umbel web token add NAME)"
    return answer(
        Problem(title="Unauthorized", status=401, detail=detail), {"WWW-Authenticate": 'Bearer realm="umbel"'}
    )


def _limited(scope: Scope, receive: Receive) -> Receive:
    """The request's body, of at most BODY_MAX bytes."""
    length = Headers(scope=scope).get("content-length", "0")
    if not length.isdecimal() or len(length) > LENGTH_DIGITS_MAX or int(length) > BODY_MAX:
        raise Refused(413, "Content Too Large", f"a request may have {BODY_MAX:,} bytes at most")
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > BODY_MAX:
            raise Refused(413, "Content Too Large", f"a request may have {BODY_MAX:,} bytes at most")
        return message

    return counted
