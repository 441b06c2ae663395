"""ClaimAhead: what was claimed starts or goes back in time (no task waits while a worker is idle)."""

from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.delivery.delivery import GRAIN_S, PATIENCE_S, ClaimAhead


def test_a_job_is_overdue_when_its_patience_is_over_and_not_before() -> None:
    ahead = ClaimAhead(patience_s=0.3)
    ahead.submit(7, now=10.0)
    assert ahead.deadline == 10.3
    assert ahead.overdue(now=10.2) == 0
    assert ahead.overdue(now=10.31) == 7
    assert ahead.overdue(now=11.0) == 0 and ahead.deadline is None


def test_a_stalled_worker_claims_what_it_can_start_until_something_ends() -> None:
    ahead = ClaimAhead()
    assert ahead.claimable(room=192, free=0) == 192
    ahead.submit(7, now=10.0)
    ahead.stall()
    assert ahead.deadline is None  # all of it went back
    assert ahead.claimable(room=192, free=0) == 0
    assert ahead.claimable(room=192, free=2) == 2
    assert ahead.claimable(room=1, free=2) == 1
    ahead.move()
    assert ahead.claimable(room=192, free=0) == 192


def test_jobs_that_come_back_to_the_pool_do_not_hide_later_ones() -> None:
    ahead = ClaimAhead(patience_s=0.3)
    ahead.submit(9, now=10.0)
    ahead.submit(4, now=10.01)
    assert ahead.overdue(now=10.31) == 9
    ahead.submit(9, now=20.0)
    ahead.submit(4, now=20.2)
    assert ahead.overdue(now=20.6) == 9


@given(st.lists(st.tuples(st.floats(0.0, 0.2), st.integers(1, 500)), min_size=1, max_size=200))
def test_every_job_is_looked_at_within_its_patience_and_a_moment(steps: list[tuple[float, int]]) -> None:
    """Whatever the pauses between claims: by its deadlines alone, with few looks and little memory."""
    ahead, now, last, looks = ClaimAhead(), 0.0, 0, 0
    submitted: dict[int, float] = {}

    def look_until(time: float) -> None:
        nonlocal looks
        while (deadline := ahead.deadline) is not None and deadline <= time:
            looks += 1
            seen = ahead.overdue(deadline)
            for number in [number for number in submitted if number <= seen]:
                assert deadline - submitted.pop(number) <= PATIENCE_S + 1e-9
            assert all(deadline - at < PATIENCE_S + GRAIN_S for at in submitted.values())

    for pause_s, count in steps:
        look_until(now + pause_s)
        now, last = now + pause_s, last + count
        ahead.submit(last, now)
        submitted[last] = now
    look_until(now + PATIENCE_S + GRAIN_S)
    assert not submitted
    assert looks <= now / GRAIN_S + 1
