"""Messages of a Celery project, and what an ending task sends and stores.

Messages are converted both ways: from what Celery hands to its producer to Umbel's, and from Umbel's to what
Celery's tracer takes.

By default Celery sends the next step of a chain and stores the result itself, each over a separate
connection, and the worker acknowledges later: a crash in between repeats or splits what follows. Here a
Capture collects results and follow-up messages while a task ends, and the worker writes them together with
the acknowledgement, in one step where the broker can. What the task's own code sends with `delay()` is sent
at once, as in Celery.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Self

import msgspec
from kombu import Producer
from kombu.compression import decompress
from kombu.serialization import loads

from umbel.app.sending.signing import signed
from umbel.celery.configuration import app_for, settings_of
from umbel.clock import cluster_now
from umbel.protocol.delivery.trust import UNSIGNED
from umbel.wire.call import read_header_map
from umbel.wire.message import (
    JSON_CONTENT,
    Message,
    Outgoing,
    StoredResult,
    delivery_info_of,
    encode_others,
    parse_instant,
    properties_of,
)
from umbel.wire.signing import marked_unsigned, signer_of

# ---- messages --------------------------------------------------------------------------------------
#
# From what Celery hands to its producer to ours, and from ours to what Celery's tracer takes.

KOMBUS_MARK = b"__type__"  # in a body with values that JSON has no form for


def outgoing_from(producer: Any, body: Any, headers: dict[str, Any], options: dict[str, Any]) -> Outgoing:
    """A message from the arguments of `kombu.Producer.publish`. Its values must be encodable as JSON, as
    kombu's are.
    """
    data, content_type, content_encoding = producer._prepare(
        body, options.get("serializer"), compression=options.get("compression"), headers=headers
    )
    message = Message(
        msgspec.json.encode(headers, enc_hook=str),
        data.encode() if isinstance(data, str) else bytes(data),
        content_type,
        content_encoding,
        options.get("priority") or 0,
        options.get("correlation_id") or "",
        options.get("reply_to") or "",
        _milliseconds(options.get("expiration")),
        encode_others({name: value for name, value in options.items() if name not in _NOT_PROPERTIES}),
    )
    eta = headers.get("eta")
    due = parse_instant(eta) if eta else 0.0
    exchange, routing_key = options.get("exchange"), options.get("routing_key") or ""
    name = getattr(exchange, "name", exchange) or ""
    if not name:
        return Outgoing(routing_key, message, due)
    return Outgoing("", message, due, exchange=name, routing_key=routing_key)


def signed_for(app: Any, outgoing: Outgoing, *, signs_for: str | None, cause: str) -> Outgoing:
    """A follow-up of a Celery task, signed like the task's own message. `signs_for`: as for a `Job`."""
    keyring = settings_of(app).keyring
    if keyring is None or signs_for is None:
        return outgoing
    if signs_for == UNSIGNED:
        return marked_unsigned(outgoing, cause)
    return signer_of(keyring, signs_for).sign_task(outgoing, cluster_now())


def signed_here(app: Any, outgoing: Outgoing) -> Outgoing:
    """A message that a worker sends for the project by itself, signed if there are keys."""
    ours = app_for(app)
    keyring = ours.settings.keyring
    return outgoing if keyring is None else signed(ours, keyring, outgoing)


# Arguments of `publish` about sending, not about the message.
_NOT_PROPERTIES = frozenset(
    ("exchange", "routing_key", "serializer", "compression", "retry", "retry_policy", "declare", "timeout",
     "confirm_timeout", "mandatory", "immediate")
)  # fmt: skip


