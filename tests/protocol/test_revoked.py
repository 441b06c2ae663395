from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.delivery.revoked import HEARSAY_S, SWEEP_EVERY_S, RevokedTasks


def filled(entries: list[tuple[str, float]]) -> RevokedTasks:
    revoked = RevokedTasks()
    for task_id, expires_at in entries:
        revoked.add(task_id, expires_at)
    return revoked


def test_a_revoked_task_is_known_until_it_expires() -> None:
    revoked = filled([("a", 100.0)])
    assert "a" in revoked and "b" not in revoked
    revoked.expire(99.9)
    assert "a" in revoked
    revoked.expire(100.0)
    assert "a" not in revoked and len(revoked) == 0


def test_the_later_expiry_of_two_holds_in_either_order() -> None:
    for entries in ([("a", 100.0), ("a", 200.0)], [("a", 200.0), ("a", 100.0)]):
        revoked = filled(entries)
        revoked.expire(150.0)
        assert "a" in revoked and len(revoked) == 1
        revoked.expire(200.0)
        assert "a" not in revoked


def test_what_is_taken_back_may_start_and_peers_cannot_bring_it_again() -> None:
    revoked = filled([("a", 100.0), ("b", 100.0)])
    revoked.learn("c", 0.0, 10.0)
    revoked.add_header("k=v", 100.0)
    for one in ("a", "c", "unknown"):
        revoked.take_back(one, 10.0)
    revoked.take_back_header("k=v")
    assert not revoked.learn("a", 0.0, 11.0) and not revoked.learn("c", 0.0, 11.0)
    assert list(revoked) == ["b"] and revoked.told(11.0)[0][0] == "b"
    assert not revoked.covers("x", {"k": ["v"]})
    revoked.expire(50.0)
    revoked.add("a", 200.0)  # the record can
    revoked.expire(150.0)
    assert list(revoked) == ["a"]


def test_revoking_one_task_over_and_over_takes_no_more_room() -> None:
    revoked = filled([("a", float(moment)) for moment in range(1, 50_000)])
    assert len(revoked) == 1
    assert len(revoked._by_expiry) < 5_000
    revoked.expire(49_998.0)
    assert "a" in revoked
    revoked.expire(49_999.0)
    assert "a" not in revoked


def test_tasks_are_revoked_by_a_stamped_header_too() -> None:
    revoked = RevokedTasks()
    assert not revoked.covers("a", {"customer": "7"})
    revoked.add_header("customer=7", 100.0)
    assert revoked.covers("a", {"customer": "7"}) and revoked.covers("a", {"customer": 7})
    assert revoked.covers("a", {"other": "x", "customer": ["6", "7"]})
    assert not revoked.covers("a", {"customer": "8"}) and not revoked.covers("a", {})
    revoked.expire(100.0)
    assert not revoked.covers("a", {"customer": "7"})


def test_an_id_of_a_peer_holds_three_hours_and_cannot_come_back_at_once() -> None:
    revoked = RevokedTasks()
    assert revoked.learn("a", 0.0, 1000.0) and not revoked.learn("a", 0.0, 5000.0)
    revoked.expire(1000.0 + HEARSAY_S - 1)
    assert "a" in revoked
    revoked.expire(1000.0 + HEARSAY_S + SWEEP_EVERY_S)
    assert "a" not in revoked
    assert not revoked.learn("a", 0.0, 1000.0 + HEARSAY_S + 60) and "a" not in revoked
    revoked.add("a", 1e9)  # but whoever revokes it in the record is heard
    assert "a" in revoked


entries = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(1.0, 100.0)), max_size=40)


@given(entries, st.randoms(), st.floats(0.0, 110.0))
def test_order_and_repetition_change_nothing(  # a join, as the merge of mingle needs it (S2)
    given_entries: list[tuple[str, float]], random: object, now: float
) -> None:
    shuffled = [*given_entries, *given_entries]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = filled(given_entries), filled(shuffled)
    one.expire(now)
    other.expire(now)
    assert [task_id in one for task_id in "abcdef"] == [task_id in other for task_id in "abcdef"]
    assert len(one) == len(other)


@given(entries, st.floats(0.0, 110.0))
def test_exactly_what_has_not_expired_is_there(given_entries: list[tuple[str, float]], now: float) -> None:
    revoked = filled(given_entries)
    revoked.expire(now)
    alive = {task_id for task_id, expires_at in given_entries if expires_at > now}
    assert {task_id for task_id in "abcdef" if task_id in revoked} == alive
