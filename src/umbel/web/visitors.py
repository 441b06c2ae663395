"""Visitors: who asks, and what is refused before a handler runs.

Who asks is said, in this order, by a bearer token, by a session's cookie, by the header of a trusted proxy,
or by the application that mounts the dashboard. A change must come from the dashboard's own pages: its
Origin is the host that was asked, and it carries the CSRF token of the visitor. A bearer token is in no
browser's keeping, so nothing can send it unasked, and the CSRF token is not needed.
"""

import asyncio
import hashlib
import hmac
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from inspect import iscoroutine
from math import inf
from secrets import token_bytes, token_urlsafe
from time import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from umbel.pools.guard import Raised, call_guarded
from umbel.web.origins import FORWARDED, address_of, cookie_name, is_secure, peer_of
from umbel.web.problems import Forbidden, Refused
from umbel.web.roles import Role
from umbel.web.settings import Authenticate, WebSettings, is_from, is_loopback
from umbel.web.site import Visitor
from umbel.web.tokens import PREFIX, Token, digest_of, find_token, make_token, valid
from umbel.wire.show import brief

log = logging.getLogger("umbel.web")
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 10_000
GUESSES_MAX = 20  # wrong tokens of one address in GUESSES_S
GUESSES_S = 60.0
ADDRESSES_MAX = 10_000
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
CSRF_HEADER = "x-csrf-token"
ROLES = tuple(one.value for one in Role)
LOG_IN = "/session"  # a plain form, which has its token in the form


class Session(msgspec.Struct, frozen=True):
    """`digest`: of the token that it was begun with, and with which it ends; "" for the one-time token."""

    name: str
    role: Role
    expires_at: float
    digest: str = ""


