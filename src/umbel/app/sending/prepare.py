"""Sending: from "call this task with these options" to a message and its queue.

Everything that sends a task goes through `prepare`: `delay`, signatures, retries, callbacks and
the steps of a chain, in clients and inside running tasks. Who wins when several say the same
thing: the call's option, then the task's own, then the route, then the app's default.
"""

import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from os import getpid
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from umbel.app.configuration.settings import Settings
from umbel.app.limits import check_limit
from umbel.app.options import TaskOptions, checked_priority
from umbel.app.running.request import Request
from umbel.app.sending.ids import new_id
from umbel.app.sending.options import SendOptions, check_options
from umbel.app.sending.publish import patiently
from umbel.app.sending.routing import NAMES_MAX, Router
from umbel.app.types.call_types import CallTypes
from umbel.backends.interface import Addressed, Backend
from umbel.backends.registry import sends_results
from umbel.clock import cluster_now
from umbel.errors import TooLarge
from umbel.wire.instant import LATEST_S
from umbel.wire.limits import HEADER_TEXT_MAX_CHARS, TASK_MAX_CHARS
from umbel.wire.message import Message, Outgoing
from umbel.wire.options import is_task_name
from umbel.wire.show import brief
from umbel.wire.signing import Keyring
from umbel.wire.task import (
    Embed,
    SignatureMap,
    TaskCall,
    TaskHeaders,
    encode_task,
    format_instant,
    parse_instant,
    show_args,
    show_kwargs,
)
from umbel.wire.template import CallTemplate

_NO_TASK = TaskOptions()


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


class Prepared(msgspec.Struct, frozen=True, gc=False):
    task: str
    task_id: str
    outgoing: Outgoing
    ignores_result: bool
    types: CallTypes | None = None  # of the task, where that is known here


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


def is_unique(own: TaskOptions | None, options: SendOptions) -> bool:
    if "unique_key" in options or "unique_for" in options:
        return True
    return own is not None and own.unique_for_s is not None


def prepare(
    app: Sender,
    task: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: SendOptions,
    *,
    defaults: TaskOptions | None = None,
    sender: Request | None = None,
    task_id: str = "",
) -> Prepared:
    """`task_id` is for a call whose options name none; without it such a call gets a new one."""
    if options:
        check_options(options)
        task_id = options.get("task_id") or task_id
    task_id = task_id or new_id()
    send_defaults = _send_defaults(app, task, defaults or _NO_TASK)
    ignores_result = send_defaults.headers.ignore_result
    types = send_defaults.own.types
    if types is not None:
        args, kwargs = types.lower(args, kwargs, options.get("serializer") or send_defaults.serializer)
    if send_defaults.template is None or not _PLAIN.issuperset(options):
        ignores_result = _first(options.get("ignore_result"), ignores_result)
        outgoing = _encoded_in_full(app, task_id, args, kwargs, options, send_defaults, sender)
    elif options or sender is not None or send_defaults.sends_results:
        message = send_defaults.template.message(
            task_id,
            args,
            kwargs,
            origin=origin(),
            root_id=options.get("root_id") or (sender.root_id if sender else None),
            parent_id=options.get("parent_id") or (sender.id if sender else None),
            group=options.get("group_id"),
            group_index=options.get("group_index"),
            priority=_priority(options, send_defaults),
            reply_to=_reply_to(app, options, send_defaults, wants_result=not ignores_result),
        )
        outgoing = Outgoing(_queue(options, send_defaults), message)
    else:  # as most calls are: it says nothing but its arguments
        message = send_defaults.template.message(
            task_id, args, kwargs, origin=origin(), priority=send_defaults.priority
        )
        outgoing = Outgoing(send_defaults.queue, message)
    if send_defaults.keyring is not None:
        outgoing = send_defaults.keyring.sign_task(outgoing, cluster_now())
    check_size(outgoing.message, send_defaults.settings.message_max_bytes, task)
    return Prepared(task, task_id, outgoing, bool(ignores_result), types)


