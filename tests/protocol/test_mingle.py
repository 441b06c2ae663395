"""What nodes tell one another at the start, and the revoked set as a join (S2; must-show 3)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.revoked import (
    HEARSAY_MAX,
    HEARSAY_S,
    TOLD_MAX,
    TOMBSTONE_S,
    RevokedTasks,
    adjust_clock,
    answer,
    hello,
    take_in,
)

NOW = 1_794_700_000.0
DAY = 86_400.0
MINUTES, MONTHS = 300.0, 90 * DAY


def taken(said: dict[str, Any], now: float = NOW) -> RevokedTasks:
    revoked = RevokedTasks()
    take_in(said, revoked, now)
    return revoked


def holds_until(revoked: RevokedTasks, task_id: str, moments: list[float]) -> float:
    """The last of the moments at which the id is still known."""
    last = 0.0
    for moment in moments:
        revoked.expire(moment)
        if task_id in revoked:
            last = moment
    return last


@pytest.mark.parametrize(
    "said",
    [
        {"revoked": ["a", "b"]},  # Celery 5.7
        {"revoked": {"a": [890.8, "a"], "b": [MONTHS, "b"]}},  # up to 5.6: a machine's uptime
        {"revoked": {"a": 890.8, "b": 12}},
        {"revoked": {"a": NOW - 60, "b": [NOW - 7200, "b"]}},  # wall clocks
        {"revoked": {"a": NOW + DAY, "b": NOW - DAY}},  # a day apart
        {"revoked": ["a", "b"], "ages": [0.0, 10_000]},  # ours
        {"revoked": ["a", "b"], "ages": [1.0]},  # ages that do not fit are none
        {"revoked": ["a", "b"], "ages": "soon"},
        {"revoked": {"a": [], "b": "yesterday", "c": None, "d": [NOW]}, "also": 1},
    ],
)
def test_every_form_is_understood(said: dict[str, Any]) -> None:
    revoked = taken(said)
    if "also" in said:
        assert list(revoked) == ["d"]
    else:
        assert list(revoked) == ["a", "b"]
    revoked.expire(NOW + 60)
    assert len(revoked) in (1, 2)


@pytest.mark.parametrize(
    "entry", [None, 5, "", "x" * 5000, ["a"], {"a": 1}, b"bytes", True], ids=lambda entry: repr(entry)[:10]
)
def test_one_bad_entry_never_spoils_the_others(entry: Any) -> None:
    revoked = RevokedTasks()
    learned = take_in({"revoked": ["a", entry, "b"]}, revoked, NOW)
    assert (learned.news, learned.bad) == (["a", "b"], 1)
    assert take_in({"revoked": ["c", "d"], "ages": [float("nan"), 1]}, revoked, NOW).news == ["d"]


@pytest.mark.parametrize("said", [{}, {"revoked": None}, {"revoked": 5}, {"revoked": "abc"}, {"ages": [1]}])
def test_a_hello_without_ids_is_no_harm(said: dict[str, Any]) -> None:
    assert len(taken(said)) == 0


def test_what_is_known_is_no_news() -> None:
    revoked = RevokedTasks()
    revoked.add("a", NOW + DAY, NOW)
    assert take_in({"revoked": ["a", "b"]}, revoked, NOW).news == ["b"]
    assert take_in({"revoked": ["a", "b"]}, revoked, NOW).news == []


def test_a_hello_holds_the_newest_ids_with_their_ages_oldest_first() -> None:
    revoked = RevokedTasks()
    for number in range(TOLD_MAX + 10):
        revoked.add(f"t{number}", NOW + DAY, NOW - 10_000 + number / 2)
    said = hello("me@x", revoked, NOW)
    assert (said["from_node"], said["cver"], len(said["revoked"])) == ("me@x", 2, TOLD_MAX)
    assert said["revoked"][-1] == f"t{TOLD_MAX + 9}" and said["ages"][-1] < said["ages"][0]


def test_ids_that_were_revoked_long_ago_are_not_told() -> None:
    revoked = RevokedTasks()
    revoked.add("old", NOW + DAY, NOW - HEARSAY_S)
    revoked.add("new", NOW + DAY, NOW - 5)
    assert hello("me@x", revoked, NOW)["revoked"] == ["new"]
    assert "old" in revoked  # it still must not start


def test_long_ids_do_not_make_a_hello_that_nobody_takes() -> None:
    revoked = RevokedTasks()
    for number in range(5000):
        revoked.add(f"{number}".rjust(1000, "x"), NOW + DAY, NOW)
    assert sum(map(len, hello("me@x", revoked, NOW)["revoked"])) <= 400_000


def test_the_clock_steps_past_the_highest_and_past_nothing_that_is_beyond_belief() -> None:
    clock = LamportClock(5)
    answers = {
        "a": {"clock": 30},
        "b": {"clock": 100},
        "c": {"clock": 7},
        "d": None,
        "e": {"error": "x"},
        "f": {"clock": "9"},
        "g": {"clock": 2**60},
    }
    adjust_clock(clock, answers)
    assert 101 <= clock.value <= 110
    assert clock.rejected == 2
    said = answer(RevokedTasks(), clock, [["a@x", 1, 2, 3, 2.0, "umbel"]], NOW)
    assert said["clock"] == clock.value and said["members"] == [["a@x", 1, 2, 3, 2.0, "umbel"]]


# ---- neither lost nor immortal ---------------------------------------------------------------------

offsets = st.sampled_from([-DAY, -3600.0, -1.0, 0.0, 1.0, 3600.0, DAY])


@given(offsets, offsets, st.floats(0.0, HEARSAY_S - 60), st.floats(0.0, 5.0))
def test_between_hosts_a_day_apart_an_id_holds_for_as_long_as_it_should(
    here: float, there: float, age: float, transit: float
) -> None:
    """Each host has its own wall clock; the id was revoked `age` before it is told."""
    teller = RevokedTasks()
    teller.learn("t", 0.0, NOW + there)
    said = hello("a@x", teller, NOW + there + age)
    learner = taken(said, NOW + here + age + transit)
    assert "t" in learner
    moments = [NOW + here + after for after in range(0, int(2 * HEARSAY_S), 60)]
    held = holds_until(learner, "t", moments) - NOW - here
    assert HEARSAY_S - 60 - 11 <= held <= HEARSAY_S + transit + 60 + 11


@given(offsets, st.sampled_from([MINUTES, MONTHS]), st.sampled_from(["list", "uptime", "wall", "pair"]))
def test_what_celery_says_however_it_stamps_it_holds_three_hours_and_no_longer(
    offset: float, uptime: float, form: str
) -> None:
    """A Celery node repeats it every ten minutes for two days, in each of its forms."""
    stamp = uptime if form in ("uptime", "pair") else NOW + offset
    forms: dict[str, Any] = {"list": ["t"], "pair": {"t": [stamp, "t"]}}
    revoked = RevokedTasks()
    held = []
    for after in range(0, int(TOMBSTONE_S), 600):
        take_in({"revoked": forms.get(form, {"t": stamp})}, revoked, NOW + after)
        revoked.expire(NOW + after)
        if "t" in revoked:
            held.append(after)
    assert held == list(range(0, held[-1] + 1, 600)), "it was gone and came back"
    least = HEARSAY_S - 3600 if form == "wall" and offset in (-3600.0, -1.0) else HEARSAY_S
    assert least - 620 <= held[-1] <= HEARSAY_S + 20


entries = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.0, HEARSAY_S - 1)), max_size=12)


def said_of(batch: list[tuple[str, float]]) -> dict[str, Any]:
    return {"revoked": [task_id for task_id, _ in batch], "ages": [age for _, age in batch]}


def known(revoked: RevokedTasks) -> dict[str, float]:
    return {task_id: round(age, 3) for task_id, age in revoked.told(NOW + 1.0)}


@given(entries, entries, entries)
def test_merging_is_a_join(
    a: list[tuple[str, float]], b: list[tuple[str, float]], c: list[tuple[str, float]]
) -> None:
    """Commutative, associative, idempotent: any order, any grouping, any repetition."""

    def merged(*batches: list[tuple[str, float]]) -> dict[str, float]:
        revoked = RevokedTasks()
        for batch in batches:
            take_in(said_of(batch), revoked, NOW)
        return known(revoked)

    assert merged(a, b, c) == merged(c, b, a) == merged(b, a, c) == merged([*a, *b], c) == merged(a, [*b, *c])
    assert merged(a, b, a, a, b) == merged(a, b)


@given(entries, entries)
def test_two_nodes_that_told_each_other_know_the_same_and_telling_again_changes_nothing(
    a: list[tuple[str, float]], b: list[tuple[str, float]]
) -> None:
    one, other = taken(said_of(a)), taken(said_of(b))
    take_in(hello("one@x", one, NOW), other, NOW)
    take_in(answer(other, LamportClock(), (), NOW), one, NOW)
    assert set(one) == set(other) == {task_id for task_id, _ in [*a, *b]}
    before = known(one)
    for _ in range(50):
        take_in(hello("one@x", one, NOW), other, NOW)
        take_in(hello("other@x", other, NOW), one, NOW)
    assert known(one) == before


def test_the_set_that_peers_fill_is_bounded_and_the_first_to_arrive_goes_first() -> None:
    revoked = RevokedTasks()
    revoked.add("t0", NOW + DAY, NOW)
    for number in range(HEARSAY_MAX + 2):
        revoked.learn(f"t{number}", 0.0, NOW + number / 1e6)
    assert len(revoked) == HEARSAY_MAX + 1  # one of the two that went is in the record as well
    assert "t0" in revoked and "t1" not in revoked and revoked.dropped == 1
