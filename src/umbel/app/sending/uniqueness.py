"""Unique tasks: a call that waits or runs already is not sent a second time.

A key is taken in the broker, in one atomic step, before the message is sent: by the first sender, under
its task's id, for `unique_for` seconds. Who comes meanwhile gets the first one's result instead. The
worker that ends the task gives the key back, after the message is settled; a retry or a return to the
queue is not an end. Whatever happens, the key is free when its time is over, although the task may
still be at work then: choose a time that is longer than the task takes.

What it costs: a round trip more to send. Where it stops being right: a sender that dies between the
two steps leaves the key taken until its time is over, and so does a worker that dies between the end of
a task and giving the key back.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from umbel.app.results import AsyncResult
from umbel.app.running.request import current_request
from umbel.app.sending.options import SendOptions, check_options
from umbel.app.sending.publish import patiently
from umbel.errors import BrokerError, NotSupported
from umbel.wire.values import encode_json

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

UNIQUE_FOR_MAX_S = 30 * 86_400.0


def send_unique(
    app: "SendingApp", name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
) -> AsyncResult[Any]:
    """Send it, unless it waits or runs already; the result of the one that does."""
    check_options(options)
    ttl_s = _time_of(app, name, options)
    key = key_of(name, args, kwargs, options.get("unique_key"))
    stated = {option: value for option, value in options.items() if option not in _OF_UNIQUENESS}
    prepared = app.prepare(
        name, args, kwargs, cast(SendOptions, {**stated, "unique_token": key}), sender=current_request()
    )
    result: AsyncResult[Any] = AsyncResult(
        prepared.task_id, app=app, ignored=prepared.ignores_result, types=prepared.types
    )
    if app.eager_backend is not None:  # it has ended before it could be sent again
        app.publish([prepared])
        return result
    producer, timeout_s = app.producer, app.settings.publish_timeout_s
    if not producer.capabilities.unique:
        raise NotSupported(f"task {name!r} cannot be unique: {producer.capabilities.reasons['unique']}")
    holder = patiently(lambda: producer.hold_unique(key, result.id, ttl_s=ttl_s), timeout_s)
    if holder != result.id:
        return AsyncResult(holder, app=app, ignored=prepared.ignores_result, types=prepared.types)
    try:
        app.publish([prepared])
    except BrokerError:
        with suppress(BrokerError):  # then its time frees it
            producer.release_unique([(key, result.id)])
        raise
    return result


def key_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: str | None) -> str:
    """The same for the same call: the task's name with the key that was given, else with its arguments."""
    from hashlib import sha256  # half a megabyte that only who sends unique tasks needs

    what = [name, given] if given is not None else [name, list(args), dict(sorted(kwargs.items()))]
    return sha256(encode_json(what, root="the key")).hexdigest()


def _time_of(app: "SendingApp", name: str, options: SendOptions) -> float:
    own = app.tasks.get(name)
    ttl_s = options.get("unique_for") or (own.options.unique_for_s if own is not None else None)
    if ttl_s is None or not 0 < ttl_s <= UNIQUE_FOR_MAX_S:
        raise ValueError(
            f"unique_for of task {name!r} is {ttl_s!r}: give seconds, up to {UNIQUE_FOR_MAX_S:.0f}, "
            "in the call or in @app.task"
        )
    return ttl_s


_OF_UNIQUENESS = frozenset({"unique_key", "unique_for"})