def _encoded_in_full(
    app: Sender,
    task_id: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: SendOptions,
    send_defaults: SendDefaults,
    sender: Request | None,
) -> Outgoing:
    stated, due, expiration_ms = _stated(options, send_defaults)
    headers = replace(
        send_defaults.headers,
        id=task_id,
        root_id=options.get("root_id") or (sender.root_id if sender else None) or task_id,
        parent_id=options.get("parent_id") or (sender.id if sender else None),
        origin=origin(),
        umbel_limit=send_defaults.own.limit_key(args, kwargs),
        **_shown(send_defaults, args, kwargs),
        **stated,
    )
    reply_to = _reply_to(
        app, options, send_defaults, wants_result=not headers.ignore_result or "chain" in options
    )
    call = TaskCall(
        headers=headers,
        args=list(args),
        kwargs=dict(kwargs),
        embed=_embed(options, reply_to),
        extra=dict(options.get("headers") or {}),
        reply_to=reply_to,
        priority=_priority(options, send_defaults),
    )
    message = encode_task(
        call,
        serializer=options.get("serializer") or send_defaults.serializer,
        compression=options.get("compression"),
        expiration_ms=expiration_ms,
    )
    return Outgoing(_queue(options, send_defaults), message, due)


def _shown(send_defaults: SendDefaults, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The arguments as headers show them, without the sensitive ones."""
    if send_defaults.own.hides is not None:
        args, kwargs = send_defaults.own.hides.hide(args, kwargs)
    text_max = _text_max(send_defaults.settings)
    return {"argsrepr": show_args(args, text_max), "kwargsrepr": show_kwargs(kwargs, text_max)}


def _text_max(settings: Settings) -> int:
    return min(settings.task_repr_max_chars, HEADER_TEXT_MAX_CHARS)


# Options that leave the headers of a call as the task's other calls have them, but for the gaps
# of the template.
_PLAIN = frozenset(
    {
        "task_id",
        "root_id",
        "parent_id",
        "group_id",
        "group_index",
        "queue",
        "routing_key",
        "exchange",
        "priority",
        "reply_to",
    }
)


def _queue(options: SendOptions, send_defaults: SendDefaults) -> str:
    return options.get("queue") or options.get("routing_key") or send_defaults.queue


def _priority(options: SendOptions, send_defaults: SendDefaults) -> int:
    stated = options.get("priority")
    return send_defaults.priority if stated is None else checked_priority(stated)


def queue_of(app: Sender, task: str, own: TaskOptions) -> str:
    """Where calls of the task go that name no queue."""
    return own.queue or app.router.route(task).get("queue") or app.settings.task_default_queue


def _send_defaults(app: Sender, task: str, own: TaskOptions) -> SendDefaults:
    known = app.send_defaults.get(task)
    # A task that is defined again has other options.
    if known is not None and known.own is own and known.settings is app.settings:
        return known
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
            _first(own.time_limit_s, settings.task_time_limit_s),
            _first(own.soft_time_limit_s, settings.task_soft_time_limit_s),
        ),
        ignore_result=_first(own.ignore_result, settings.task_ignore_result),
    )
    serializer = own.serializer or settings.task_serializer
    check_limit(own, settings.broker)
    made = app.send_defaults[task] = SendDefaults(
        own=own,
        settings=settings,
        queue=queue,
        priority=checked_priority(
            _first(own.priority, route.get("priority"), settings.task_default_priority)
        ),
        serializer=serializer,
        sends_results=sends_results(settings.backend),
        headers=headers,
        template=CallTemplate(headers, text_max=_text_max(settings)) if own.is_plain(serializer) else None,
        keyring=settings.keyring,
    )
    return made


def _stated(options: SendOptions, send_defaults: SendDefaults) -> tuple[Mapping[str, Any], float, int | None]:
    """The headers that the call itself states, when it is due, and how long it may wait to be run."""
    due, eta = _due(options)
    expires, expiration_ms = _expiry(options, send_defaults.own)
    hard_s, soft_s = send_defaults.headers.timelimit
    stated = {
        "eta": eta,
        "expires": expires,
        "timelimit": (
            _first(options.get("time_limit"), hard_s),
            _first(options.get("soft_time_limit"), soft_s),
        ),
        **_stamps(options),
    }
    for name, value in options.items():
        if name in _HEADER_OF and value is not None:
            stated[_HEADER_OF[name]] = value
    return stated, due, expiration_ms


_HEADER_OF = {  # options that are headers, as they are
    "shadow": "shadow",
    "group_id": "group",
    "group_index": "group_index",
    "retries": "retries",
    "ignore_result": "ignore_result",
    "unique_token": "umbel_unique",
    "replaced_task_nesting": "replaced_task_nesting",
}


def _reply_to(app: Sender, options: SendOptions, send_defaults: SendDefaults, *, wants_result: bool) -> str:
    """Where the result must be sent; "" where results are looked up, or this one is not wanted."""
    given = options.get("reply_to")
    if given is not None:
        return given
    if not wants_result or not send_defaults.sends_results:
        return ""
    backend = app.backend
    timeout_s = send_defaults.settings.publish_timeout_s
    return patiently(lambda: backend.reply_to if isinstance(backend, Addressed) else "", timeout_s)


def check_size(message: Message, most: int, task: str) -> None:
    size = len(message.body) + len(message.headers)
    if size > most:
        raise TooLarge(
            f"the message for task {task!r} has {size} bytes, over the limit of {most}; "
            "send a reference to the data instead, or raise 'message_max_bytes'"
        )


def origin() -> str:
    """The anonymous node name of this client, as Celery has it."""
    return _origin(getpid())


@lru_cache(maxsize=4)
def _origin(pid: int) -> str:
    return f"gen{pid}@{socket.gethostname()}"


def instant(value: datetime | str | float) -> float:
    """Unix time from what a user may give: a datetime, ISO text, or seconds."""
    if isinstance(value, datetime):
        return min((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp(), LATEST_S)
    if isinstance(value, str):
        return parse_instant(value)
    return float(value)


def _due(options: SendOptions) -> tuple[float, str | None]:
    if "countdown" in options and options["countdown"] is not None:
        due = cluster_now() + options["countdown"]
    elif options.get("eta") is not None:
        due = instant(options["eta"])
    else:
        return 0.0, None
    return due, format_instant(due)


def _expiry(options: SendOptions, own: TaskOptions) -> tuple[str | None, int | None]:
    expires = _first(options.get("expires"), own.expires_s)
    if expires is None:
        return None, None
    now = cluster_now()
    # A number is "seconds from now", as Celery has it; a moment is a moment.
    at = now + expires if isinstance(expires, int | float) else instant(expires)
    return format_instant(at), max(0, int((at - now) * 1000))


def _embed(options: SendOptions, reply_to: str) -> Embed:
    if options.keys().isdisjoint(("link", "link_error", "chain", "chord")):
        return _EMPTY
    return Embed(
        callbacks=_maps(options.get("link")),
        errbacks=_maps(options.get("link_error")),
        chain=[_answering(step, reply_to) for step in options.get("chain") or ()] or None,
        chord=options.get("chord"),
    )


_EMPTY = Embed()


def _answering(step: SignatureMap, reply_to: str) -> SignatureMap:
    """The step with the address for its result, or the last result of the chain would be lost."""
    if not reply_to or "reply_to" in step["options"]:
        return step
    return {**step, "options": {**step["options"], "reply_to": reply_to}}


def _maps(signatures: Any) -> list[SignatureMap] | None:
    if not signatures:
        return None
    several = signatures if isinstance(signatures, list | tuple) else [signatures]
    return [one.to_map() if hasattr(one, "to_map") else one for one in several]


def _stamps(options: SendOptions) -> dict[str, Any]:
    names = options.get("stamped_headers")
    if not names:
        return {}
    given = {**(options.get("stamps") or {}), **options}
    return {"stamped_headers": list(names), "stamps": {name: given[name] for name in names if name in given}}


def _first(*values: Any) -> Any:
    for value in values:
        if value is not None:
            return value
    return None
