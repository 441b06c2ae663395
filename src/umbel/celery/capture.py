"""Capture: what Celery's tracer says when a task ends becomes part of its outcome.

Left alone, Celery sends the next step of a chain and stores the result by itself, each over a
connection of its own, and the worker acknowledges later: a crash in between repeats or splits what
follows. Here results and follow-up messages are collected while a task ends, and the worker writes them
together with the acknowledgement, in one step where the broker can.

What the task's own code sends with `delay()` is sent at once, as ever.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Self

from kombu import Producer

from umbel.celery.messages import outgoing_from
from umbel.wire.message import Outgoing, StoredResult


class Capture:
    """What one ending task has to store and to send: collected inside `with Capture() as capture`."""

    __slots__ = ("_depth", "_token", "by_task", "chords", "follow_ups", "keeps_results", "last_sent")

    def __init__(self) -> None:
        self.by_task: dict[str, StoredResult] = {}
        self.follow_ups: list[Outgoing] = []
        self.last_sent: list[Outgoing] = []  # in the last call of `sending`
        self.chords: list[str] = []  # to be marked as done once their bodies are sent
        self.keeps_results = True
        self._depth = 0

    def __enter__(self) -> Self:
        self._token = CAPTURE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        CAPTURE.reset(self._token)

    @property
    def after(self) -> bytes:
        """For `after_settle`."""
        return "\n".join(self.chords).encode()

    @property
    def is_sending(self) -> bool:
        return self._depth > 0

    @contextmanager
    def sending(self) -> Iterator[None]:
        """What is sent inside is a part of the task's end."""
        before = len(self.follow_ups)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.last_sent = self.follow_ups[before:]

    @contextmanager
    def storing_at_once(self) -> Iterator[None]:
        """Results are stored now, because others are told to look for them."""
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


CAPTURE: ContextVar[Capture | None] = ContextVar("umbel.celery.capture", default=None)


def install(app: Any) -> None:
    """Let this process's sends and retries be captured. Once per process, before any task runs."""
    from celery.app.task import Task

    acquire = app.producer_or_acquire
    app.amqp._retry_publish = _retry_publish
    app.producer_or_acquire = lambda producer=None: _recorder(app) or acquire(producer)
    for name in ("retry", "on_replace"):
        method = getattr(Task, name)
        if not hasattr(method, "umbel_captured"):
            setattr(Task, name, _captured(method))


def captured_call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it; what it sends belongs to the end of the task."""
    capture = CAPTURE.get()
    if capture is None:
        return method(*args, **kwargs)
    with capture.sending():
        return method(*args, **kwargs)


def _retry_publish(publish: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of Celery's: nothing has to be retried, because nothing is sent yet."""
    return captured_call(publish, *args, **kwargs)


def _captured(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return captured_call(method, *args, **kwargs)

    call.umbel_captured = True  # type: ignore[attr-defined]
    return call


class _Connection:
    """What Celery asks of a producer's connection while it sends."""

    @contextmanager
    def _reraise_as_library_errors(self) -> Iterator[None]:
        yield


class _Recorder:
    """A producer that keeps task messages for the outcome, and sends everything else."""

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
        self._capture.follow_ups.append(outgoing_from(self._preparing, body, headers, options))


def _recorder(app: Any) -> _Recorder | None:
    capture = CAPTURE.get()
    return _Recorder(app, capture) if capture is not None and capture.is_sending else None
