"""Tasks whose classes have hooks, and tasks whose signals are watched (`watching.py`)."""

# mypy: disable-error-code="untyped-decorator, misc, no-any-return"

from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject

from tests.celery_apps.project.celery import app
from tests.celery_apps.project.journal import note, wait_at


class Hooked(Task):
    """Notes every call of a hook, in the list that is named after the root of the work flow."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self._note("before_start", task_id == self.request.id, args, kwargs)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self._note("on_success", retval, args, kwargs)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._note("on_failure", repr(exc), task_id == self.request.id, args, kwargs, type(einfo).__name__)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._note("on_retry", repr(exc), args, kwargs, type(einfo).__name__)

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        self._note("after_return", status, repr(retval), args, kwargs, einfo is not None)

    def _note(self, *line: Any) -> None:
        note(f"hooks-{self.request.root_id}", *line)


class Called(Hooked):
    abstract = True
    prefix = "called"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note("__call__", args, kwargs)
        return [self.prefix, super().__call__(*args, **kwargs)]


class RaisesInHooks(Task):
    abstract = True

    def on_success(self, *_: Any) -> None:
        raise RuntimeError("the hook is broken")

    on_failure = on_success


class RaisesAtStart(Task):
    abstract = True

    def before_start(self, *_: Any) -> None:
        raise RuntimeError("not started")


class Caches(Task):
    """Keeps something for the process, as a connection is kept."""

    abstract = True
    _made: Any = None

    @property
    def made(self) -> Any:
        if self._made is None:
            self._made = ["made"]
        return self._made


class OwnRequest(Task):
    """Says by itself whether it was called with sense."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        options.setdefault("shadow", "from-the-class")
        return super().apply_async(args, kwargs, **options)


@app.task(base=Hooked)
def hooked(x: Any, y: Any = 0) -> Any:
    return x + y


@app.task(base=Hooked)
def hooked_failure(text: str) -> None:
    raise ValueError(text)


@app.task(base=Hooked, bind=True, default_retry_delay=0, max_retries=1)
def hooked_retry(self: Any) -> str:
    if self.request.retries == 0:
        raise self.retry(exc=KeyError("once"))
    return "second"


@app.task(base=Hooked)
def hooked_ignore() -> None:
    raise Ignore


@app.task(base=Hooked, acks_late=True)
def hooked_reject() -> None:
    raise Reject("no good", requeue=False)


@app.task(base=Hooked, time_limit=1)
def hooked_waits(key: str) -> str:
    wait_at(f"never-{key}")
    return "was let through"


@app.task(base=Called)
def called(x: Any) -> Any:
    return x


@app.task(base=RaisesInHooks)
def breaks_in_success() -> str:
    return "done"


@app.task(base=RaisesInHooks)
def breaks_in_failure() -> None:
    raise ValueError("the task is broken")


@app.task(base=RaisesAtStart)
def breaks_at_start() -> str:
    return "never"


@app.task(base=Caches, bind=True)
def cached(self: Any) -> Any:
    return self.made


@app.task(base=OwnRequest, bind=True)
def shadowed(self: Any) -> Any:
    return self.request.shadow


# ---- watched by signal handlers --------------------------------------------------------------------


@app.task
def watched(x: Any, y: Any = 0) -> Any:
    return x + y


@app.task
def watched_failure(text: str) -> None:
    raise ValueError(text)


@app.task(bind=True, default_retry_delay=0, max_retries=1)
def watched_retry(self: Any) -> str:
    if self.request.retries == 0:
        raise self.retry(exc=KeyError("once"))
    return "second"


@app.task
def watched_ignore() -> None:
    raise Ignore


@app.task(acks_late=True)
def watched_reject() -> None:
    raise Reject("no good", requeue=False)


@app.task(time_limit=1)
def watched_waits(key: str) -> str:
    wait_at(f"never-{key}")
    return "was let through"


@app.task(bind=True)
def watched_replaced(self: Any, x: Any) -> Any:
    raise self.replace(watched.s(x, 1))


@app.task
def watched_hold(gate: str) -> str:
    note(gate, "began")
    wait_at(gate)
    return "let through"


@app.task
def watched_exit() -> None:
    raise SystemExit(3)
