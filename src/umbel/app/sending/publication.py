"""Publication: a prepared batch on its way to the broker, what comes before it and what after it.

Before: signals (`before_task_publish`), records in the result backend (saved groups, started chords), and the
key of a unique task. After: the event `task-sent`.

A running task gets no error while the broker is unavailable: its unsent messages are buffered and go out when
the task ends, with its result and its acknowledgement, in one step where the broker can. Messages that the
broker may have received already go out as redelivered. If the process dies before that, the buffered messages
are lost with it; the task was not acknowledged and runs again. `publish_buffer_max` limits what one task
buffers; past it the task gets an error.

An awaited send whose outcome is unknown is an error in a task too (`SendUnknown`): messages that go out when
the task ends are not recognized as a repetition of the first attempt, and could run twice. Only the task can
repeat the send.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Lock
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from msgspec.structs import replace

from umbel.app.options import SendOptions, TaskOptions, check_options
from umbel.app.request import Request, current_request
from umbel.app.results import AsyncResult, StoringApp
from umbel.app.sending.preparation import Prepared, Sender, new_id, queue_of
from umbel.app.settings import Settings
from umbel.app.signals import Signals
from umbel.app.waiting import LONGEST_PAUSE_S, Patience, patiently, retried
from umbel.backends.interface import Backend
from umbel.brokers.interface import Broadcast, Capabilities, Producer
from umbel.errors import (
    AccessRefused,
    BrokerError,
    BrokerUnavailable,
    BufferFull,
    MayHaveArrived,
    NotSupported,
    SendUnknown,
)
from umbel.events.stamp import EVENT_EXCHANGE, EVENT_TTL_S, EventStamper
from umbel.outbox.current import refuse_unique
from umbel.protocol.clock import LamportClock
from umbel.wire.call import read_headers
from umbel.wire.event import LOGGED, EventEncoder, by_type, encode_event
from umbel.wire.message import Outgoing
from umbel.wire.values import encode_json

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp


# ---- publication -----------------------------------------------------------------------------------
#
# One batch of messages on its way to the broker, and what an outage of the broker does to it.
#
# A running task gets no error while the broker is unavailable: its unsent messages are buffered and go out
# when the task ends, with its result and its acknowledgement, in one step where the broker can. Messages
# that the broker may have received already go out as redelivered. If the process dies before that, the
# buffered messages are lost with it; the task was not acknowledged and runs again. `publish_buffer_max`
# limits what one task buffers; past it the task gets an error.
#
# An awaited send whose outcome is unknown is an error in a task too (`SendUnknown`): messages that go out
# when the task ends are not recognized as a repetition of the first attempt, and could run twice. Only the
# task can repeat the send.

log = logging.getLogger("umbel.publishing")


def publish(
    producer: Producer, batch: Sequence[Outgoing], settings: Settings, request: Request | None
) -> bool:
    """Publish a batch, with retries. Returns False if it is buffered until the running task ends."""
    # Outside of tasks nothing is buffered, and most sends succeed at once.
    publication = None if request is None else Publication(batch, settings, request)
    if publication is not None and publication.must_wait():
        return False
    began = monotonic()
    try:
        producer.publish(batch if publication is None else publication.messages)
    except BrokerUnavailable as error:
        failed = error
    else:
        return publication is None or publication.succeeded()
    publication = publication or Publication(batch, settings, request)
    try:
        patience = Patience(publication.timeout_s, began=began)
        retried(lambda: producer.publish(publication.messages), failed, patience)
    except BrokerUnavailable as error:
        return publication.failed(error)
    return publication.succeeded()


class Publication:
    """The decisions of `publish`, for blocking and async senders: which messages go out within which time,
    and what an error means. Each step returns whether the batch was sent.
    """

    def __init__(self, batch: Sequence[Outgoing], settings: Settings, request: Request | None) -> None:
        self._batch = batch
        self._limit = settings.publish_buffer_max
        self._task = None if request is None or request.called_directly else request
        # Buffered messages go first. A task that has waited once does not wait again with every message.
        self._waiting = () if self._task is None else tuple(self._task.unsent)
        self.messages: Sequence[Outgoing] = [*self._waiting, *batch] if self._waiting else batch
        self.timeout_s = 0.0 if self._waiting else settings.publish_timeout_s

    def must_wait(self) -> bool:
        """Whether the broker was unavailable a moment ago; the task's messages are buffered then."""
        if self._task is None or monotonic() >= self._task.try_again_at:
            return False
        _keep(self._task, self._batch, self._limit, None)
        return True

    def succeeded(self) -> bool:
        """Remove the messages that were sent from the task's buffer."""
        if self._task is not None and self._waiting:
            # Other coroutines of the task may have added messages meanwhile, or sent these.
            sent = set(map(id, self._waiting))
            self._task.unsent[:] = [message for message in self._task.unsent if id(message) not in sent]
        return True

    def failed(self, error: BrokerUnavailable) -> bool:
        """Buffer the batch until the task ends; outside of tasks raise the error."""
        if self._task is None or isinstance(error, AccessRefused):
            raise error
        if isinstance(error, SendUnknown):  # buffered messages were promised, and go out when the task ends
            raise SendUnknown(
                [outgoing.message.correlation_id for outgoing in self._batch], error.why
            ) from error
        batch = self._batch
        if isinstance(error, MayHaveArrived):
            batch = [replace(message, redelivered=True) for message in batch]
            self._task.unsent[:] = [replace(message, redelivered=True) for message in self._task.unsent]
        _keep(self._task, batch, self._limit, error)
        return False


