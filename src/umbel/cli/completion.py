"""Shell completion: names of tasks, nodes, queues and remote commands.

The app and the broker are those that -A and -b name, or those that the command itself would find. On an
error nothing is offered, because a message would garble the line that the user is typing.

Functions import what they need, so that commands start without these imports.
"""

from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from functools import wraps
from io import StringIO
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from umbel.brokers.interface import Broker

ASK_S = 1.0  # the user waits for the completion
Names = Callable[[click.Context, click.Parameter, str], list[str]]


def _offered(names: Callable[[click.Context], Iterable[str]]) -> Names:
    """Offer the names that begin with the typed text. In a comma-separated list, complete the last name."""

    @wraps(names)
    def offer(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        """Return the names that complete the typed text."""
        from umbel.errors import UmbelError

        before, comma, last = typed.rpartition(",")
        try:
            with redirect_stdout(StringIO()):  # discard output of the app
                found = sorted(names(context))
        except (UmbelError, click.ClickException):
            return []
        return [f"{before}{comma}{name}" for name in found if name.startswith(last)]

    return offer


@_offered
def tasks(context: click.Context) -> Iterable[str]:
    """Return the names of the app's tasks."""
    from umbel.launch.loading import find_app

    found = find_app(_app_name(context))
    names = found.project.task_names() if found.project else found.app.tasks
    return [name for name in names if not name.startswith("celery.")]


@_offered
def queues(context: click.Context) -> Iterable[str]:
    """Return the queues of the broker, and those that the app names."""
    from umbel.cli.broker import ask_in_time
    from umbel.errors import BrokerError

    async def ask(broker: "Broker") -> Iterable[str]:
        return list(await broker.queues())

    named, url = _queues_of_app(context), context.params.get("url")
    with suppress(BrokerError):  # without the broker, offer only the queues that the app names
        named |= set(ask_in_time(_app_name(context), ask, ASK_S, url=url))
    return named


def _queues_of_app(context: click.Context) -> set[str]:
    """Return the queues that the app's settings and tasks name, whether or not they exist at the broker."""
    from umbel.app.sending.preparation import queue_of
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
    """Return the names of the workers that reply, and of known workers that do not."""
    from umbel.cli.broker import ask_in_time
    from umbel.control.client import ControlClient

    async def ask(broker: "Broker") -> Iterable[str]:
        answers = await ControlClient(broker).ask("ping", {}, timeout_s=ASK_S)
        return [*answers.replies, *(worker.node for worker in answers.silent)]

    return ask_in_time(_app_name(context), ask, ASK_S, url=context.params.get("url"))


@_offered
def inspect_commands(context: click.Context) -> Iterable[str]:
    """Return the names of remote commands that only query."""
    return _commands(context, changes=False)


@_offered
def control_commands(context: click.Context) -> Iterable[str]:
    """Return the names of remote commands that change something."""
    return _commands(context, changes=True)


def _commands(context: click.Context, *, changes: bool) -> Iterable[str]:
    """Return the names of visible remote commands of one kind."""
    from umbel.cli.broker import known_commands

    known = known_commands(_app_name(context))
    return [command.name for command in known if command.changes is changes and not command.is_hidden]


def _app_name(context: click.Context) -> str | None:
    """Return the value of -A, which may stand before or after the command. Completion does not run the
    command, so its callback has not stored the value.
    """
    name: str | None = context.params.get("app_name") or context.find_root().params.get("app_name")
    return name
