"""Publication: what running tasks send while the broker is unavailable, the keys of unique tasks, and the
events `task-sent`.

A running task gets no error while the broker is unavailable. Its messages are buffered and go out when the
task ends, together with its result and its acknowledgement, in one step where the broker can. Messages that
the broker may have received already go out as redelivered. If the process dies before that, the buffered
messages are lost, but the task was not acknowledged and runs again. `publish_buffer_max` limits the buffer of
one task; beyond it the task gets an error.

An awaited send whose outcome is unknown raises `SendUnknown` in a task too. Buffered messages are not
recognized as a repetition of the first attempt and could run twice, so only the task can decide to send
again.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace

from umbel.app.options import SendOptions, check_options
from umbel.app.request import Request, current_request
from umbel.app.results import AsyncResult
from umbel.app.sending.preparation import Prepared, origin, prepare
from umbel.app.settings import Settings
from umbel.app.waiting import LONGEST_PAUSE_S, Patience, patiently, retried
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
from umbel.outbox import refuse_unique
from umbel.protocol.clock import LamportClock
from umbel.wire.call import read_headers
from umbel.wire.event import LOGGED, EventEncoder, by_type, encode_event
from umbel.wire.message import Outgoing
from umbel.wire.values import encode_json

if TYPE_CHECKING:
    from umbel.app.app import App

log = logging.getLogger("umbel.publishing")

# ---- sends of a running task -----------------------------------------------------------------------


class Publication:
    """One send of a running task, blocking or awaited. Messages that the task has buffered before go out
    first.

    Each step returns whether the messages were sent. False means that they are in the buffer of the task.
    """

    def __init__(self, messages: Sequence[Outgoing], settings: Settings, request: Request) -> None:
        self._new = messages
        self._buffer_max = settings.publish_buffer_max
        self._request = request
        self._buffered = tuple(request.unsent)
        self.messages: Sequence[Outgoing] = [*self._buffered, *messages] if self._buffered else messages
        # A task that has waited once does not wait again with every message.
        self.timeout_s = 0.0 if self._buffered else settings.publish_timeout_s

    def publish(self, producer: Producer) -> bool:
        """Publish with retries."""
        if self.must_wait():
            return False
        began = monotonic()
        try:
            producer.publish(self.messages)
        except BrokerUnavailable as error:
            failed = error
        else:
            return self.succeeded()
        try:
            patience = Patience(self.timeout_s, began=began)
            retried(lambda: producer.publish(self.messages), failed, patience)
        except BrokerUnavailable as error:
            return self.failed(error)
        return self.succeeded()

    def must_wait(self) -> bool:
        """Whether the broker was unavailable a moment ago; if so, the messages are buffered."""
        if monotonic() >= self._request.try_again_at:
            return False
        self._buffer(self._new, None)
        return True

    def succeeded(self) -> bool:
        """Remove the messages that were sent from the buffer of the task."""
        if self._buffered:
            # Other coroutines of the task may have added messages meanwhile, or sent these.
            sent = set(map(id, self._buffered))
            unsent = self._request.unsent
            unsent[:] = [message for message in unsent if id(message) not in sent]
        return True

    def failed(self, error: BrokerUnavailable) -> bool:
        """Buffer the messages until the task ends. Raises an error that waiting cannot mend."""
        if isinstance(error, AccessRefused):
            raise error
        if isinstance(error, SendUnknown):  # the buffered messages still go out when the task ends
            raise SendUnknown(
                [outgoing.message.correlation_id for outgoing in self._new], error.why
            ) from error
        messages, unsent = self._new, self._request.unsent
        if isinstance(error, MayHaveArrived):
            messages = [replace(message, redelivered=True) for message in messages]
            unsent[:] = [replace(message, redelivered=True) for message in unsent]
        self._buffer(messages, error)
        return False

    def _buffer(self, messages: Sequence[Outgoing], error: BrokerUnavailable | None) -> None:
        request, count = self._request, len(self._request.unsent)
        request.try_again_at = monotonic() + LONGEST_PAUSE_S
        if count + len(messages) > self._buffer_max:
            raise BufferFull(
                f"broker unavailable; {request.task}[{request.id}] buffers {count} messages, and "
                f"{len(messages)} more would exceed the limit of {self._buffer_max} ('publish_buffer_max')"
            ) from error
        if not count:
            why = {"task": request.task, "task_id": request.id, "why": str(error)}
            log.warning("broker unavailable; messages sent by the task are buffered until it ends", extra=why)
        request.unsent.extend(messages)


# ---- unique tasks ----------------------------------------------------------------------------------
#
# The broker takes the key of a call in one atomic step, before the message is sent: for the first sender,
# under its task's id, for `unique_for` seconds. Later senders get the first sender's result instead. The
# worker that ends the task releases the key after the message is settled, and so does a purge; a retry or a
# requeue does not. The key expires after its time even if the task still runs, so the time must be longer
# than the task takes.
#
# The cost is one more round trip. If the sender dies between the two steps, or the worker between the end of
# the task and the release, the key stays taken until it expires.

UNIQUE_FOR_MAX_S = 30 * 86_400.0
_UNIQUE_OPTIONS = frozenset({"unique_key", "unique_for"})


class UniqueCall(msgspec.Struct, frozen=True):
    """A call with its key, before it is known whether it will be sent."""

    app: "App"
    key: str
    ttl_s: float
    prepared: Prepared

    def send(self) -> AsyncResult[Any]:
        """Take the key and publish; return the result of the task that holds the key."""
        app, task_id = self.app, self.prepared.task_id
        if app.eager_backend is not None:
            holder = self._eager_holder()
        else:
            producer = app.producer
            self._check(producer.capabilities)
            holder = patiently(
                lambda: producer.hold_unique(self.key, task_id, ttl_s=self.ttl_s),
                app.settings.publish_timeout_s,
            )
        if holder == task_id:
            try:
                app.publish([self.prepared])
            except BrokerError as error:
                if self._must_release(error):
                    with suppress(BrokerError):  # then the key expires
                        app.producer.release_unique([(self.key, task_id)])
                raise
        return self.prepared.result(app, holder)

    async def asend(self, deadline: float) -> AsyncResult[Any]:
        """The same as `send` for async code, before the deadline on the monotonic clock."""
        app, task_id = self.app, self.prepared.task_id
        if app.eager_backend is not None:
            holder = self._eager_holder()
        else:
            client = app.clients.here()
            async with client.producer() as producer:
                self._check(producer.capabilities)
                holder = await client.patiently(
                    lambda: producer.hold_unique(self.key, task_id, ttl_s=self.ttl_s),
                    deadline,
                    "cannot take the key of a unique task",
                )
        if holder == task_id:
            try:
                await app.apublish([self.prepared], deadline)
            except BrokerError as error:
                if self._must_release(error):
                    with suppress(BrokerError):
                        async with app.clients.here().producer() as producer:
                            await producer.release_unique([(self.key, task_id)])
                raise
        return self.prepared.result(app, holder)

    def _eager_holder(self) -> str:
        assert self.app.eager_backend is not None
        return self.app.eager_backend.unique_holder(self.key) or self.prepared.task_id

    def _check(self, capabilities: Capabilities) -> None:
        if not capabilities.unique:
            reason = capabilities.reasons["unique"]
            raise NotSupported(f"task {self.prepared.task!r} cannot be unique: {reason}")

    def _must_release(self, error: BrokerError) -> bool:
        """Whether the key is free again. A message that may have arrived keeps it: the same id may be sent
        again.
        """
        return self.app.eager_backend is None and not isinstance(error, SendUnknown)


def unique_call(
    app: "App", name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
) -> UniqueCall:
    """Prepare a call with its key.

    ValueError: `unique_for` is invalid; OutboxError: an outbox block is open.
    """
    check_options(options)
    if app.eager_backend is None:
        refuse_unique(app, name)
    task = app.tasks.get(name)
    ttl_s = options.get("unique_for") or (None if task is None else task.options.unique_for_s)
    if ttl_s is None or not 0 < ttl_s <= UNIQUE_FOR_MAX_S:
        raise ValueError(
            f"unique_for of task {name!r} is {ttl_s!r}: give seconds, up to {UNIQUE_FOR_MAX_S:.0f}, "
            "in the call or in @app.task"
        )
    key = key_of(name, args, kwargs, options.get("unique_key"))
    others = {option: value for option, value in options.items() if option not in _UNIQUE_OPTIONS}
    keyed = cast(SendOptions, {**others, "unique_token": key})
    return UniqueCall(app, key, ttl_s, prepare(app, name, args, kwargs, keyed, sender=current_request()))


def key_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: str | None) -> str:
    """The key of a call: a hash of the task's name and the given key, or of the arguments without one."""
    from hashlib import sha256  # half a megabyte, needed for unique tasks alone

    what = [name, given] if given is not None else [name, list(args), dict(sorted(kwargs.items()))]
    return sha256(encode_json(what, root="the key")).hexdigest()


