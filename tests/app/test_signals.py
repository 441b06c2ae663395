import logging
from typing import Any

import pytest

from umbel import App, Task
from umbel.app.signals import Signal, Signals
from umbel.pools.interface import ChildContext


def watch(app: App) -> list[tuple[str, dict[str, Any]]]:
    """Every signal as it is sent, in order."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def connect(signal: Signal) -> None:
        signal.connect(lambda **context: seen.append((signal.name, context)))

    for signal in vars(app.signals).values():
        connect(signal)
    return seen


def test_a_receiver_is_connected_by_decorating_it_and_can_be_disconnected() -> None:
    signal, heard = Signal("s"), list[int]()

    @signal.connect
    def hear(**context: Any) -> None:
        heard.append(context["number"])

    assert signal.receivers
    signal.send(number=1)
    signal.disconnect(hear)
    signal.disconnect(hear)
    signal.send(number=2)
    assert heard == [1]
    assert not signal.receivers


def test_a_receiver_that_raises_is_logged_and_the_others_still_hear(caplog: pytest.LogCaptureFixture) -> None:
    signal, heard = Signal("s"), list[int]()

    @signal.connect
    def broken(**context: Any) -> None:
        raise RuntimeError("broken receiver")

    signal.connect(lambda **context: heard.append(1))
    with caplog.at_level(logging.ERROR):
        signal.send()
    assert heard == [1]
    assert [record.message for record in caplog.records] == ["signal receiver raised an exception"]


def test_each_app_has_signals_of_its_own_named_as_they_are_reached() -> None:
    assert all(name == signal.name for name, signal in vars(Signals()).items())


def test_a_task_that_succeeds_is_told_from_publishing_to_its_end(app: App) -> None:
    seen = watch(app)

    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    with app.eager():
        add.apply_async((1,), {"b": 2}, task_id="t", queue="q")
    assert [name for name, _ in seen] == [
        "before_task_publish",
        "task_prerun",
        "task_success",
        "task_postrun",
        "after_task_publish",  # eager mode runs it while it publishes
    ]
    told = dict(seen)
    assert told["before_task_publish"] == {
        "task": add.name,
        "task_id": "t",
        "args": (1,),
        "kwargs": {"b": 2},
        "queue": "q",
        "headers": {},
    }
    assert told["after_task_publish"] == {"task": add.name, "task_id": "t", "queue": "q"}
    assert told["task_prerun"] == {"task": add, "task_id": "t", "args": [1], "kwargs": {"b": 2}}
    assert told["task_success"] == {"task": add, "task_id": "t", "result": 3}
    assert told["task_postrun"] == told["task_prerun"] | {"state": "success", "value": 3}


def test_a_task_that_fails_is_told_with_its_error(app: App) -> None:
    seen = watch(app)

    @app.task
    def fail() -> None:
        raise ValueError("why")

    with app.eager():
        fail.delay()
    told = dict(seen)
    assert "task_success" not in told
    assert repr(told["task_failure"]["error"]) == "ValueError('why')"
    assert "ValueError: why" in told["task_failure"]["traceback"]
    assert told["task_postrun"]["state"] == "failure"


def test_who_hears_of_a_call_may_add_headers_to_its_message(app: App) -> None:
    @app.task(bind=True)
    def tenant(self: Task[..., Any]) -> Any:
        return self.request.headers

    app.signals.before_task_publish.connect(lambda headers, **_: headers.setdefault("tenant", "blue"))
    with app.eager():
        assert tenant.delay().get() == {"tenant": "blue"}
        assert tenant.apply_async(headers={"tenant": "red"}).get() == {"tenant": "red"}


def test_a_failure_is_told_with_its_arguments_but_for_the_sensitive_ones(app: App) -> None:
    seen = watch(app)

    @app.task(sensitive=("password",))
    def login(user: str, password: str, *, tries: int) -> None:
        raise PermissionError(password)

    with app.eager():
        login.delay("ann", "hunter-two", tries=3)
    told = dict(seen)["task_failure"]
    assert (told["args"], told["kwargs"]) == (["ann", "***"], {"tries": 3})
    assert "hunter" not in told["traceback"]


def test_a_retry_is_told_before_the_next_attempt(app: App) -> None:
    seen = watch(app)

    @app.task(bind=True)
    def fetch(self: Task[..., Any]) -> None:
        if not self.request.retries:
            self.retry(ConnectionError("host"), eta=1893456000)

    with app.eager():
        fetch.delay()
    of_tasks = [name for name, _ in seen if not name.endswith("publish")]
    assert of_tasks == [
        "task_prerun",
        "task_retry",
        "task_postrun",
        "task_prerun",
        "task_success",
        "task_postrun",
    ]
    assert (repr(dict(seen)["task_retry"]["error"]), dict(seen)["task_retry"]["due"]) == (
        "ConnectionError('host')",
        1893456000,
    )


def test_a_child_is_told_when_it_starts_and_before_it_ends(app: App) -> None:
    seen = watch(app)
    app.start_child(ChildContext("w@host", 3))
    app.stop_child()
    assert seen == [
        ("worker_process_init", {"node": "w@host", "child": 3}),
        ("worker_process_shutdown", {"node": "w@host"}),
    ]
