"""Origins: where a request comes from: the address, whether by TLS, and the port that the browser sees.

What `X-Forwarded-For` and `X-Forwarded-Proto` say is believed from the addresses in `proxies` only. Each
proxy appends the address that it was asked from, so the last one that is no proxy of ours is the visitor's;
what stands before it was written by the visitor, and is not read.
"""

from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

from umbel.web.settings import is_from

COOKIE = "umbel_session"
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")  # a proxy was asked, not we


def peer_of(scope: Scope) -> str:
    """Who is connected: the visitor, or the last proxy."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def address_of(scope: Scope, proxies: Sequence[str]) -> str:
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
    """Whether the browser asked by https, here or at the trusted proxy."""
    if scope.get("scheme") == "https":
        return True
    told = Headers(scope=scope).get("x-forwarded-proto", "").partition(",")[0]
    return told.strip().lower() == "https" and is_from(peer_of(scope), proxies)


def cookie_name(headers: Headers) -> str:
    """With the port that the browser sees: two dashboards of one machine would share a cookie else."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdecimal() and len(port) <= 5 else COOKIE


def _without_port(hop: str) -> str:
    """The address alone, of `1.2.3.4`, `1.2.3.4:567`, `::1` or `[::1]:567`; "" for anything else."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ip_address(hop))
    except ValueError:
        return ""
