"""Login: the routes for logging in and out: with a token, with the one-time URL, at an identity provider.

A named token is accepted from the form only, because browsers and logs store addresses. After the provider's
redirect the browser gets a page that refreshes itself: a redirect would still count as coming from another
site, and the browser would not send the cookie of the new session with it.
"""

from time import time
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from umbel.web.credentials import SESSION_S, Session, Verdict, cookie, written_cookie
from umbel.web.http import Refused, path_to
from umbel.web.oidc import BEGIN, CALLBACK, LATE, LOGIN_MAX_S, LoginFailed
from umbel.web.pages.frame import render_login
from umbel.web.visitors import UNKNOWN

if TYPE_CHECKING:
    from umbel.web.dashboard import Dashboard

COOKIE = "umbel_login"


def routes(dashboard: "Dashboard") -> list[BaseRoute]:
    """Return the routes for logging in and out, with those of the identity provider if there is one."""
    visitors = dashboard.visitors

    async def begin(request: Request) -> Response:
        is_form = request.method == "POST"
        text = (await request.body() if is_form else request.scope["query_string"]).decode(errors="replace")
        (token,) = parse_qs(text).get("token", [""])[-1:]
        try:
            log_in = visitors.log_in if is_form else visitors.log_in_once
            set_cookie = await log_in(token, request.scope)
        except Refused as refused:
            if refused.problem.status in {401, 429} and "text/html" in request.headers.get("accept", ""):
                return _redirect(request, "/login?failed=token")
            raise
        return _redirect(request, "/", {"Set-Cookie": set_cookie})

    async def end(request: Request) -> Response:
        everywhere = request.query_params.get("everywhere") == "yes"
        set_cookie = await visitors.log_out(request.scope, everywhere=everywhere)
        headers = {"Set-Cookie": set_cookie, "Clear-Site-Data": '"cache"'}
        if "hx-request" in request.headers:
            return Response(None, 204, headers | {"HX-Redirect": path_to(request, "/login")})
        return _redirect(request, "/login", headers)

    async def login(request: Request) -> Response:
        at_provider = None if dashboard.provider is None else (dashboard.provider.issuer, BEGIN)
        return render_login(request, failed=request.query_params.get("failed", ""), provider=at_provider)

    found: list[BaseRoute] = [
        Route("/session", begin, methods=["GET", "POST"]),
        Route("/session/end", end, methods=["POST"]),
        Route("/login", login),
    ]
    return found if dashboard.provider is None else [*found, *_of_provider(dashboard)]


def _of_provider(dashboard: "Dashboard") -> list[BaseRoute]:
    visitors, provider = dashboard.visitors, dashboard.provider
    assert provider is not None

    def provider_cookie(request: Request, value: str, age_s: float) -> str:
        secure = visitors.is_secure(request.scope)
        return written_cookie(request.scope, value, age_s, COOKIE, secure=secure, same_site="Lax")

    async def begin(request: Request) -> Response:
        if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return _redirect(request, "/login")  # another site started the login, not the visitor
        try:
            url, value = await provider.begin()
        except LoginFailed as error:
            await visitors.note_failure(request.scope, str(error), failures=visitors.at_provider)
            return _redirect(request, f"/login?failed={error.reason}")
        set_cookie = provider_cookie(request, value, LOGIN_MAX_S)
        return RedirectResponse(url, 303, headers={"Set-Cookie": set_cookie})

    async def callback(request: Request) -> Response:
        if visitors.at_provider.is_locked_out(visitors.address_of(request.scope), time()):
            return _redirect(request, "/login?failed=many")
        value = cookie(request.scope, COOKIE, secure=visitors.is_secure(request.scope))
        try:
            person = await provider.finish(request.query_params, value)
        except LoginFailed as error:
            # Any page can redirect its visitors here; for a login that this browser did not start, the
            # provider is not asked.
            failures = visitors.failures if error.reason == LATE else visitors.at_provider
            verdict = await visitors.note_failure(request.scope, str(error), error.who or UNKNOWN, failures)
            reason = "many" if verdict is Verdict.IGNORED else error.reason
            return _redirect(request, f"/login?failed={reason}")
        session = Session(
            name=person.name,
            role=person.role,
            holder=f"person {person.subject} of {provider.issuer}",
            ends_at=time() + SESSION_S,
        )
        arguments = {"by": "provider", "issuer": provider.issuer, "subject": person.subject}
        answer = render_login(request, entered=path_to(request, "/"))
        answer.headers.append("Set-Cookie", await visitors.admit(request.scope, session, arguments))
        answer.headers.append("Set-Cookie", provider_cookie(request, "", 0))
        return answer

    return [Route(BEGIN, begin), Route(CALLBACK, callback)]


def _redirect(request: Request, path: str, headers: dict[str, str] | None = None) -> Response:
    return RedirectResponse(path_to(request, path), 303, headers=headers)