class Visitors:
    """`tokens` are read each time they are needed, in a thread: one that was removed is worth nothing at
    once, and a session that it began ends with it."""

    def __init__(self, settings: WebSettings, tokens: Callable[[], list[Token]]) -> None:
        self._settings = settings
        self._tokens = tokens
        self._secret = token_bytes(32)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._guesses: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self.one_time = make_token() if settings.login and is_loopback(settings.host) else ""

    async def judge(self, scope: Scope) -> Visitor | None:
        """Who asks, or None if nobody knows; Refused for what must not be answered at all."""
        headers = Headers(scope=scope)
        if self._settings.is_open:
            _check_is_local(headers, scope)
        given = self._bearer(headers)
        if given is None:
            found = await self._known(headers, scope)
        else:
            address = self.address_of(scope)
            found = _holder(await self._named(given, address), address)
        if scope["method"] not in SAFE:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            self._check_change(headers, None if path == LOG_IN else found)
        return found

    async def still_knows(self, visitor: Visitor, scope: Scope) -> bool:
        """Whether the same request would come from the same visitor now."""
        headers = Headers(scope=scope)
        given = self._bearer(headers)
        try:
            if given is None:
                return await self._known(headers, scope) == visitor
            token = find_token(await self._read(), given, time())
        except Refused:
            return False
        return token is not None and _holder(token, visitor.address) == visitor

    async def log_in(self, token: str, scope: Scope) -> tuple[str, Session]:
        """A session for a token, the one-time token or a named one; Refused for any other."""
        address, ends_at = self.address_of(scope), time() + SESSION_S
        self._check_guesses(address)
        if self._spend(token):
            session = Session("one-time token", Role.ADMIN, ends_at)
        else:
            known = await self._named(token, address)
            session = Session(known.name, known.role, min(ends_at, known.expires_at or inf), known.digest)
        number = token_urlsafe(32)
        self._sessions[digest_of(number)] = session
        if len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return number, session

    def log_out(self, scope: Scope) -> None:
        self._sessions.pop(digest_of(_cookie(Headers(scope=scope))), None)

    def address_of(self, scope: Scope) -> str:
        return address_of(scope, self._settings.proxies)

    def set_cookie(self, number: str, session: Session, scope: Scope) -> str:
        secure = "; Secure" if is_secure(scope, self._settings.proxies) else ""
        return _written_cookie(number, max(0, int(session.expires_at - time())), scope) + secure

    # -- who -------------------------------------------------------------------------------------

    def _bearer(self, headers: Headers) -> str | None:
        """The bearer token; None without one, or if it belongs to the application or proxy in front."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        is_alone = self._settings.authenticate is None and not self._settings.proxies
        if kind.lower() != "bearer" or not (is_alone or given.strip().startswith(PREFIX)):
            return None
        return given.strip()

    async def _named(self, given: str, address: str) -> Token:
        """The valid token that this is; Refused for another, and after too many others."""
        self._check_guesses(address)
        tokens = await self._read()
        self._check_guesses(address)  # others may have guessed meanwhile
        found = find_token(tokens, given, time())
        if found is None:
            self._note_guess(address, time())
            detail = "the token is wrong, was used before, or has expired"
            raise Refused(401, "Unauthorized", detail, www_authenticate="Bearer")
        return found

    async def _known(self, headers: Headers, scope: Scope) -> Visitor | None:
        address = self.address_of(scope)
        number = _cookie(headers)
        session = await self._session(number) if number else None
        if session is not None:
            return self._visitor(session.name, session.role, f"session {number}", address)
        name = self._named_by_proxy(headers, scope)
        if name:
            return self._visitor(name, self._settings.proxy_role, f"proxy {name}", address)
        if self._settings.authenticate is not None:
            told = _told_by_host(self._settings.authenticate, scope)
            if told is not None:
                return self._visitor(told[0], told[1], f"host {told[0]}", address)
        if self._settings.is_open:
            return self._visitor("local user", Role.ADMIN, "local", address)
        return None

    async def _session(self, number: str) -> Session | None:
        """None, too, once its token has ended or was removed."""
        key = digest_of(number)
        session = self._sessions.get(key)
        if session is None:
            return None
        is_valid = time() < session.expires_at
        if is_valid and session.digest:
            is_valid = session.digest in {one.digest for one in valid(await self._read(), time())}
        if not is_valid:
            self._sessions.pop(key, None)
        return session if is_valid else None

    def _named_by_proxy(self, headers: Headers, scope: Scope) -> str:
        if not is_from(peer_of(scope), self._settings.proxies):
            return ""
        names = headers.getlist(self._settings.proxy_header)
        if len(names) > 1:  # one of them may be the visitor's own
            name = self._settings.proxy_header
            detail = f"the request has {len(names)} headers {name}; let the proxy replace it, not add one"
            raise Refused(400, "Bad Request", detail)
        return names[0] if names else ""

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

    # -- what is refused -------------------------------------------------------------------------

    def _check_change(self, headers: Headers, visitor: Visitor | None) -> None:
        origin = headers.get("origin")
        if origin is not None:
            if _place(origin) != headers.get("host", ""):
                raise Forbidden(
                    f"the request comes from another site, {origin[:100]}; open the dashboard directly"
                )
        elif visitor is not None and visitor.csrf and headers.get("sec-fetch-site") != "same-origin":
            raise Forbidden("the request does not say where it comes from; send the header Origin")
        if visitor is None or not visitor.csrf:
            return
        if not hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), visitor.csrf.encode()):
            raise Forbidden("the header X-CSRF-Token is missing or wrong; reload the page")

    def _spend(self, token: str) -> bool:
        if not self.one_time or not hmac.compare_digest(token.encode(), self.one_time.encode()):
            return False
        self.one_time = ""
        return True

    def _check_guesses(self, address: str) -> None:
        began, count = self._guesses.get(address, (0.0, 0))
        if count >= GUESSES_MAX and time() - began < GUESSES_S:
            raise Refused(429, "Too Many Requests", "too many wrong tokens; wait a minute", retry_after="60")

    def _note_guess(self, address: str, now: float) -> None:
        began, count = self._guesses.pop(address, (now, 0))
        self._guesses[address] = (began, count + 1) if now - began < GUESSES_S else (now, 1)
        if len(self._guesses) > ADDRESSES_MAX:
            self._guesses.popitem(last=False)


def _told_by_host(authenticate: Authenticate, scope: Scope) -> tuple[str, Role] | None:
    """What the application says of who asks; while it cannot say, nobody is answered."""
    happened = call_guarded(authenticate, scope)
    if isinstance(happened, Raised):
        log.error(
            "authenticate function of the dashboard raised an exception; request refused",
            exc_info=happened.error,
        )
    else:
        told: Any = happened.value
        if told is None:
            return None
        match told:
            case (str() as name, role) if role in ROLES:
                return name, Role(role)
        if iscoroutine(told):  # an `async def`, which is not awaited here
            told.close()
        fields = {"returned": brief(told), "roles": ", ".join(ROLES)}
        log.error(
            "authenticate function of the dashboard must return (name, role) or None; request refused",
            extra=fields,
        )
    detail = "the application's authenticate function failed; the application's log says why"
    raise Refused(503, "Service Unavailable", detail)


def _check_is_local(headers: Headers, scope: Scope) -> None:
    """Without a login, only this machine is answered, and no page elsewhere whose name leads here."""
    host = headers.get("host", "")
    if not is_loopback(_hostname(host)):
        raise Forbidden(f"the dashboard does not serve the host {host[:100]!r}; open it by its own address")
    if not is_loopback(peer_of(scope)) or any(name in headers for name in FORWARDED):
        raise Forbidden(
            "without a login, only requests from this machine are answered, and none through a proxy"
        )


def _place(origin: str) -> str:
    """Host and port of an Origin; "" for what is none."""
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


def _cookie(headers: Headers) -> str:
    wanted = cookie_name(headers)
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == wanted:
            return value
    return ""


def end_cookie(scope: Scope) -> str:
    return _written_cookie("", 0, scope)


def _written_cookie(value: str, age_s: int, scope: Scope) -> str:
    name, path = cookie_name(Headers(scope=scope)), scope.get("root_path") or "/"
    return f"{name}={value}; Path={path}; HttpOnly; SameSite=Strict; Max-Age={age_s}"