# ---- the event task-sent ---------------------------------------------------------------------------
#
# A client takes no part in the cluster's clock, so its stamps order only its own events; receivers give
# `task-sent` a time of theirs (L3). A forked process is another sender.
#
# The event follows the task. If the broker refuses the event, the sender gets no error, because it would send
# the task again: the refusal is logged and shows as a gap in `seq`.

events_log = logging.getLogger("umbel.events")
TASK_SENT = "task-sent"
Batches = Iterable[tuple[Iterable[Outgoing], float]]
"""Messages that were sent, each batch with a time before which no worker could take it."""


class SentEvents:
    """Sends the events `task-sent` of this process, in order, to receivers and the event log."""

    def __init__(self, app: "App") -> None:
        self._app = app
        self._pid = 0
        self._in_order = Lock()  # an app may send from several threads

    def send(self, batches: Batches) -> None:
        """Send an event for each message. Its time is that of the batch: a later one could follow the start
        of the task.
        """
        tasks = [(_fields(outgoing), at) for batch, at in batches for outgoing in batch]
        producer = self._app.producer
        try:
            with self._in_order:
                if self._pid != os.getpid():
                    self._begin()
                events = [self._encoder.tell(TASK_SENT, fields, at=at) for fields, at in tasks]
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

    def _begin(self) -> None:
        self._pid, hostname = os.getpid(), origin()
        incarnation, clock = time_ns() // 1000, LamportClock()
        self._encoder = EventEncoder(
            EventStamper(hostname=hostname, pid=self._pid, incarnation=incarnation, clock=clock)
        )
        self._headers = encode_event({"hostname": hostname})
        self._logged_headers = encode_event({"hostname": hostname, LOGGED: True})


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
