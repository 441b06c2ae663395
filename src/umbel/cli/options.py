"""Options that several commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
APP_KEY = "umbel.app"
LEVELS = ("debug", "info", "warning", "warn", "error", "critical", "fatal")
_CELERYS = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")
_BROKER_VARIABLES = ("UMBEL_BROKER", *_CELERYS)
_SAME_LEVEL = {"warn": "warning", "fatal": "critical"}


def app_option(function: FunctionT) -> FunctionT:
    """-A after the command; one before it counts as well."""
    return chosen_app_option(function, is_handed=True)


def broker_option(function: FunctionT) -> FunctionT:
    return _broker_option("Address of the broker; no app is needed then.")(function)


def other_broker_option(function: FunctionT) -> FunctionT:
    """For commands that need the app as well."""
    return _broker_option("Address of the broker, instead of the app's own.")(function)


def _broker_option(what: str) -> Callable[[FunctionT], FunctionT]:
    return click.option("-b", "--broker", "url", metavar="URL", is_eager=True, help=what)


def use_broker(url: str | None) -> None:
    """-b where an app is needed: from now on this is its address, in this process and those it starts."""
    if url is not None:
        os.environ |= dict.fromkeys(_BROKER_VARIABLES, url)


def json_option(function: FunctionT) -> FunctionT:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def log_options(default: str) -> Callable[[FunctionT], FunctionT]:
    """How a process logs: its level, in words that `level_of` reads, and whether lines are JSON."""
    level = click.option(
        "-l",
        "--loglevel",
        type=click.Choice(LEVELS, case_sensitive=False),
        envvar="UMBEL_LOG_LEVEL",
        show_envvar=True,
        help=f"Level of the log; default: {default}.",
    )
    form = click.option(
        "--log-format",
        type=click.Choice(("plain", "json"), case_sensitive=False),
        envvar="UMBEL_LOG_FORMAT",
        show_envvar=True,
        help="How a line of the log is written; default: plain.",
    )
    return lambda function: level(form(function))


def level_of(given: str) -> str:
    return _SAME_LEVEL.get(given.lower(), given.lower())


def timeout_option(function: FunctionT) -> FunctionT:
    option = click.option(
        "--timeout",
        "timeout_s",
        type=float,
        default=1.0,
        show_default=True,
        help="Seconds to wait for replies.",
    )
    return option(function)


def run_directory_option(function: FunctionT) -> FunctionT:
    option = click.option(
        "--run-dir",
        "run_directory",
        envvar="UMBEL_RUN_DIR",
        type=click.Path(path_type=Path),
        help="Directory in which workers keep their state files.",
    )
    return option(function)


def chosen_app_option(function: FunctionT, *, is_handed: bool) -> FunctionT:
    def chosen(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        ctx.meta[APP_KEY] = value or ctx.find_root().obj
        return value or ctx.find_root().obj

    option = click.option(
        "-A",
        "--app",
        "app_name",
        metavar="MODULE[:ATTR]",
        callback=chosen,
        is_eager=True,  # before --lake, which may depend on it
        expose_value=is_handed,
        help="The app.",
    )
    return option(function)
