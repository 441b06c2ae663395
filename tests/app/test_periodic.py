"""Periodic tasks as an app defines them: rules, slots, ids, and what is refused."""

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel import App
from umbel.app.cluster.periodic import Cron, slot_id
from umbel.errors import ConfigurationError
from umbel.protocol.leadership.schedule import CatchUp, Every
from umbel.wire.call import read_headers

VIENNA = ZoneInfo("Europe/Vienna")


def us(*moment: int) -> int:
    return int(datetime(*moment, tzinfo=UTC).timestamp() * 1_000_000)  # type: ignore[misc,arg-type]


def test_a_task_or_a_plain_function_can_be_periodic() -> None:
    app = App("periodic")

    @app.periodic(every=30, catch_up="all", args=(1,), queue="slow")
    @app.task
    def first(number: int) -> int:
        return number

    @app.periodic(cron="15 4 * * *", tz="Europe/Vienna", name="nightly")
    def second() -> None: ...

    one, two = app.periodic_tasks
    assert (one.name, one.entry.rule, one.entry.catch_up) == (first.name, Every(30_000_000), CatchUp.ALL)
    assert (two.name, two.entry.rule) == ("nightly", Cron("15 4 * * *", VIENNA))
    assert two.signature.task in app.tasks
    assert first(2) == 2
    (message,) = one.messages(60_000_000)
    assert message.queue == "slow"
    assert read_headers(message.message).id == slot_id(one.name, 60_000_000)
    assert one.messages(60_000_000)[0].message.headers == message.message.headers


def test_an_app_without_periodic_tasks_has_none() -> None:
    assert App("plain").periodic_tasks == []


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({}, "give exactly one of every= and cron="),
        ({"every": 1, "cron": "* * * * *"}, "give exactly one of every= and cron="),
        ({"every": 0}, "every=0 must be a number of seconds"),
        ({"every": float("nan")}, "every=nan"),
        ({"every": timedelta(days=-1)}, "every=datetime.timedelta(days=-1)"),
        ({"cron": "61 * * * *"}, "cron='61 * * * *'"),
        ({"cron": "often"}, "cron='often'"),
        ({"cron": "* * * * *", "tz": "Mars/Olympus"}, "tz='Mars/Olympus'"),
        ({"every": 1, "catch_up": "some"}, "catch_up='some' must be one of none, one, all"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(rule: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        App("periodic").periodic(**rule, name="beat")(_nothing)
    assert problem in str(refused.value) and "'beat'" in str(refused.value)


def test_two_entries_need_two_names() -> None:
    app = App("periodic")
    app.periodic(every=1)(app.task(_nothing))
    with pytest.raises(ConfigurationError, match="two periodic tasks are named"):
        app.periodic(every=2)(app.task(_nothing))
    app.periodic(every=2, name="other")(app.task(_nothing))


def test_a_nightly_slot_comes_once_on_the_days_the_clocks_change() -> None:
    rule = Cron("30 2 * * *", VIENNA)
    # Spring: there is no 2:30 on 29 March 2026. Autumn: 2:30 comes twice on 25 October 2026.
    spring = _slots(rule, us(2026, 3, 28), us(2026, 3, 31))
    autumn = _slots(rule, us(2026, 10, 24), us(2026, 10, 27))
    assert len(spring) == 3 and len(autumn) == 3


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["* * * * *", "*/7 3 * * *", "0 0 29 2 *", "30 2 * * sun", "0 0 1 * *"]),
    st.integers(us(2020, 1, 1), us(2030, 1, 1)),
)
def test_looking_forward_and_back_name_the_same_slots(expression: str, at_us: int) -> None:
    rule = Cron(expression, VIENNA)
    following = rule.after(at_us)
    assert following > at_us
    assert rule.until(following) == following
    assert rule.until(following - 1) <= at_us
    assert rule.after(rule.until(at_us)) == following


def _slots(rule: Cron, begin_us: int, end_us: int) -> list[int]:
    found, at_us = list[int](), begin_us
    while (at_us := rule.after(at_us)) < end_us:
        found.append(at_us)
    return found


def _nothing() -> None: ...
