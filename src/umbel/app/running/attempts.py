"""Attempts: a retried task is sent again, under its own id, with one more retry counted.

Mostly nothing else changes, and the body is sent on as the bytes it came as. When `retry` names other
arguments or options, the call is sent again with all that its message said, and those on top.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from umbel.app.options import PRIORITY_MAX
from umbel.app.running.request import Request
from umbel.app.sending.options import SendOptions
from umbel.clock import cluster_now
from umbel.wire.message import Message, Outgoing
from umbel.wire.signing import Keyring
from umbel.wire.task import TaskCall, encode_headers, format_instant

if TYPE_CHECKING:
    from umbel.app.interfaces import PreparingApp


def next_attempt(
    message: Message,
    call: TaskCall,
    request: Request,
    *,
    due: float,
    queue: str,
    keyring: Keyring | None = None,
) -> Outgoing:
    """The same call once more: same id, one retry further. A task without a parent becomes its own,
    as Celery has it.

    Only the headers change, and with them the signature; the body is sent on as the bytes it came as.
    """
    headers = msgspec.structs.replace(
        call.headers,
        retries=request.retries + 1,
        eta=format_instant(due),
        parent_id=request.parent_id or request.id,
        redelivered=msgspec.UNSET,  # the new message has not been delivered yet
        umbel_signature=msgspec.UNSET,
    )
    again = msgspec.structs.replace(message, headers=encode_headers(headers, call.extra))
    outgoing = Outgoing(queue, again, due)
    return outgoing if keyring is None else keyring.sign_task(outgoing, cluster_now())


def changed_attempt(
    app: "PreparingApp",
    request: Request,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: SendOptions,
    *,
    due: float,
) -> Outgoing:
    """The call once more with other arguments or options; refused here if it cannot be sent."""
    assert request.call is not None, "only a call that came as a message is retried"
    stated = {**_stated(request.call, request), **options, "eta": due, "retries": request.retries + 1}
    return app.prepare(
        request.task,
        request.args if args is None else args,
        request.kwargs if kwargs is None else kwargs,
        cast(SendOptions, stated),
    ).outgoing


def _stated(call: TaskCall, request: Request) -> dict[str, Any]:
    """What the message said, as options of a call. Its time limits may be the task's: they hold on."""
    headers, embed = call.headers, call.embed
    hard_s, soft_s = headers.timelimit
    said = {
        "task_id": request.id,
        "root_id": request.root_id,
        "parent_id": request.parent_id or request.id,
        "group_id": headers.group,
        "group_index": headers.group_index,
        "shadow": headers.shadow,
        "expires": headers.expires,
        "time_limit": hard_s or None,
        "soft_time_limit": soft_s or None,
        "ignore_result": headers.ignore_result,
        "headers": call.extra,
        "link": embed.callbacks,
        "link_error": embed.errbacks,
        "chain": embed.chain,
        "chord": embed.chord,
        "reply_to": call.reply_to,
        "priority": min(call.priority, PRIORITY_MAX),  # a peer may have sent one that we do not
        "queue": request.delivery_info["routing_key"],
        "stamped_headers": headers.stamped_headers,
        "stamps": headers.stamps,
        "unique_token": headers.umbel_unique or None,
    }
    return {name: value for name, value in said.items() if value is not None}
