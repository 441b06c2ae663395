"""Visitors: who sends a request, and what is refused before a handler runs.

A visitor is identified, in this order, by a bearer token, by a session's cookie, by the header of a trusted
proxy, or by the application that mounts the dashboard. A change must come from the dashboard's own pages: its
Origin is the host of the request, and it carries the visitor's CSRF token. A request with a bearer token
needs no CSRF token, because browsers do not send such a token by themselves.

Logins and refused requests are written to the audit, up to the limits of failures.
"""

import asyncio
import hashlib
import hmac
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from inspect import iscoroutine
from math import inf
from secrets import token_bytes
from time import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from umbel.pools.guard import Raised, call_guarded
from umbel.web.actions import AuditEntry
from umbel.web.audit import FAILED_LOGIN, LOCKED_OUT, LOGIN, LOGOUT, REFUSED_REQUEST, note_of
from umbel.web.credentials import (
    PREFIX,
    SESSION_S,
    FailureLimit,
    Session,
    Sessions,
    Token,
    Verdict,
    address_of,
    came_through_proxy,
    cookie,
    find_token,
    is_background,
    is_secure,
    make_token,
    path_of,
    peer_of,
    written_cookie,
)
from umbel.web.http import Forbidden, Refused, Visitor
from umbel.web.settings import PROXY_HEADER, Authenticate, Role, WebSettings, is_from, is_loopback
from umbel.wire.show import brief

log = logging.getLogger("umbel.web")
ONE_TIME = "one-time token"
ONE_TIME_S = 12 * 3600.0
TOGETHER_S = 1.0
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
CSRF_HEADER = "x-csrf-token"
ROLES = tuple(role.value for role in Role)
LOG_IN = "/session"  # a plain form, which carries its token in a field
UNKNOWN = "unknown"


