"""Preparation: makes the message of a call. Every call passes through `prepare`: `delay`, signatures,
retries, callbacks and chain steps, in clients and in running tasks.

The first of these that has a value decides: the call's options, the task's options, the route of the task,
the app's settings. Values that are equal for all calls of a task are computed once (`SendDefaults`). A call
with few options fills in a template; any other call is encoded header by header.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from os import getpid, urandom
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from umbel.app.options import (
    NAMES_MAX,
    SendOptions,
    TaskOptions,
    check_options,
    checked_priority,
)
from umbel.app.request import Request
from umbel.app.results import AsyncResult
from umbel.app.sending.signing import signed
from umbel.app.settings import Settings
from umbel.app.types import CallTypes
from umbel.app.waiting import patiently
from umbel.backends.interface import Backend
from umbel.backends.registry import sends_results
from umbel.brokers.registry import check_limits_on
from umbel.clock import cluster_now
from umbel.errors import TooLarge
from umbel.wire.call import Embed, TaskCall, TaskHeaders
from umbel.wire.message import (
    HEADER_TEXT_MAX_CHARS,
    LATEST_S,
    TASK_MAX_CHARS,
    Outgoing,
    format_instant,
    is_task_name,
    parse_instant,
)
from umbel.wire.show import brief, show_args, show_kwargs
from umbel.wire.signing import Keyring
from umbel.wire.steps import SignatureMap, answering
from umbel.wire.task import CallTemplate, encode_task

if TYPE_CHECKING:
    from umbel.app.app import App

_NO_OPTIONS = TaskOptions()  # of a task that is not defined in this process


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """A call whose message is ready to be published, with what its result handle needs."""

    task: str
    task_id: str
    outgoing: Outgoing
    ignores_result: bool
    types: CallTypes | None = None  # of the task, if it is defined in this process

    def result(self, app: "App", task_id: str = "") -> AsyncResult[Any]:
        """The result handle of the call, or of the task `task_id` that runs in its place."""
        return AsyncResult(task_id or self.task_id, app=app, ignored=self.ignores_result, types=self.types)


def prepare(
    app: "App",
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: SendOptions,
    *,
    sender: Request | None = None,
    task_id: str = "",
) -> Prepared:
    """Make the message of one call of the named task, signed and with its queue.

    `task_id` is the id of a call whose options contain none; without it the call gets a random id.
    TooLarge: the message is larger than `message_max_bytes`.
    """
    defaults = defaults_of(app, name)
    if app.signals.before_task_publish.receivers:
        options, task_id = _announce(app, name, args, kwargs, options, defaults, task_id)
    if options:
        check_options(options)
        task_id = options.get("task_id") or task_id
    task_id = task_id or new_id()
    ignores_result = defaults.headers.ignore_result
    types = defaults.task_options.types
    if types is not None:
        args, kwargs = types.lower(args, kwargs, options.get("serializer") or defaults.serializer)
    template = defaults.template if _IN_TEMPLATE.issuperset(options) else None
    if template is None:
        ignores_result = first(options.get("ignore_result"), ignores_result)
        outgoing = _encode_in_full(app, task_id, args, kwargs, options, defaults, sender)
    elif options or sender is not None or defaults.sends_results:
        message = template.message(
            task_id,
            args,
            kwargs,
            origin=origin(),
            root_id=options.get("root_id") or (sender.root_id if sender else None),
            parent_id=options.get("parent_id") or (sender.id if sender else None),
            group=options.get("group_id"),
            group_index=options.get("group_index"),
            priority=_priority(options, defaults),
            reply_to=_reply_to(app, options, defaults, wants_result=not ignores_result),
        )
        outgoing = Outgoing(_queue(options, defaults), message)
    else:  # most calls: they give nothing but arguments
        message = template.message(task_id, args, kwargs, origin=origin(), priority=defaults.priority)
        outgoing = Outgoing(defaults.queue, message)
    if (keyring := defaults.keyring) is not None:
        outgoing = signed(app, keyring, outgoing, sender, is_canonical=template is not None)
    size, most = (
        len(outgoing.message.body) + len(outgoing.message.headers),
        defaults.settings.message_max_bytes,
    )
    if size > most:
        raise TooLarge(
            f"the message for task {name!r} has {size} bytes, over the limit of {most}; "
            "send a reference to the data instead, or raise 'message_max_bytes'"
        )
    return Prepared(name, task_id, outgoing, bool(ignores_result), types)


_IN_TEMPLATE = frozenset(
    {
        *("task_id", "root_id", "parent_id", "group_id", "group_index"),
        *("queue", "routing_key", "exchange", "priority", "reply_to"),
    }
)


def is_unique(task_options: TaskOptions | None, options: SendOptions) -> bool:
    """Whether the options of the call or of the task make the call unique."""
    if "unique_key" in options or "unique_for" in options:
        return True
    return task_options is not None and task_options.unique_for_s is not None


def _announce(
    app: "App",
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: SendOptions,
    defaults: "SendDefaults",
    task_id: str,
) -> tuple[SendOptions, str]:
    """Send `before_task_publish`; return the options with the headers that receivers added, and the task's
    id.

    Receivers run before the message is encoded and signed, so their headers travel like the caller's own.
    """
    check_options(options)
    task_id = options.get("task_id") or task_id or new_id()
    headers = dict(options.get("headers") or {})
    app.signals.before_task_publish.send(
        task=name,
        task_id=task_id,
        args=args,
        kwargs=kwargs,
        queue=_queue(options, defaults),
        headers=headers,
    )
    return ({**options, "headers": headers} if headers else options), task_id


# ---- defaults of a task ----------------------------------------------------------------------------


class SendDefaults(msgspec.Struct, frozen=True):
    """The values for calls of one task whose options say nothing else. Computed once for each task."""

    task_options: TaskOptions
    settings: Settings
    queue: str
    priority: int
    serializer: str
    sends_results: bool
    headers: TaskHeaders  # without the headers that differ between calls
    template: CallTemplate | None  # None: not JSON, an expiry, a cluster limit, or sensitive arguments
    keyring: Keyring | None  # signs the messages


def defaults_of(app: "App", name: str) -> SendDefaults:
    """The defaults of the named task, from the cache of the app. ValueError: the name, queue or priority is
    invalid.
    """
    task = app.tasks.get(name)
    task_options = _NO_OPTIONS if task is None else task.options
    defaults = app.send_defaults.get(name)
    # A task that was defined again has other options.
    if defaults is not None and defaults.task_options is task_options and defaults.settings is app.settings:
        return defaults
    if len(app.send_defaults) >= NAMES_MAX:
        app.send_defaults.clear()
    defaults = app.send_defaults[name] = _make_defaults(app, name, task_options)
    return defaults


def _make_defaults(app: "App", name: str, task_options: TaskOptions) -> SendDefaults:
    if not is_task_name(name):
        raise ValueError(
            f"task name {brief(name)} is not valid; it must be text of 1 to {TASK_MAX_CHARS} characters"
        )
    settings, route = app.settings, app.router.route(name)
    queue = queue_of(app, name, task_options)
    check_options({"queue": queue})
    headers = TaskHeaders(
        task=name,
        id="",
        timelimit=(
            first(task_options.time_limit_s, settings.task_time_limit_s),
            first(task_options.soft_time_limit_s, settings.task_soft_time_limit_s),
        ),
        ignore_result=first(task_options.ignore_result, settings.task_ignore_result),
    )
    keyring, template = settings.keyring, None
    serializer = task_options.serializer or settings.task_serializer
    if task_options.cluster_limit is not None:
        check_limits_on(settings.for_broker(), name)
    if task_options.is_plain(serializer):
        template = CallTemplate(headers, text_max=_text_max(settings), is_canonical=keyring is not None)
    priority = first(task_options.priority, route.get("priority"), settings.task_default_priority)
    return SendDefaults(
        task_options=task_options,
        settings=settings,
        queue=queue,
        priority=checked_priority(priority),
        serializer=serializer,
        sends_results=sends_results(settings.backend),
        headers=headers,
        template=template,
        keyring=keyring,
    )


def queue_of(app: "App", name: str, task_options: TaskOptions) -> str:
    """The queue for calls of the task whose options contain none."""
    return task_options.queue or app.router.route(name).get("queue") or app.settings.task_default_queue


def first(*values: Any) -> Any:
    """The first value that is not None; None if there is none."""
    for value in values:
        if value is not None:
            return value
    return None


def _text_max(settings: Settings) -> int:
    """How many characters of arguments the headers of a message may show."""
    return min(settings.task_repr_max_chars, HEADER_TEXT_MAX_CHARS)


# ---- options of a call -----------------------------------------------------------------------------


def _encode_in_full(
    app: "App",
    task_id: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: SendOptions,
    defaults: SendDefaults,
    sender: Request | None,
) -> Outgoing:
    """Encode a call header by header, because its options do not fit into the template."""
    task_options = defaults.task_options
    due, eta = _due(options)
    expires, expiration_ms = _expiry(options, task_options)
    hard_s, soft_s = defaults.headers.timelimit
    headers = replace(
        defaults.headers,
        id=task_id,
        root_id=options.get("root_id") or (sender.root_id if sender else None) or task_id,
        parent_id=options.get("parent_id") or (sender.id if sender else None),
        origin=origin(),
        umbel_limit=task_options.limit_key(args, kwargs),
        eta=eta,
        expires=expires,
        timelimit=(first(options.get("time_limit"), hard_s), first(options.get("soft_time_limit"), soft_s)),
        **_shown_arguments(defaults, args, kwargs),
        **_stamps(options),
        **{
            _HEADER_OF[name]: value
            for name, value in options.items()
            if name in _HEADER_OF and value is not None
        },
    )
    wants_result = not headers.ignore_result or "chain" in options
    reply_to = _reply_to(app, options, defaults, wants_result=wants_result)
    call = TaskCall(
        headers=headers,
        args=list(args),
        kwargs=dict(kwargs),
        embed=_embed(options, reply_to),
        extra=dict(options.get("headers") or {}),
        reply_to=reply_to,
        priority=_priority(options, defaults),
    )
    message = encode_task(
        call,
        serializer=options.get("serializer") or defaults.serializer,
        compression=options.get("compression"),
        expiration_ms=expiration_ms,
    )
    return Outgoing(_queue(options, defaults), message, due)


_HEADER_OF = {  # options whose values become headers unchanged
    "shadow": "shadow",
    "group_id": "group",
    "group_index": "group_index",
    "retries": "retries",
    "ignore_result": "ignore_result",
    "unique_token": "umbel_unique",
    "replaced_task_nesting": "replaced_task_nesting",
}


def _shown_arguments(
    defaults: SendDefaults, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """The arguments as text for the headers, without the sensitive ones."""
    if defaults.task_options.hides is not None:
        args, kwargs = defaults.task_options.hides.hide(args, kwargs)
    most = _text_max(defaults.settings)
    return {"argsrepr": show_args(args, most), "kwargsrepr": show_kwargs(kwargs, most)}


def _queue(options: SendOptions, defaults: SendDefaults) -> str:
    return options.get("queue") or options.get("routing_key") or defaults.queue


def _priority(options: SendOptions, defaults: SendDefaults) -> int:
    priority = options.get("priority")
    return defaults.priority if priority is None else checked_priority(priority)


def _reply_to(app: "App", options: SendOptions, defaults: SendDefaults, *, wants_result: bool) -> str:
    """The address to which the result is sent; "" if it is stored, or not wanted."""
    given = options.get("reply_to")
    if given is not None:
        return given
    if not wants_result or not defaults.sends_results:
        return ""
    backend = app.backend
    return patiently(lambda: backend.reply_to, defaults.settings.publish_timeout_s)


def instant(value: datetime | str | float) -> float:
    """Unix time from a datetime, an ISO text, or seconds."""
    if isinstance(value, datetime):
        return min((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp(), LATEST_S)
    if isinstance(value, str):
        return parse_instant(value)
    return float(value)


def _due(options: SendOptions) -> tuple[float, str | None]:
    if (countdown := options.get("countdown")) is not None:
        due = cluster_now() + countdown
    elif (eta := options.get("eta")) is not None:
        due = instant(eta)
    else:
        return 0.0, None
    return due, format_instant(due)


def _expiry(options: SendOptions, task_options: TaskOptions) -> tuple[str | None, int | None]:
    """The time at which the call expires, and the milliseconds until then."""
    expires = first(options.get("expires"), task_options.expires_s)
    if expires is None:
        return None, None
    now = cluster_now()
    # As in Celery, a number is seconds from now; anything else is a point in time.
    at = now + expires if isinstance(expires, int | float) else instant(expires)
    return format_instant(at), max(0, int((at - now) * 1000))


def _embed(options: SendOptions, reply_to: str) -> Embed:
    """The signatures that follow the call: callbacks, errbacks, rest of the chain, body of the chord."""
    if options.keys().isdisjoint(("link", "link_error", "chain", "chord")):
        return _EMPTY
    steps = options.get("chain")
    if steps and reply_to:
        steps = [answering(step, reply_to) for step in steps]
    return Embed(
        callbacks=_maps(options.get("link")),
        errbacks=_maps(options.get("link_error")),
        chain=steps or None,
        chord=options.get("chord"),
    )


_EMPTY = Embed()


def _maps(signatures: Any) -> list[SignatureMap] | None:
    if not signatures:
        return None
    several = signatures if isinstance(signatures, list | tuple) else [signatures]
    return [signature.to_map() if hasattr(signature, "to_map") else signature for signature in several]


def _stamps(options: SendOptions) -> dict[str, Any]:
    names = options.get("stamped_headers")
    if not names:
        return {}
    given = {**(options.get("stamps") or {}), **options}
    return {"stamped_headers": list(names), "stamps": {name: given[name] for name in names if name in given}}


# ---- steps on the result backend -------------------------------------------------------------------
#
# A chord must be known to the result backend before its messages are sent. Blocking code writes it while the
# messages are made. Async code collects these steps and runs them in a thread before it publishes.

BackendStep = Callable[[Backend], object]
_collected: ContextVar[list[BackendStep] | None] = ContextVar("umbel_backend_steps", default=None)


def arrange(app: "App", step: BackendStep) -> None:
    """Run this step on the result backend now, or collect it in a block of `collected_steps`."""
    steps = _collected.get()
    if steps is None:
        step(app.backend)
    else:
        steps.append(step)


@contextmanager
def collected_steps() -> Iterator[list[BackendStep]]:
    """Collect the backend steps of the messages that are made in this block, instead of running them."""
    steps: list[BackendStep] = []
    token = _collected.set(steps)
    try:
        yield steps
    finally:
        _collected.reset(token)


# ---- ids -------------------------------------------------------------------------------------------


def origin() -> str:
    """The anonymous node name of this client, in Celery's form."""
    return _origin(getpid())


@lru_cache(maxsize=4)
def _origin(pid: int) -> str:
    return f"gen{pid}@{socket.gethostname()}"


def new_id() -> str:
    """A random id of RFC 4122, version 4, in the form of `str(uuid4())`, at a third of its cost."""
    return _as_id(urandom(16).hex())


def new_ids(count: int) -> list[str]:
    """Random ids, made with a single system call."""
    digits = urandom(16 * count).hex()
    return [_as_id(digits[start : start + 32]) for start in range(0, 32 * count, 32)]


def _as_id(digits: str) -> str:
    variant = _VARIANT[digits[16]]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


_VARIANT = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}
