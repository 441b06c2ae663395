"""F7: warm, soft and cold, in the order of how urgent it is."""

from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.machine import Tick
from umbel.protocol.shutdown import (
    Cut,
    Drained,
    Effect,
    InterruptTasks,
    QuitRequested,
    Shutdown,
    ShutdownPhase,
    StopRequested,
    StopTaking,
    TasksRunning,
)


def machine() -> Shutdown:
    return Shutdown(grace_s=30.0, soft_s=5.0)


def test_the_first_request_stops_taking_and_waits_for_what_runs() -> None:
    shutdown = machine()
    assert shutdown.step(StopRequested(), now=100.0) == [StopTaking()]
    assert shutdown.step(TasksRunning(3), now=100.0) == []
    assert (shutdown.phase, shutdown.running, shutdown.left_s(110.0)) == (ShutdownPhase.WARM, 3, 20.0)
    assert shutdown.step(TasksRunning(0), now=120.0) == [Drained()]
    assert (shutdown.phase, shutdown.deadline, shutdown.cut) == (ShutdownPhase.DONE, None, 0)


def test_at_the_end_of_the_grace_what_still_runs_is_cut_off_and_counted() -> None:
    shutdown = machine()
    shutdown.step(StopRequested(), now=0.0)
    shutdown.step(TasksRunning(2), now=0.0)
    assert shutdown.step(Tick(), now=29.9) == []
    assert shutdown.step(Tick(), now=30.0) == [Cut(2)]
    assert shutdown.cut == 2
    assert shutdown.step(TasksRunning(0), now=30.1) == [Drained()]


def test_the_second_request_tells_the_tasks_and_gives_them_a_short_time() -> None:
    shutdown = machine()
    shutdown.step(StopRequested(), now=0.0)
    shutdown.step(TasksRunning(2), now=0.0)
    assert shutdown.step(StopRequested(), now=10.0) == [InterruptTasks()]
    assert shutdown.left_s(10.0) == 5.0
    assert shutdown.step(TasksRunning(1), now=12.0) == []
    assert shutdown.step(Tick(), now=15.0) == [Cut(1)]


def test_the_second_request_never_makes_it_longer() -> None:
    shutdown = machine()
    shutdown.step(StopRequested(), now=0.0)
    shutdown.step(StopRequested(), now=28.0)
    assert shutdown.deadline == 30.0


def test_the_third_request_is_cold() -> None:
    shutdown = machine()
    shutdown.step(TasksRunning(1), now=0.0)
    assert [shutdown.step(StopRequested(), now=0.0) for _ in range(4)] == [
        [StopTaking()],
        [InterruptTasks()],
        [Cut(1)],
        [],
    ]


def test_quit_is_cold_at_once() -> None:
    shutdown = machine()
    assert shutdown.step(QuitRequested(), now=0.0) == [StopTaking(), Cut(0)]
    later = machine()
    later.step(StopRequested(), now=0.0)
    assert later.step(QuitRequested(), now=1.0) == [Cut(0)]


EVENTS = st.one_of(
    st.just(StopRequested()),
    st.just(QuitRequested()),
    st.builds(TasksRunning, st.integers(0, 3)),
    st.just(Tick()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 20))))
def test_it_only_goes_on_and_says_each_thing_once(
    events: list[tuple[StopRequested | QuitRequested | TasksRunning | Tick, float]],
) -> None:
    shutdown, now, order = machine(), 0.0, list(ShutdownPhase)
    said: list[Effect] = []
    for event, passed_s in events:
        now += passed_s
        before = order.index(shutdown.phase)
        said += shutdown.step(event, now)
        assert order.index(shutdown.phase) >= before
        assert (shutdown.deadline is not None) == (shutdown.phase in (ShutdownPhase.WARM, ShutdownPhase.SOFT))
    kinds = [type(effect) for effect in said]
    assert len(kinds) == len(set(kinds))
    order_said = [kind for kind in (StopTaking, InterruptTasks, Cut, Drained) if kind in kinds]
    assert kinds == order_said
