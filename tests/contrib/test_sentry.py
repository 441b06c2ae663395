import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from umbel import App, Task
from umbel.contrib.sentry import instrument

DSN = "https://key@sentry.test/1"
Told = Callable[[], list[dict[str, Any]]]


class ToFile(Transport):
    """Writes what would leave, as it would leave."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def capture_envelope(self, envelope: Envelope) -> None:
        with self._path.open("ab") as file:
            for item in envelope.items:
                file.write(item.get_bytes() + b"\n")


@pytest.fixture
def told(app: App, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Told]:
    with_logs = bool(getattr(request, "param", False))
    file = tmp_path / "sentry.jsonl"
    file.touch()
    with sentry_sdk.isolation_scope():
        sentry_sdk.init(dsn=DSN, transport=ToFile(file), release="test", enable_logs=with_logs)
        instrument(app)
        instrument(app)  # a second time changes nothing
        client = sentry_sdk.get_client()
        yield lambda: [json.loads(line) for line in file.read_text().splitlines()]
        client.close()  # ends its threads, which draw from the `random` that hypothesis watches
        sentry_sdk.init()


def test_a_failure_is_told_with_its_task_and_its_arguments(app: App, told: Told) -> None:
    @app.task(name="t.divide")
    def divide(a: int, b: int) -> float:
        return a / b

    with app.eager():
        failed = divide.delay(1, 0)
        divide.delay(1, 1)
    (event,) = told()
    (error,) = event["exception"]["values"]
    assert (error["type"], error["mechanism"]) == ("ZeroDivisionError", {"type": "umbel", "handled": False})
    assert event["transaction"] == "t.divide"
    node = "eager@localhost"
    assert event["tags"] == {"umbel.task": "t.divide", "umbel.task_id": failed.id, "umbel.node": node}
    assert event["extra"]["umbel-task"] == {
        "task": "t.divide",
        "id": failed.id,
        "args": [1, 0],
        "kwargs": {},
    }


def test_sensitive_arguments_never_leave(app: App, told: Told) -> None:
    @app.task(name="t.login", sensitive=("password",))
    def login(user: str, password: str) -> None:
        copied = password * 2
        logging.getLogger("t").warning("trying %s", password)  # Sentry keeps log lines as breadcrumbs
        logging.getLogger("t").error("refused %s", password)  # and makes an event of an error
        sentry_sdk.capture_message(f"note {password}")
        raise PermissionError(f"no entry for {user} with {copied}")

    with app.eager():
        login.delay("ann", "hunter-two")
    events = told()
    assert [one.get("message") or one.get("logentry", {}).get("message") for one in events] == [
        "refused %s",
        "note ***",
        None,
    ]
    assert "hunter" not in json.dumps(events)
    failure = events[-1]
    assert failure["extra"]["umbel-task"]["args"] == ["ann", "***"]
    (error,) = failure["exception"]["values"]
    assert error["value"] == "no entry for ann with ******"
    assert not [one for one in error["stacktrace"]["frames"] if "vars" in one]


def test_what_reads_like_a_secret_never_leaves(app: App, told: Told) -> None:
    @app.task(name="t.call")
    def call(url: str, options: dict[str, Any]) -> None:
        password = options["password"]
        logging.getLogger("t").warning("PIN 493021 of %s", options)
        logging.getLogger("t").warning("trying %s", "with password hunter2", extra={"api_key": "hunter2"})
        raise PermissionError(f"no entry with Bearer hunter2-493021 at {url}: password is {password}")

    with app.eager():
        call.delay("https://ann:hunter2@shop.example", options={"password": "hunter2", "limit": 3})
    sentry_sdk.flush()
    events = told()
    assert '"trying with password ***"' in json.dumps(events)  # a log line
    failure = next(event for event in events if "exception" in event)
    assert "hunter2" not in json.dumps(events) and "493021" not in json.dumps(events)
    (error,) = failure["exception"]["values"]
    assert error["value"] == "no entry with Bearer *** at https://ann:***@shop.example: password is ***"
    assert failure["extra"]["umbel-task"]["kwargs"] == {"options": {"password": "***", "limit": 3}}
    (frame, *_) = [frame for frame in error["stacktrace"]["frames"] if frame["function"] == "call"]
    assert frame["vars"]["password"] in {"***", "[Filtered]"} and frame["vars"]["options"]["limit"] == "3"


@pytest.mark.parametrize("word", ["exception", "event_id", "values", "trace", "umbel", "task"])
def test_a_secret_that_is_a_word_of_sentrys_protocol_costs_no_event(app: App, told: Told, word: str) -> None:
    @app.task(name="t.login", sensitive=("password",))
    def login(password: str) -> None:
        sentry_sdk.set_tag(f"tried-{password}", "yes")
        sentry_sdk.set_context("form", {f"field-{password}": {"typed": password}})
        sentry_sdk.set_extra("seen", [{f"in-{password}": 1}])
        raise PermissionError(f"not {password}")

    with app.eager():
        failed = login.delay(word)
    (event,) = told()
    (error,) = event["exception"]["values"]
    assert (error["type"], error["value"]) == ("PermissionError", "not ***")
    assert (event["tags"]["umbel.task"], event["tags"]["umbel.task_id"]) == ("t.login", failed.id)
    assert event["tags"]["tried-***"] == "yes"
    assert event["contexts"]["form"] == {"field-***": {"typed": "***"}}
    assert event["extra"]["seen"] == [{"in-***": 1}]
    assert event["extra"]["umbel-task"]["id"] == failed.id and event["contexts"]["trace"]["trace_id"]


def test_where_everything_is_secret_the_kind_of_the_error_and_its_task_are_told(app: App, told: Told) -> None:
    @app.task(name="t.login", sensitive=("passwords",))
    def login(passwords: list[str]) -> None:
        sentry_sdk.capture_message(f"note {passwords[-1]}")
        raise PermissionError(f"not {passwords[-1]}")

    with app.eager():
        failed = login.delay([f"secret-{number}" for number in range(5000)])
    note, event = told()
    assert "secret-" not in json.dumps([note, event])
    assert (note["message"], note["tags"]["umbel.task_id"]) == ("***", failed.id)
    (error,) = event["exception"]["values"]
    assert (error["type"], error["value"]) == ("PermissionError", "***")
    assert event["extra"]["umbel-task"] == {"task": "t.login", "id": failed.id}


def test_a_task_that_runs_another_here_keeps_its_scope_and_no_longer(app: App, told: Told) -> None:
    @app.task(name="t.inner", sensitive=("password",))
    def inner(password: str) -> None:
        sentry_sdk.set_tag("inner", "yes")

    @app.task(name="t.outer")
    def outer() -> None:
        inner.apply(["hunter-two"])
        sentry_sdk.capture_message("of outer")

    before = sentry_sdk.get_isolation_scope()
    with app.eager():
        outer.delay()
    assert sentry_sdk.get_isolation_scope() is before
    (event,) = told()
    assert event["tags"]["umbel.task"] == "t.outer" and "inner" not in event["tags"]


@pytest.mark.parametrize("told", [True], indirect=True, ids=["with logs"])
def test_sensitive_arguments_leave_by_no_log_line_and_no_metric(app: App, told: Told) -> None:
    heard: list[str] = []

    def before_send_log(log: dict[str, Any], _hint: Any) -> dict[str, Any]:
        heard.append(log["body"])
        return log

    sentry_sdk.get_client().options["before_send_log"] = before_send_log

    @app.task(name="t.login", sensitive=("password",))
    def login(user: str, password: str) -> None:
        logging.getLogger("t").warning("trying %s for %s", password, user, extra={"given": password})
        inner.apply([password])
        sentry_sdk.metrics.count("logins", 1, attributes={"by": password})

    @app.task(name="t.inner")
    def inner(text: str) -> None:
        logging.getLogger("t").warning("inner %s", text)

    with app.eager():
        login.delay("ann", "hunter-two")
        login.delay("bob", "hunter-two")
    sentry_sdk.flush()
    left = json.dumps(told())
    assert "hunter" not in left and "logins" in left
    assert heard == ["trying *** for ann", "inner ***", "trying *** for bob", "inner ***"]


def test_arguments_can_be_left_out(tmp_path: Path, told: Told) -> None:
    app = App("other", broker=f"sqlite:///{tmp_path}/umbel.db")
    instrument(app, arguments=False)

    @app.task(name="t.fail")
    def fail(number: int) -> None:
        raise ValueError("why")

    with app.eager():
        failed = fail.delay(1)
    assert told()[0]["extra"]["umbel-task"] == {"task": "t.fail", "id": failed.id}


def test_nothing_of_one_task_shows_in_the_event_of_another(app: App, told: Told) -> None:
    @app.task(name="t.noisy")
    def noisy() -> None:
        sentry_sdk.set_tag("customer", "ann")
        logging.getLogger("t").warning("of the first")

    @app.task(name="t.fail")
    def fail() -> None:
        raise ValueError("why")

    with app.eager():
        noisy.delay()
        fail.delay()
    (event,) = told()
    assert "customer" not in event["tags"]
    assert "of the first" not in json.dumps(event.get("breadcrumbs"))


def test_an_expected_failure_is_not_told(app: App, told: Told) -> None:
    @app.task(name="t.expected", throws=(LookupError,))
    def expected() -> None:
        raise KeyError("as foreseen")

    with app.eager():
        expected.delay()
    assert told() == []


def test_the_run_of_a_slot_is_a_check_in_whatever_its_attempts(app: App, told: Told) -> None:
    @app.periodic(cron="5 4 * * *", tz="Europe/Vienna", name="Nightly Report")
    @app.task(name="t.report", bind=True)
    def report(self: Task[..., Any]) -> None:
        if self.request.retries == 0:
            raise self.retry(exc=KeyError("not yet"), countdown=0)

    @app.periodic(every=300)
    @app.task(name="t.broken", throws=(LookupError,))
    def broken() -> None:
        raise KeyError("as ever")

    with app.eager():
        report.delay()  # by hand: no check-in
        for entry in app.periodic_tasks:
            app.eager_runner.run(entry.messages(1_800_000_000_000_000))  # type: ignore[union-attr]
    said = [(one["monitor_slug"], one["status"]) for one in told()]
    assert said == [
        ("nightly-report", "in_progress"),
        ("nightly-report", "ok"),
        ("t-broken", "in_progress"),
        ("t-broken", "error"),
    ]
    begun, ended, first, last = told()
    assert begun["check_in_id"] == ended["check_in_id"] != first["check_in_id"] == last["check_in_id"]
    assert begun["monitor_config"] == {
        "schedule": {"type": "crontab", "value": "5 4 * * *"},
        "timezone": "Europe/Vienna",
    }
    assert first["monitor_config"] == {"schedule": {"type": "interval", "value": 5, "unit": "minute"}}
