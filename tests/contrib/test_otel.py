import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from umbel import App, Task, chain, chord
from umbel.app.running.async_tracer import AsyncTracer
from umbel.contrib.otel import instrument, uninstrument
from umbel.pools.interface import Job
from umbel.wire.call import read_headers


@pytest.fixture
def spans(app: App) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(app, tracer_provider=provider)
    yield exporter
    provider.shutdown()


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [one for one in spans.get_finished_spans() if one.name == name]


def only(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = named(spans, name)
    return found


def ids(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def test_a_run_lies_below_the_send_that_caused_it(app: App, spans: InMemorySpanExporter) -> None:
    seen: list[trace.SpanContext] = []

    @app.task(name="t.add")
    def add(a: int, b: int) -> int:
        seen.append(trace.get_current_span().get_span_context())
        return a + b

    with app.eager():
        sent = add.apply_async((1, 2), queue="q")
    send, run = only(spans, "apply_async/t.add"), only(spans, "run/t.add")
    assert (send.kind, run.kind) == (trace.SpanKind.PRODUCER, trace.SpanKind.CONSUMER)
    assert (parent(send), parent(run)) == (None, ids(send))
    assert seen == [run.context]  # what the task itself traces lies below its run
    assert run.attributes is not None and send.attributes is not None
    assert run.attributes["messaging.message.id"] == send.attributes["messaging.message.id"] == sent.id
    assert run.attributes["messaging.destination.name"] == "q"
    assert (run.attributes["umbel.node"], run.attributes["umbel.clock"]) == ("eager@localhost", 0)
    assert run.attributes["celery.state"] == "SUCCESS"
    assert context.get_current() == {}  # nothing is left behind for the next task


def test_the_context_travels_as_celerys_instrumentation_writes_it(
    app: App, spans: InMemorySpanExporter
) -> None:
    prepared = app.prepare("t.add", (1,), {}, {"headers": {"tenant": "blue"}})
    send = only(spans, "apply_async/t.add")
    said = f"00-{send.context.trace_id:032x}-{send.context.span_id:016x}-{send.context.trace_flags:02x}"
    assert f'"tenant":"blue","traceparent":"{said}"'.encode() in prepared.outgoing.message.headers
    assert read_headers(prepared.outgoing.message).id == prepared.task_id


def test_a_chain_is_one_trace(app: App, spans: InMemorySpanExporter) -> None:
    @app.task(name="t.step")
    def step(number: int) -> int:
        return number + 1

    with app.eager():
        chain(step.s(1), step.s(), step.s()).apply_async()
    sends, runs = named(spans, "apply_async/t.step"), named(spans, "run/t.step")
    assert [len(sends), len(runs), len({ids(one)[0] for one in (*sends, *runs)})] == [3, 3, 1]
    by_start = sorted((*sends, *runs), key=lambda one: one.start_time or 0)
    assert [parent(one) for one in by_start] == [None, *(ids(one) for one in by_start[:-1])]


def test_all_attempts_lie_below_the_send(app: App, spans: InMemorySpanExporter) -> None:
    @app.task(name="t.flaky", bind=True)
    def flaky(self: Task[..., Any], way: str) -> None:
        if self.request.retries == 0:
            raise self.retry(exc=KeyError("first"), countdown=0)
        if self.request.retries == 1:
            raise self.retry(args=["other"], exc=KeyError("second"), countdown=0)

    with app.eager():
        flaky.delay("one")
    send, runs = only(spans, "apply_async/t.flaky"), named(spans, "run/t.flaky")
    assert [parent(one) for one in runs] == [ids(send)] * 3
    said = [(one.attributes or {}).get("celery.retry.reason") for one in runs]
    assert said == ["'first'", "'second'", None]
    assert [(one.attributes or {})["celery.retries"] for one in runs] == [0, 1, 2]


def test_the_body_of_a_chord_is_linked_to_its_parts(app: App, spans: InMemorySpanExporter) -> None:
    @app.task(name="t.part")
    def part(number: int) -> int:
        return number

    @app.task(name="t.body")
    def body(numbers: list[int]) -> int:
        return sum(numbers)

    with app.eager():
        assert chord([part.s(n) for n in range(3)], body.s()).apply_async().get() == 3
    sends, body_send = named(spans, "apply_async/t.part"), only(spans, "apply_async/t.body")
    linked = [(one.context.trace_id, one.context.span_id) for one in body_send.links]
    assert linked == [ids(one) for one in sends]
    assert parent(body_send) == ids(named(spans, "run/t.part")[-1])
    assert parent(only(spans, "run/t.body")) == ids(body_send)


def test_a_failure_says_why_without_its_secrets(app: App, spans: InMemorySpanExporter) -> None:
    @app.task(name="t.login", sensitive=("password",))
    def login(user: str, password: str) -> None:
        raise PermissionError(f"no entry for {user} with {password}")

    with app.eager():
        login.delay("ann", "hunter-two")
    run = only(spans, "run/t.login")
    assert run.status.status_code is trace.StatusCode.ERROR
    assert run.status.description == "no entry for ann with ***"
    (event,) = run.events
    assert (event.name, (event.attributes or {})["exception.type"]) == ("exception", "PermissionError")
    assert "login" in str((event.attributes or {})["exception.stacktrace"])
    assert not [one for one in spans.get_finished_spans() if "hunter" in one.to_json()]


def test_an_expected_failure_is_no_error(app: App, spans: InMemorySpanExporter) -> None:
    @app.task(name="t.expected", throws=(LookupError,))
    def expected() -> None:
        raise KeyError("as foreseen")

    with app.eager():
        expected.delay()
    assert only(spans, "run/t.expected").status.status_code is trace.StatusCode.UNSET


@pytest.mark.parametrize("said", [5, ["00"], "nonsense", "00-0-0-01", None])
def test_a_context_that_cannot_be_read_begins_a_trace(
    app: App, spans: InMemorySpanExporter, said: Any
) -> None:
    @app.task(name="t.add")
    def add() -> None: ...

    uninstrument(app)
    sent = app.prepare("t.add", (), {}, {"headers": {"traceparent": said}})
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    instrument(app, tracer_provider=provider)
    with app.eager():
        app.publish([sent])
    assert parent(only(spans, "run/t.add")) is None


def test_awaited_tasks_at_once_are_told_apart(app: App, spans: InMemorySpanExporter) -> None:
    both, begun = asyncio.Event(), list[str]()

    @app.task(name="t.inner", bind=True)
    async def inner(self: Task[..., Any]) -> None:
        begun.append(self.request.id)
        if len(begun) == 2:
            both.set()
        await both.wait()

    async def run_both() -> None:
        tracer = AsyncTracer(app, hostname="w@host")
        prepared = [app.prepare("t.inner", (), {}, {"link": app.signature("t.next")}) for _ in range(2)]
        jobs = [
            Job(number, "t.inner", one.task_id, "q", one.outgoing.message, lamport=7)
            for number, one in enumerate(prepared)
        ]
        await asyncio.gather(*(tracer.run(one) for one in jobs))

    asyncio.run(run_both())
    sends, runs = named(spans, "apply_async/t.inner"), named(spans, "run/t.inner")
    assert {parent(one) for one in runs} == {ids(one) for one in sends}
    assert {parent(one) for one in named(spans, "apply_async/t.next")} == {ids(one) for one in runs}
    assert [(one.attributes or {})["umbel.clock"] for one in runs] == [7, 7]


def test_it_is_instrumented_once_and_can_be_undone(app: App, spans: InMemorySpanExporter) -> None:
    instrument(app)
    app.prepare("t.add", (), {}, {})
    assert len(spans.get_finished_spans()) == 1
    uninstrument(app)
    assert b"traceparent" not in app.prepare("t.add", (), {}, {}).outgoing.message.headers
    assert not any(signal.receivers for signal in vars(app.signals).values())


def test_an_app_that_is_not_instrumented_loads_nothing_of_it() -> None:
    """Nor Sentry: who has them installed for other reasons pays nothing here."""
    code = (
        "import sys; from umbel import App\n"
        "App(broker='sqlite:///nowhere.db').prepare('t', (), {}, {})\n"
        "print([one for one in sys.modules if one.startswith(('opentelemetry', 'sentry_sdk'))])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
