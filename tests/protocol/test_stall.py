from umbel.protocol.pool.autoscale import StallWatch

PATIENCE_S = 60.0


def looked(watch: StallWatch, *, received: int, free: int, ready: int | None, now: float) -> bool:
    return watch.is_idle(received=received, free=free) and watch.is_stalled(ready=ready, now=now)


def test_a_worker_with_work_and_room_that_takes_nothing_is_stalled_after_its_patience() -> None:
    watch = StallWatch(patience_s=PATIENCE_S)
    assert not looked(watch, received=7, free=1, ready=5, now=0)  # the first look knows nothing
    assert not looked(watch, received=7, free=1, ready=5, now=5)
    assert not looked(watch, received=7, free=1, ready=5, now=64)
    assert looked(watch, received=7, free=1, ready=5, now=65)


def test_anything_received_begins_the_patience_anew() -> None:
    watch = StallWatch(patience_s=PATIENCE_S)
    for now in range(0, 600, 5):
        assert not looked(watch, received=now // 50, free=1, ready=5, now=now)


def test_a_busy_worker_an_empty_queue_and_an_absent_broker_are_no_stall() -> None:
    for free, ready in ((0, 5), (1, 0), (1, None)):
        watch = StallWatch(patience_s=PATIENCE_S)
        assert not any(looked(watch, received=7, free=free, ready=ready, now=now) for now in range(0, 600, 5))


def test_a_moment_without_work_begins_the_patience_anew() -> None:
    watch = StallWatch(patience_s=PATIENCE_S)
    stalled = [looked(watch, received=7, free=1, ready=now % 50, now=now) for now in range(0, 600, 5)]
    assert not any(stalled)
