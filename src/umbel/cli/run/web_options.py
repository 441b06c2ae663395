"""Options of `umbel web` that say who may log in, and the libraries that the dashboard needs.

Loads little: `umbel worker` and `umbel demo` check these libraries before they load anything else.
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
#
# Options of `umbel web` that say who may log in: without a login, by a proxy, by an identity provider.

ROLES = click.Choice(["viewer", "operator", "admin"])
SECRET = "UMBEL_WEB_OIDC_SECRET"  # noqa: S105 (the name of a variable)
IDLE_MINUTES, IDLE_MINUTES_MAX = 30, 720
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--no-login", is_flag=True, help="Let everyone in; on a loopback address only."),
    click.option(
        "--public-url",
        default="",
        metavar="URL",
        envvar="UMBEL_WEB_PUBLIC_URL",
        help="The address that people open, where a proxy is in front.",
    ),
    click.option(
        "--idle",
        "idle_minutes",
        type=click.IntRange(1, IDLE_MINUTES_MAX),
        default=IDLE_MINUTES,
        show_default=True,
        metavar="MINUTES",
        help="A session ends when nobody has worked with it for so long.",
    ),
    click.option(
        "--trusted-proxy",
        "proxies",
        multiple=True,
        metavar="ADDRESS",
        help="Believe the user name that this address or network sends.",
    ),
    click.option(
        "--proxy-header",
        default="",
        metavar="NAME",
        help="Where it sends it (default: X-Forwarded-User; with --oidc-issuer: nowhere).",
    ),
    click.option(
        "--proxy-role",
        type=ROLES,
        default="viewer",
        show_default=True,
        help="Role of users that a trusted proxy names.",
    ),
    click.option(
        "--oidc-issuer",
        default="",
        metavar="URL",
        envvar="UMBEL_WEB_OIDC_ISSUER",
        help="Let people log in at this provider of OpenID Connect; needs umbel[oidc].",
    ),
    click.option(
        "--oidc-client-id",
        default="",
        metavar="ID",
        envvar="UMBEL_WEB_OIDC_CLIENT_ID",
        help="Under which the provider knows the dashboard.",
    ),
    click.option(
        "--oidc-secret-file",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        help=f"File with the client's secret; or set {SECRET}. Public clients have none.",
    ),
    click.option(
        "--oidc-role",
        "oidc_roles",
        multiple=True,
        metavar="VALUE=ROLE",
        help="Role of people whose claim has this value; the highest counts; *=ROLE: of all who log in.",
    ),
    click.option(
        "--oidc-claim",
        default="groups",
        show_default=True,
        metavar="NAME",
        help="The claim that --oidc-role looks at, such as realm_access.roles.",
    ),
    click.option(
        "--oidc-scope",
        "oidc_scopes",
        multiple=True,
        metavar="NAME",
        help="Scope to ask for in addition to openid, profile and email.",
    ),
)


def login_options(function: FunctionT) -> FunctionT:
    """Add the options that say who may log in to the dashboard."""
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
    """The identity provider that the options describe; None without an issuer."""
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
    from umbel.web.settings import Role

    value, _, role = given.rpartition("=")
    if not value or role not in set(Role):
        known = ", ".join(Role)
        raise ConfigurationError(
            f"--oidc-role {given!r} is not VALUE=ROLE with one of {known}; try ops=operator"
        )
    return value, Role(role)


# ---- web needs -------------------------------------------------------------------------------------
#
# Libraries that the dashboard needs; checked before anything else is loaded.


def missing_for_web() -> list[str]:
    """Names of the libraries that the dashboard needs and that are not installed."""
    return [
        name for name in ("starlette", "uvicorn", "jinja2", "prometheus_client") if find_spec(name) is None
    ]


def require_web() -> None:
    """Raise a ClickException that says how to install the dashboard, if a library is missing."""
    if missing := missing_for_web():
        raise click.ClickException(f"umbel web needs {missing[0]}: pip install 'umbel[web]'")
