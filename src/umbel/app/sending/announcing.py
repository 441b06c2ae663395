"""Announcing: `before_task_publish` is told of a call, and may add headers to its message.

Before the message is encoded and signed, so that what receivers add travels as the caller's own headers do.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from umbel.app.options import TaskOptions
from umbel.app.sending.defaults import Sender, queue_of
from umbel.app.sending.options import SendOptions, check_options
from umbel.app.sending.prepare import Prepared, new_id
from umbel.app.signals import Signals

_NO_TASK = TaskOptions()


class TellingApp(Protocol):
    @property
    def signals(self) -> Signals: ...


class AnnouncingApp(Sender, TellingApp, Protocol):
    """Makes messages, and tells of them."""


def announce(
    app: AnnouncingApp,
    task: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: SendOptions,
    *,
    defaults: TaskOptions | None,
    task_id: str,
) -> tuple[SendOptions, str]:
    """The options of the call, with the headers that receivers added, and its id."""
    check_options(options)
    task_id = options.get("task_id") or task_id or new_id()
    queue = options.get("queue") or options.get("routing_key") or queue_of(app, task, defaults or _NO_TASK)
    headers = dict(options.get("headers") or {})
    app.signals.before_task_publish.send(
        task=task, task_id=task_id, args=args, kwargs=kwargs, queue=queue, headers=headers
    )
    return ({**options, "headers": headers} if headers else options), task_id


def announced_parts(app: TellingApp, group_id: str, parts: list[Prepared]) -> list[Prepared]:
    """The messages of a chord's header, after `before_chord_publish` was told of them."""
    if app.signals.before_chord_publish.receivers:
        app.signals.before_chord_publish.send(group_id=group_id, parts=parts)
    return parts
