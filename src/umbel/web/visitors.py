"""Visitors: who asks, and what is refused before a handler runs.

Who asks is said, in this order, by a bearer token, by a session's cookie, by the header of a trusted proxy,
or by the application that mounts the dashboard. A change must come from the dashboard's own pages: its
Origin is the host that was asked, and it carries the CSRF token of the visitor. A bearer token is in no
browser's keeping, so nothing can send it unasked, and the CSRF token is not needed.
"""

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from secrets import token_bytes, token_urlsafe
from time import time
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from umbel.web.problems import Forbidden, Refused
from umbel.web.roles import Role
from umbel.web.settings import WebSettings, is_from, is_loopback
from umbel.web.site import Visitor
from umbel.web.tokens import Token, digest_of, find_token, make_token

COOKIE = "umbel_session"
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 10_000
GUESSES_MAX = 20  # wrong tokens of one address in GUESSES_S
GUESSES_S = 60.0
ADDRESSES_MAX = 10_000
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
CSRF_HEADER = "x-csrf-token"
LOG_IN = "/session"  # a plain form, which has its token in the form


class Session(msgspec.Struct, frozen=True):
    name: str
    role: Role
    expires_at: float


class Visitors:
    """`tokens` are read each time they are needed: one that was removed is worth nothing at once."""

    def __init__(self, settings: WebSettings, tokens: Callable[[], list[Token]]) -> None:
        self._settings = settings
        self._tokens = tokens
        self._secret = token_bytes(32)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._guesses: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self.one_time = make_token() if settings.login and is_loopback(settings.host) else ""

    def judge(self, scope: Scope) -> Visitor | None:
        """Who asks, or None if nobody knows; Refused for what must not be answered at all."""
        headers = Headers(scope=scope)
        self._check_host(headers)
        found = self._bearer(headers, scope) or self._known(headers, scope)
        if scope["method"] not in SAFE:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            self._check_change(headers, None if path == LOG_IN else found)
        return found

    def log_in(self, token: str, address: str) -> tuple[str, Session]:
        """A session for a token, the one-time token or a named one; Refused for any other."""
        self._check_guesses(address)
        now = time()
        name, role = "one-time token", Role.ADMIN
        if not self._spend(token):
            known = find_token(self._tokens(), token, now) if token else None
            if known is None:
                self._note_guess(address, now)
                raise Refused(401, "Unauthorized", "the token is wrong, was used before, or has ended")
            name, role = known.name, known.role
        number, session = token_urlsafe(32), Session(name, role, now + SESSION_S)
        self._sessions[digest_of(number)] = session
        if len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return number, session

    def log_out(self, scope: Scope) -> None:
        self._sessions.pop(digest_of(_cookie(Headers(scope=scope))), None)

    # -- who -------------------------------------------------------------------------------------

    def _bearer(self, headers: Headers, scope: Scope) -> Visitor | None:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        address = address_of(scope)
        self._check_guesses(address)
        token = find_token(self._tokens(), given.strip(), time())
        if token is None:
            self._note_guess(address, time())
            raise Refused(401, "Unauthorized", "the token is wrong or has ended", www_authenticate="Bearer")
        return Visitor(name=token.name, role=token.role, csrf="", address=address)

    def _known(self, headers: Headers, scope: Scope) -> Visitor | None:
        address = address_of(scope)
        number = _cookie(headers)
        session = self._sessions.get(digest_of(number)) if number else None
        if session is not None and time() < session.expires_at:
            return self._visitor(session.name, session.role, f"session {number}", address)
        if self._settings.proxies and is_from(address, self._settings.proxies):
            name = headers.get(self._settings.proxy_header, "")
            if name:
                return self._visitor(name, self._settings.proxy_role, f"proxy {name}", address)
        if self._settings.authenticate is not None:
            told = self._settings.authenticate(scope)
            if told is not None:
                return self._visitor(told[0], Role(told[1]), f"host {told[0]}", address)
        if not self._settings.login:
            return self._visitor("local user", Role.ADMIN, "local", address)
        return None

    def _visitor(self, name: str, role: Role, key: str, address: str) -> Visitor:
        csrf = hmac.new(self._secret, key.encode("utf-8", "replace"), hashlib.sha256).hexdigest()
        return Visitor(name=name[:100], role=role, csrf=csrf, address=address)

    # -- what is refused -------------------------------------------------------------------------

    def _check_host(self, headers: Headers) -> None:
        """Without a login, a page elsewhere whose name leads here must not be answered."""
        if self._settings.login:
            return
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if not is_loopback(host):
            raise Forbidden(f"the dashboard is not {host!r}; open it by its own address")

    def _check_change(self, headers: Headers, visitor: Visitor | None) -> None:
        origin = headers.get("origin")
        if origin is not None:
            if urlsplit(origin).netloc != headers.get("host", ""):
                raise Forbidden(f"the request comes from another site: {origin[:100]}")
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


def address_of(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def _cookie(headers: Headers) -> str:
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def set_cookie(number: str, scope: Scope) -> str:
    path = scope.get("root_path") or "/"
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    return f"{COOKIE}={number}; Path={path}; HttpOnly; SameSite=Strict; Max-Age={int(SESSION_S)}{secure}"


def end_cookie(scope: Scope) -> str:
    return f"{COOKIE}=; Path={scope.get('root_path') or '/'}; HttpOnly; SameSite=Strict; Max-Age=0"
