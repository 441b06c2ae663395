"""How old a signature may be, and that each is heard once."""

from umbel.protocol.delivery.trust import (
    HEARD_MAX,
    REQUEST_WINDOW_S,
    Doubt,
    Doubted,
    Heard,
    Signed,
    age_doubt,
    is_replayed,
    remembered_until,
)

NOW = 1000.0


def signed(at: float = NOW, mark: str = "m") -> Signed:
    return Signed("k", at, mark)


def test_a_task_may_wait_for_its_window_and_no_longer() -> None:
    assert age_doubt(signed(), 0.0, NOW + 60, 60) is None
    late = age_doubt(signed(), 0.0, NOW + 61, 60)
    assert late is not None
    assert late.doubt is Doubt.STALE
    assert "dlq requeue" in late.why


def test_what_is_due_later_is_counted_from_then() -> None:
    assert age_doubt(signed(), NOW + 500, NOW + 560, 60) is None
    assert remembered_until(signed(), NOW + 500, 60) == NOW + 560


def test_a_clock_far_ahead_is_told() -> None:
    doubted = age_doubt(signed(NOW + 61), 0.0, NOW, 60)
    assert doubted is not None
    assert "future" in doubted.why


def test_a_request_is_heard_once() -> None:
    heard = Heard(lambda: 0.0)
    assert heard.doubt(signed(), NOW) is None
    again = heard.doubt(signed(), NOW + 1)
    assert again is not None
    assert again.doubt is Doubt.REPLAYED
    assert heard.doubt(signed(mark="n"), NOW + 1) is None


def test_a_copy_is_never_both_fresh_and_forgotten() -> None:
    heard = Heard(lambda: 0.0)
    ahead = signed(NOW + REQUEST_WINDOW_S)
    assert heard.doubt(ahead, NOW) is None
    for later in (1.0, REQUEST_WINDOW_S, 2 * REQUEST_WINDOW_S):
        heard.doubt(signed(NOW + later, f"other {later}"), NOW + later)
        assert heard.doubt(ahead, NOW + later) is not None


def test_a_node_that_started_since_does_not_obey_what_it_may_have_obeyed_before() -> None:
    doubted = Heard(lambda: NOW).doubt(signed(NOW - 1), NOW + 1)
    assert doubted is not None
    assert doubted.doubt is Doubt.STALE


def test_an_old_request_is_refused_and_the_memory_has_a_limit() -> None:
    heard = Heard(lambda: 0.0)
    assert heard.doubt(signed(), NOW + REQUEST_WINDOW_S + 1) is not None
    for number in range(HEARD_MAX):
        assert heard.doubt(signed(mark=str(number)), NOW) is None
    assert heard.doubt(signed(mark="one more"), NOW) is not None
    later = NOW + 2 * REQUEST_WINDOW_S + 1
    assert heard.doubt(signed(later, "later"), later) is None


def test_a_copy_is_known_among_the_dead_letters() -> None:
    assert is_replayed(Doubted(Doubt.REPLAYED, "why").reason)
    assert not is_replayed(Doubted(Doubt.STALE, "why").reason)
