"""Spans of the processes of a mixed cluster, as files: one for each process, a JSON line for each span.

Where a process starts beside a folder `spans`, it is instrumented as the documents of its library say: a
worker's children set up their exporters after the fork.
"""

# mypy: disable-error-code="import-not-found, no-redef"
# Each library is there in its own environment only.

import json
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PLACE = Path("spans").resolve()


def wanted() -> bool:
    """Celery 5.5's environment has no OpenTelemetry."""
    return PLACE.is_dir() and find_spec("opentelemetry") is not None


def instrument_workers(app: Any, library: str) -> None:
    if not wanted():
        return
    if library == "umbel":
        from umbel.contrib.otel import instrument

        instrument(app)
        app.signals.worker_process_init.connect(lambda **_: export(library))
    else:
        from celery.signals import worker_process_init

        worker_process_init.connect(lambda **_: instrument_celery(), weak=False)


def instrument_client(library: str) -> None:
    if wanted():
        instrument_celery() if library == "celery" else export(library)


def instrument_celery() -> None:
    from opentelemetry.instrumentation.celery import CeleryInstrumentor

    export("celery")
    CeleryInstrumentor().instrument()


def export(library: str) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Writer(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            with (PLACE / f"{os.getpid()}.jsonl").open("a") as file:
                file.writelines(json.dumps(described(one, library)) + "\n" for one in spans)
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Writer(), schedule_delay_millis=100))
    trace.set_tracer_provider(provider)


def described(span: Any, library: str) -> dict[str, Any]:
    return {
        "name": span.name,
        "library": library,
        "pid": os.getpid(),
        "trace": f"{span.context.trace_id:032x}",
        "span": f"{span.context.span_id:016x}",
        "parent": None if span.parent is None else f"{span.parent.span_id:016x}",
        "attributes": dict(span.attributes),
        "links": [f"{one.context.span_id:016x}" for one in span.links],
    }


def in_one_span(call: Callable[[], Any]) -> list[Any]:
    """The trace that the call was part of, and what it gave."""
    from opentelemetry import trace

    with trace.get_tracer("client").start_as_current_span("request") as span:
        return [f"{span.get_span_context().trace_id:032x}", call()]
