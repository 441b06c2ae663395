"""A monitor rests while others need the CPU, and only then (W3)."""

from umbel.monitor.pace import LOOK_EVERY_S, REST_S, CpuUse, Pace, cpu_use


class Machine:
    """What a thread is told of its CPU."""

    def __init__(self) -> None:
        self.now = 0.0
        self.use = CpuUse(0.0, 0.0)
        self.pace = Pace(lambda: self.use, lambda: self.now)

    def after(self, *, ran_s: float, waited_s: float) -> float:
        self.now += LOOK_EVERY_S
        self.use = CpuUse(self.use.ran_s + ran_s, self.use.waited_s + waited_s)
        return self.pace.rest_s()


def test_it_rests_while_it_has_to_wait_for_a_cpu() -> None:
    machine = Machine()
    assert machine.after(ran_s=0.05, waited_s=0.0) == 0.0
    assert machine.after(ran_s=0.05, waited_s=0.01) == REST_S
    assert machine.pace.rest_s() == REST_S  # until it looks again
    assert machine.after(ran_s=0.05, waited_s=0.001) == 0.0


def test_one_that_did_nothing_does_not_rest() -> None:
    assert Machine().after(ran_s=0.0, waited_s=0.0) == 0.0


def test_the_system_tells_what_a_thread_has_used() -> None:
    before = cpu_use()
    sum(range(1_000_000))
    assert cpu_use().ran_s > before.ran_s
