"""Credentials: where a request comes from, and the tokens and sessions that it carries.

`X-Forwarded-For` and `X-Forwarded-Proto` are trusted from the addresses in `proxies` only. A token is long
and random, so nobody can guess it, and its SHA-256 is as good as a slow hash; only the hash is stored, and it
is compared in constant time. Sessions live in memory and end by time, by idleness, or with their token.
"""

import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from ipaddress import IPv6Address, ip_address
from secrets import token_urlsafe

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from umbel.web.settings import Role, is_from

# ---- origins ---------------------------------------------------------------------------------------

COOKIE = "umbel_session"
OF_PROXIES = (
    *(
        "forwarded",
        "via",
        "x-real-ip",
        "x-scheme",
        "x-remote-",
        "remote-user",
        "x-client-ip",
        "true-client-ip",
    ),
    *("x-cluster-client-ip", "x-original-", "x-proxy", "x-envoy-", "x-amzn-", "x-azure-", "x-appengine-"),
    *("x-arr-", "x-goog-iap-", "x-forwarded", "x-auth-request-", "cf-", "fastly-", "x-varnish", "x-vercel-"),
    *("x-webauth-", "x-authentik-", "x-ms-client-principal", "cdn-loop", "x-request-start"),
)
"""Beginnings of the headers that proxies and load balancers add: a request with such a header was sent to a
proxy, and not to the dashboard."""


def path_of(scope: Scope) -> str:
    """Return the path of a request below the path at which the dashboard is mounted."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def peer_of(scope: Scope) -> str:
    """Return the address of the connection: the visitor's, or the last proxy's."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def address_of(scope: Scope, proxies: Sequence[str]) -> str:
    """Return the visitor's address: the last hop of X-Forwarded-For that is no trusted proxy, else the peer.

    Each proxy appends the address of its client, so the visitor may have written everything before that hop.
    """
    peer = peer_of(scope)
    if not is_from(peer, proxies):
        return peer
    hops = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
    for hop in reversed(hops):
        address = _without_port(hop.strip())
        if not address:
            return peer
        if not is_from(address, proxies):
            return address
    return peer


def is_secure(scope: Scope, proxies: Sequence[str]) -> bool:
    """Return whether the browser uses https, here or at the trusted proxy."""
    if scope.get("scheme") == "https":
        return True
    scheme = Headers(scope=scope).get("x-forwarded-proto", "").partition(",")[0]
    return scheme.strip().lower() == "https" and is_from(peer_of(scope), proxies)


def came_through_proxy(scope: Scope, names: Iterable[str] = ()) -> str:
    """Return what shows that a proxy forwarded the request, also the headers `names`; "" if nothing does.

    Many proxies speak HTTP/1.0 to their backend and add no header; browsers do not speak it.
    """
    known = (*OF_PROXIES, *filter(None, names))
    found = [name for name in Headers(scope=scope) if name.startswith(known)]
    return f"header {found[0]}" if found else "HTTP/1.0" if scope.get("http_version") == "1.0" else ""


def cookie_name(scope: Scope, name: str = COOKIE, *, secure: bool) -> str:
    """Return the cookie's name with the port that the browser sees, and with the path of the dashboard.

    Otherwise several dashboards on one host would share a cookie. With TLS the prefix `__Host-` keeps other
    hosts and plain HTTP from setting it.
    """
    port = Headers(scope=scope).get("host", "").rpartition(":")[2]
    if port.isascii() and port.isdecimal() and len(port) <= 5:
        name = f"{name}_{port}"
    mounted = re.sub(r"[^A-Za-z0-9]+", "-", scope.get("root_path", "")).strip("-")
    return f"{'__Host-' if secure else ''}{name}{f'_{mounted}' if mounted else ''}"


def cookie(scope: Scope, name: str = COOKIE, *, secure: bool) -> str:
    """Return the cookie's value in the request; "" without one.

    Of several cookies with this name the first counts: browsers send the cookie with the longest path first.
    """
    wanted = cookie_name(scope, name, secure=secure)
    parts = (part.strip().partition("=") for part in Headers(scope=scope).get("cookie", "").split(";"))
    return next((value for found, _, value in parts if found == wanted), "")


def written_cookie(
    scope: Scope, value: str, age_s: float, name: str = COOKIE, *, secure: bool, same_site: str = "Strict"
) -> str:
    """Return the header Set-Cookie. A cookie with `__Host-` must have the path `/`."""
    path = "/" if secure else scope.get("root_path") or "/"
    attributes = f"Path={path}; HttpOnly; SameSite={same_site}; Max-Age={max(0, int(age_s))}"
    return f"{cookie_name(scope, name, secure=secure)}={value}; {attributes}{'; Secure' if secure else ''}"


