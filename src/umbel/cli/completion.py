"""What the shell is offered where a command wants the name of a task, node, queue or remote command.

The app and the broker are asked as the command would ask them: those that -A and -b name, or that are
found. Whatever goes wrong, nothing is offered: nobody wants an error in the middle of a line.

What is imported here is imported when somebody presses TAB, and not with every command.
"""

from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from functools import wraps
from io import StringIO
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from umbel.brokers.interface import Broker

ASK_S = 1.0  # somebody waits at the keyboard
Names = Callable[[click.Context, click.Parameter, str], list[str]]


def _offered(names: Callable[[click.Context], Iterable[str]]) -> Names:
    """Those that begin as what was typed does; of a list with commas, its last name is completed."""

    @wraps(names)
    def offer(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        from umbel.errors import UmbelError

        before, comma, last = typed.rpartition(",")
        try:
            with redirect_stdout(StringIO()):  # what the app prints is no name
                found = sorted(names(context))
        except (UmbelError, click.ClickException):
            return []
        return [f"{before}{comma}{name}" for name in found if name.startswith(last)]

    return offer


@_offered
def tasks(context: click.Context) -> Iterable[str]:
    from umbel.launch.loading import find_app

    found = find_app(_app_name(context))
    names = found.project.task_names() if found.project else found.app.tasks
    return [name for name in names if not name.startswith("celery.")]


@_offered
def queues(context: click.Context) -> Iterable[str]:
    from umbel.cli.broker import ask_in_time
    from umbel.errors import BrokerError

    async def ask(broker: "Broker", _left_s: float) -> Iterable[str]:
        return list(await broker.queues())

    named, url = _queues_of_app(context), context.params.get("url")
    with suppress(BrokerError):  # else those that the app names are all that is known
        named |= set(ask_in_time(_app_name(context), ask, ASK_S, url=url))
    return named


def _queues_of_app(context: click.Context) -> set[str]:
    """Those that its settings name, empty or not."""
    from umbel.app.sending.defaults import queue_of
    from umbel.errors import AppNotFound
    from umbel.launch.loading import find_app

    try:
        app = find_app(_app_name(context)).app
    except AppNotFound:
        return set()
    of_tasks = {queue_of(app, name, task.options) for name, task in app.tasks.items()}
    return {app.settings.task_default_queue, *app.settings.worker_queues, *of_tasks}


@_offered
def nodes(context: click.Context) -> Iterable[str]:
    from umbel.cli.broker import ask_in_time
    from umbel.control.client import Asker

    async def ask(broker: "Broker", left_s: float) -> Iterable[str]:
        answers = await Asker(broker).ask("ping", {}, timeout_s=left_s)
        return [*answers.replies, *(one.node for one in answers.silent)]

    return ask_in_time(_app_name(context), ask, ASK_S, url=context.params.get("url"))


@_offered
def inspect_commands(context: click.Context) -> Iterable[str]:
    return _commands(context, changes=False)


@_offered
def control_commands(context: click.Context) -> Iterable[str]:
    return _commands(context, changes=True)


def _commands(context: click.Context, *, changes: bool) -> Iterable[str]:
    from umbel.cli.cluster.panels import known_commands

    known = known_commands(_app_name(context))
    return [one.name for one in known if one.changes is changes and not one.is_hidden]


def _app_name(context: click.Context) -> str | None:
    """-A before or after the command; the commands themselves are not run."""
    name: str | None = context.params.get("app_name") or context.find_root().params.get("app_name")
    return name
