"""From a call to its message: every option as it stands on the wire."""

import os
import re
import socket
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import RFC_4122, UUID

import msgspec
import pytest

from umbel import App
from umbel.app.options import NAMES_MAX
from umbel.app.request import Request
from umbel.app.sending.preparation import Prepared, new_id
from umbel.errors import BadValue, TooLarge
from umbel.wire.call import decode_task
from umbel.wire.show import brief

NOW = 1_750_000_000.25  # 2025-06-15T15:06:40.250000+00:00


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.app.sending.preparation.cluster_now", lambda: NOW)


def prepared(app: App, *args: Any, sender: Request | None = None, **options: Any) -> Prepared:
    kwargs = options.pop("kwargs", {})
    return app.prepare("shop.pack", args, kwargs, options, sender=sender)  # type: ignore[arg-type]


def headers_of(one: Prepared) -> dict[str, Any]:
    headers: dict[str, Any] = msgspec.json.decode(one.outgoing.message.headers)
    return headers


def test_a_plain_call_states_what_every_v2_message_states(app: App) -> None:
    one = prepared(app, 1, kwargs={"b": 2}, task_id="t")
    message = one.outgoing.message
    assert msgspec.json.decode(message.body) == [
        [1],
        {"b": 2},
        {"callbacks": None, "errbacks": None, "chain": None, "chord": None},
    ]
    assert headers_of(one) == {
        "lang": "py",
        "task": "shop.pack",
        "id": "t",
        "shadow": None,
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": "t",
        "parent_id": None,
        "argsrepr": "(1,)",
        "kwargsrepr": "{'b': 2}",
        "origin": f"gen{os.getpid()}@{socket.gethostname()}",
        "ignore_result": False,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
    }
    assert (message.correlation_id, message.priority, message.expiration_ms) == ("t", 0, None)
    assert (one.outgoing.queue, one.outgoing.not_before) == ("celery", 0.0)


def test_each_call_has_an_id_of_its_own(app: App) -> None:
    ids = {prepared(app).task_id for _ in range(100)}
    assert len(ids) == 100


def test_an_id_has_the_form_of_a_random_uuid() -> None:
    for _ in range(100):
        made = new_id()
        assert str(UUID(made)) == made
        assert (UUID(made).version, UUID(made).variant) == (4, RFC_4122)


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "due", "text"),
    [
        ({"countdown": 10}, NOW + 10, "2025-06-15T15:06:50.250000+00:00"),
        ({"countdown": 0}, NOW, "2025-06-15T15:06:40.250000+00:00"),
        ({"eta": datetime(2030, 1, 1, tzinfo=UTC)}, 1893456000.0, "2030-01-01T00:00:00.000000+00:00"),
        (
            {"eta": datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=2)))},
            1893448800.0,
            "2029-12-31T22:00:00.000000+00:00",
        ),
        ({"eta": datetime(2030, 1, 1)}, 1893456000.0, "2030-01-01T00:00:00.000000+00:00"),  # noqa: DTZ001
        ({"eta": "2030-01-01T01:00:00+01:00"}, 1893456000.0, "2030-01-01T00:00:00.000000+00:00"),
        ({"eta": 1893456000}, 1893456000.0, "2030-01-01T00:00:00.000000+00:00"),
        ({"countdown": 10, "eta": 1893456000}, NOW + 10, "2025-06-15T15:06:50.250000+00:00"),
        ({"countdown": None, "eta": None}, 0.0, None),
    ],
)
def test_a_delay_is_written_as_a_moment_and_given_to_the_broker(
    app: App, options: dict[str, Any], due: float, text: str | None
) -> None:
    one = prepared(app, **options)
    assert (one.outgoing.not_before, headers_of(one)["eta"]) == (due, text)


@pytest.mark.parametrize(
    ("expires", "text", "milliseconds"),
    [
        (60, "2025-06-15T15:07:40.250000+00:00", 60_000),
        (0.5, "2025-06-15T15:06:40.750000+00:00", 500),
        (datetime(2025, 6, 15, 15, 6, 41, tzinfo=UTC), "2025-06-15T15:06:41.000000+00:00", 750),
        ("2025-06-15T15:06:41Z", "2025-06-15T15:06:41.000000+00:00", 750),
        (-5, "2025-06-15T15:06:35.250000+00:00", 0),  # past is past: Celery writes "0"
        (None, None, None),
    ],
)
def test_an_expiry_is_written_as_a_moment_and_as_time_to_live(
    app: App, expires: Any, text: str | None, milliseconds: int | None
) -> None:
    one = prepared(app, expires=expires)
    assert (headers_of(one)["expires"], one.outgoing.message.expiration_ms) == (text, milliseconds)


