"""Login options of `umbel web`, and the check for the libraries that the dashboard needs.

This module imports little, because `umbel worker` and `umbel demo` also use the check when they start.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from umbel.errors import ConfigurationError

if TYPE_CHECKING:
    from umbel.web.settings import Oidc


# ---- web login -------------------------------------------------------------------------------------

ROLES = click.Choice(["viewer", "operator", "admin"])
SECRET = "UMBEL_WEB_OIDC_SECRET"  # noqa: S105 (the name of a variable)
IDLE_MINUTES, IDLE_MINUTES_MAX = 30, 720
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--no-login", is_flag=True, help="Require no login; only allowed on a loopback address."),
    click.option(
        "--public-url",
        default="",
        metavar="URL",
        envvar="UMBEL_WEB_PUBLIC_URL",
        help="The address that users open, if there is a reverse proxy.",
    ),
    click.option(
        "--idle",
        "idle_minutes",
        type=click.IntRange(1, IDLE_MINUTES_MAX),
        default=IDLE_MINUTES,
        show_default=True,
        metavar="MINUTES",
        help="Minutes without activity until a session ends.",
    ),
    click.option(
        "--trusted-proxy",
        "proxies",
        multiple=True,
        metavar="ADDRESS",
        help="Trust the user name that this address or network sends.",
    ),
    click.option(
        "--proxy-header",
        default="",
        metavar="NAME",
        help="Header with that user name (default: X-Forwarded-User; with --oidc-issuer: none).",
    ),
    click.option(
        "--proxy-role",
        type=ROLES,
        default="viewer",
        show_default=True,
        help="Role of users whose name comes from a trusted proxy.",
    ),
    click.option(
        "--oidc-issuer",
        default="",
        metavar="URL",
        envvar="UMBEL_WEB_OIDC_ISSUER",
        help="Log in with this OpenID Connect provider; needs umbel[oidc].",
    ),
    click.option(
        "--oidc-client-id",
        default="",
        metavar="ID",
        envvar="UMBEL_WEB_OIDC_CLIENT_ID",
        help="Client id of the dashboard at the provider.",
    ),
    click.option(
        "--oidc-secret-file",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        help=f"File with the client secret; or set {SECRET}. Public clients have none.",
    ),
    click.option(
        "--oidc-role",
        "oidc_roles",
        multiple=True,
        metavar="VALUE=ROLE",
        help="Role of users whose claim has this value; the highest role counts; *=ROLE for all users.",
    ),
    click.option(
        "--oidc-claim",
        default="groups",
        show_default=True,
        metavar="NAME",
        help="The claim for --oidc-role, such as realm_access.roles.",
    ),
    click.option(
        "--oidc-scope",
        "oidc_scopes",
        multiple=True,
        metavar="NAME",
        help="Scope to request in addition to openid, profile and email.",
    ),
)


def login_options(function: FunctionT) -> FunctionT:
    """Add the login options of the dashboard to a command."""
    return reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), function)


def provider_of(
    issuer: str,
    client_id: str,
    secret_file: Path | None,
    roles: Sequence[str],
    claim: str,
    scopes: tuple[str, ...],
    secret: str,
) -> "Oidc | None":
    """Return the identity provider that the options describe; None without an issuer."""
    from umbel.web.settings import Oidc

    if not issuer:
        if client_id or roles:
            raise ConfigurationError(
                "--oidc-client-id and --oidc-role need --oidc-issuer, the provider's address"
            )
        return None
    return Oidc(
        issuer=issuer,
        client_id=client_id,
        client_secret=secret if secret_file is None else secret_file.read_text().strip(),
        roles=dict(map(_role_of, roles)),
        claim=claim,
        scopes=scopes,
    )


def _role_of(given: str) -> tuple[str, Any]:
    """Parse VALUE=ROLE. Raise ConfigurationError for an unknown role."""
    from umbel.web.settings import Role

    value, _, role = given.rpartition("=")
    if not value or role not in set(Role):
        known = ", ".join(Role)
        raise ConfigurationError(
            f"--oidc-role {given!r} is not VALUE=ROLE with one of {known}; try ops=operator"
        )
    return value, Role(role)


# ---- web needs -------------------------------------------------------------------------------------


def missing_for_web() -> list[str]:
    """Return the names of the missing libraries of the dashboard."""
    return [
        name for name in ("starlette", "uvicorn", "jinja2", "prometheus_client") if find_spec(name) is None
    ]


def require_web() -> None:
    """Raise a ClickException with the command to install the dashboard if a library is missing."""
    if missing := missing_for_web():
        raise click.ClickException(f"umbel web needs {missing[0]}: pip install 'umbel[web]'")
