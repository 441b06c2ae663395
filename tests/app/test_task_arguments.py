"""What does not fit the function is refused where it is sent, before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest

from umbel import App


def plain(a: int, b: int) -> None: ...
def with_default(a: int, b: int = 2) -> None: ...
def keyword_only(a: int, *, flag: bool) -> None: ...
def keyword_only_default(a: int, *, flag: bool = True) -> None: ...
def positional_only(a: int, /, b: int = 2) -> None: ...
def any_arguments(*args: int) -> None: ...
def any_keywords(a: int, **rest: int) -> None: ...
def nothing() -> None: ...
async def later(a: int) -> None: ...
def bound(self: Any, a: int) -> None: ...
def bound_any(*args: Any) -> None: ...
async def bound_later(self: Any, a: int = 1) -> None: ...


Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


FITS: list[tuple[Callable[..., Any], Call]] = [
    (plain, call(1, 2)),
    (plain, call(1, b=2)),
    (plain, call(a=1, b=2)),
    (with_default, call(1)),
    (with_default, call(1, 3)),
    (with_default, call(1, b=3)),
    (keyword_only, call(1, flag=True)),
    (keyword_only_default, call(1)),
    (positional_only, call(1, b=2)),
    (any_arguments, call()),
    (any_arguments, call(1, 2, 3, 4, 5)),
    (any_keywords, call(1, x=2, y=3)),
    (nothing, call()),
    (later, call(1)),
    (bound, call(1)),
    (bound, call(a=1)),
    (bound_any, call(1, 2, 3)),
    (bound_later, call()),
]

DOES_NOT_FIT: list[tuple[Callable[..., Any], Call, str]] = [
    (plain, call(1), "missing a required argument: 'b'"),
    (plain, call(1, 2, 3), "too many positional arguments"),
    (plain, call(1, 2, c=3), "unexpected keyword argument 'c'"),
    (plain, call(1, 2, b=3), "multiple values for argument 'b'"),
    (with_default, call(), "missing a required argument: 'a'"),
    (with_default, call(1, 2, 3), "too many positional arguments"),
    (keyword_only, call(1), "missing a required argument: 'flag'"),
    (keyword_only, call(1, True), "too many positional arguments"),
    (positional_only, call(a=1), "'a'"),
    (any_keywords, call(x=2), "missing a required argument: 'a'"),
    (nothing, call(1), "too many positional arguments"),
    (later, call(), "missing a required argument: 'a'"),
    (bound, call(), "missing a required argument: 'a'"),
    (bound, call(1, 2), "too many positional arguments"),
    (bound_later, call(1, 2), "too many positional arguments"),
]


def define(app: App, function: Callable[..., Any]) -> Any:
    return app.task(bind=True)(function) if "bound" in function.__name__ else app.task(function)


@pytest.mark.parametrize(("function", "given"), FITS)
def test_a_call_that_fits_is_sent(app: App, function: Callable[..., Any], given: Call) -> None:
    args, kwargs = given
    with app.eager():
        assert define(app, function).delay(*args, **kwargs).successful()


@pytest.mark.parametrize(("function", "given", "problem"), DOES_NOT_FIT)
def test_a_call_that_does_not_fit_is_refused(
    app: App, function: Callable[..., Any], given: Call, problem: str
) -> None:
    args, kwargs = given
    task = define(app, function)
    sent: list[str] = []
    app.signals.before_task_publish.connect(lambda **context: sent.append(context["task"]))
    with app.eager(), pytest.raises(TypeError) as caught:
        task.delay(*args, **kwargs)
    assert str(caught.value).startswith(f"cannot send {task.name}(")
    assert problem in str(caught.value)
    assert sent == []


def test_the_refusal_shows_the_signature_that_callers_see(app: App) -> None:
    with pytest.raises(TypeError, match=r"cannot send .*\.bound\(a: int\) -> None|\.bound\(a: int\)"):
        define(app, bound).delay()


def test_a_signature_is_checked_when_it_is_sent_not_when_it_is_made(app: App) -> None:
    task = define(app, plain)
    part = task.s(2)
    with app.eager():
        assert part.delay(1).successful()
        with pytest.raises(TypeError, match="missing a required argument"):
            part.delay()


def test_a_task_sent_by_name_is_not_checked_by_the_sender(app: App) -> None:
    define(app, plain)
    with app.eager():
        assert app.send_task("no.such", [1, 2, 3]).failed()
