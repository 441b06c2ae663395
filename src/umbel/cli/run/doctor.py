"""`umbel doctor`: what a person would check by hand before asking for help."""

import os
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click

from umbel.app.configuration.settings import Settings, wrong_variables
from umbel.brokers.interface import Queues
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, json_option, run_directory_option
from umbel.cli.run.extras import EXTRAS
from umbel.cli.show.printing import print_json, print_table
from umbel.errors import NoApp, UmbelError
from umbel.launch.loading import find_app
from umbel.urls import without_password
from umbel.worker.process.run_directory import default_run_directory, read_states

SQLITE_LEAST = (3, 35, 0)  # UPDATE ... RETURNING


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: str  # ok, note, FAIL
    detail: str


@click.command("doctor")
@app_option
@run_directory_option
@json_option
def command(app_name: str | None, run_directory: Path | None, as_json: bool) -> int:
    """Check this machine and the app's settings."""
    findings = [
        _python(),
        _sqlite(),
        *_extras(),
        _java(),
        _run_directory(run_directory or default_run_directory()),
        *_variables(),
        *_app(app_name),
    ]
    if as_json:
        print_json([{"check": one.check, "verdict": one.verdict, "detail": one.detail} for one in findings])
    else:
        print_table(
            ("check", "verdict", "detail"), [(one.check, one.verdict, one.detail) for one in findings]
        )
    return exits.FAILED if any(one.verdict == "FAIL" for one in findings) else exits.OK


def _python() -> Finding:
    platform = "" if sys.platform == "linux" else f" on {sys.platform}; workers need Linux"
    return Finding("python", "note" if platform else "ok", sys.version.split()[0] + platform)


def _sqlite() -> Finding:
    enough = sqlite3.sqlite_version_info >= SQLITE_LEAST
    needed = "" if enough else f"; the embedded broker needs {'.'.join(map(str, SQLITE_LEAST))}"
    return Finding("sqlite", "ok" if enough else "FAIL", sqlite3.sqlite_version + needed)


def _extras() -> Iterator[Finding]:
    """One that is not there is worth a note: who does not use it needs none."""
    for name, extra in EXTRAS.items():
        versions = extra.versions()
        missing = [package for package, found in versions.items() if not found]
        if missing:
            what = "not installed" if len(missing) == len(versions) else f"without {', '.join(missing)}"
            yield Finding(f"umbel[{name}]", "note", f"{extra.use}: {what}; pip install 'umbel[{name}]'")
        else:
            found = ", ".join(f"{package} {found}" for package, found in versions.items())
            yield Finding(f"umbel[{name}]", "ok", f"{extra.use}: {found or 'needs nothing more'}")


def _java() -> Finding:
    """Only `umbel history build` needs it: that there is none is worth a note, not a failure."""
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        return Finding("java", "note", "not checked: only Spark needs it; pip install 'umbel[history]'")
    from umbel.pipeline.faults import NoJava
    from umbel.pipeline.java import TRIED, look_for_java

    try:
        java = look_for_java(os.environ)
    except NoJava as fault:
        return Finding("java", "note", str(fault))
    if java.version not in TRIED:
        return Finding(
            "java", "note", f"{java.version} at {java.home}, {java.found}: not tested; 17 and 21 are"
        )
    return Finding("java", "ok", f"{java.version} at {java.home}, {java.found}")


def _run_directory(directory: Path) -> Finding:
    nearest = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        return Finding("run directory", "FAIL", f"{nearest} is not writable; set UMBEL_RUN_DIR")
    states = read_states(directory)
    unwell = [state.node for state in states if not state.healthy]
    detail = f"{directory}: {len(states)} workers" + (f", unhealthy: {', '.join(unwell)}" if unwell else "")
    return Finding("run directory", "note" if unwell else "ok", detail)


def _variables() -> Iterator[Finding]:

    for error in wrong_variables(os.environ):
        yield Finding("environment", "FAIL", str(error))


def _app(app_name: str | None) -> Iterator[Finding]:

    try:
        app = find_app(app_name).app
    except UmbelError as error:
        yield Finding("app", "FAIL" if _must_load(app_name, error) else "note", str(error))
        return
    yield Finding("app", "ok" if app.tasks else "note", f"{app.name}: {len(app.tasks)} tasks")
    yield _signing(app.settings)
    try:
        waiting = ask_broker(app_name, _waiting)
        letters = ask_broker(app_name, lambda broker: broker.dead_letters(1))
    except UmbelError as error:
        yield Finding("broker", "FAIL", str(error))
        return
    yield Finding("broker", "ok", f"{without_password(app.settings.broker)}: {waiting}")
    if letters:
        yield Finding("dead letters", "note", "there are some; `umbel dlq ls` lists them with reasons")


async def _waiting(broker: Queues) -> str:
    if not broker.capabilities.depths:
        return "it does not tell how many messages wait"
    depths = (await broker.queues()).values()
    return f"{sum(depth.ready + depth.delayed for depth in depths)} messages waiting"


def _must_load(app_name: str | None, error: UmbelError) -> bool:
    """That no app is here is worth a note; one that was named or cannot be imported is a failure."""
    was_named = bool(app_name or os.environ.get("UMBEL_APP"))
    return was_named or not isinstance(error, NoApp)


def _signing(settings: "Settings") -> Finding:
    """What is open to anyone with access to the broker."""
    if settings.keyring is None:
        open_to_all = (
            "unsigned: anyone with access to the broker can run all tasks and commands; set 'signing_keys'"
        )
        return Finding("signing", "note", open_to_all)
    keys = f"keys {', '.join(settings.keyring.ids)}; the first one signs"
    if not settings.accept_unsigned:
        return Finding("signing", "ok", keys)
    queues = ", ".join(settings.accept_unsigned)
    return Finding(
        "signing", "note", f"{keys}; 'accept_unsigned' accepts any message from the queues {queues}"
    )
