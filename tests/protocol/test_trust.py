"""How old a signature may be, and that each is heard once."""

from umbel.protocol.delivery.trust import (
    GRACE_MAX_S,
    HEARD_MAX,
    REQUEST_WINDOW_S,
    Doubt,
    SeenRequests,
    Signed,
    age_doubt,
    forgotten_doubt,
    remembered_s,
    unbound_doubt,
    unknown_doubt,
)

NOW = 1000.0


def signed(at: float = NOW, mark: str = "m", *, is_bound: bool = True, due: float = 0.0) -> Signed:
    return Signed("k", at, mark, is_bound, due)


def test_a_task_may_wait_for_its_window_and_no_longer() -> None:
    assert age_doubt(signed(), NOW + 60, 60) is None
    late = age_doubt(signed(), NOW + 61, 60)
    assert late is not None
    assert late.doubt is Doubt.STALE
    assert "dlq requeue" in late.why


def test_what_is_due_later_is_counted_from_then() -> None:
    assert age_doubt(signed(due=NOW + 500), NOW + 560, 60) is None
    assert unknown_doubt(signed(due=NOW + 500), NOW + 560, 60) is None


def test_a_used_signature_is_remembered_for_longer_than_a_task_may_wait() -> None:
    """So what is too old to run can be told from a copy of what ran, for a while; then nobody can."""
    assert (remembered_s(60), remembered_s(86_400)) == (120, 86_400 + GRACE_MAX_S)
    assert unknown_doubt(signed(), NOW + 120, 60) is None
    unknown = unknown_doubt(signed(), NOW + 121, 60)
    assert unknown is not None
    for doubted in (unknown, forgotten_doubt(signed(), NOW + 9)):
        assert doubted.doubt is Doubt.STALE
        assert "--even-if-used" in doubted.why


def test_a_clock_far_ahead_is_told() -> None:
    assert unknown_doubt(signed(NOW + 60), NOW, 60) is None
    doubted = unknown_doubt(signed(NOW + 61), NOW, 60)
    assert doubted is not None
    assert "future" in doubted.why


def test_what_umbel_0_3_signed_is_verified_for_one_window_after_the_upgrade() -> None:
    for late_s, due, is_verified in ((0, 0, True), (60, 0, True), (61, 0, False), (500, NOW + 450, True)):
        old = signed(is_bound=False, due=due)
        assert (unbound_doubt(old, NOW + late_s, NOW, 60) is None) is is_verified
    assert unbound_doubt(signed(NOW + 61, is_bound=False, due=NOW + 90), NOW + 91, NOW, 60) is not None
    assert unbound_doubt(signed(is_bound=False), NOW, NOW, 0) is not None  # where that is switched off
    assert unbound_doubt(signed(), NOW + 10**6, NOW, 0) is None


def test_a_request_is_heard_once() -> None:
    heard = SeenRequests(lambda: 0.0)
    assert heard.doubt(signed(), NOW) is None
    again = heard.doubt(signed(), NOW + 1)
    assert again is not None
    assert again.doubt is Doubt.REPLAYED
    assert heard.doubt(signed(mark="n"), NOW + 1) is None


def test_a_copy_is_never_both_fresh_and_forgotten() -> None:
    heard = SeenRequests(lambda: 0.0)
    ahead = signed(NOW + REQUEST_WINDOW_S)
    assert heard.doubt(ahead, NOW) is None
    for later in (1.0, REQUEST_WINDOW_S, 2 * REQUEST_WINDOW_S):
        heard.doubt(signed(NOW + later, f"other {later}"), NOW + later)
        assert heard.doubt(ahead, NOW + later) is not None


def test_a_node_that_started_since_does_not_obey_what_it_may_have_obeyed_before() -> None:
    doubted = SeenRequests(lambda: NOW).doubt(signed(NOW - 1), NOW + 1)
    assert doubted is not None
    assert doubted.doubt is Doubt.STALE


def test_an_old_request_is_refused_and_the_memory_has_a_limit() -> None:
    heard = SeenRequests(lambda: 0.0)
    assert heard.doubt(signed(), NOW + REQUEST_WINDOW_S + 1) is not None
    for number in range(HEARD_MAX):
        assert heard.doubt(signed(mark=str(number)), NOW) is None
    assert heard.doubt(signed(mark="one more"), NOW) is not None
    later = NOW + 2 * REQUEST_WINDOW_S + 1
    assert heard.doubt(signed(later, "later"), later) is None
