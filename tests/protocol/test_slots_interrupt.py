"""F7: a worker that stops tells the jobs that run, at once, again, and nobody else."""

import pytest

from tests.protocol.test_slots import Job, ended, make
from umbel.protocol.machine import Tick
from umbel.protocol.pool.events import Finished, Interrupt, SignalSoftLimit, Submit
from umbel.protocol.pool.slots import _SOFT_REPEATS


def test_each_job_that_runs_is_told_that_the_worker_stops() -> None:
    slots = make(3)
    slots.step(Submit([Job(1, "slow"), Job(2, "slow")]), now=0.0)
    told = [SignalSoftLimit(0, 1, stopping=True), SignalSoftLimit(1, 2, stopping=True)]
    assert slots.step(Interrupt(), now=5.0) == told  # the third child is idle
    assert slots.deadline == pytest.approx(5.25)
    assert slots.step(Tick(), now=5.25) == told


def test_a_job_that_goes_on_is_told_a_few_times_and_one_that_ended_no_more() -> None:
    slots = make(2)
    slots.step(Submit([Job(1, "slow"), Job(2, "slow")]), now=0.0)
    slots.step(Interrupt(), now=1.0)
    slots.step(Finished(1, ended(2)), now=1.1)
    again = [slots.step(Tick(), now=1.0 + 0.25 * number) for number in range(1, _SOFT_REPEATS + 3)]
    signals = [effect for effects in again for effect in effects if isinstance(effect, SignalSoftLimit)]
    assert signals == [SignalSoftLimit(0, 1, stopping=True)] * (_SOFT_REPEATS - 1)


def test_an_idle_pool_has_nobody_to_tell() -> None:
    assert make(2).step(Interrupt(), now=1.0) == []
