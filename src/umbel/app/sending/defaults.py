"""Defaults: what holds for the calls of one task that say nothing else, worked out once.

Who wins when several say the same thing: the task's own option, then the route, then the app's setting.
"""

from typing import Any, Protocol

import msgspec

from umbel.app.configuration.settings import Settings
from umbel.app.limits import check_limit
from umbel.app.options import TaskOptions, checked_priority
from umbel.app.sending.options import check_options
from umbel.app.sending.routing import NAMES_MAX, Router
from umbel.backends.interface import Backend
from umbel.backends.registry import sends_results
from umbel.wire.limits import HEADER_TEXT_MAX_CHARS, TASK_MAX_CHARS
from umbel.wire.options import is_task_name
from umbel.wire.show import brief
from umbel.wire.signing import Keyring
from umbel.wire.task import TaskHeaders
from umbel.wire.template import CallTemplate


class Sender(Protocol):
    """What sending needs of the app."""

    @property
    def settings(self) -> Settings: ...
    @property
    def router(self) -> Router: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def send_defaults(self) -> dict[str, "SendDefaults"]: ...


class SendDefaults(msgspec.Struct, frozen=True):
    """What holds for the calls of one task that say nothing else: worked out once, not for each."""

    own: TaskOptions
    settings: Settings
    queue: str
    priority: int
    serializer: str
    sends_results: bool
    headers: TaskHeaders  # without those that differ from call to call
    template: CallTemplate | None  # None: not JSON, an expiry or a limit of its own, or something to hide
    keyring: Keyring | None  # what its messages are signed with


def make_defaults(app: Sender, task: str, own: TaskOptions) -> SendDefaults:
    if len(app.send_defaults) >= NAMES_MAX:
        app.send_defaults.clear()
    if not is_task_name(task):
        raise ValueError(
            f"task name {brief(task)} is not valid; it must be text of 1 to {TASK_MAX_CHARS} characters"
        )
    settings, route = app.settings, app.router.route(task)
    queue = queue_of(app, task, own)
    check_options({"queue": queue})
    headers = TaskHeaders(
        task=task,
        id="",
        timelimit=(
            first(own.time_limit_s, settings.task_time_limit_s),
            first(own.soft_time_limit_s, settings.task_soft_time_limit_s),
        ),
        ignore_result=first(own.ignore_result, settings.task_ignore_result),
    )
    serializer = own.serializer or settings.task_serializer
    check_limit(own, settings.for_broker())
    made = app.send_defaults[task] = SendDefaults(
        own=own,
        settings=settings,
        queue=queue,
        priority=checked_priority(first(own.priority, route.get("priority"), settings.task_default_priority)),
        serializer=serializer,
        sends_results=sends_results(settings.backend),
        headers=headers,
        template=CallTemplate(headers, text_max=text_max(settings)) if own.is_plain(serializer) else None,
        keyring=settings.keyring,
    )
    return made


def queue_of(app: Sender, task: str, own: TaskOptions) -> str:
    """Where calls of the task go that name no queue."""
    return own.queue or app.router.route(task).get("queue") or app.settings.task_default_queue


def text_max(settings: Settings) -> int:
    return min(settings.task_repr_max_chars, HEADER_TEXT_MAX_CHARS)


def first(*values: Any) -> Any:
    for value in values:
        if value is not None:
            return value
    return None
