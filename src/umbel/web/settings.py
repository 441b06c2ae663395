"""WebSettings: what the dashboard is started with, and what is refused before it starts."""

from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import msgspec

from umbel.errors import ConfigurationError
from umbel.web.roles import Role

PORT = 5555
STATE_FILE = "umbel-web.db"
TASKS_MAX = 100_000
CLIENTS_MAX = 500
Authenticate = Callable[[Mapping[str, Any]], tuple[str, str] | None]


class WebSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`proxies`: addresses or networks whose `proxy_header` names the user; nobody else's is read.

    `authenticate`: for an application that mounts the dashboard: given the ASGI scope, who asks and
    in which role, or None.
    `login`: False: this machine's users are let in as admins; with `authenticate`, it alone decides.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    state_file: Path = Path(STATE_FILE)
    badge: str = ""
    login: bool = True
    proxies: tuple[str, ...] = ()
    proxy_header: str = "x-forwarded-user"
    proxy_role: Role = Role.VIEWER
    authenticate: Authenticate | None = None
    tasks_max: int = TASKS_MAX
    clients_max: int = CLIENTS_MAX
    enable_events: bool = True

    @property
    def is_open(self) -> bool:
        """Nobody is asked who they are."""
        return not self.login and self.authenticate is None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_from(address: str, networks: Sequence[str]) -> bool:
    try:
        found = ip_address(address)
    except ValueError:
        return False
    return any(found in ip_network(one, strict=False) for one in networks)


def check(settings: WebSettings, *, named_tokens: int) -> None:
    """ConfigurationError for what must not start."""
    for one in settings.proxies:
        try:
            ip_network(one, strict=False)
        except ValueError:
            raise ConfigurationError(
                f"--trusted-proxy {one!r} is neither an address nor a network; write 10.0.0.5 or 10.0.0.0/8"
            ) from None
    if settings.is_open and settings.proxies:
        raise ConfigurationError(
            "--no-login with --trusted-proxy would let in users that the proxy did not identify; use only one"
        )
    if is_loopback(settings.host):
        return
    if settings.is_open:
        raise ConfigurationError(
            f"--no-login on {settings.host} would let everyone in; use it with a loopback address only"
        )
    if not named_tokens and not settings.proxies and settings.authenticate is None:
        raise ConfigurationError(
            f"{settings.host} can be reached from other machines, and there is no login yet; "
            "add a token first (umbel web token add NAME), or name a --trusted-proxy"
        )
