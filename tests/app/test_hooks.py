"""Hooks of a task: methods of its base class, or functions that were given with it."""

import asyncio
import logging
from typing import Any, ClassVar

import pytest

from tests.app.test_tracer import job_of
from umbel import App, Ignore, Task
from umbel.app.running.async_tracer import AsyncTracer
from umbel.errors import ConfigurationError, MaxRetriesExceeded


class Told(Task[..., Any]):
    """Notes what is called, with what is worth comparing."""

    max_retries = 7
    queue = "slow"
    autoretry_for = (OSError,)
    default_retry_delay = 0
    told: ClassVar[list[tuple[Any, ...]]] = []

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.told.append(("before", list(args), kwargs))
        if args == ["refused"]:
            raise LookupError("not today")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.told.append(("success", retval))
        if retval == "loud":
            raise RuntimeError("the hook itself")

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        assert einfo.exception is exc and einfo.type is type(exc)
        self.told.append(("failure", repr(exc), str(einfo).splitlines()[-1]))

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.told.append(("retry", repr(exc)))

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        self.told.append(("after", status, retval if status == "SUCCESS" else repr(retval)))


@pytest.fixture
def told() -> list[tuple[Any, ...]]:
    Told.told.clear()
    return Told.told


def act(self: Task[..., Any], word: str) -> str:
    if word == "fail":
        raise ValueError("no")
    if word == "retry" and not self.request.retries:
        self.retry(KeyError("again"), countdown=0)
    if word == "lost" and not self.request.retries:
        raise OSError("lost")
    if word == "ignore":
        raise Ignore
    return word


CASES: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("ok", [("success", "ok"), ("after", "SUCCESS", "ok")]),
    ("fail", [("failure", "ValueError('no')", "ValueError: no"), ("after", "FAILURE", "ValueError('no')")]),
    ("retry", [("retry", "KeyError('again')")]),
    ("lost", [("retry", "OSError('lost')")]),
    ("ignore", []),
    ("loud", [("success", "loud"), ("after", "SUCCESS", "loud")]),
    (
        "refused",
        [
            ("failure", "LookupError('not today')", "LookupError: not today"),
            ("after", "FAILURE", "LookupError('not today')"),
        ],
    ),
]


@pytest.mark.parametrize(("word", "expected"), CASES)
def test_hooks_of_a_base_class_are_called(
    app: App, told: list[tuple[Any, ...]], word: str, expected: list[tuple[Any, ...]]
) -> None:
    task = app.task(bind=True, base=Told)(act)
    with app.eager():
        task.delay(word)
    assert told[: len(expected) + 1] == [("before", [word], {}), *expected]


@pytest.mark.parametrize(("word", "expected"), CASES)
def test_hooks_of_a_coroutine_are_called(
    app: App, told: list[tuple[Any, ...]], word: str, expected: list[tuple[Any, ...]]
) -> None:
    async def act_later(self: Task[..., Any], word: str) -> str:
        return act(self, word)

    task: Any = app.task(bind=True, base=Told)(act_later)
    assert task.is_async and isinstance(task, Told)
    tracer = AsyncTracer(app, hostname="w@host")
    asyncio.run(tracer.run(job_of(app, task.name, word)))
    assert told == [("before", [word], {}), *expected]


def test_a_hook_that_raises_is_logged_and_the_task_keeps_its_outcome(
    app: App, told: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    task = app.task(bind=True, base=Told)(act)
    with app.eager(), caplog.at_level(logging.ERROR):
        assert task.delay("loud").get() == "loud"
    assert "task hook raised an exception" in caplog.text


def test_hooks_may_be_given_with_the_task(app: App) -> None:
    seen: list[Any] = []

    def on_success(self: Task[..., Any], retval: Any, *_: Any) -> None:
        seen.append((self.name, retval))

    @app.task(name="double", on_success=on_success)
    def double(x: int) -> int:
        return 2 * x

    with app.eager():
        double.delay(2)
    assert seen == [("double", 4)]
    with pytest.raises(ConfigurationError, match=r"option 'on_failure' of task .* it must be callable"):
        app.task(on_failure=5)(act)  # type: ignore[call-overload]


def test_a_task_without_hooks_has_none(app: App) -> None:
    assert app.task(act).hooks is None


def test_options_of_a_base_class_are_those_of_its_tasks(app: App) -> None:
    plain = app.task(name="plain", bind=True, base=Told)(act)
    own = app.task(name="own", bind=True, base=Told, max_retries=2, queue="fast")(act)
    assert (plain.options.queue, plain.options.retry.max_retries, plain.queue, plain.max_retries) == (
        "slow",
        7,
        "slow",
        7,
    )
    assert (own.options.queue, own.options.retry.max_retries, own.queue, own.max_retries) == (
        "fast",
        2,
        "fast",
        2,
    )


def test_a_base_class_may_wrap_every_run(app: App) -> None:
    """As those do that open a context of a web framework."""
    inside: list[str] = []

    class InContext(app.Task):  # type: ignore[name-defined,misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            inside.append(self.name)
            return self.run(*args, **kwargs)

    plain = app.task(name="plain", base=InContext)(lambda x: x + 1)
    bound = app.task(name="bound", base=InContext, bind=True)(lambda self, x: [self.name, x])
    with app.eager():
        assert plain.delay(1).get() == 2
        assert bound.delay(1).get() == ["bound", 1]
    assert inside == ["plain", "bound"]


def test_a_base_must_be_a_class_of_tasks(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a subclass of umbel\.Task"):
        app.task(base=dict)(act)


# ---- retries by themselves ----------------------------------------------------------------------------


def test_errors_that_are_not_retried_are_excepted(app: App) -> None:
    runs: list[int] = []

    @app.task(bind=True, autoretry_for=(LookupError,), dont_autoretry_for=(KeyError,), default_retry_delay=0)
    def look(self: Task[..., Any], kind: str) -> None:
        runs.append(self.request.retries)
        raise {"index": IndexError, "key": KeyError}[kind]("x")

    with app.eager():
        with pytest.raises(KeyError):
            look.delay("key").get()
        assert runs == [0]
        with pytest.raises(IndexError):
            look.delay("index").get()
    assert runs == [0, 0, 1, 2, 3]


def test_automatic_retries_are_sent_as_retry_kwargs_say(app: App) -> None:
    runs: list[tuple[int, str]] = []

    @app.task(
        bind=True,
        autoretry_for=(ValueError,),
        retry_kwargs={"max_retries": 1, "countdown": 0, "queue": "slow"},
        max_retries=5,
    )
    def look(self: Task[..., Any], by_hand: bool = False) -> None:
        runs.append((self.request.retries, self.request.delivery_info["routing_key"]))
        if by_hand:
            self.retry(countdown=0)
        raise ValueError("x")

    with app.eager():
        with pytest.raises(ValueError, match="x"):
            look.delay().get()
        assert runs == [(0, "celery"), (1, "slow")]
        with pytest.raises(MaxRetriesExceeded, match="failed after 5 retries"):
            look.delay(by_hand=True).get()
    assert look.retry_kwargs["max_retries"] == 1
