"""Tasks that make or replace other tasks, that retry, and that are called when others fail."""

# mypy: disable-error-code="untyped-decorator, misc"

from typing import Any

from celery import chain, chord, group
from celery.exceptions import MaxRetriesExceededError

from tests.celery_apps.project.celery import app
from tests.celery_apps.project.journal import note, store
from tests.celery_apps.project.tasks import add, echo, fail, mul, total


@app.task
def old_errback(task_id: str, key: str) -> None:
    note(key, "old style", task_id)


@app.task
def errback(request: Any, exc: Any, traceback: Any, key: str) -> None:
    """In the new style: Celery calls it in the process where the task failed."""
    shown = traceback is not None and bool(str(traceback))
    note(key, "new style", request.id, request.task, type(exc).__name__, str(exc), shown)


@app.task
def errback_by_name(request: Any, exc: Any, traceback: Any, key: str = "") -> None:
    note(key, "by name", type(exc).__name__, str(exc))


@app.task(bind=True)
def bound_errback(self: Any, request: Any, exc: Any, traceback: Any, key: str) -> None:
    note(key, "bound", request.id, type(exc).__name__, str(exc))


@app.task
def failing_errback(request: Any, exc: Any, traceback: Any, key: str) -> None:
    note(key, "before it fails")
    raise RuntimeError("the errback is broken")


@app.task(bind=True)
def replaced(self: Any, x: Any) -> Any:
    raise self.replace(add.s(x, 10))


@app.task(bind=True)
def replaced_by_chain(self: Any, x: Any) -> Any:
    raise self.replace(chain(add.s(x, 1), mul.s(2)))


@app.task(bind=True)
def replaced_by_group(self: Any, x: Any) -> Any:
    raise self.replace(group(add.s(x, 1), add.s(x, 2)))


@app.task(bind=True)
def replaced_by_chord(self: Any, x: Any) -> Any:
    raise self.replace(chord([add.s(x, 1), add.s(x, 2)], total.s()))


@app.task(bind=True)
def replaced_by_empty_group(self: Any) -> Any:
    raise self.replace(group([]))


@app.task(bind=True)
def replaced_by_failure(self: Any, text: str) -> Any:
    raise self.replace(fail.s(text))


@app.task(bind=True)
def replaced_often(self: Any, times: int) -> Any:
    if times:
        raise self.replace(replaced_often.s(times - 1))
    return self.request.replaced_task_nesting


@app.task(bind=True)
def replaced_by_add_in_chord(self: Any, x: Any) -> Any:
    raise self.replace(chain(echo.s(x), add.s(5)))


@app.task(bind=True)
def replaced_with_options(self: Any, key: str) -> Any:
    raise self.replace(add.si(2, 2).set(link_error=errback.s(key=key)))


@app.task(bind=True)
def adds_to_chord(self: Any, x: Any) -> Any:
    self.add_to_chord(add.si(x, 100))
    return x


@app.task(bind=True)
def adds_group_to_chord(self: Any, x: Any) -> Any:
    for extra in (100, 200):
        self.add_to_chord(add.si(x, extra))
    return x


@app.task(bind=True)
def starts_chord(self: Any, numbers: list[int], key: str) -> str:
    from tests.celery_apps.project.tasks import write_given

    chord([add.s(number, 1) for number in numbers], write_given.s(key)).delay()
    return "sent"


@app.task
def returns_signature(x: Any) -> Any:
    return add.s(x, 1)


@app.task
def runs_given(signature: Any, x: Any) -> Any:
    """A signature as an argument."""
    from celery import signature as made

    return made(signature, app=app).clone((x,))()


# ---- retries ---------------------------------------------------------------------------------------


# Celery sends a retry before it stores that state. On a backend that keeps the later of two writes the state
# could replace the result of a retry without delay, for which a client then waits for ever.
@app.task(bind=True, default_retry_delay=1)
def retries(self: Any, key: str, times: int) -> Any:
    note(key, "attempt", self.request.retries)
    if self.request.retries < times:
        raise self.retry()
    return self.request.retries


@app.task(bind=True, max_retries=2, default_retry_delay=0)
def retries_with_error(self: Any, key: str) -> Any:
    note(key, "attempt", self.request.retries)
    try:
        raise ValueError("always")
    except ValueError as error:
        raise self.retry(exc=error) from error


@app.task(bind=True, max_retries=1, default_retry_delay=0)
def retries_for_nothing(self: Any, key: str) -> Any:
    note(key, "attempt", self.request.retries)
    raise self.retry()


@app.task(bind=True, max_retries=1, default_retry_delay=0)
def catches_the_last(self: Any, key: str) -> Any:
    try:
        raise self.retry()
    except MaxRetriesExceededError as error:
        note(key, type(error).__name__, list(error.task_args), error.task_kwargs)
        return "gave up"


@app.task(bind=True, max_retries=None, default_retry_delay=0)
def retries_without_end(self: Any, times: int) -> Any:
    if self.request.retries < times:
        raise self.retry()
    return [self.request.retries, self.max_retries]


@app.task(bind=True)
def retries_otherwise(self: Any, x: int, y: int = 0) -> Any:
    if self.request.retries == 0:
        raise self.retry(args=(x + 1,), kwargs={"y": 5}, countdown=0)
    return [x, y, self.request.retries]


@app.task(bind=True)
def retries_elsewhere(self: Any) -> Any:
    if self.request.retries == 0:
        raise self.retry(queue="urgent", countdown=0, headers={"mine": "kept"}, priority=5)
    return [self.request.delivery_info["routing_key"], self.request.retries]


@app.task(bind=True)
def retries_without_raising(self: Any, key: str) -> Any:
    note(key, "attempt", self.request.retries)
    if self.request.retries == 0:
        self.retry(countdown=0, throw=False)
        return "went on"
    return "second"


@app.task(bind=True, max_retries=5)
def overrides_max(self: Any, key: str) -> Any:
    note(key, "attempt", self.request.retries)
    raise self.retry(exc=KeyError("enough"), countdown=0, max_retries=1)


@app.task(bind=True, autoretry_for=(KeyError,), retry_kwargs={"max_retries": 2, "countdown": 0})
def retries_by_itself(self: Any, key: str) -> Any:
    note(key, "attempt", self.request.retries)
    raise KeyError("always")


@app.task(bind=True, autoretry_for=(Exception,), dont_autoretry_for=(KeyError,), default_retry_delay=0)
def does_not_retry(self: Any, key: str) -> Any:
    note(key, "attempt", self.request.retries)
    raise KeyError("not this one")


@app.task(
    bind=True,
    autoretry_for=(KeyError,),
    retry_backoff=1,
    retry_backoff_max=1,
    retry_jitter=False,
    max_retries=1,
)
def backs_off(self: Any, key: str) -> Any:
    note(key, "attempt", self.request.retries, self.request.eta is not None)
    raise KeyError("always")


@app.task(bind=True, default_retry_delay=0)
def retries_in_a_chain(self: Any, x: int, key: str) -> int:
    if store().incr(f"count:{key}") < 3:
        raise self.retry()
    return x + 1


@app.task(bind=True, default_retry_delay=0, expires=60)
def shows_after_retry(self: Any) -> Any:
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    request = self.request
    return [request.retries, request.expires is not None, request.timelimit, request.root_id == request.id]


@app.task(bind=True)
def signs_retry(self: Any, x: int) -> Any:
    signature = self.signature_from_request(countdown=0)
    return [
        signature.task,
        list(signature.args),
        signature.options["retries"],
        self.request.as_execution_options()["root_id"] == self.request.root_id,
        x,
    ]