class Visitors:
    """Authenticates requests, starts and ends sessions, and audits both with `note`.

    `tokens` reads the tokens, for each request and in a thread: a token that is removed is invalid at once,
    and the sessions that it started end with it.
    """

    def __init__(
        self,
        settings: WebSettings,
        tokens: Callable[[], list[Token]],
        note: Callable[[AuditEntry], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._tokens = tokens
        self._note = note
        self._secret = token_bytes(32)
        self._reading: asyncio.Task[list[Token]] | None = None
        self._one_time_ends = time() + ONE_TIME_S
        self.sessions = Sessions(settings.session_idle_s)
        self.failures, self.at_provider, self._refusals = FailureLimit(), FailureLimit(), FailureLimit()
        self.one_time = make_token() if settings.has_one_time_token else ""

    async def judge(self, scope: Scope) -> Visitor | None:
        """Return the visitor, or None for an anonymous request; Refused for what must not be answered."""
        headers = Headers(scope=scope)
        if self._settings.is_open:
            self._check_is_local(headers, scope)
        given = self._bearer(headers)
        if given is None:
            found = await self._known(headers, scope, is_used=not is_background(scope))
        else:
            found = _holder(await self._token(given, scope), self.address_of(scope))
        if scope["method"] not in SAFE:
            try:
                self._check_change(headers, None if path_of(scope) == LOG_IN else found)
            except Forbidden as refused:
                await self._note_refused(scope, found, refused)
                raise
        return found

    async def still_knows(self, visitor: Visitor, scope: Scope) -> bool:
        """Return whether the same request would be authenticated as the same visitor now."""
        headers = Headers(scope=scope)
        given = self._bearer(headers)
        try:
            if given is None:
                return await self._known(headers, scope, is_used=False) == visitor
            token = find_token(await self._read(), given, time())
        except Refused:
            return False
        return token is not None and _holder(token, visitor.address) == visitor

    # -- logging in and out ----------------------------------------------------------------------

    async def log_in(self, token: str, scope: Scope) -> str:
        """Return the cookie of a session for a named token; Refused for any other token."""
        known = await self._token(token, scope)
        session = Session(
            name=known.name,
            role=known.role,
            holder=f"token {known.digest}",
            ends_at=min(time() + SESSION_S, known.expires_at or inf),
            digest=known.digest,
        )
        return await self.admit(scope, session, {"by": "token"})

    async def log_in_once(self, token: str, scope: Scope) -> str:
        """Return the cookie of a session for the one-time token.

        A named token is refused, because the token is in an address, which browsers and logs store. A request
        that a proxy forwarded is refused too: the one-time token is for this machine alone.
        """
        if seen := came_through_proxy(scope):
            raise await self._failed(scope, f"the one-time token came through a proxy ({seen[:100]})")
        if not self._spend(token):
            raise await self._failed(scope, "the one-time token is wrong, was used before, or has expired")
        ends_at = time() + SESSION_S
        session = Session(name=ONE_TIME, role=Role.ADMIN, holder=ONE_TIME, ends_at=ends_at)
        return await self.admit(scope, session, {"by": ONE_TIME})

    async def admit(self, scope: Scope, session: Session, arguments: dict[str, Any]) -> str:
        """Return the cookie of a new session, which replaces the browser's previous session."""
        self.sessions.end(self._cookie(scope))
        number = self.sessions.begin(session, time())
        address = self.address_of(scope)
        await self._note(note_of(LOGIN, session.name, session.role, address, arguments=arguments))
        return written_cookie(scope, number, session.ends_at - time(), secure=self.is_secure(scope))

    async def log_out(self, scope: Scope, *, everywhere: bool = False) -> str:
        """End the session; return the header that removes its cookie.

        `everywhere`: the holder's other sessions end too.
        """
        ended = self.sessions.end(self._cookie(scope))
        if ended is not None:
            arguments = {"other_sessions": self.sessions.end_all(ended.holder) if everywhere else 0}
            address = self.address_of(scope)
            await self._note(note_of(LOGOUT, ended.name, ended.role, address, arguments=arguments))
        return written_cookie(scope, "", 0, secure=self.is_secure(scope))

    async def note_failure(
        self, scope: Scope, why: str, who: str = UNKNOWN, failures: FailureLimit | None = None
    ) -> Verdict:
        """Write a failed login to the audit, unless the address has failed too often."""
        address = self.address_of(scope)
        verdict = (failures or self.failures).note(address, time())
        if verdict is not Verdict.IGNORED:
            await self._note(note_of(FAILED_LOGIN, who, "", address, target=why, status="refused"))
        if verdict is Verdict.LOCKED_OUT:
            log.warning(
                "too many failed logins to the dashboard; ignored for a minute", extra={"address": address}
            )
            await self._note(note_of(LOCKED_OUT, who, "", address, status="refused"))
        return verdict

    def sessions_of(self, scope: Scope) -> list[Session]:
        """Return all sessions of the request's holder."""
        own = self.sessions.find(self._cookie(scope), time(), is_used=False)
        return [] if own is None else self.sessions.of(own.holder)

    def address_of(self, scope: Scope) -> str:
        """Return the visitor's address, also behind trusted proxies."""
        return address_of(scope, self._settings.proxies)

    def is_secure(self, scope: Scope) -> bool:
        """Return whether the browser uses TLS."""
        return self._settings.is_public_by_tls or is_secure(scope, self._settings.proxies)

    # -- authentication --------------------------------------------------------------------------

    def _bearer(self, headers: Headers) -> str | None:
        """Return the bearer token; None without one, or if it is for the application or proxy in front."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        is_alone = self._settings.authenticate is None and not self._settings.proxies
        if kind.lower() != "bearer" or not (is_alone or given.strip().startswith(PREFIX)):
            return None
        return given.strip()

    async def _token(self, given: str, scope: Scope) -> Token:
        """Return the valid token that was given, also from a locked-out address; Refused for another."""
        is_locked_out = self.failures.is_locked_out(self.address_of(scope), time())
        tokens = await (self._read_together() if is_locked_out else self._read())
        found = find_token(tokens, given, time())
        if found is not None:
            return found
        ended = find_token(tokens, given, -inf)
        if ended is not None:
            raise await self._failed(scope, "the token has expired", ended.name)
        raise await self._failed(scope, "wrong token")

    async def _failed(self, scope: Scope, why: str, who: str = UNKNOWN) -> Refused:
        if await self.note_failure(scope, why, who) is Verdict.IGNORED:
            return Refused(429, "Too Many Requests", "too many wrong tokens; wait a minute", retry_after="60")
        detail = "the token is wrong, was used before, or has expired"
        return Refused(401, "Unauthorized", detail, www_authenticate="Bearer")

    async def _known(self, headers: Headers, scope: Scope, *, is_used: bool) -> Visitor | None:
        address = self.address_of(scope)
        number = self._cookie(scope)
        session = await self._session(number, is_used=is_used) if number else None
        if session is not None:
            return self._visitor(session.name, session.role, f"session {number}", address)
        name = self._named_by_proxy(headers, scope)
        if name:
            return self._visitor(name, self._settings.proxy_role, f"proxy {name}", address)
        if self._settings.authenticate is not None:
            identity = _identity_from_host(self._settings.authenticate, scope)
            if identity is not None:
                return self._visitor(identity[0], identity[1], f"host {identity[0]}", address)
        if self._settings.is_open:
            return self._visitor("local user", Role.ADMIN, "local", address)
        return None

    async def _session(self, number: str, *, is_used: bool) -> Session | None:
        """Return the session; None, too, if its token has expired or was removed."""
        session = self.sessions.find(number, time(), is_used=is_used)
        if session is None or not session.digest:
            return session
        now = time()
        if any(token.digest == session.digest and token.is_valid(now) for token in await self._read()):
            return session
        self.sessions.end(number)
        return None

    def _cookie(self, scope: Scope) -> str:
        return cookie(scope, secure=self.is_secure(scope))

    def _named_by_proxy(self, headers: Headers, scope: Scope) -> str:
        header = self._settings.user_header
        if not header or not is_from(peer_of(scope), self._settings.proxies):
            return ""
        names = headers.getlist(header)
        if len(names) > 1:  # the visitor may have added one
            detail = f"the request has {len(names)} headers {header}; let the proxy replace it, not add one"
            raise Refused(400, "Bad Request", detail)
        return names[0] if names else ""

    async def _read_together(self) -> list[Token]:
        """Read the tokens once for all requests of a second, so that guesses cost little."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_later(), name="umbel-tokens")
        return await asyncio.shield(self._reading)

    async def _read_later(self) -> list[Token]:
        await asyncio.sleep(TOGETHER_S)
        self._reading = None  # later requests may use a newer token
        return await self._read()

    async def _read(self) -> list[Token]:
        try:
            return await asyncio.to_thread(self._tokens)
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            log.error("cannot read the login tokens of the dashboard", extra={"error": str(error)})
            detail = "the dashboard cannot read its state file; its log says why"
            raise Refused(503, "Service Unavailable", detail, retry_after="5") from None

    def _visitor(self, name: str, role: Role, key: str, address: str) -> Visitor:
        csrf = hmac.new(self._secret, key.encode("utf-8", "replace"), hashlib.sha256).hexdigest()
        return Visitor(name=name[:100], role=role, csrf=csrf, address=address)

    def _spend(self, token: str) -> bool:
        if not self.one_time or time() >= self._one_time_ends:
            return False
        if not hmac.compare_digest(token.encode(), self.one_time.encode()):
            return False
        self.one_time = ""
        return True

    # -- refusals --------------------------------------------------------------------------------

    def _check_change(self, headers: Headers, visitor: Visitor | None) -> None:
        origin = headers.get("origin")
        if origin is not None:
            if _netloc(origin) != headers.get("host", ""):
                raise Forbidden(
                    f"the request comes from another site, {origin[:100]}; open the dashboard directly"
                )
        elif visitor is not None and visitor.csrf and headers.get("sec-fetch-site") != "same-origin":
            raise Forbidden("the request does not say where it comes from; send the header Origin")
        if visitor is None or not visitor.csrf:
            return
        if not hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), visitor.csrf.encode()):
            raise Forbidden("the header X-CSRF-Token is missing or wrong; reload the page")

    async def _note_refused(self, scope: Scope, visitor: Visitor | None, refused: Forbidden) -> None:
        address = self.address_of(scope)
        if self._refusals.note(address, time()) is Verdict.IGNORED:
            return
        who, role = (visitor.name, visitor.role.value) if visitor else (UNKNOWN, "")
        target = f"{scope['method']} {path_of(scope)}"
        why = {"why": refused.problem.detail}
        await self._note(
            note_of(REFUSED_REQUEST, who, role, address, target=target, arguments=why, status="refused")
        )

    def _check_is_local(self, headers: Headers, scope: Scope) -> None:
        """Without a login, refuse other machines, and other sites' pages whose names resolve to this one."""
        host = headers.get("host", "")
        if not is_loopback(_hostname(host)):
            raise Forbidden(
                f"the dashboard does not serve the host {host[:100]!r}; open it by its own address"
            )
        if not is_loopback(peer_of(scope)):
            raise Forbidden("without a login, only requests from this machine are answered")
        if seen := came_through_proxy(scope, [PROXY_HEADER, self._settings.user_header]):
            raise Forbidden(
                "without a login, nothing that a proxy forwards is answered, and this request has "
                f"{seen[:100]}; log in by tokens, or name the proxy with --trusted-proxy"
            )


def _identity_from_host(authenticate: Authenticate, scope: Scope) -> tuple[str, Role] | None:
    """Return the identity that the application gives the request, or None; Refused if its function fails."""
    happened = call_guarded(authenticate, scope)
    if isinstance(happened, Raised):
        log.error(
            "authenticate function of the dashboard raised an exception; request refused",
            exc_info=happened.error,
        )
    else:
        returned: Any = happened.value
        match returned:
            case None:
                return None
            case (str() as name, role) if role in ROLES:
                return name, Role(role)
        if iscoroutine(returned):  # of an `async def`, which is not awaited here
            returned.close()
        fields = {"returned": brief(returned), "roles": ", ".join(ROLES)}
        log.error(
            "authenticate function of the dashboard must return (name, role) or None; request refused",
            extra=fields,
        )
    detail = "the application's authenticate function failed; the application's log says why"
    raise Refused(503, "Service Unavailable", detail)


def _netloc(origin: str) -> str:
    """Return host and port of an Origin; "" if it is not valid."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _holder(token: Token, address: str) -> Visitor:
    return Visitor(name=token.name, role=token.role, csrf="", address=address)
