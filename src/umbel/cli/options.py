"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
APP_KEY = "umbel.app"


def app_option(function: FunctionT) -> FunctionT:
    """-A after the command; one before it counts as well."""
    return chosen_app_option(function, is_handed=True)


def broker_option(function: FunctionT) -> FunctionT:
    option = click.option(
        "-b",
        "--broker",
        "url",
        metavar="URL",
        is_eager=True,
        help="Address of the broker; no app is needed then.",
    )
    return option(function)


def json_option(function: FunctionT) -> FunctionT:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


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