@pytest.mark.parametrize("option", ["eta", "expires"])
def test_a_moment_that_is_none_is_refused(app: App, option: str) -> None:
    with pytest.raises(ValueError, match=f"option '{option}'.*'tomorrow'"):
        app.prepare("shop.pack", (), {}, {option: "tomorrow"})  # type: ignore[misc]


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("time_limit", value) for value in (10**30, 0, -1, NAN, INFINITE, 1e300)),
        *(("soft_time_limit", value) for value in (10**30, -0.5, NAN, INFINITE)),
        *(("countdown", value) for value in (1e15, -1e15, 10**400, NAN, INFINITE)),
        *(
            ("eta", value)
            for value in (1e15, -1e15, NAN, "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00")
        ),
        *(("expires", value) for value in (1e15, NAN, INFINITE, "9999-12-31T23:59:59-12:00")),
        *(("retries", value) for value in (-1, 2**31, 10**30)),
        *(("group_index", value) for value in (-1, 2**31)),
        *(("priority", value) for value in (-1, 10, 10**20)),
        *(("task_id", value) for value in ("", "a\0b", "x" * 256, "ä" * 128, "\udcff")),
        *(("queue", value) for value in ("a\0b", "x" * 256, "ä" * 128, "\udcff")),
        ("reply_to", "x" * 256),
        ("root_id", "\0"),
        ("group_id", "x" * 256),
        ("shadow", "x" * 1025),
        ("headers", {"x" * 256: 1}),
        ("stamps", {"\udcff": 1}),
    ],
)
def test_a_value_that_no_worker_could_use_is_refused_where_it_is_sent(
    app: App, option: str, value: Any
) -> None:
    """N1: naming the option, the value and what it may be; nothing is sent."""
    with pytest.raises(ValueError, match=rf"(?s){option}.*{re.escape(brief(value))}.*(must be|from 0 to 9)"):
        prepared(app, **{option: value})


@pytest.mark.parametrize("option", ["time_limit", "countdown", "retries", "group_index", "expires"])
def test_a_truth_value_is_no_number(app: App, option: str) -> None:
    with pytest.raises(TypeError, match=f"option {option!r} for sending a task is True"):
        app.prepare("shop.pack", (), {}, {option: True})  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", "\0", "x" * 1025, "\udcff"])
def test_a_task_whose_name_no_worker_could_use_is_refused(app: App, name: str) -> None:
    with pytest.raises(ValueError, match=r"task name .* is not valid"):
        app.prepare(name, (), {}, {})


def test_never_may_be_said_by_the_last_moment_of_the_calendar(app: App) -> None:
    one = prepared(app, expires=datetime.max.replace(tzinfo=UTC))
    assert headers_of(one)["expires"] == "9999-12-31T23:59:59.000000+00:00"


# -- what goes along -------------------------------------------------------------------------------


def test_own_headers_stand_beside_the_protocols(app: App) -> None:
    one = prepared(app, headers={"tenant": 7})
    assert headers_of(one)["tenant"] == 7
    assert decode_task(one.outgoing.message).extra == {"tenant": 7}


def test_own_headers_cannot_take_the_protocols_names(app: App) -> None:
    with pytest.raises(BadValue, match="names of the protocol: id"):
        prepared(app, headers={"id": "forged"})


def test_stamps_are_named_and_carried(app: App) -> None:
    one = prepared(app, stamped_headers=["batch", "user"], batch=7, stamps={"user": "ada", "other": 1})
    headers = headers_of(one)
    assert headers["stamped_headers"] == ["batch", "user"]
    assert headers["stamps"] == {"batch": 7, "user": "ada"}


def test_limits_shadow_and_group_are_written(app: App) -> None:
    headers = headers_of(
        prepared(app, time_limit=10, soft_time_limit=8.5, shadow="packing", group_id="g", group_index=3)
    )
    assert headers["timelimit"] == [10, 8.5]  # hard, soft
    assert (headers["shadow"], headers["group"], headers["group_index"]) == ("packing", "g", 3)


def test_reply_to_and_retries_are_written(app: App) -> None:
    one = prepared(app, reply_to="here", retries=2)
    assert (one.outgoing.message.reply_to, headers_of(one)["retries"]) == ("here", 2)


def test_a_task_sent_by_a_task_has_it_as_parent_and_its_root(app: App) -> None:
    headers = headers_of(prepared(app, sender=Request(id="parent", root_id="root")))
    assert (headers["parent_id"], headers["root_id"]) == ("parent", "root")
    headers = headers_of(prepared(app, sender=Request(id="parent"), root_id="r", parent_id="p"))
    assert (headers["parent_id"], headers["root_id"]) == ("p", "r")


def test_a_body_can_be_compressed(app: App) -> None:
    text = "a" * 10_000
    one = prepared(app, text, compression="gzip")
    assert len(one.outgoing.message.body) < 1000
    assert decode_task(one.outgoing.message).args == [text]


@pytest.mark.parametrize("serializer", ["json", "msgpack", "pickle"])
def test_the_serializer_can_be_chosen(app: App, serializer: str) -> None:
    one = prepared(app, 1, serializer=serializer)
    assert decode_task(one.outgoing.message, accept=[serializer]).args == [1]


def test_an_unknown_serializer_is_refused(app: App) -> None:
    with pytest.raises(BadValue, match="serializer 'yaml' is unknown"):
        prepared(app, serializer="yaml")


# -- who wins: call, then task, then route, then default ---------------------------------------------


