"""Tasks that do something small each."""

# mypy: disable-error-code="untyped-decorator, misc"

import os
import signal
from time import time
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from pydantic import BaseModel

from tests.celery_apps.project.celery import app
from tests.celery_apps.project.journal import note, store, wait_at


class Odd(Exception):
    """An error that cannot be made again from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Known(Exception):
    """An error that a task says it throws."""


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.cause = lambda: text


@app.task
def add(x: Any, y: Any = 0) -> Any:
    return x + y


@shared_task
def mul(x: Any, y: Any) -> Any:
    return x * y


@app.task
def echo(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs] if len(args) != 1 or kwargs else args[0]


@app.task
def total(numbers: Any) -> Any:
    return sum(numbers)


@app.task
def clock() -> float:
    return time()


@app.task
def one() -> int:
    return 1


@app.task
def nothing() -> None:
    return None


@app.task
def fail(text: str = "broken") -> None:
    raise ValueError(text)


@app.task
def fail_with(_: Any, text: str = "broken") -> None:
    """As a later step of a chain: it is handed a result."""
    raise KeyError(text)


@app.task
def fail_odd() -> None:
    raise Odd(1, 2)


@app.task
def fail_unpicklable() -> None:
    raise Unpicklable("cannot be sent")


@app.task
def fail_from() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise RuntimeError("outer") from error


@app.task(throws=(Known,))
def fail_known() -> None:
    raise Known("was to be expected")


@app.task(serializer="json")
def unserializable() -> Any:
    return object()


@app.task
def write(key: str, line: Any) -> Any:
    note(key, line)
    return line


@app.task
def write_given(given: Any, key: str) -> Any:
    """As a callback: it is handed a result."""
    note(key, given)
    return given


@app.task
def count(key: str) -> int:
    return int(store().incr(f"count:{key}"))


@app.task(bind=True)
def hold(self: Any, gate: str, **_: Any) -> str:
    note(gate, "began")
    wait_at(gate)
    note(gate, "ended")
    return "let through"


@app.task(autoretry_for=(Exception,), retry_kwargs={"countdown": 0})
def retries_the_hold(gate: str) -> str:
    note(gate, "began")
    wait_at(gate)
    return "let through"


@app.task(bind=True)
def request_of(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a task sees of its call, as far as it can be compared."""
    request = self.request
    names = (
        "args kwargs retries is_eager called_directly lang task shadow group group_index chord chain "
        "errbacks callbacks eta expires timelimit origin ignore_result stamped_headers stamps "
        "replaced_task_nesting argsrepr kwargsrepr utc delivery_info correlation_id hostname headers "
        "meth logfile loglevel taskset reply_to parent_id root_id id"
    )
    return {name: getattr(request, name, "no such attribute") for name in names.split()}


@app.task(bind=True)
def properties_of(self: Any) -> dict[str, Any]:
    return dict(self.request.properties)


@app.task(bind=True)
def ids_of(self: Any, *_: Any) -> dict[str, Any]:
    request = self.request
    return {
        "own": request.id,
        "root": request.root_id,
        "parent": request.parent_id,
        "group": request.group,
        "index": request.group_index,
    }


@app.task(bind=True)
def headers_of(self: Any) -> dict[str, Any]:
    return {
        "headers": self.request.headers,
        "mine": self.request.get("mine"),
        "get": self.request.get("my_id"),
    }


@app.task(bind=True)
def stamps_of(self: Any, *_: Any) -> dict[str, Any]:
    request = self.request
    return {"stamps": request.stamps, "names": sorted(request.stamped_headers or [])}


@app.task
def routed() -> str:
    return "by a route"


@app.task(bind=True)
def letter(self: Any) -> dict[str, Any]:
    return dict(self.request.delivery_info)


@app.task(bind=True)
def annotated(self: Any) -> Any:
    if self.request.retries == 0:
        raise self.retry(exc=ValueError("once more"))
    return [self.max_retries, self.default_retry_delay]


@app.task(ignore_result=True)
def ignored(key: str) -> str:
    note(key, "ran")
    return "nobody sees this"


@app.task(ignore_result=True)
def ignored_failure(key: str) -> None:
    note(key, "ran")
    raise ValueError("nobody sees this")


@app.task(ignore_result=True, store_errors_even_if_ignored=True)
def seen_failure() -> None:
    raise ValueError("everybody sees this")


@app.task(track_started=True)
def tracked(gate: str) -> str:
    wait_at(gate)
    return "done"


@app.task(bind=True)
def reports(self: Any, gate: str) -> str:
    self.update_state(state="PROGRESS", meta={"done": 1, "of": 2})
    wait_at(gate)
    return "done"


@app.task(bind=True)
def sets_state_and_ignores(self: Any, state: str) -> None:
    self.update_state(state=state, meta={"set": "by hand"})
    raise Ignore


@app.task
def ignores() -> None:
    raise Ignore("not today")


@app.task(acks_late=True)
def rejects(key: str) -> None:
    note(key, "ran")
    raise Reject("no good", requeue=False)


@app.task
def rejects_early(key: str) -> None:
    note(key, "ran")
    raise Reject("no good", requeue=False)


@app.task(bind=True, acks_late=True)
def requeues(self: Any, key: str) -> Any:
    note(key, "ran", bool(self.request.delivery_info["redelivered"]))
    if store().incr(f"count:{key}") == 1:
        raise Reject("once more", requeue=True)
    return "second time"


@app.task
def requeues_early(key: str) -> Any:
    """Its message is acknowledged already, so there is nothing to put back."""
    note(key, "ran")
    raise Reject("once more", requeue=True)


class Order(BaseModel):
    number: int
    names: list[str] = []


@app.task(pydantic=True)
def ship(order: Order, times: int = 1) -> Order:
    return Order(number=order.number * times, names=[*order.names, type(order).__name__])


@app.task(pydantic=True, pydantic_strict=True)
def ship_strictly(order: Order) -> int:
    return order.number


@app.task(name="named.by.hand")
def named() -> str:
    return "by hand"


@app.task(typing=False)
def loose(x: Any) -> Any:
    return x


@app.task(bind=True)
def sends(self: Any, key: str) -> list[Any]:
    """Sends a task of its own and says how it knows it."""
    sent = add.delay(1, 2)
    write.delay(key, "sent from a task")
    return [child.id == sent.id for child in self.request.children][:1]


@app.task(trail=False)
def sends_without_trail() -> str:
    add.delay(1, 2)
    return "done"


@app.task
def asks(x: Any) -> Any:
    """Waits for another task, which nobody should do."""
    return add.delay(x, 1).get(timeout=60, disable_sync_subtasks=False)


@app.task
def asks_and_is_refused() -> Any:
    return add.delay(1, 1).get(timeout=60)


@app.task
def exits() -> None:
    raise SystemExit(3)


@app.task
def interrupts() -> None:
    raise KeyboardInterrupt


@app.task(bind=True)
def catches_the_limit(self: Any, key: str) -> str:
    try:
        wait_at(f"never-{key}")
    except SoftTimeLimitExceeded as error:
        note(key, "limit", type(error).__module__, repr(error))
        return "cleaned up"
    return "was let through"


@app.task
def waits(key: str) -> str:
    wait_at(f"never-{key}")
    return "was let through"


@app.task(bind=True)
def dies(self: Any, key: str) -> Any:
    """Kills its own process, the first time."""
    runs = store().incr(f"count:{key}")
    note(key, "run", runs)
    if runs == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return runs
