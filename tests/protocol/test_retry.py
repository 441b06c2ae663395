import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.delivery.states import RetryPolicy, reconnect_wait_s

chances = st.floats(0.0, 1.0, exclude_max=True)
seconds = st.floats(0.0, 1e6)


@pytest.mark.parametrize(
    ("most", "retries", "exhausted"),
    [(3, 0, False), (3, 2, False), (3, 3, True), (3, 4, True), (0, 0, True), (None, 10**9, False)],
)
def test_a_task_is_tried_again_so_often(most: int | None, retries: int, exhausted: bool) -> None:
    assert RetryPolicy(max_retries=most).exhausted(retries) is exhausted


def test_without_backoff_the_wait_is_always_the_same() -> None:
    policy = RetryPolicy(delay_s=7.0)
    assert [policy.wait_s(retries, 0.3) for retries in range(4)] == [7.0] * 4


def test_with_backoff_it_doubles_up_to_the_ceiling() -> None:
    policy = RetryPolicy(backoff_s=1.0, backoff_max_s=10.0, jitter=False)
    assert [policy.wait_s(retries, 0.3) for retries in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_jitter_spreads_the_wait_over_all_of_it() -> None:
    policy = RetryPolicy(backoff_s=8.0, jitter=True)
    assert [policy.wait_s(0, chance) for chance in (0.0, 0.25, 0.5, 0.999)] == [0.0, 2.0, 4.0, 7.992]


@given(retries=st.integers(0, 10**6), chance=chances, backoff=seconds, most=seconds, jitter=st.booleans())
def test_a_wait_is_never_below_nothing_nor_above_the_ceiling(
    retries: int, chance: float, backoff: float, most: float, jitter: bool
) -> None:
    policy = RetryPolicy(backoff_s=backoff, backoff_max_s=most, jitter=jitter)
    assert 0.0 <= policy.wait_s(retries, chance) <= most


@given(retries=st.integers(0, 10**6), backoff=seconds, most=seconds)
def test_without_jitter_a_later_wait_is_never_shorter(retries: int, backoff: float, most: float) -> None:
    policy = RetryPolicy(backoff_s=backoff, backoff_max_s=most, jitter=False)
    assert policy.wait_s(retries, 0.5) <= policy.wait_s(retries + 1, 0.5)


@given(failures=st.integers(0, 10**6), chance=chances)
def test_a_reconnecting_worker_never_waits_long_and_never_spins(failures: int, chance: float) -> None:
    assert 0.05 <= reconnect_wait_s(failures, chance) <= 5.0


@given(chance=chances)
def test_it_soon_waits_seconds_not_less(chance: float) -> None:
    assert reconnect_wait_s(10, chance) >= 2.5