def _keep(request: Request, batch: Sequence[Outgoing], limit: int, error: BrokerUnavailable | None) -> None:
    request.try_again_at = monotonic() + LONGEST_PAUSE_S
    if len(request.unsent) + len(batch) > limit:
        raise BufferFull(
            f"broker unavailable; {request.task}[{request.id}] buffers {len(request.unsent)} messages, and "
            f"{len(batch)} more would exceed the limit of {limit} ('publish_buffer_max')"
        ) from error
    if not request.unsent:
        why = {"task": request.task, "task_id": request.id, "why": str(error)}
        log.warning("broker unavailable; messages sent by the task are buffered until it ends", extra=why)
    request.unsent.extend(batch)


# ---- announcing ------------------------------------------------------------------------------------
#
# Receivers of `before_task_publish` see a call before it is sent, and may add headers.
#
# This comes before the message is encoded and signed, so that added headers travel as the caller's own do.

_NO_TASK = TaskOptions()


class SignallingApp(Protocol):
    """An app whose signals users' code may be connected to."""

    @property
    def signals(self) -> Signals:
        """The signals that are sent before a publish."""


class AnnouncingApp(Sender, SignallingApp, Protocol):
    """An app that makes messages and sends signals about them."""


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
    """Send `before_task_publish`; return the call's options with the headers that receivers added, and its
    id.
    """
    check_options(options)
    task_id = options.get("task_id") or task_id or new_id()
    queue = options.get("queue") or options.get("routing_key") or queue_of(app, task, defaults or _NO_TASK)
    headers = dict(options.get("headers") or {})
    app.signals.before_task_publish.send(
        task=task, task_id=task_id, args=args, kwargs=kwargs, queue=queue, headers=headers
    )
    return ({**options, "headers": headers} if headers else options), task_id


def announced_parts(app: SignallingApp, group_id: str, parts: list[Prepared]) -> list[Prepared]:
    """Send `before_chord_publish` with the messages of a chord's header; return the messages."""
    if app.signals.before_chord_publish.receivers:
        app.signals.before_chord_publish.send(group_id=group_id, parts=parts)
    return parts


# ---- arranging -------------------------------------------------------------------------------------
#
# What the result backend must know before the messages of a canvas are sent.
#
# A chord is announced to the backend while its messages are made. Blocking code does that on the spot;
# async code collects the steps and has them done off the loop, before it publishes.

Step = Callable[[Backend], None]
_later: ContextVar[list[Step] | None] = ContextVar("umbel_arranged_later", default=None)


def arrange(app: StoringApp, step: Step) -> None:
    """Run this step on the result backend now, or collect it for the block of `arranged_later`."""
    later = _later.get()
    if later is None:
        step(app.backend)
    else:
        later.append(step)


@contextmanager
def arranged_later() -> Iterator[list[Step]]:
    """Collect the backend steps of what is prepared in this block, instead of running them."""
    steps: list[Step] = []
    token = _later.set(steps)
    try:
        yield steps
    finally:
        _later.reset(token)


# ---- unique tasks ----------------------------------------------------------------------------------
#
# A call that waits or runs already is not sent a second time.
#
# A key is taken in the broker, in one atomic step, before the message is sent: by the first sender, under
# its task's id, for `unique_for` seconds. Later senders get the first one's result instead. The worker that
# ends the task releases the key, after the message is settled, and so does a purge; a retry or a return to
# the queue does not. In any case the key expires after its time, although the task may still run then:
# choose a time that is longer than the task takes.
#
# The cost: one more round trip to send. The limits: a sender that dies between the two steps leaves the key
# taken until it expires, and so does a worker that dies between the end of a task and the release of the
# key.

