"""Which log lines are written in a flood (N1)."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.log_limit import SHARED, Budget, LeftOut, LogLimit

FEW = Budget(3, 0.5)
MANY = Budget(10, 0.0)


def is_written(limit: LogLimit, kind: str, now: float) -> bool:
    return limit.take({kind: FEW}, now) is None


def test_a_kind_may_write_so_many_at_once_and_then_so_many_a_second() -> None:
    limit = LogLimit()
    assert [is_written(limit, "a", 0.0) for _ in range(5)] == [True, True, True, False, False]
    assert is_written(limit, "b", 0.0)
    assert not is_written(limit, "a", 1.9)
    assert is_written(limit, "a", 2.0)
    assert limit.left_out(5.0) == [LeftOut("a", 3, 5.0)]
    assert limit.left_out(6.0) == []


def test_kinds_that_are_made_up_share_one_budget_and_take_no_place_from_others() -> None:
    limit = LogLimit(kinds_max=10)
    assert is_written(limit, "real", 0.0)
    admitted = sum(is_written(limit, f"made up {number}", 0.0) for number in range(1000))
    assert admitted == 9 + FEW.at_once and len(limit) == 11
    assert is_written(limit, "real", 0.0)
    assert limit.left_out(1.0) == [LeftOut(SHARED, 1000 - admitted, 1.0)]
    assert limit.left_out(100.0) == [] and len(limit) == 0


def test_a_narrow_kind_spends_the_wider_budget_only_when_it_has_room_itself() -> None:
    limit = LogLimit()
    taken = [limit.take({"failed": MANY, "failed a": FEW}, 0.0) for _ in range(100)]
    assert taken == [None] * FEW.at_once + ["failed a"] * 97
    taken = [limit.take({"failed": MANY, f"failed {number}": FEW}, 0.0) for number in range(100)]
    assert taken == [None] * 7 + ["failed"] * 93
    assert len(limit) == 9  # names that came when the wider budget was spent have no place


def test_a_clock_that_is_set_back_neither_gives_nor_takes() -> None:
    limit = LogLimit()
    assert [is_written(limit, "a", now) for now in (100.0, 50.0, 0.0, -50.0)] == [True, True, True, False]


LINES = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.sampled_from("abcdef"), st.booleans()), min_size=1, max_size=300
)


@given(lines=LINES, kinds_max=st.integers(1, 8))
def test_every_line_is_written_or_in_one_count(lines: list[tuple[float, str, bool]], kinds_max: int) -> None:
    limit, now = LogLimit(kinds_max), 0.0
    written, counted = Counter[str](), 0
    for passed_s, kind, asks in lines:
        now += passed_s
        written[kind] += is_written(limit, kind, now)
        if asks:
            counted += sum(one.count for one in limit.left_out(now))
        assert len(limit) <= kinds_max + 1
    counted += sum(one.count for one in limit.left_out(now))
    assert written.total() + counted == len(lines)
    # At the limit of kinds a line may be written on the shared budget besides the kind's own.
    assert all(count <= 2 * (FEW.at_once + now * FEW.per_second) for count in written.values())