@pytest.fixture
def routed(tmp_path: Any) -> App:
    return App(
        "tests",
        broker=f"sqlite:///{tmp_path}/never.db",
        task_default_queue="default",
        task_default_priority=5,
        task_routes={"shop.pa*": {"queue": "routed", "priority": 4}, "shop.*": "later"},
    )


def queue_and_priority(app: App, name: str, **options: Any) -> tuple[str, int]:
    outgoing = app.prepare(name, (), {}, options).outgoing  # type: ignore[arg-type]
    return outgoing.queue, outgoing.message.priority


def test_without_anything_the_default_holds(routed: App) -> None:
    assert queue_and_priority(routed, "bank.pay") == ("default", 5)


def test_a_route_beats_the_default_and_the_first_match_wins(routed: App) -> None:
    assert queue_and_priority(routed, "shop.pack") == ("routed", 4)
    assert queue_and_priority(routed, "shop.sell") == ("later", 5)


def test_the_task_beats_the_route(routed: App) -> None:
    routed.task(name="shop.pack", queue="own", priority=3)(lambda: None)
    assert queue_and_priority(routed, "shop.pack") == ("own", 3)


def test_the_call_beats_the_task(routed: App) -> None:
    routed.task(name="shop.pack", queue="own", priority=3)(lambda: None)
    assert queue_and_priority(routed, "shop.pack", queue="call", priority=0) == ("call", 0)
    assert queue_and_priority(routed, "shop.pack", routing_key="key") == ("key", 3)


def test_a_task_that_is_defined_anew_is_sent_by_its_new_options(app: App) -> None:
    def pack() -> None: ...

    def queue() -> str:
        return app.prepare("shop.pack", (), {}, {}).outgoing.queue

    app.task(name="shop.pack", queue="first")(pack)
    assert (queue(), queue()) == ("first", "first")
    app.task(name="shop.pack", queue="second")(pack)
    assert queue() == "second"
    app.tasks.clear()
    assert queue() == app.settings.task_default_queue


def test_what_is_remembered_of_tasks_has_a_limit(app: App) -> None:
    for number in range(NAMES_MAX + 10):
        app.prepare(f"shop.task{number}", (), {}, {})
    assert len(app.send_defaults) <= NAMES_MAX


def test_limits_ignoring_and_serializer_follow_the_same_order(tmp_path: Any) -> None:
    app = App(
        "tests",
        broker=f"sqlite:///{tmp_path}/never.db",
        task_time_limit_s=30.0,
        task_ignore_result=True,
        task_serializer="msgpack",
    )
    app.task(name="own", time_limit=20.0, ignore_result=False, serializer="json")(lambda: None)

    def said(name: str, **options: Any) -> tuple[Any, Any, str]:
        one = app.prepare(name, (), {}, options)  # type: ignore[arg-type]
        headers = headers_of(one)
        return headers["timelimit"][0], headers["ignore_result"], one.outgoing.message.content_encoding

    assert said("any") == (30.0, True, "binary")
    assert said("own") == (20.0, False, "utf-8")
    assert said("own", time_limit=10, ignore_result=True, serializer="pickle") == (10, True, "binary")


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [-1, 10, 2.5, "3", True])
def test_a_priority_that_does_not_exist_is_refused(app: App, priority: Any) -> None:
    with pytest.raises(ValueError, match=f"priority {priority!r} is not a whole number from 0 to 9"):
        prepared(app, priority=priority)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("countdown", "10"),
        ("task_id", 7),
        ("queue", 3),
        ("time_limit", "10"),
        ("retries", 1.5),
        ("eta", [2030]),
        ("headers", [1]),
        ("stamped_headers", "batch"),
        ("ignore_result", "no"),
        ("group_index", "3"),
        ("shadow", b"x"),
    ],
)
def test_an_ill_typed_option_is_refused_with_its_value(app: App, option: str, value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        prepared(app, **{option: value})
    assert f"option {option!r} for sending a task is {value!r}" in str(caught.value)


def test_an_unknown_option_is_refused_with_the_nearest(app: App) -> None:
    with pytest.raises(TypeError, match=r"unknown option 'prioritty'.*did you mean 'priority'\?"):
        prepared(app, prioritty=3)


def test_a_message_over_the_limit_is_refused_with_figures_and_remedy(tmp_path: Any) -> None:
    app = App("tests", broker=f"sqlite:///{tmp_path}/never.db", message_max_bytes=2048)
    app.prepare("shop.pack", ("x" * 500,), {}, {})
    with pytest.raises(TooLarge) as caught:
        app.prepare("shop.pack", ("x" * 5000,), {}, {})
    text = str(caught.value)
    assert "task 'shop.pack'" in text
    assert "over the limit of 2048" in text
    assert "'message_max_bytes'" in text
    assert any(word.isdigit() and int(word) > 5000 for word in text.split())


def test_none_of_a_batch_is_sent_when_one_is_refused(app: App) -> None:
    ran: list[int] = []

    @app.task
    def note(value: int) -> None:
        ran.append(value)

    with app.eager(), pytest.raises(TypeError):
        app.send_many([note.s(1), note.s(), note.s(3)])
    assert ran == []
