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

import msgspec

from umbel.app.results import AsyncResult
from umbel.app.running.request import current_request
from umbel.app.sending.options import SendOptions, check_options
from umbel.app.sending.patience import patiently
from umbel.app.sending.prepare import Prepared
from umbel.brokers.interface import Capabilities
from umbel.errors import BrokerError, NotSupported
from umbel.outbox.current import refuse_unique
from umbel.wire.values import encode_json

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

UNIQUE_FOR_MAX_S = 30 * 86_400.0


class UniqueCall(msgspec.Struct, frozen=True):
    """A call with its key, before anybody knows whether it will be sent."""

    app: "SendingApp"
    key: str
    ttl_s: float
    prepared: Prepared

    @property
    def result(self) -> AsyncResult[Any]:
        return self.result_of(self.prepared.task_id)

    def result_of(self, holder: str) -> AsyncResult[Any]:
        prepared = self.prepared
        return AsyncResult(holder, app=self.app, ignored=prepared.ignores_result, types=prepared.types)

    def check(self, capabilities: Capabilities) -> None:
        if not capabilities.unique:
            raise NotSupported(
                f"task {self.prepared.task!r} cannot be unique: {capabilities.reasons['unique']}"
            )


def unique_call(
    app: "SendingApp", name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
) -> UniqueCall:
    check_options(options)
    if app.eager_backend is None:
        refuse_unique(app, name)
    ttl_s = _time_of(app, name, options)
    key = key_of(name, args, kwargs, options.get("unique_key"))
    stated = {option: value for option, value in options.items() if option not in _OF_UNIQUENESS}
    prepared = app.prepare(
        name, args, kwargs, cast(SendOptions, {**stated, "unique_token": key}), sender=current_request()
    )
    return UniqueCall(app, key, ttl_s, prepared)


def send_unique(
    app: "SendingApp", name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
) -> AsyncResult[Any]:
    """Send it, unless it waits or runs already; the result of the one that does."""
    return send_call(app, unique_call(app, name, args, kwargs, options))


def send_call(app: "SendingApp", call: UniqueCall) -> AsyncResult[Any]:
    if (in_place := app.eager_backend) is not None:
        if (first := in_place.unique_holder(call.key)) is not None:
            return call.result_of(first)
        app.publish([call.prepared])
        return call.result
    producer, timeout_s, task_id = app.producer, app.settings.publish_timeout_s, call.prepared.task_id
    call.check(producer.capabilities)
    holder = patiently(lambda: producer.hold_unique(call.key, task_id, ttl_s=call.ttl_s), timeout_s)
    if holder != task_id:
        return call.result_of(holder)
    try:
        app.publish([call.prepared])
    except BrokerError:
        with suppress(BrokerError):  # then its time frees it
            producer.release_unique([(call.key, task_id)])
        raise
    return call.result


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