UNIQUE_FOR_MAX_S = 30 * 86_400.0


class UniqueCall(msgspec.Struct, frozen=True):
    """A call with its key, before it is known whether it will be sent."""

    app: "SendingApp"
    key: str
    ttl_s: float
    prepared: Prepared

    @property
    def result(self) -> AsyncResult[Any]:
        """The result of this call, if this call is the one that runs."""
        return self.result_of(self.prepared.task_id)

    def result_of(self, holder: str) -> AsyncResult[Any]:
        """The result under the id of the task that holds the key."""
        prepared = self.prepared
        return AsyncResult(holder, app=self.app, ignored=prepared.ignores_result, types=prepared.types)

    def check(self, capabilities: Capabilities) -> None:
        """Raise NotSupported for a broker that cannot hold keys."""
        if not capabilities.unique:
            raise NotSupported(
                f"task {self.prepared.task!r} cannot be unique: {capabilities.reasons['unique']}"
            )


def unique_call(
    app: "SendingApp", name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
) -> UniqueCall:
    """Prepare a call with its key; ValueError for an invalid `unique_for`, OutboxError in an outbox block."""
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
    """Send the call, unless its key is held; return the result of the task that holds the key."""
    return send_call(app, unique_call(app, name, args, kwargs, options))


def send_call(app: "SendingApp", call: UniqueCall) -> AsyncResult[Any]:
    """Take the key, then publish; release the key if the publish fails."""
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
        with suppress(BrokerError):  # then the key expires
            producer.release_unique([(call.key, task_id)])
        raise
    return call.result


def key_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: str | None) -> str:
    """The key of a call: a hash of the task's name and the given key, or its arguments without one."""
    from hashlib import sha256  # half a megabyte, needed for unique tasks alone

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


# ---- sent events -----------------------------------------------------------------------------------
#
# Sends an event for each task that is sent, if `task_send_sent_event` is set.
#
# A client takes no part in the cluster's clock, so its stamps order only its own events; receivers give
# `task-sent` a time of theirs (L3). A process forked from this one is another sender.
#
# The task is sent already by then. So a broker that refuses the event is no error for the sender, which
# would send the task again: it is logged and shows as a gap in `seq`.

events_log = logging.getLogger("umbel.events")
TASK_SENT = "task-sent"


class SentEvents:
    """Sends the events `task-sent` of this process, in order, to receivers and the event log."""

    def __init__(self, hostname: str) -> None:
        self.pid = os.getpid()
        clock = LamportClock()
        self._teller = EventEncoder(
            EventStamper(hostname=hostname, pid=self.pid, incarnation=time_ns() // 1000, clock=clock)
        )
        self._headers = encode_event({"hostname": hostname})
        self._logged_headers = encode_event({"hostname": hostname, LOGGED: True})
        self._in_order = Lock()  # an app may send from several threads

    def tell(self, producer: Producer, sent: Iterable[tuple[Iterable[Outgoing], float]]) -> None:
        """Send one event for each message of the batches. Each batch comes with a time before which no worker
        could take it: otherwise tasks would seem to start before they were sent.
        """
        tasks = [(_fields(outgoing), at) for batch, at in sent for outgoing in batch]
        try:
            with self._in_order:
                events = [self._teller.tell(TASK_SENT, outgoing, at=at) for outgoing, at in tasks]
                entries, counts = by_type(events)
                logged = producer.log_events(entries, counts=counts)
                headers = self._logged_headers if logged else self._headers
                messages = [Broadcast(EVENT_EXCHANGE, key, body, headers) for key, body in events]
                producer.broadcast(messages, ttl_s=EVENT_TTL_S)
        except BrokerError as error:
            events_log.warning(
                "tasks sent, but their task-sent events could not be sent",
                extra={"count": len(tasks), "why": str(error)},
            )


def _fields(outgoing: Outgoing) -> dict[str, Any]:
    headers = read_headers(outgoing.message)
    return {
        "uuid": headers.id,
        "name": headers.shadow or headers.task,
        "args": headers.argsrepr,
        "kwargs": headers.kwargsrepr,
        "root_id": headers.root_id,
        "parent_id": headers.parent_id,
        "retries": headers.retries,
        "eta": headers.eta,
        "expires": headers.expires,
        "queue": outgoing.queue,
        "exchange": "",
        "routing_key": outgoing.queue,
    }
