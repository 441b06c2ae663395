"""Limits for the cluster: what a task may state, which key a call has, when a bucket lets one start."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel import App
from umbel.app.options import limit_of, options_from
from umbel.app.task import Parameters
from umbel.errors import ConfigurationError
from umbel.protocol.delivery.limits import KEY_MAX_BYTES, ClusterLimit, Concurrency, Pace, Rate, Terms

RATES = st.builds(lambda count, period: Rate(f"{count}/{period}"), st.integers(1, 40), st.sampled_from("smh"))


def starts_of(pace: Pace, asked_at: list[float]) -> list[float]:
    """When those start that ask at these times, and ask again when they are due."""
    free_at, started = 0.0, []
    for now in asked_at:
        taken = pace.take(free_at, now)
        if taken is not None:
            free_at = taken
            started.append(now)
    return started


@given(RATES, st.lists(st.floats(0.0, 1.0), max_size=200), st.lists(st.floats(0.0, 1.0), max_size=200))
def test_no_window_has_more_starts_than_the_rate_even_if_they_start_late(
    rate: Rate, gaps: list[float], lags: list[float]
) -> None:
    assert rate.terms.pace is not None
    asked_at, now = [], 1000.0
    for gap in gaps:
        now += gap * 2 * rate.terms.pace.interval_s
        asked_at.append(now)
    allowed = starts_of(rate.terms.pace, asked_at)
    lags = [*lags, *[0.0] * len(allowed)]
    started = sorted(at + lag * rate.terms.pace.slack_s for at, lag in zip(allowed, lags, strict=False))
    for first in started:
        assert sum(first <= one < first + rate.period_s for one in started) <= rate.count


@given(RATES, st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50))
def test_who_comes_when_it_is_due_or_a_little_late_starts(rate: Rate, lateness: list[float]) -> None:
    pace = rate.terms.pace
    assert pace is not None
    free_at, now = 0.0, 1000.0
    for late in lateness:
        due = pace.due(free_at, now, 0)
        assert due >= now
        now = due
        taken = pace.take(free_at, due + late * pace.slack_s * 0.99)
        assert taken is not None
        free_at = taken
        now = max(now, due)


@given(RATES, st.lists(st.floats(0.0, 0.99), min_size=1, max_size=50))
def test_who_comes_within_the_slack_costs_the_rate_nothing(rate: Rate, lateness: list[float]) -> None:
    pace = rate.terms.pace
    assert pace is not None
    free_at, now = 0.0, 1000.0
    most_s = min(pace.slack_s, pace.interval_s)  # each is called when the one before has started
    for late in lateness:
        now = pace.due(free_at, now, 0) + late * most_s
        taken = pace.take(free_at, now)
        assert taken is not None
        free_at = taken
    assert now <= 1000.0 + lateness[0] * most_s + (len(lateness) - 1) * pace.interval_s + 1e-6


@given(RATES, st.integers(0, 5), st.booleans())
def test_one_is_due_as_soon_as_it_may_start_after_those_before_it(
    rate: Rate, ahead: int, is_idle: bool
) -> None:
    pace = rate.terms.pace
    assert pace is not None
    free_at = 0.0 if is_idle else 50.0 + pace.interval_s
    due = pace.due(free_at, 50.0, ahead)
    assert due == pytest.approx(max(50.0, 50.0 + (ahead + (not is_idle)) * pace.interval_s - pace.slack_s))
    for _ in range(ahead):
        free_at = max(free_at, 50.0) + pace.interval_s
    assert pace.take(free_at, due + 1e-6) is not None
    assert due == 50.0 or pace.take(free_at, due - 1e-6) is None


def test_a_clock_that_was_set_back_stops_nobody_for_long() -> None:
    pace = Pace(2.0, 0.5)
    assert pace.due(1e9, 100.0, 0) == 102.0
    assert pace.take(1e9, 100.0) is None
    assert pace.take(102.5, 102.0) == 104.5


def test_a_rate_costs_a_little_of_itself() -> None:
    paces = {text: Rate(text).terms.pace for text in ("100/s", "100/m", "100/h")}
    assert {text: pace and round(pace.interval_s, 3) for text, pace in paces.items()} == {
        "100/s": 0.011,
        "100/m": 0.62,
        "100/h": 36.02,
    }
    assert Concurrency(3).terms == Terms(3)
    assert Rate(" 5 / m ").count == 5
    assert (Rate("5/m").key, Concurrency(1).key, Rate("5/m").terms.most) == ("", "", 0)


@pytest.mark.parametrize("rate", ["", "5", "5/d", "0/s", "1.5/s", "-1/s", "٣/s", "2000000/s", 5, None])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a rate for the cluster; write a whole number"):
        Rate(rate)


@pytest.mark.parametrize("most", [0, -1, 1.5, "4", True, 10_001, None])
def test_a_number_at_a_time_that_is_none_is_refused(most: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid concurrency limit"):
        Concurrency(most)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("{", "'{'"),
        ("}", "'}'"),
        ("{}", "name of a parameter"),
        ("{0}", "name of a parameter"),
        ("{a.b}", "name of a parameter"),
        ("{a[b]}", "name of a parameter"),
        ("{a!r}", "name of a parameter"),
        ("{a:>9}", "name of a parameter"),
        ("x" * 201, "at most 200"),
        ("a\0", "NUL"),
        ("\ud800", "Unicode"),
        (5, "must be text"),
    ],
)
def test_a_bad_key_is_refused_where_it_is_written(key: Any, why: str) -> None:
    for limit in (lambda: Rate("1/s", key=key), lambda: Concurrency(1, key=key)):
        with pytest.raises(ConfigurationError, match=why):
            limit()


def bound(function: Any, key: str, **options: Any) -> ClusterLimit:
    stated = options_from("t", {"limit": Concurrency(1, key=key), **options}, bind=False)
    found = limit_of(stated, Parameters("t", function))
    assert found is not None
    return found


def some(customer: str, /, region: str, *rest: int, tier: str = "free", **more: int) -> None: ...


def plain(customer: str, region: str = "eu", *, tier: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs", "key"),
    [
        (("ada",), {}, "ada-eu-1"),
        (("ada", "us"), {"tier": 2}, "ada-us-2"),
        ((), {"customer": 5, "region": None}, "5-None-1"),
    ],
)
def test_the_key_is_filled_from_the_arguments(args: tuple[Any], kwargs: dict[str, Any], key: str) -> None:
    limit = bound(plain, "{customer}-{region}-{tier}")
    assert limit.key_of(args, kwargs) == key
    assert limit.bucket(key) == f"t:{key}"
    assert bound(plain, "all{{").key_of(args, kwargs) == "all{"


@pytest.mark.parametrize(
    ("args", "error", "why"),
    [
        ((), ValueError, "needs 'customer' for its key '{customer}': give it in the call"),
        (([1],), TypeError, "'customer' into its key, which is a list"),
        (({},), TypeError, "dict"),
        ((b"x",), TypeError, "bytes"),
        (("x" * (KEY_MAX_BYTES + 1),), ValueError, "201 bytes, and at most 200"),
        (("ä" * (KEY_MAX_BYTES // 2 + 1),), ValueError, "202 bytes"),
        (("a\0b",), ValueError, "NUL"),
    ],
)
def test_a_call_without_a_key_is_refused(args: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        bound(plain, "{customer}").key_of(args, {})


def test_a_key_must_name_what_the_task_has_and_may_show() -> None:
    with pytest.raises(ConfigurationError, match=r"no parameter 'custmer'.*did you mean 'customer'"):
        bound(plain, "{custmer}")
    with pytest.raises(ConfigurationError, match=r"which the key of its limit names$"):
        bound(plain, "{x9z}")
    for name in ("rest", "more", "customer"):  # of many values, of many names, and by position alone
        with pytest.raises(ConfigurationError, match=f"no parameter '{name}'"):
            bound(some, f"{{{name}}}")
    assert bound(some, "{region}").key_of(("x", "eu"), {}) == "eu"
    with pytest.raises(ConfigurationError, match="'customer', which is sensitive"):
        bound(plain, "{customer}", sensitive=("customer",))


def test_a_task_states_its_limit_and_its_calls_carry_the_key() -> None:
    app = App("limits", broker="sqlite:///nowhere.db")

    @app.task(name="calls", bind=True, limit=Rate("5/m", key="{customer}"))
    def calls(self: Any, customer: str) -> None: ...

    prepared = app.prepare("calls", ("ada",), {}, {})
    assert b'"umbel_limit":"ada"' in prepared.outgoing.message.headers
    with pytest.raises(TypeError, match="which is a list"):
        app.prepare("calls", (["ada"],), {}, {})
    with pytest.raises(ConfigurationError, match=r"option 'limit' of task 'x' is '5/m': write Rate\("):
        app.task(name="x", limit="5/m")(lambda: None)  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match=r"'y' has limit=.*acks_early"):
        app.task(name="y", limit=Concurrency(1), acks_early=True)(lambda: None)
