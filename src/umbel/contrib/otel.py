"""OpenTelemetry: spans for what an app sends and runs, in one trace across processes and libraries.

    from umbel.contrib.otel import instrument

    instrument(app)

A send makes a span of kind producer, `apply_async/NAME`, and writes its context into the message's headers
(`traceparent`, `tracestate`, or the fields of the configured propagator). The run of the message is a span of
kind consumer, `run/NAME`, below it. Names, headers and the main attributes are those of OpenTelemetry's
instrumentation of Celery, so that traces continue through clusters with both kinds of workers.

Handlers of the app's signals make the spans: without `instrument` nothing is imported, and tasks have no
extra cost. The producer's span covers the making of the message only, because messages that a task sends at
its end are published by another process. The gap between the span of the send and that of the run is the time
on the way and in the queue. All attempts of a task are below the span that sent it. A run whose process is
killed has no span, because nothing can export it.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from umbel.app.app import App
from umbel.app.request import Request, current_request
from umbel.app.sending.preparation import Prepared, arrange
from umbel.errors import BrokerError, ConfigurationError, WireError
from umbel.pools.guard import Raised, call_guarded
from umbel.version import VERSION
from umbel.wire.call import read_header_map
from umbel.wire.show import cut
from umbel.wire.values import decode_json, encode_json

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.propagate import extract, inject
    from opentelemetry.propagators.textmap import Getter
except ImportError as missing:
    raise ConfigurationError("traces need OpenTelemetry: pip install 'umbel[otel]'") from missing

LINKS_MAX = 128  # OpenTelemetry's default limit for a span
FLUSH_MS = 3000
TEXT_MAX_CHARS = 8 * 1024
PARENT = "traceparent"


def instrument(app: App, *, tracer_provider: trace.TracerProvider | None = None) -> None:
    """Make spans for what `app` sends and runs; further calls do nothing.

    Without `tracer_provider` the global one is used when the span is made: a child may set one in
    `worker_process_init`.
    """
    if _spans_of(app):
        return
    spans = Spans(app, tracer_provider)
    signals = app.signals
    signals.before_task_publish.connect(spans.sending)
    signals.before_chord_publish.connect(spans.sending_chord)
    signals.task_prerun.connect(spans.begin)
    signals.task_failure.connect(spans.failed)
    signals.task_retry.connect(spans.retried)
    signals.task_postrun.connect(spans.end)
    signals.worker_process_shutdown.connect(spans.flush)
    signals.worker_shutdown.connect(spans.flush)


def uninstrument(app: App) -> None:
    """Make no more spans for this app."""
    for signal, receiver in _spans_of(app):
        signal.disconnect(receiver)


def _spans_of(app: App) -> list[tuple[Any, Any]]:
    return [
        (signal, receiver)
        for signal in vars(app.signals).values()
        for receiver in signal.receivers
        if isinstance(getattr(receiver, "__self__", None), Spans)
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    span: trace.Span
    before: Context
    around: "_Run | None"  # of the task that called this one in eager mode


_RUN: ContextVar[_Run | None] = ContextVar("umbel_otel_run", default=None)


class Spans:
    """The signal handlers that begin and end spans."""

    def __init__(self, app: App, provider: trace.TracerProvider | None) -> None:
        self._app = app
        self._provider = provider
        self._tracer = trace.get_tracer("umbel", VERSION, provider)

    # -- sending ---------------------------------------------------------------------------------

    def sending(self, task: str, task_id: str, queue: str, headers: dict[str, Any], **_: Any) -> None:
        """Make the span of a send, and write its context into the headers."""
        request = current_request()
        if request is not None and request.id == task_id and PARENT in headers:
            return  # a retry, which keeps the context of the first attempt
        about = {"celery.action": "apply_async", "messaging.operation.type": "create"}
        span = self._tracer.start_span(
            f"apply_async/{task}",
            kind=trace.SpanKind.PRODUCER,
            links=self._parts(request, task_id),
            attributes=_attributes(task, task_id, queue, request) | about,
        )
        inject(headers, trace.set_span_in_context(span))
        span.end()

    def sending_chord(self, group_id: str, parts: Sequence[Prepared], **_: Any) -> None:
        """Store the contexts of the chord's parts, for the task that sends the body."""
        parents = [read_header_map(item.outgoing.message.headers).get(PARENT) for item in parts[:LINKS_MAX]]
        if found := [item for item in parents if item]:
            arrange(self._app, lambda backend: backend.save_group(_key(group_id), encode_json(found)))

    def _parts(self, request: Request | None, task_id: str) -> list[trace.Link]:
        """Links to the parts of the chord, if this call is the body of a chord."""
        if request is None or request.chord is None or not request.group:
            return []
        if (request.chord.get("options") or {}).get("task_id") != task_id:
            return []
        try:
            stored = self._app.backend.read_group(_key(request.group))
            self._app.backend.forget_group(_key(request.group))
        except BrokerError:  # the body is sent without links
            return []
        return [] if stored is None else _links(stored)

    # -- running ---------------------------------------------------------------------------------

    def begin(self, task: Any, task_id: str, **_: Any) -> None:
        """Begin the span of a run, below the span in the message's headers."""
        request = current_request()
        assert request is not None, "a task runs with its request in place"
        parent = extract(request.headers, context=Context(), getter=_TEXTS)
        queue = request.delivery_info.get("routing_key", "")
        about = {"celery.action": "run", "messaging.operation.type": "process"}
        span = self._tracer.start_span(
            f"run/{task.name}",
            context=parent,
            kind=trace.SpanKind.CONSUMER,
            attributes=_attributes(task.name, task_id, queue, request) | about | _of_run(request),
        )
        _RUN.set(_Run(span, contexts.get_current(), _RUN.get() if request.is_eager else None))
        contexts.attach(trace.set_span_in_context(span, parent))

    def failed(self, task: Any, error: BaseException, traceback: str, **_: Any) -> None:
        """Record the exception, with sensitive arguments replaced in its texts."""
        run = _RUN.get()
        if run is None or isinstance(error, task.options.throws):
            return
        attributes = {"exception.type": type(error).__qualname__, "exception.message": _text(error)}
        run.span.add_event("exception", {**attributes, "exception.stacktrace": traceback})
        run.span.set_status(trace.Status(trace.StatusCode.ERROR, _text(error)))

    def retried(self, error: BaseException, **_: Any) -> None:
        """Record why the task is retried."""
        if (run := _RUN.get()) is not None:
            run.span.set_attribute("celery.retry.reason", _text(error))

    def end(self, state: str, **_: Any) -> None:
        """End the span of the run and restore the context from before."""
        run = _RUN.get()
        if run is None:
            return
        run.span.set_attribute("celery.state", state.upper())
        run.span.end()
        _RUN.set(run.around)
        # Not with a token: an awaited task may end in another thread, where the token of `begin` is invalid.
        contexts.attach(run.before)

    def flush(self, **_: Any) -> None:
        """Export the buffered spans before the process ends."""
        provider: Any = self._provider or trace.get_tracer_provider()
        if hasattr(provider, "force_flush"):
            provider.force_flush(FLUSH_MS)


