"""`umbel web`: the dashboard in the browser, and the tokens with which people log in."""

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
NICENESS = 10  # workers on the same machine come first
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
        help="The dashboard's own file: tokens, the audit, saved views, the last hour.",
    )
    return option(function)


@click.group("web", invoke_without_command=True)
@app_option
@broker_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=PORT, show_default=True, help="0: any free one."
)
@state_option
@click.option("--badge", default="", metavar="TEXT", help="Name of the environment, shown on every page.")
@login_options
@click.option(WITH_PARENT, is_flag=True, help="End when standard input closes, as it does with the parent.")
@click.option("--no-enable", is_flag=True, help="Do not ask workers to send task events.")
@click.pass_context
def command(ctx: click.Context, /, app_name: str | None, url: str | None, **options: Any) -> int:
    """Show the cluster in the browser; press Ctrl-C to stop.

    Listens on this machine only, unless --host says otherwise. Prints an address with a token that
    works once; `umbel web token add NAME` makes others.
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
    **same: Any,  # options that have the same names in WebSettings
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
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid():  # with autogroups Linux schedules sessions, not processes
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICENESS))


def _say_where(url: str) -> None:
    click.echo(f"umbel web: {url}", err=True)


@command.group("token")
def token() -> None:
    """Tokens with which people and programs log in."""


@token.command("add")
@click.argument("name")
@state_option
@click.option(
    "--role",
    type=ROLES,
    default="viewer",
    show_default=True,
    help="What its holder may do.",
)
@click.option(
    "--days", type=click.IntRange(1, DAYS_MAX), default=90, show_default=True, help="Until it ends."
)
@json_option
def add(name: str, state_file: Path, role: str, days: int, as_json: bool) -> int:
    """Make a token NAME and print it, once: only its hash is stored."""
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
    """List the tokens: names, roles, ends."""
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
    """Remove the token NAME; it is refused from then on."""
    with closing(_journal(state_file)) as journal:
        removed = journal.remove_token(name)
    if not removed:
        click.echo(f"umbel: unknown token {name!r}; `umbel web token ls` lists them", err=True)
    return exits.OK if removed else exits.NOT_FOUND


def _journal(state_file: Path) -> "Journal":
    from umbel.web.journal import Journal

    return Journal(state_file)


def _day(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at, UTC).date().isoformat()
