"""Preparing: from "call this task with these options" to a message and its queue.

Everything that sends a task goes through `prepare`: `delay`, signatures, retries, callbacks and
the steps of a chain, in clients and inside running tasks. Who wins when several say the same
thing: the call's option, then the task's own, then the route, then the app's default.
"""

import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache
from os import getpid, urandom
from typing import Any

import msgspec

from umbel.app.options import TaskOptions
from umbel.app.running.request import Request
from umbel.app.sending.defaults import SendDefaults, Sender, first, make_defaults
from umbel.app.sending.options import SendOptions, check_options
from umbel.app.sending.stated import encoded_in_full, stated_priority, stated_queue, stated_reply_to
from umbel.app.types.call_types import CallTypes
from umbel.clock import cluster_now
from umbel.errors import TooLarge
from umbel.wire.message import Message, Outgoing

_NO_TASK = TaskOptions()


class Prepared(msgspec.Struct, frozen=True, gc=False):
    task: str
    task_id: str
    outgoing: Outgoing
    ignores_result: bool
    types: CallTypes | None = None  # of the task, where that is known here


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
        ignores_result = first(options.get("ignore_result"), ignores_result)
        outgoing = encoded_in_full(app, task_id, args, kwargs, options, send_defaults, sender, origin())
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
            priority=stated_priority(options, send_defaults),
            reply_to=stated_reply_to(app, options, send_defaults, wants_result=not ignores_result),
        )
        outgoing = Outgoing(stated_queue(options, send_defaults), message)
    else:  # as most calls are: it says nothing but its arguments
        message = send_defaults.template.message(
            task_id, args, kwargs, origin=origin(), priority=send_defaults.priority
        )
        outgoing = Outgoing(send_defaults.queue, message)
    if send_defaults.keyring is not None:
        outgoing = send_defaults.keyring.sign_task(outgoing, cluster_now())
    check_size(outgoing.message, send_defaults.settings.message_max_bytes, task)
    return Prepared(task, task_id, outgoing, bool(ignores_result), types)


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


def _send_defaults(app: Sender, task: str, own: TaskOptions) -> SendDefaults:
    known = app.send_defaults.get(task)
    # A task that is defined again has other options.
    if known is not None and known.own is own and known.settings is app.settings:
        return known
    return make_defaults(app, task, own)


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


def new_id() -> str:
    """A random id in the form of RFC 4122, version 4: what `str(uuid4())` makes, at a third of its cost."""
    return _as_id(urandom(16).hex())


def new_ids(count: int) -> list[str]:
    """This many ids, for one system call."""
    digits = urandom(16 * count).hex()
    return [_as_id(digits[first : first + 32]) for first in range(0, 32 * count, 32)]


def _as_id(digits: str) -> str:
    variant = _VARIANT[digits[16]]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


_VARIANT = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}
