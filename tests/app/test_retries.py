from time import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from umbel import App, Retry, Task
from umbel.app.options import SendOptions
from umbel.app.running.tracer import Tracer
from umbel.errors import MaxRetriesExceeded
from umbel.pools.interface import Job
from umbel.wire.call import decode_task
from umbel.wire.message import Outgoing


class Unreachable(ConnectionError):
    pass


def watch_retries(app: App) -> list[tuple[str, float]]:
    """(exception, seconds until the next attempt) of each retry, as the signal tells them."""
    seen: list[tuple[str, float]] = []

    @app.signals.task_retry.connect
    def note(**context: Any) -> None:
        seen.append((type(context["error"]).__name__, context["due"]))

    return seen


def test_a_task_may_try_again_until_it_succeeds(app: App) -> None:
    attempts: list[tuple[str, int, str | None]] = []

    @app.task(bind=True)
    def fetch(self: Task[..., Any]) -> str:
        attempts.append((self.request.id, self.request.retries, self.request.parent_id))
        if self.request.retries < 2:
            self.retry(Unreachable("host"), countdown=60)
        return "fetched"

    with app.eager():
        result = fetch.apply_async(task_id="t")
        assert result.get() == "fetched"
    # The same id, one retry further each time, and from the second on its own parent.
    assert attempts == [("t", 0, None), ("t", 1, "t"), ("t", 2, "t")]


def test_between_attempts_the_state_is_retry_with_the_reason(app: App) -> None:
    seen: list[tuple[str, str]] = []

    @app.task(bind=True)
    def fetch(self: Task[..., Any]) -> None:
        if self.request.retries:
            mine = self.app.AsyncResult(self.request.id)
            seen.append((mine.state, repr(mine.result)))
        else:
            self.retry(Unreachable("host"))

    with app.eager():
        fetch.delay()
    assert seen == [("RETRY", "Unreachable('host')")]


def test_a_task_that_retried_too_often_fails_with_the_last_reason(app: App) -> None:
    runs: list[int] = []

    @app.task(bind=True, max_retries=2)
    def fetch(self: Task[..., Any]) -> None:
        runs.append(self.request.retries)
        self.retry(Unreachable("host"))

    with app.eager(), pytest.raises(Unreachable, match="host"):
        fetch.delay().get()
    assert runs == [0, 1, 2]


def test_without_a_reason_it_fails_for_having_retried_too_often(app: App) -> None:
    @app.task(bind=True, max_retries=1)
    def fetch(self: Task[..., Any]) -> None:
        self.retry()

    with app.eager(), pytest.raises(MaxRetriesExceeded, match="failed after 1 retries"):
        fetch.apply_async(task_id="t").get()


def test_the_call_of_retry_may_set_another_limit(app: App) -> None:
    runs: list[int] = []

    @app.task(bind=True, max_retries=1)
    def fetch(self: Task[..., Any]) -> None:
        runs.append(1)
        self.retry(max_retries=4)

    with app.eager():
        assert fetch.delay().failed()
    assert len(runs) == 5


def test_a_sender_may_say_how_often_it_was_tried_already(app: App) -> None:
    @app.task(bind=True, max_retries=3)
    def fetch(self: Task[..., Any]) -> int:
        return self.request.retries

    with app.eager():
        assert fetch.apply_async(retries=2).get() == 2


def test_retrying_a_plain_call_raises_the_reason(app: App) -> None:
    @app.task(bind=True)
    def fetch(self: Task[..., Any]) -> None:
        self.retry(Unreachable("host"))

    with pytest.raises(Unreachable):
        fetch()


def test_named_exceptions_are_retried_by_themselves(app: App) -> None:
    runs: list[int] = []
    seen = watch_retries(app)

    @app.task(autoretry_for=(ConnectionError,), max_retries=3)
    def fetch() -> int:
        runs.append(1)
        if len(runs) < 3:
            raise Unreachable("host")
        return len(runs)

    with app.eager():
        assert fetch.delay().get() == 3
    assert [name for name, _ in seen] == ["Unreachable", "Unreachable"]


def test_other_exceptions_are_not(app: App) -> None:
    runs: list[int] = []

    @app.task(autoretry_for=(ConnectionError,))
    def fetch() -> None:
        runs.append(1)
        raise ValueError

    with app.eager():
        assert fetch.delay().failed()
    assert len(runs) == 1


def test_named_exceptions_too_are_retried_only_so_often(app: App) -> None:
    runs: list[int] = []

    @app.task(autoretry_for=(Unreachable,), max_retries=2)
    def fetch() -> None:
        runs.append(1)
        raise Unreachable("host")

    with app.eager(), pytest.raises(Unreachable):
        fetch.delay().get()
    assert len(runs) == 3