def _without_port(hop: str) -> str:
    """Return the address alone, of `1.2.3.4`, `1.2.3.4:567`, `::1` or `[::1]:567`; "" for anything else."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ip_address(hop))
    except ValueError:
        return ""


# ---- failures --------------------------------------------------------------------------------------

FAILURES_MAX = 20  # of an address in PERIOD_S
ALL_FAILURES_MAX = 1000  # failures of all addresses in PERIOD_S that are audited
PERIOD_S = 60.0
ADDRESSES_MAX = 10_000


class Verdict(Enum):
    """Whether a failure is written to the audit."""

    COUNTED = "counted"  # it is
    LOCKED_OUT = "locked out"  # it is, as the last failure before the address is locked out
    IGNORED = "ignored"  # it is not


class FailureLimit:
    """Counts failures by address over PERIOD_S; an address with FAILURES_MAX failures is locked out.

    A valid token is accepted all the same: a person who shares the address with a guesser, behind a proxy or
    in an office, is not refused. Tokens are too long to be guessed, so the limit only protects the disk and
    the audit. IPv6 addresses count by their network of 64 bits, because one machine has such a network for
    itself.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._everyone = (0.0, 0)

    def note(self, address: str, now: float) -> Verdict:
        """Count a failure of an address; return whether it is written to the audit."""
        network = _network_of(address)
        began, count = _counted(self._counts.pop(network, (now, 0)), now)
        self._counts[network] = (began, count)
        if len(self._counts) > ADDRESSES_MAX:
            self._counts.popitem(last=False)
        self._everyone = _counted(self._everyone, now)
        if count > FAILURES_MAX or self._everyone[1] > ALL_FAILURES_MAX:
            return Verdict.IGNORED
        return Verdict.LOCKED_OUT if count == FAILURES_MAX else Verdict.COUNTED

    def is_locked_out(self, address: str, now: float) -> bool:
        """Return whether the address has failed too often lately."""
        began, count = self._counts.get(_network_of(address), (0.0, 0))
        return count >= FAILURES_MAX and now - began < PERIOD_S


def _counted(before: tuple[float, int], now: float) -> tuple[float, int]:
    began, count = before
    return (began, count + 1) if now - began < PERIOD_S else (now, 1)


def _network_of(address: str) -> str:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    return str(found.ipv4_mapped) if found.ipv4_mapped else str(IPv6Address(int(found) >> 64 << 64))


# ---- tokens ----------------------------------------------------------------------------------------

PREFIX = "umbel_"
TOKEN_BYTES = 32


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A named token with its role; `expires_at` is a Unix time, None for no end."""

    name: str
    digest: str
    role: Role
    created_at: float
    expires_at: float | None = None

    def is_valid(self, now: float) -> bool:
        """Return whether the token has not expired."""
        return self.expires_at is None or now < self.expires_at


def make_token() -> str:
    """Return a new random token."""
    return PREFIX + token_urlsafe(TOKEN_BYTES)


def digest_of(token: str) -> str:
    """Return the hash under which a token is stored."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def find_token(known: Iterable[Token], given: str, now: float) -> Token | None:
    """Return the token that matches; it is compared with every token, so that the time reveals nothing."""
    wanted = digest_of(given)
    found: Token | None = None
    for token in known:
        if hmac.compare_digest(token.digest, wanted):
            found = token
    return found if found is not None and found.is_valid(now) else None


# ---- sessions --------------------------------------------------------------------------------------

SESSION_S = 12 * 3600.0
ROOM_MAX = 3000  # sessions of a role
OF_HOLDER_MAX = 100  # sessions of a token, or of a person at the identity provider
BACKGROUND_HEADER = "x-umbel-live"  # sent by umbel.js with its periodic requests
STREAM = "/api/v1/stream"


class Session(msgspec.Struct, kw_only=True):
    """A login of a browser.

    `holder` is the token or the person that logged in. `digest` is the hash of the token with which the
    session ends, "" for none.
    """

    name: str
    role: Role
    holder: str
    ends_at: float
    digest: str = ""
    seen_at: float = 0.0


class Sessions:
    """The sessions, by the digest of the number in the browser's cookie; the numbers are not stored.

    Each role has room for ROOM_MAX sessions, and each holder for OF_HOLDER_MAX. At a limit the oldest session
    there ends: a flood of a viewer's sessions ends sessions of that viewer, never an admin's.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._rooms: Mapping[Role, OrderedDict[str, Session]] = {role: OrderedDict() for role in Role}

    def __len__(self) -> int:
        return sum(map(len, self._rooms.values()))

    def begin(self, session: Session, now: float) -> str:
        """Start a session; return its number. At a limit, the oldest session of the holder or role ends."""
        room, number = self._rooms[session.role], token_urlsafe(32)
        of_holder = [key for key, other in room.items() if other.holder == session.holder]
        if len(of_holder) >= OF_HOLDER_MAX:
            del room[of_holder[0]]
        if len(room) >= ROOM_MAX:
            room.popitem(last=False)
        session.seen_at = now
        room[digest_of(number)] = session
        return number

    def find(self, number: str, now: float, *, is_used: bool) -> Session | None:
        """Return a session that has not ended; `is_used`: a person works with it now, so it is not idle."""
        key = digest_of(number)
        for room in self._rooms.values():
            session = room.get(key)
            if session is None:
                continue
            if now >= session.ends_at or now - session.seen_at >= self._idle_s:
                del room[key]
                return None
            if is_used:
                session.seen_at = now
            return session
        return None

    def end(self, number: str) -> Session | None:
        """End a session; return it, or None if there was none."""
        key = digest_of(number)
        ended = [room.pop(key) for room in self._rooms.values() if key in room]
        return ended[0] if ended else None

    def end_all(self, holder: str) -> int:
        """End every session of the holder; return how many."""
        return self._end_where(lambda session: session.holder == holder)

    def end_named(self, name: str) -> int:
        """End every session under this name; return how many."""
        return self._end_where(lambda session: session.name == name)

    def _end_where(self, ends: Callable[[Session], bool]) -> int:
        ended = [(room, key) for room in self._rooms.values() for key in room if ends(room[key])]
        for room, key in ended:
            del room[key]
        return len(ended)

    def of(self, holder: str) -> list[Session]:
        """Return the sessions of a holder."""
        sessions = (session for room in self._rooms.values() for session in room.values())
        return [session for session in sessions if session.holder == holder]


def is_background(scope: Scope) -> bool:
    """Return whether the page sent this request by itself, so that it does not show that a person is
    there.
    """
    return path_of(scope) == STREAM or BACKGROUND_HEADER in Headers(scope=scope)