def _attributes(task: str, task_id: str, queue: str, request: Request | None) -> dict[str, Any]:
    about: dict[str, Any] = {
        "celery.task_name": task,
        "messaging.system": "umbel",
        "messaging.message.id": task_id,
        "messaging.destination.name": queue,
    }
    if request is not None and request.hostname:
        about |= {"umbel.node": request.hostname, "umbel.clock": request.clock}
    return about


def _of_run(request: Request) -> dict[str, Any]:
    return {
        "celery.hostname": request.hostname,
        "celery.retries": request.retries,
        "umbel.root_id": request.root_id or request.id,
        "umbel.redelivered": bool(request.delivery_info.get("redelivered")),
    }


def _text(error: BaseException) -> str:
    shown, request = call_guarded(str, error), current_request()
    text = f"<{type(error).__name__}>" if isinstance(shown, Raised) else shown.value
    if request is not None and request.secrets is not None:
        text = request.secrets.strike(text)
    return cut(text, TEXT_MAX_CHARS)


def _key(group_id: str) -> str:
    """The key of the stored contexts. If a Celery worker ends the last part, it stays until results
    expire.
    """
    return f"traces-{group_id}"


def _links(stored: bytes) -> list[trace.Link]:
    try:
        found = decode_json(stored)
    except WireError:  # not written by Umbel
        return []
    texts = [item for item in found if isinstance(item, str)] if isinstance(found, list) else []
    parents = (extract({PARENT: item}, context=Context()) for item in texts[:LINKS_MAX])
    spans = [trace.get_current_span(item).get_span_context() for item in parents]
    return [trace.Link(item) for item in spans if item.is_valid]


class _Texts(Getter[Mapping[str, Any]]):
    """Reads headers of any sender; values that are not texts are ignored."""

    def get(self, carrier: Mapping[str, Any], key: str) -> list[str] | None:
        value = carrier.get(key)
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Mapping[str, Any]) -> list[str]:
        return [key for key, value in carrier.items() if isinstance(value, str)]


_TEXTS = _Texts()
