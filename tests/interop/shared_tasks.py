"""The tasks of both sides: one module, an app of whichever library is installed where it is imported.

Celery's environment has no Umbel, so a process is of one kind for sure, and `LIBRARY` says of which.
Where brokers and results are is said by the variables of each library.
"""

# mypy: disable-error-code="untyped-decorator"
# Of which class the app is, depends on where this is imported.

from pathlib import Path
from threading import Event
from time import monotonic, time
from typing import Any

try:
    from umbel import App, chain, chord, group

    LIBRARY = "umbel"
except ImportError:
    from celery import Celery as App  # type: ignore[no-redef]
    from celery import chain, chord, group  # type: ignore[no-redef]

    LIBRARY = "celery"

# These have one name on both sides.
from span_files import instrument_workers  # type: ignore[import-not-found]
from typed_tasks import accept_msgpack, register  # type: ignore[import-not-found]

__all__ = ["App", "chain", "chord", "group"]

app: Any = App("interop") if LIBRARY == "celery" else App("interop", accept_content=["json", "msgpack"])
if LIBRARY == "celery":
    accept_msgpack(app)
register(app)
instrument_workers(app, LIBRARY)
WAIT_MAX_S = 30.0


class Broken(Exception):
    """An error of the application's own, which both sides can import."""


class Odd(Exception):
    """An error that cannot be made again from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@app.task
def add(x: Any, y: Any = 0) -> Any:
    return x + y


@app.task
def note(journal: str, line: str) -> None:
    with Path(journal).open("a") as file:
        file.write(f"{line}\n")


@app.task
def total(numbers: list[Any]) -> Any:
    return sum(numbers)


@app.task
def echo(value: Any) -> Any:
    return value


@app.task(acks_late=False, track_started=True)
def hasty(value: Any) -> Any:
    """Its message is gone before it runs, and it tells that it has begun."""
    return value


@app.task
def trail(steps: list[Any]) -> list[Any]:
    """Where a chain has been: each step adds the library that ran it."""
    return [*steps, LIBRARY]


@app.task
def where(*_: Any) -> str:
    return LIBRARY


@app.task
def where_and(value: Any) -> list[Any]:
    return [LIBRARY, value]


@app.task
def now(*_: Any) -> float:
    return time()


@app.task
def fails(text: str = "boom") -> None:
    raise ValueError(text, 42)


@app.task
def breaks() -> None:
    raise Broken("of our own", {"why": ["this", None]})


@app.task
def is_odd() -> None:
    raise Odd(1, 2)


@app.task
def fails_with_an_object() -> None:
    raise LookupError(object)


@app.task
def returns_an_object() -> object:
    return object


@app.task(bind=True, max_retries=5)
def flaky(self: Any, failures: int) -> list[Any]:
    """Fails so many times, then says what its last message said."""
    if self.request.retries < failures:
        raise self.retry(exc=Broken("not yet"), countdown=0)
    return [LIBRARY, self.request.retries, self.request.parent_id == self.request.id]


@app.task(bind=True, max_retries=1)
def never_works(self: Any) -> None:
    raise self.retry(exc=Broken("again"), countdown=0)


@app.task(bind=True, max_retries=0)
def gives_up(self: Any) -> None:
    raise self.retry(countdown=0)


@app.task(autoretry_for=(Broken,), max_retries=2, default_retry_delay=0, bind=True)
def retries_by_itself(self: Any) -> int:
    if self.request.retries < 2:
        raise Broken("not yet")
    retries: int = self.request.retries
    return retries


@app.task(bind=True, max_retries=40)
def runs_only_on(self: Any, library: str, queue: str = "") -> list[Any]:
    """Taken by the other kind of worker it is tried again; Celery can send it elsewhere."""
    if library != LIBRARY:
        raise self.retry(countdown=0.05, **({"queue": queue} if queue else {}))
    return [LIBRARY, self.request.retries]


@app.task(bind=True)
def about_itself(self: Any, *_: Any) -> dict[str, Any]:
    request = self.request
    return {
        "id": request.id,
        "root": request.root_id,
        "parent": request.parent_id,
        "group": request.group,
        "index": request.group_index,
        "retries": request.retries,
        "queue": request.delivery_info["routing_key"],
        "library": LIBRARY,
    }


@app.task(bind=True)
def header(self: Any, name: str) -> Any:
    return (self.request.headers or {}).get(name)


@app.task(bind=True)
def sends(self: Any, queue: str) -> list[str]:
    """A task that sends another one."""
    sent = about_itself.apply_async(queue=queue)
    return [self.request.id, sent.id]


@app.task(ignore_result=True)
def silent() -> str:
    return "nobody hears this"


@app.task(bind=True)
def reports_progress(self: Any, gate: str) -> str:
    self.update_state(state="HALFWAY", meta={"done": 50})
    wait_for(Path(gate))
    return "done"


@app.task(track_started=True)
def waits_for(gate: str) -> str:
    wait_for(Path(gate))
    return "done"


@app.task
def takes_long() -> None:
    Event().wait(WAIT_MAX_S)


@app.task
def notes(file: str, text: Any) -> None:
    with Path(file).open("a") as journal:
        journal.write(f"{text}\n")


@app.task
def sees_failure(task_id: str) -> list[str]:
    """An errback that is sent: it gets the id of what failed."""
    return [LIBRARY, task_id]


@app.task
def hears_error(request: Any, error: BaseException, traceback: str, file: str) -> None:
    """An errback that is called where the task failed: it gets the error itself."""
    Path(file).write_text(f"{LIBRARY} {request.id} {type(error).__name__} {bool(traceback)}")


@app.task(bind=True)
def becomes(self: Any, queue: str) -> None:
    """The task is replaced by another one, under its id."""
    raise self.replace(add.s(20, 22).set(queue=queue))


@app.task(bind=True)
def brings_another(self: Any, queue: str) -> int:
    """A part of a chord that adds one more part to it."""
    self.add_to_chord(add.s(100, 0).set(queue=queue))
    return 1


def wait_for(gate: Path) -> None:
    ends = monotonic() + WAIT_MAX_S
    while not gate.exists() and monotonic() < ends:
        Event().wait(0.01)
