"""`sensitive=` arguments: what they hold stands in no text that leaves the processes it is meant for."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from umbel import App, Reject, Task
from umbel.app.options import sensitive_of
from umbel.app.running.tracer import Tracer, traceback_text
from umbel.app.task import Parameters
from umbel.brokers.interface import Delivery
from umbel.errors import ConfigurationError
from umbel.pools.interface import Job, Outcome, UserEvent
from umbel.protocol.delivery.sensitive import HIDDEN, MASK, Secrets, Sensitive
from umbel.wire.call import read_headers
from umbel.wire.message import Message
from umbel.wire.result import decode_result
from umbel.worker.delivery.admit import arrival_of
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.remote.view import shown_arguments

ALPHABET = st.characters(codec="utf-8", exclude_characters="*")
SECRETS = st.text(ALPHABET, min_size=4, max_size=3000)


def made_app(told: list[UserEvent]) -> tuple[App, Tracer]:
    app = App("shop", broker="sqlite:////never/opened.db", result_extended=True)

    @app.task(name="log-in", bind=True, sensitive=("password", "card"))
    def log_in(self: Task[..., Any], user: str, password: Any, how: str = "", *, card: Any = None) -> Any:
        if how == "raise":
            raise ValueError(f"{user} cannot log in with {password}")
        if how == "repr":
            raise KeyError(password, [card], {"card": card})
        if how == "chained":
            try:
                raise OSError(f"no such key: {password!r}")
            except OSError as error:
                raise RuntimeError("it failed") from error
        if how == "reject":
            raise Reject(f"not {password}")
        if how == "retry":
            self.retry(ValueError(password), countdown=1)
        if how == "again":
            self.retry(args=(user, password, "again"), countdown=1)
        if how == "tell":
            self.send_event("task-seen", what=str(password), deep=[{"card": card}])
        return {"session": password, "card": card}

    return app, Tracer(app, hostname="w@host", send_event=told.append)


def outward(outcome: Outcome, told: list[UserEvent]) -> Iterator[str]:
    """Every text that is for people, not for the caller."""
    yield outcome.summary
    yield outcome.traceback
    for one in outcome.results:
        found = decode_result(one.payload)
        yield found.traceback or ""
        if found.status != "SUCCESS":
            yield str(found.result)
        raw = msgspec.json.decode(one.payload)
        yield str([raw.get("args"), raw.get("kwargs")])
    for follow_up in outcome.follow_ups:
        headers = read_headers(follow_up.message)
        yield headers.argsrepr + headers.kwargsrepr
    for event in told:
        yield str(msgspec.json.decode(event.fields))


def held_of(app: App, message: Message) -> Claimed:
    delivery = Delivery("t", "q", message)
    headers = read_headers(message)
    held = Claimed(1, delivery, message, headers, arrival_of(delivery, headers))
    held.hides = app.tasks["log-in"].options.hides
    return held


@given(
    SECRETS,
    st.sampled_from(["", "raise", "repr", "chained", "reject", "retry", "again", "tell"]),
    st.booleans(),
)
@example('it\'s\n a "secret"\\', "repr", True)
@example("x" * 2000, "", False)
def test_a_secret_never_stands_in_an_outward_text(secret: str, how: str, by_celery: bool) -> None:
    secret = f"#{secret}"  # so that no text of ours has it by chance
    assume(len(secret.strip()) >= 4)
    told: list[UserEvent] = []
    app, tracer = made_app(told)
    card = {"number": secret}
    message = app.prepare("log-in", ["bob", secret, how], {"card": card}, {"task_id": "t"}).outgoing.message
    texts = [message.headers.decode()]
    if by_celery:  # its clients show everything
        shown = {"task": "log-in", "id": "t", "argsrepr": repr(secret), "kwargsrepr": repr(secret)}
        message = msgspec.structs.replace(message, headers=msgspec.json.encode(shown))
    held = held_of(app, message)
    texts += [
        *held.shown,
        *map(str, shown_arguments(held, safe=False)),
        *map(str, shown_arguments(held, safe=True)),
    ]
    outcome = tracer(Job(7, "log-in", "t", "q", message))
    texts += outward(outcome, told)
    tracer.close()
    texts.append(repr(app.tasks["log-in"].s("bob", secret, card=card)))
    assert outcome.kind in ("success", "failure", "retry", "rejected")
    forms = {secret, repr(secret)[1:-1], secret[:16] if len(secret) > 16 else secret}
    for text in texts:
        assert not any(form in text for form in forms), text


def test_what_is_not_sensitive_is_shown_and_the_task_gets_it_all() -> None:
    app, tracer = made_app([])
    message = app.prepare("log-in", ["bob", "hunter22"], {}, {"task_id": "t"}).outgoing.message
    assert read_headers(message).argsrepr == "('bob', ***)"
    outcome = tracer(Job(7, "log-in", "t", "q", message))
    assert outcome.summary == "{'session': '***', 'card': None}"
    result = decode_result(outcome.results[0].payload).result
    assert result == {"session": "hunter22", "card": None}  # the caller's own
    tracer.close()


def test_a_parameter_that_does_not_exist_cannot_be_sensitive() -> None:
    app = App("shop", broker="sqlite:////never/opened.db")
    with pytest.raises(ConfigurationError, match="did you mean 'password'"):

        @app.task(sensitive=("pasword",))
        def log_in(user: str, password: str) -> None: ...


def test_parameters_are_found_however_they_are_given() -> None:
    def function(a: int, b: int, /, c: int, *rest: int, d: int, **more: int) -> None: ...

    parameters = Parameters("t", function)

    def hidden(*names: str) -> tuple[list[Any], dict[str, Any]]:
        found = sensitive_of(names, parameters)
        assert found is not None
        return found.hide([1, 2, 3, 4, 5], {"d": 6, "e": 7})

    assert hidden("b", "d") == ([1, HIDDEN, 3, 4, 5], {"d": HIDDEN, "e": 7})
    assert hidden("rest") == ([1, 2, 3, HIDDEN, HIDDEN], {"d": 6, "e": 7})
    assert hidden("more") == ([1, 2, 3, 4, 5], {"d": 6, "e": HIDDEN})
    assert hidden("e") == ([1, 2, 3, 4, 5], {"d": 6, "e": HIDDEN})


def test_the_beginning_of_a_long_secret_is_struck_out_too() -> None:
    secret = "0123456789abcdefghijklmnopqrstuvwxyz"
    secrets = Secrets([secret])
    assert secrets.strike(f"<{secret[:20]}...> {secret} {secret[:5]}") == f"<{MASK}...> {MASK} {secret[:5]}"


def test_what_holds_more_than_anyone_looks_at_makes_the_whole_text_secret() -> None:
    assert Secrets([list(range(10_000, 20_000))]).strike("anything") == MASK


@given(st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_plain_data_stays_plain(data: Any) -> None:
    assert Secrets([]).strike_all(data) == data


def test_sensitive_is_nothing_without_names() -> None:
    assert sensitive_of((), Parameters("t", print)) is None
    assert Sensitive(frozenset({"a"})).hide([1], {"a": 2}) == ([1], {"a": HIDDEN})


def test_a_long_traceback_is_cut_at_its_bytes_and_keeps_its_end() -> None:
    try:
        raise ValueError("ü" * 5000 + "the end")
    except ValueError as error:
        text = traceback_text(error, max_bytes=1024)
    assert len(text.encode()) <= 1024
    assert text.startswith("…")
    assert text.endswith("the end\n")


def test_our_own_frames_are_left_out_of_causes_too(app: App) -> None:
    @app.task(bind=True)
    def fail(self: Task[..., Any]) -> None:
        try:
            self.retry("not an exception", countdown="soon")  # type: ignore[arg-type]
        except TypeError as error:
            raise RuntimeError("it failed") from error

    message = app.prepare(fail.name, [], {}, {"task_id": "t"}).outgoing.message
    outcome = Tracer(app, hostname="w@host")(Job(7, fail.name, "t", "q", message))
    assert outcome.kind == "failure"
    assert "call_guarded" not in outcome.traceback
    assert "test_sensitive.py" in outcome.traceback
