"""Stated: what a call says in options, beside its arguments, and the message that says it.

When it is due and when it expires, what follows it, where its result goes, what it is stamped with.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from umbel.app.options import TaskOptions, checked_priority
from umbel.app.running.request import Request
from umbel.app.sending.defaults import SendDefaults, Sender, first, text_max
from umbel.app.sending.options import SendOptions
from umbel.app.sending.patience import patiently
from umbel.backends.interface import Addressed
from umbel.clock import cluster_now
from umbel.wire.instant import LATEST_S
from umbel.wire.message import Outgoing
from umbel.wire.steps import answering
from umbel.wire.task import (
    Embed,
    SignatureMap,
    TaskCall,
    encode_task,
    format_instant,
    parse_instant,
    show_args,
    show_kwargs,
)


def encoded_in_full(
    app: Sender,
    task_id: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: SendOptions,
    send_defaults: SendDefaults,
    sender: Request | None,
    origin: str,
) -> Outgoing:
    stated, due, expiration_ms = _stated(options, send_defaults)
    headers = replace(
        send_defaults.headers,
        id=task_id,
        root_id=options.get("root_id") or (sender.root_id if sender else None) or task_id,
        parent_id=options.get("parent_id") or (sender.id if sender else None),
        origin=origin,
        umbel_limit=send_defaults.own.limit_key(args, kwargs),
        **_shown(send_defaults, args, kwargs),
        **stated,
    )
    reply_to = stated_reply_to(
        app, options, send_defaults, wants_result=not headers.ignore_result or "chain" in options
    )
    call = TaskCall(
        headers=headers,
        args=list(args),
        kwargs=dict(kwargs),
        embed=_embed(options, reply_to),
        extra=dict(options.get("headers") or {}),
        reply_to=reply_to,
        priority=stated_priority(options, send_defaults),
    )
    message = encode_task(
        call,
        serializer=options.get("serializer") or send_defaults.serializer,
        compression=options.get("compression"),
        expiration_ms=expiration_ms,
    )
    return Outgoing(stated_queue(options, send_defaults), message, due)


def _shown(send_defaults: SendDefaults, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The arguments as headers show them, without the sensitive ones."""
    if send_defaults.own.hides is not None:
        args, kwargs = send_defaults.own.hides.hide(args, kwargs)
    most = text_max(send_defaults.settings)
    return {"argsrepr": show_args(args, most), "kwargsrepr": show_kwargs(kwargs, most)}


def stated_queue(options: SendOptions, send_defaults: SendDefaults) -> str:
    return options.get("queue") or options.get("routing_key") or send_defaults.queue


def stated_priority(options: SendOptions, send_defaults: SendDefaults) -> int:
    stated = options.get("priority")
    return send_defaults.priority if stated is None else checked_priority(stated)


def _stated(options: SendOptions, send_defaults: SendDefaults) -> tuple[Mapping[str, Any], float, int | None]:
    """The headers that the call itself states, when it is due, and how long it may wait to be run."""
    due, eta = _due(options)
    expires, expiration_ms = _expiry(options, send_defaults.own)
    hard_s, soft_s = send_defaults.headers.timelimit
    stated = {
        "eta": eta,
        "expires": expires,
        "timelimit": (
            first(options.get("time_limit"), hard_s),
            first(options.get("soft_time_limit"), soft_s),
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


def stated_reply_to(
    app: Sender, options: SendOptions, send_defaults: SendDefaults, *, wants_result: bool
) -> str:
    """Where the result must be sent; "" where results are looked up, or this one is not wanted."""
    given = options.get("reply_to")
    if given is not None:
        return given
    if not wants_result or not send_defaults.sends_results:
        return ""
    backend = app.backend
    timeout_s = send_defaults.settings.publish_timeout_s
    return patiently(lambda: backend.reply_to if isinstance(backend, Addressed) else "", timeout_s)


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
    expires = first(options.get("expires"), own.expires_s)
    if expires is None:
        return None, None
    now = cluster_now()
    # A number is "seconds from now", as Celery has it; a moment is a moment.
    at = now + expires if isinstance(expires, int | float) else instant(expires)
    return format_instant(at), max(0, int((at - now) * 1000))


def _embed(options: SendOptions, reply_to: str) -> Embed:
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
    return [one.to_map() if hasattr(one, "to_map") else one for one in several]


def _stamps(options: SendOptions) -> dict[str, Any]:
    names = options.get("stamped_headers")
    if not names:
        return {}
    given = {**(options.get("stamps") or {}), **options}
    return {"stamped_headers": list(names), "stamps": {name: given[name] for name in names if name in given}}