def test_backoff_doubles_the_wait_up_to_its_ceiling(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.app.running.tracer.cluster_now", lambda: 1000.0)
    seen = watch_retries(app)

    @app.task(
        autoretry_for=(Unreachable,),
        max_retries=5,
        retry_backoff=2,
        retry_backoff_max=20,
        retry_jitter=False,
    )
    def fetch() -> None:
        raise Unreachable

    with app.eager():
        fetch.delay()
    assert [due - 1000.0 for _, due in seen] == [2.0, 4.0, 8.0, 16.0, 20.0]


def test_the_wait_and_the_moment_can_be_named(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.app.task.cluster_now", lambda: 1000.0)
    seen = watch_retries(app)

    @app.task(bind=True, default_retry_delay=7)
    def fetch(self: Task[..., Any]) -> None:
        how: list[dict[str, Any]] = [{}, {"countdown": 5}, {"eta": "2030-01-01T00:00:00Z"}]
        if self.request.retries < len(how):
            self.retry(**how[self.request.retries])

    with app.eager():
        assert fetch.delay().successful()
    assert [due for _, due in seen] == [1007.0, 1005.0, 1893456000.0]


def test_a_retry_raised_by_hand_keeps_to_the_tasks_limit_and_delay(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.app.running.tracer.cluster_now", lambda: 1000.0)
    seen = watch_retries(app)

    @app.task(max_retries=2, default_retry_delay=30)
    def fetch() -> None:
        raise Retry("later")

    with app.eager(), pytest.raises(MaxRetriesExceeded):
        fetch.delay().get()
    assert [due for _, due in seen] == [1030.0, 1030.0]


def test_a_retry_keeps_arguments_callbacks_and_headers(app: App) -> None:
    noted: list[Any] = []

    @app.task
    def note(value: Any) -> None:
        noted.append(value)

    @app.task(bind=True)
    def fetch(self: Task[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.request.retries:
            self.retry()
        return [args, kwargs, self.request.headers, self.request.root_id]

    with app.eager():
        fetch.apply_async((1,), {"b": 2}, headers={"tenant": 7}, link=note.s(), task_id="t", root_id="r")
    assert noted == [[[1], {"b": 2}, {"tenant": 7}, "r"]]


def test_ignored_results_are_ignored_for_retries_too(app: App) -> None:
    @app.task(bind=True, ignore_result=True)
    def fetch(self: Task[..., Any]) -> None:
        if not self.request.retries:
            self.retry()
        raise ValueError

    with app.eager():
        assert fetch.delay().state == "PENDING"


def attempt_after(app: App, task: Task[..., Any], *args: Any, **options: Any) -> Outgoing:
    """Run the task as a child does, once: what is sent for its next attempt."""
    sent = app.prepare(task.name, args, {}, cast(SendOptions, options)).outgoing
    tracer = Tracer(app, hostname="w@host")
    try:
        outcome = tracer(Job(1, task.name, sent.message.correlation_id, sent.queue, sent.message))
    finally:
        tracer.close()
    assert outcome.kind == "retry", outcome.summary
    (again,) = outcome.follow_ups
    return again


def test_a_retry_may_go_elsewhere_with_other_arguments_and_options(app: App) -> None:
    @app.task(bind=True)
    def fetch(self: Task[..., Any], url: str) -> None:
        self.retry(args=["b"], queue="slow", priority=7, countdown=60, expires=3600, time_limit=9)

    link = app.signature("note")
    again = attempt_after(app, fetch, "a", task_id="t", root_id="r", headers={"tenant": 7}, link=link)
    assert again.queue == "slow"
    assert 0 < again.not_before - time() <= 60
    call = decode_task(again.message)
    assert (call.args, call.priority, call.extra) == (["b"], 7, {"tenant": 7})
    headers = call.headers
    assert (headers.id, headers.root_id, headers.parent_id, headers.retries) == ("t", "r", "t", 1)
    assert (headers.timelimit, headers.argsrepr) == ((9, None), "('b',)")
    assert headers.expires is not None
    assert call.embed.callbacks is not None
    assert call.embed.callbacks[0]["task"] == "note"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "queue": st.just("slow"),
            "priority": st.integers(0, 9),
            "headers": st.just({"tenant": 7}),
            "shadow": st.just("other"),
            "expires": st.just("2030-01-01T00:00:00+00:00"),
            "soft_time_limit": st.just(3),
            "ignore_result": st.booleans(),
            "group_id": st.just("g"),
            "group_index": st.just(2),
            "retries": st.just(1),
            "reply_to": st.just("me"),
        },
    )
)
def test_a_retry_that_changes_one_thing_keeps_all_others(options: dict[str, Any]) -> None:
    app = App("tests", broker="sqlite:////nowhere/retries.db")

    @app.task(bind=True)
    def fetch(self: Task[..., Any], changed: bool) -> None:
        self.retry(countdown=5, args=[True] if changed else None)

    plain, changed = (attempt_after(app, fetch, flag, task_id="t", **options) for flag in (False, True))
    assert changed.queue == plain.queue
    differ = {"argsrepr": "", "eta": None, "origin": ""}
    one, other = (replace(decode_task(sent.message), args=[]) for sent in (plain, changed))
    assert replace(one, headers=replace(one.headers, **differ)) == replace(
        other, headers=replace(other.headers, **differ)
    )


def test_what_a_retry_cannot_send_is_refused_in_the_task(app: App) -> None:
    @app.task(bind=True)
    def fetch(self: Task[..., Any], how: dict[str, Any]) -> str:
        try:
            self.retry(**how)
        except (TypeError, ValueError) as error:
            return str(error)

    wrong: list[dict[str, Any]] = [
        {"quuee": "slow"},
        {"args": []},
        {"priority": 12},
        {"time_limit": "long"},
    ]
    with app.eager():
        said = [fetch.delay(how).get() for how in wrong]
    assert "did you mean 'queue'" in said[0]
    assert "missing a required argument" in said[1]
    assert "priority 12" in said[2]
    assert "time_limit" in said[3]
