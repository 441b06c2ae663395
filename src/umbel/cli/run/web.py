"""`umbel web`: serve the dashboard, and manage its login tokens."""

import os
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import click

from umbel.app.app import App
from umbel.cli import exits
from umbel.cli.options import app_option, broker_option, json_option, print_json, print_table
from umbel.cli.run.web_options import ROLES, SECRET, login_options, provider_of, require_web
from umbel.launch.loading import find_app
from umbel.logs import set_up_logging
from umbel.worker.sidecar import WITH_PARENT, end_with_parent

if TYPE_CHECKING:
    from umbel.web.journal import Journal

PORT = 5555
NICENESS = 10  # lower priority than the workers on the same machine
STATE_FILE = "umbel-web.db"
DAY_S = 86_400.0
DAYS_MAX = 3650


def state_option(function: Any) -> Any:
    """Add --state, the file in which the dashboard stores tokens and the audit log."""
    option = click.option(
        "--state",
        "state_file",
        metavar="FILE",
        envvar="UMBEL_WEB_STATE",
        type=click.Path(path_type=Path, dir_okay=False),
        default=STATE_FILE,
        show_default=True,
        help="The dashboard's state: tokens, audit log, saved views, data of the last hour.",
    )
    return option(function)


@click.group("web", invoke_without_command=True)
@app_option
@broker_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=PORT, show_default=True, help="0: any free port."
)
@state_option
@click.option("--badge", default="", metavar="TEXT", help="Name of the environment, shown on every page.")
@login_options
@click.option(
    WITH_PARENT, is_flag=True, help="Exit when standard input closes, which happens when the parent exits."
)
@click.option("--no-enable", is_flag=True, help="Do not ask workers to send task events.")
@click.pass_context
def command(ctx: click.Context, /, app_name: str | None, url: str | None, **options: Any) -> int:
    """Show the cluster in the browser; press Ctrl-C to stop.

    Listens only on this machine unless --host is given. Prints an address with a token for one login; create
    further tokens with `umbel web token add NAME`.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = ctx.obj or app_name
        return exits.OK
    app = App("umbel", broker=url) if url else find_app(app_name).app
    return serve(app, **options)


def serve(
    app: App,
    *,
    proxy_role: str,
    no_login: bool,
    idle_minutes: int,
    no_enable: bool,
    with_parent: bool,
    oidc_issuer: str,
    oidc_client_id: str,
    oidc_secret_file: Path | None,
    oidc_roles: tuple[str, ...],
    oidc_claim: str,
    oidc_scopes: tuple[str, ...],
    **same: Any,  # options with the same names as in WebSettings
) -> int:
    """Run the dashboard until it is stopped, and return the exit code."""
    require_web()
    set_up_logging(
        os.environ.get("UMBEL_LOG_LEVEL", "warning"), as_json=os.environ.get("UMBEL_LOG_FORMAT") == "json"
    )
    if with_parent:
        end_with_parent()
    from umbel.web.server import Server
    from umbel.web.settings import Role, WebSettings

    secret = os.environ.get(SECRET, "")
    of_provider = (oidc_issuer, oidc_client_id, oidc_secret_file, oidc_roles, oidc_claim, oidc_scopes, secret)
    settings = WebSettings(
        login=not no_login,
        proxy_role=Role(proxy_role),
        oidc=provider_of(*of_provider),
        session_idle_s=idle_minutes * 60.0,
        enable_events=not no_enable,
        **same,
    )
    server = Server(app, settings, _say_where)
    _let_workers_go_first()
    server.run()
    return exits.OK if server.started else exits.FAILED


def _let_workers_go_first() -> None:
    """Lower the priority of this process."""
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid():  # with autogroups, Linux schedules sessions instead of processes
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICENESS))


def _say_where(url: str) -> None:
    """Print the address of the dashboard."""
    click.echo(f"umbel web: {url}", err=True)


@command.group("token")
def token() -> None:
    """Manage login tokens for people and programs."""


@token.command("add")
@click.argument("name")
@state_option
@click.option(
    "--role",
    type=ROLES,
    default="viewer",
    show_default=True,
    help="Permissions of the token.",
)
@click.option(
    "--days",
    type=click.IntRange(1, DAYS_MAX),
    default=90,
    show_default=True,
    help="Days until the token expires.",
)
@json_option
def add(name: str, state_file: Path, role: str, days: int, as_json: bool) -> int:
    """Create a token NAME and print it. It cannot be printed again, because only its hash is stored."""
    from umbel.web.credentials import Token, digest_of, make_token
    from umbel.web.settings import Role

    made, now = make_token(), time()
    with closing(_journal(state_file)) as journal:
        journal.add_token(
            Token(
                name=name,
                digest=digest_of(made),
                role=Role(role),
                created_at=now,
                expires_at=now + days * DAY_S,
            )
        )
    if as_json:
        print_json({"name": name, "role": role, "token": made})
    else:
        click.echo(made)
    return exits.OK


@token.command("ls")
@state_option
@json_option
def ls(state_file: Path, as_json: bool) -> int:
    """List the tokens with their roles and expiry dates."""
    with closing(_journal(state_file)) as journal:
        rows = [
            {
                "name": known.name,
                "role": str(known.role),
                "made": _day(known.created_at),
                "ends": _day(known.expires_at),
            }
            for known in journal.tokens()
        ]
    if as_json:
        print_json(rows)
    else:
        columns = ("name", "role", "made", "ends")
        print_table(columns, [[row[column] for column in columns] for row in rows])
    return exits.OK


@token.command("rm")
@click.argument("name")
@state_option
def rm(name: str, state_file: Path) -> int:
    """Delete the token NAME; it is rejected from now on."""
    with closing(_journal(state_file)) as journal:
        removed = journal.remove_token(name)
    if not removed:
        click.echo(f"umbel: unknown token {name!r}; `umbel web token ls` lists them", err=True)
    return exits.OK if removed else exits.NOT_FOUND


def _journal(state_file: Path) -> "Journal":
    """Open the dashboard's state file."""
    from umbel.web.journal import Journal

    return Journal(state_file)


def _day(at: float | None) -> str:
    """Return a date in UTC; "never" for None."""
    return "never" if at is None else datetime.fromtimestamp(at, UTC).date().isoformat()
