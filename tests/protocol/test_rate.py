from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.delivery.limits import TokenBucket, parse_rate


@pytest.mark.parametrize(
    ("text", "per_second"),
    [
        ("10/s", 10.0),
        ("6/m", 0.1),
        ("36/h", 0.01),
        ("0.5", 0.5),
        (" 10 / s ", 10.0),
        (10, 10.0),
        (0.5, 0.5),
        (0.00001, 0.00001),
        ("0", 0.0),
        (0, 0.0),
    ],
)
def test_a_rate_is_so_many_in_a_second_a_minute_or_an_hour(text: str | float, per_second: float) -> None:
    assert parse_rate(text) == pytest.approx(per_second)


@pytest.mark.parametrize(
    "wrong", ["", "fast", "10/d", "-1/s", "1e3/s", "/s", -1, float("nan"), float("inf"), True]
)
def test_what_is_no_rate_is_refused_with_its_value(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a rate; write it as '10/s'") as caught:
        parse_rate(wrong)
    assert repr(wrong) in str(caught.value)


def test_a_second_may_begin_with_a_burst_of_its_worth() -> None:
    bucket = TokenBucket(10.0)
    assert [bucket.take(100.0) for _ in range(10)] == [0.0] * 10
    assert bucket.take(100.0) == pytest.approx(0.1)


def test_a_slow_rate_lets_one_through_and_then_one_at_a_time() -> None:
    bucket = TokenBucket(0.1)
    assert bucket.take(100.0) == 0.0
    assert bucket.take(100.0) == pytest.approx(10.0)
    assert bucket.take(110.0) == pytest.approx(10.0)  # the token of 110 was set aside


def test_who_is_refused_first_may_start_first() -> None:
    bucket = TokenBucket(2.0)
    waits = [bucket.take(100.0) for _ in range(6)]
    assert waits == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.5, 2.0])


def test_an_idle_bucket_gathers_no_more_than_a_burst() -> None:
    bucket = TokenBucket(2.0)
    bucket.take(100.0)
    assert [bucket.take(10_000.0) > 0 for _ in range(4)] == [False, False, True, True]


def test_a_clock_that_is_set_back_takes_no_tokens_away() -> None:
    bucket = TokenBucket(2.0)
    assert bucket.take(10_000.0) == 0.0
    assert bucket.take(100.0) == 0.0
    assert bucket.take(100.0) == pytest.approx(0.5)


@given(
    per_second=st.floats(0.01, 100.0),
    pauses=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60),
    window_s=st.floats(0.1, 30.0),
)
def test_no_window_sees_more_starts_than_a_burst_and_the_rate(
    per_second: float, pauses: list[float], window_s: float
) -> None:
    bucket, now, starts = TokenBucket(per_second), 1000.0, list[float]()
    for pause in pauses:
        now += pause
        starts.append(now + bucket.take(now))
    most = max(1.0, per_second) + per_second * window_s + 1e-6
    for begin in starts:
        assert sum(begin <= start < begin + window_s for start in starts) <= most
    assert starts == sorted(starts)