def body_of(message: Message, accept: Any, compression: str | None = None) -> Any:
    """The decoded body. Raises what kombu raises for content that is not accepted or cannot be read."""
    if not compression and message.content_type == JSON_CONTENT and JSON_CONTENT in accept:
        # Most are plain JSON, which msgspec reads in a sixth of kombu's time; not with kombu's type hints.
        try:
            if KOMBUS_MARK not in message.body:
                return msgspec.json.decode(message.body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass  # kombu raises the right error below
    body = decompress(message.body, compression) if compression else message.body
    return loads(body, message.content_type, message.content_encoding, accept=accept)


def request_of(
    message: Message, accept: Any, *, queue: str, hostname: str, redelivered: bool = False
) -> dict[str, Any]:
    """What Celery's worker makes of a message for `Task.request`, arguments and embedded signatures included.

    Raises what kombu raises for content that is not accepted, and any error for a message that is not a task.
    """
    request = read_header_map(message.headers)
    args, kwargs, embed = body_of(message, accept, request.get("compression"))
    request["properties"] = properties_of(message)
    request["reply_to"] = message.reply_to
    request["correlation_id"] = message.correlation_id
    request["hostname"] = hostname
    request["is_eager"] = False
    request["delivery_info"] = delivery_info_of(message, queue, redelivered=redelivered)
    request.update(embed or {}, args=args, kwargs=kwargs)
    return request


def keeps_errors(app: Any, task: Any, context: Any) -> bool:
    """Whether a failure of this call is stored; `task` is None for an unknown task."""
    ignored = context.ignore_result
    if ignored is None:
        ignored = task.ignore_result if task is not None else app.conf.task_ignore_result
    return not ignored or bool(task is not None and task.store_errors_even_if_ignored)


def _milliseconds(expiration_s: float | None) -> int | None:
    return None if expiration_s is None else max(0, int(expiration_s * 1000))


# ---- capture ---------------------------------------------------------------------------------------
#
# What Celery's tracer says when a task ends becomes part of its outcome.
#
# Left alone, Celery sends the next step of a chain and stores the result by itself, each over a separate
# connection, and the worker acknowledges later: a crash in between repeats or splits what follows. Here
# results and follow-up messages are collected while a task ends, and the worker writes them together with
# the acknowledgement, in one step where the broker can.
#
# What the task's own code sends with `delay()` is sent at once, as ever.


class Capture:
    """What one ending task has to store and to send: collected inside `with Capture(sign) as capture`.

    `sign` gives a message its signature, if there are keys.
    """

    __slots__ = ("_depth", "_token", "by_task", "chords", "follow_ups", "keeps_results", "last_sent", "sign")

    def __init__(self, sign: Callable[[Outgoing], Outgoing]) -> None:
        self.sign = sign
        self.by_task: dict[str, StoredResult] = {}
        self.follow_ups: list[Outgoing] = []
        self.last_sent: list[Outgoing] = []  # in the last call of `sending`
        self.chords: list[str] = []  # to be recorded as done once their bodies are sent
        self.keeps_results = True
        self._depth = 0

    def __enter__(self) -> Self:
        self._token = CAPTURE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        CAPTURE.reset(self._token)

    @property
    def after(self) -> bytes:
        """The ids of the ended chords, for `after_settle`."""
        return "\n".join(self.chords).encode()

    @property
    def is_sending(self) -> bool:
        """Whether a message that is sent now belongs to the task's end."""
        return self._depth > 0

    @contextmanager
    def sending(self) -> Iterator[None]:
        """What is sent inside this block is a part of the task's end."""
        before = len(self.follow_ups)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.last_sent = self.follow_ups[before:]

    @contextmanager
    def storing_at_once(self) -> Iterator[None]:
        """Results are stored at once inside this block, because other workers will look for them."""
        before, self.keeps_results = self.keeps_results, False
        try:
            yield
        finally:
            self.keeps_results = before

    def take_last_sent(self) -> list[Outgoing]:
        """Take back what `sending` collected last, because another step sends it."""
        taken, self.last_sent = self.last_sent, []
        if taken:
            del self.follow_ups[-len(taken) :]
        return taken


CAPTURE: ContextVar[Capture | None] = ContextVar("umbel.celery.messages", default=None)


def install(app: Any) -> None:
    """Make the sends and retries of this process capturable. Call it once per process, before any task
    runs.
    """
    from celery.app.task import Task

    acquire = app.producer_or_acquire
    app.amqp._retry_publish = _retry_publish
    app.producer_or_acquire = lambda producer=None: _recorder(app) or acquire(producer)
    for name in ("retry", "on_replace"):
        method = getattr(Task, name)
        if not hasattr(method, "umbel_captured"):
            setattr(Task, name, _captured(method))


def captured_call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the method; what it sends belongs to the end of the task."""
    capture = CAPTURE.get()
    if capture is None:
        return method(*args, **kwargs)
    with capture.sending():
        return method(*args, **kwargs)


def _retry_publish(publish: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces Celery's retries of a publish: nothing has to be retried, because nothing is sent yet."""
    return captured_call(publish, *args, **kwargs)


def _captured(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return captured_call(method, *args, **kwargs)

    call.umbel_captured = True  # type: ignore[attr-defined]
    return call


class _Connection:
    """The part of a producer's connection that Celery uses while it sends."""

    @contextmanager
    def _reraise_as_library_errors(self) -> Iterator[None]:
        yield


class _Recorder:
    """A producer that collects task messages for the outcome, and sends everything else."""

    connection = _Connection()
    _preparing = Producer(None)

    def __init__(self, app: Any, capture: Capture) -> None:
        self._app = app
        self._capture = capture

    def __enter__(self) -> "_Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def publish(self, body: Any, *, headers: Any = None, **options: Any) -> None:
        if not headers or "task" not in headers:  # an event
            with self._app.producer_pool.acquire(block=True) as producer:
                producer.publish(body, headers=headers, **options)
            return
        outgoing = outgoing_from(self._preparing, body, headers, options)
        self._capture.follow_ups.append(self._capture.sign(outgoing))


def _recorder(app: Any) -> _Recorder | None:
    capture = CAPTURE.get()
    return _Recorder(app, capture) if capture is not None and capture.is_sending else None
