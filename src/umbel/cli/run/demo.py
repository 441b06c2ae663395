"""`umbel demo`: run a cluster on this machine under load and failures, in about a minute."""

import asyncio
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import click

from umbel.app.sending.preparation import new_id
from umbel.cli import exits
from umbel.cli.options import json_option
from umbel.cli.run.web_options import missing_for_web
from umbel.demo.processes import environment
from umbel.errors import ConfigurationError
from umbel.history.lake import can_record

MARKER = ".umbel-demo"  # the demo never deletes a folder without this file


@click.command("demo")
@click.option(
    "-b",
    "--broker",
    "url",
    metavar="URL",
    help="redis://… or amqp://…, not used by other workers; default: the embedded broker.",
)
@click.option(
    "--seconds", type=click.FloatRange(5, 3600), default=30.0, show_default=True, help="Duration of the load."
)
@click.option(
    "--history/--no-history", default=True, help="Record events and build tables from them with Spark."
)
@click.option("--web/--no-web", default=True, help="Also serve the dashboard; its address is printed.")
@click.option("--celery/--no-celery", default=True, help="Run a worker for a Celery app in the same cluster.")
@click.option("--stay", is_flag=True, help="Keep a cluster running afterwards.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("umbel-demo"),
    show_default=True,
    help="Folder for logs, events and the report.",
)
@json_option
def command(
    url: str | None,
    seconds: float,
    history: bool,
    web: bool,
    celery: bool,
    stay: bool,
    directory: Path,
    as_json: bool,
) -> int:
    """Run a demo: three workers and a Celery app under load, a killed worker, an election, history.

    The report at the end shows the tasks that were sent, ran and were repeated, and why. It compares
    results, history and a ledger that the tasks write; the exit code is 1 if they differ.
    """
    home = _home(directory)
    broker = url or f"sqlite:///{home / 'demo.db'}"
    backend = broker if not broker.startswith("amqp") else f"sqlite:///{home / 'results.db'}"
    run = f"demo_{new_id()[:8]}" if url else "demo"  # the embedded broker starts empty
    os.environ.update(environment(broker, backend, home, run))
    # The demo's app reads its settings from this environment when it is imported.
    from umbel.cli.run.demo_closing import show
    from umbel.demo.story import Demo

    history = history and not skips("history", "history", missing=not can_record())
    web = web and not skips("the dashboard", "web", missing=bool(missing_for_web()))
    celery = celery and not skips("the Celery app", "celery", missing=find_spec("celery") is None)
    try:
        outcome = asyncio.run(Demo(home, seconds, history=history, web=web, celery=celery).run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("umbel: stopped; all processes have ended", err=True)
        return exits.FAILED
    show(outcome, as_json=as_json)
    if stay:
        _stay(home, web=web, celery=celery)
    return exits.OK if not outcome.verdict.problems else exits.FAILED


def skips(what: str, extra: str, *, missing: bool) -> bool:
    """Return `missing`; if it is true, print on stderr which part is skipped and how to install its extra."""
    if missing:
        click.echo(f"umbel: {what} is skipped; it needs `pip install 'umbel[{extra}]'`", err=True)
    return missing


def _stay(home: Path, *, web: bool, celery: bool) -> None:
    """Run the cluster until it is interrupted."""
    from umbel.demo.story import stay

    try:
        asyncio.run(stay(home, lambda text: click.echo(f"\n{text}", err=True), web=web, celery=celery))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("umbel: stopped; all processes have ended", err=True)


def _home(directory: Path) -> Path:
    """Create the demo's folder. An existing folder is replaced only if an earlier demo created it."""
    home = directory.resolve()
    if home.exists():
        if not (home / MARKER).exists():
            problem = (
                f"{str(directory)!r} exists and is not from a demo; name another folder with --directory"
            )
            raise ConfigurationError(problem)
        shutil.rmtree(home)
    try:
        home.mkdir(parents=True)
        (home / MARKER).touch()
    except OSError as error:
        problem = f"cannot write to {str(home)!r}: {error.strerror}; name another folder with --directory"
        raise ConfigurationError(problem) from None
    return home
