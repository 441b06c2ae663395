"""WebSettings: the settings of the dashboard, the roles of its users, and which settings are refused as
unsafe.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from umbel.errors import ConfigurationError

# ---- roles -----------------------------------------------------------------------------------------


class Role(StrEnum):
    """A visitor's role: a viewer reads, an operator controls tasks and workers, an admin deletes and
    stops.
    """

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def may(self, needed: "Role") -> bool:
        """Return whether this role includes the needed one."""
        return _RANK[self] >= _RANK[needed]


_RANK = {Role.VIEWER: 0, Role.OPERATOR: 1, Role.ADMIN: 2}


# ---- web settings ----------------------------------------------------------------------------------

PORT = 5555
STATE_FILE = "umbel-web.db"
TASKS_MAX = 100_000
CLIENTS_MAX = 500
PROXY_HEADER = "x-forwarded-user"
IDLE_S = 30 * 60.0
EVERYONE = "*"
Authenticate = Callable[[Mapping[str, Any]], tuple[str, str] | None]


class Oidc(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenID Connect identity provider, which knows the dashboard as `client_id`.

    `claim` is the claim with a person's groups; dots lead into nested claims (`realm_access.roles`). `roles`
    has the role that each group gives, `*` for everyone who logs in; a person gets the highest of them.
    """

    issuer: str
    client_id: str
    client_secret: str = ""
    roles: Mapping[str, Role]
    claim: str = "groups"
    scopes: tuple[str, ...] = ()  # in addition to `openid profile email`

    def __repr__(self) -> str:
        return f"Oidc(issuer={self.issuer!r}, client_id={self.client_id!r}, claim={self.claim!r})"


class WebSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the dashboard is served and who may log in.

    - `proxies`: addresses or networks whose `proxy_header` names the user; the header is ignored from others.
    - `authenticate`: for an application that mounts the dashboard; it returns (name, role) for the ASGI
      scope, or None.
    - `login`: if it is False, users of this machine are admitted as admins; with `authenticate`, only that
      function decides.
    - `public_url`: the address of the dashboard in browsers; with https, cookies are sent by TLS only.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    public_url: str = ""
    state_file: Path = Path(STATE_FILE)
    badge: str = ""
    login: bool = True
    proxies: tuple[str, ...] = ()
    proxy_header: str = ""
    proxy_role: Role = Role.VIEWER
    oidc: Oidc | None = None
    session_idle_s: float = IDLE_S
    authenticate: Authenticate | None = None
    tasks_max: int = TASKS_MAX
    clients_max: int = CLIENTS_MAX
    enable_events: bool = True

    @property
    def is_open(self) -> bool:
        """Whether visitors are admitted without any login."""
        return not self.login and self.authenticate is None

    @property
    def user_header(self) -> str:
        """The header in which trusted proxies name the user; "" if they do not.

        With an identity provider the header must be configured, because a proxy that only forwards requests
        would pass on a header that the visitor wrote.
        """
        return self.proxy_header.lower() or ("" if self.oidc else PROXY_HEADER)

    @property
    def has_one_time_token(self) -> bool:
        """Whether a one-time token is printed at the start: only if the dashboard serves this machine alone.

        Anyone who can read the log can log in with it.
        """
        has_own_login = self.login and self.authenticate is None and self.oidc is None
        return has_own_login and is_loopback(self.host) and not self.proxies

    @property
    def is_public_by_tls(self) -> bool:
        """Whether browsers reach the dashboard by https."""
        return self.public_url.startswith("https://")


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_from(address: str, networks: Sequence[str]) -> bool:
    """Return whether the address is in one of the networks."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    return any(found in ip_network(network, strict=False) for network in networks)


def is_safe_url(url: str) -> bool:
    """Return whether the URL uses TLS or leads to this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)))


def check(settings: WebSettings, *, named_tokens: int) -> None:
    """Raise ConfigurationError for settings that are not safe to start with."""
    for proxy in settings.proxies:
        try:
            ip_network(proxy, strict=False)
        except ValueError:
            raise ConfigurationError(
                f"--trusted-proxy {proxy!r} is neither an address nor a network; write 10.0.0.5 or 10.0.0.0/8"
            ) from None
    if settings.is_open and settings.proxies:
        raise ConfigurationError(
            "--no-login with --trusted-proxy would let in users that the proxy did not identify; use only one"
        )
    if settings.is_open and settings.oidc is not None:
        raise ConfigurationError("--no-login with --oidc-issuer would let everyone in; use only one")
    if settings.public_url and not is_safe_url(settings.public_url):
        raise ConfigurationError(
            f"--public-url {settings.public_url!r} is not an address that begins with https://; "
            "write the one that people open, such as https://umbel.example.org"
        )
    if settings.oidc is not None:
        _check_oidc(settings, settings.oidc)
    if is_loopback(settings.host):
        return
    if settings.is_open:
        raise ConfigurationError(
            f"--no-login on {settings.host} would let everyone in; use it with a loopback address only"
        )
    ways = (settings.proxies, settings.authenticate, settings.oidc)
    if not named_tokens and not any(ways):
        raise ConfigurationError(
            f"{settings.host} can be reached from other machines, and there is no login yet; add a token "
            "first (umbel web token add NAME), or name a --trusted-proxy or an --oidc-issuer"
        )


def _check_oidc(settings: WebSettings, oidc: Oidc) -> None:
    if find_spec("jwt") is None or find_spec("cryptography") is None:
        raise ConfigurationError("login by OpenID Connect needs PyJWT: pip install 'umbel[oidc]'")
    if not is_safe_url(oidc.issuer):
        raise ConfigurationError(
            f"--oidc-issuer {oidc.issuer!r} is not an address that begins with https://; "
            "write the issuer as the provider names it, such as https://login.example.org/realms/shop"
        )
    if not oidc.client_id:
        raise ConfigurationError(
            "--oidc-issuer needs --oidc-client-id, under which the provider knows the dashboard"
        )
    if not settings.public_url:
        raise ConfigurationError(
            "--oidc-issuer needs --public-url, the address that people open: the provider sends them there"
        )
    if not oidc.roles:
        raise ConfigurationError(
            "no role is mapped, so no login would succeed; add one, such as --oidc-role ops=operator, "
            f"or {EVERYONE}=viewer for everyone"
        )
    for value, role in oidc.roles.items():
        if role not in set(Role):
            known = ", ".join(Role)
            raise ConfigurationError(f"unknown role {str(role)!r} for {value!r}; use one of {known}")
