"""A monitor rests while others need the CPU, and only then (W3)."""

import pytest

from umbel.monitor.feed import MEASURE_EVERY_S, REST_MAX_S, SHARE, CpuUse, Pace, cpu_use


class Machine:
    """What a thread is told of its CPU."""

    def __init__(self) -> None:
        self.now = 0.0
        self.use = CpuUse(0.0, 0.0)
        self.pace = Pace(lambda: self.use, lambda: self.now)

    def after(self, *, ran_s: float, waited_s: float) -> float:
        self.now += MEASURE_EVERY_S
        self.use = CpuUse(self.use.ran_s + ran_s, self.use.waited_s + waited_s)
        return self.pace.rest_s(ran_s)


def test_while_it_has_to_wait_for_a_cpu_it_takes_its_share_only() -> None:
    machine = Machine()
    assert machine.after(ran_s=0.05, waited_s=0.0) == 0.0
    assert machine.after(ran_s=0.02, waited_s=0.01) == pytest.approx(0.02 / SHARE - 0.02)
    assert machine.pace.rest_s(0.01) == pytest.approx(0.01 / SHARE - 0.01)  # until it looks again
    assert machine.after(ran_s=5.0, waited_s=1.0) == REST_MAX_S
    assert machine.after(ran_s=0.05, waited_s=0.001) == 0.0


def test_one_that_did_nothing_does_not_rest() -> None:
    assert Machine().after(ran_s=0.0, waited_s=0.0) == 0.0


def test_the_system_tells_what_a_thread_has_used() -> None:
    before = cpu_use()
    sum(range(1_000_000))
    assert cpu_use().ran_s > before.ran_s
