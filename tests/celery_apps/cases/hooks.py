"""Signals with what they are given, in their order; hooks of base classes; unknown and broken messages."""

from typing import Any

from celery import chain, group

from tests.celery_apps.asking import (
    case,
    ended,
    everywhere,
    got,
    journal,
    left,
    new_key,
    passed,
    sorted_journal,
    waited,
)
from tests.celery_apps.project import hooked
from tests.celery_apps.project.celery import app
from tests.celery_apps.project.journal import store
from tests.celery_apps.project.watching import RUN


def _signals(result: Any, lines: int) -> Any:
    return [ended(result), journal(f"signals-{result.id}", lines)]


def _hooks(result: Any, lines: int) -> Any:
    return [ended(result), journal(f"hooks-{result.id}", lines)]


@everywhere(quick=True)
def signals_of_success() -> Any:
    return _signals(hooked.watched.delay(1, y=2), 3)


@case(quick=True)
def signals_of_failure() -> Any:
    return _signals(hooked.watched_failure.delay("watched"), 3)


@case(quick=True)
def signals_of_a_retry() -> Any:
    return _signals(hooked.watched_retry.delay(), 6)


@case()
def signals_of_ignore() -> Any:
    result = hooked.watched_ignore.delay()
    return journal(f"signals-{result.id}", 2)


@case()
def signals_of_reject() -> Any:
    result = hooked.watched_reject.delay()
    return [ended(result), sorted_journal(f"signals-{result.id}", 3)]


@case()
def signals_of_a_hard_limit() -> Any:
    return _signals(hooked.watched_waits.delay(new_key()), 2)


@case()
def signals_of_a_replacement() -> Any:
    result = hooked.watched_replaced.delay(1)
    return [got(result), journal(f"signals-{result.id}", 5)]


@case(alone=True)
def signals_of_an_exit() -> Any:
    return _signals(hooked.watched_exit.delay(), 2)


@case()
def signals_of_a_chain() -> Any:
    result = chain(hooked.watched.s(1, 1), hooked.watched.s(1)).delay()
    return [got(result), journal(f"signals-{result.parent.id}", 6)]


@case(quick=True)
def signal_of_receipt() -> Any:
    result = hooked.watched.apply_async((1,), {"y": 2})
    return [ended(result), journal(f"received-{result.id}", 1)]


@case()
def signal_of_receipt_by_shadow() -> Any:
    result = hooked.watched.apply_async((1,), {"y": 2}, shadow="watched-by-shadow")
    return [ended(result), journal(f"received-{result.id}", 1)]


@case()
def signals_of_publishing_in_the_worker() -> Any:
    result = chain(hooked.watched.s(1, 1), hooked.watched.s(1)).delay()
    return [got(result), journal(f"published-{result.parent.id}", 4)]


@case()
def signals_of_publishing_a_retry() -> Any:
    result = hooked.watched_retry.delay()
    return [got(result), journal(f"published-{result.id}", 4)]


@case()
def signals_of_expiry() -> Any:
    result = hooked.watched.apply_async((1, 1), countdown=1.5, expires=0.8)
    return _signals(result, 1)


@case(quick=True)
def unknown_task() -> Any:
    result = app.send_task("no.such.task", (1,))
    return [ended(result), journal(f"unknown-{result.id}", 1)]


@case()
def unknown_task_in_a_chain() -> Any:
    result = chain(hooked.watched.s(1, 1), app.signature("no.such.task")).delay()
    return ended(result)


def _publish(body: Any, headers: Any, **options: Any) -> None:
    with app.producer_or_acquire() as producer:
        queue = app.amqp.queues["main"]
        producer.publish(
            body, headers=headers, exchange=queue.exchange, routing_key="main", declare=[queue], **options
        )


@case()
def message_that_is_no_task() -> Any:
    key = new_key()
    _publish({"what": "is this"}, {"id": key}, serializer="json")
    return [journal(f"rejected-{key}", 1), passed()]


@case()
def message_with_a_broken_body() -> Any:
    key = new_key()
    headers = {"id": key, "task": "tests.celery_apps.project.tasks.add", "lang": "py"}
    _publish("{not json", headers, content_type="application/json", content_encoding="utf-8")
    return [journal(f"rejected-{key}", 0), passed()]


@case()
def message_with_broken_arguments() -> Any:
    key = new_key()
    headers = {"id": key, "task": "tests.celery_apps.project.tasks.add", "lang": "py", "eta": "not a time"}
    _publish([[1, 2], {}, {}], headers, serializer="json")
    return [journal(f"rejected-{key}", 1), passed()]


@case(quick=True)
def hooks_of_success() -> Any:
    return _hooks(hooked.hooked.delay(1, y=2), 3)


@case(quick=True)
def hooks_of_failure() -> Any:
    return _hooks(hooked.hooked_failure.delay("hooked"), 3)


@case()
def hooks_of_a_retry() -> Any:
    return _hooks(hooked.hooked_retry.delay(), 6)


@case()
def hooks_of_ignore() -> Any:
    result = hooked.hooked_ignore.delay()
    return journal(f"hooks-{result.id}", 1)


@case()
def hooks_of_reject() -> Any:
    result = hooked.hooked_reject.delay()
    return [ended(result), journal(f"hooks-{result.id}", 1)]


@case()
def hooks_of_a_hard_limit() -> Any:
    result = hooked.hooked_waits.delay(new_key())
    return [ended(result), journal(f"hooks-{result.id}", 1), sorted_journal("hooks-None", 0) and "more"]


@case()
def own_call() -> Any:
    return _hooks(hooked.called.delay(5), 4)


@case()
def hook_of_success_that_raises() -> Any:
    return left(hooked.breaks_in_success.delay())


@case()
def hook_of_failure_that_raises() -> Any:
    return left(hooked.breaks_in_failure.delay())


@case()
def hook_at_the_start_that_raises() -> Any:
    return left(hooked.breaks_at_start.delay())


@case()
def what_a_class_keeps() -> Any:
    return got(hooked.cached.delay())


@case()
def call_changed_by_a_class() -> Any:
    return got(hooked.shadowed.delay())


@case()
def hooks_in_a_group() -> Any:
    results = group(hooked.hooked.s(1, 1), hooked.hooked.s(2, 2)).delay()
    return [got(results), [journal(f"hooks-{part.id}", 3) for part in results.results]]


@case(quick=True)
def signals_of_the_worker() -> Any:
    """Until it is ready, each once, in this order; `worker_init` is sent where children are forked."""
    waited(lambda: "worker_ready" in str(store().lrange(f"journal:worker-{RUN}", 0, -1)), what="ready")
    lines = journal(f"worker-{RUN}", 1)
    main = [line for line in lines if line[0] not in ("import_modules", "worker_init")]
    return [main, [line for line in lines if line[0] == "worker_init"]]


@case(quick=True)
def signals_of_children() -> Any:
    return journal(f"children-{RUN}", 2)[:2]
