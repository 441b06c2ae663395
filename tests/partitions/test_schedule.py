"""The schedule of partitions, for any seed."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.partitions.schedule import PARTITIONS, Kind, changes, make_schedule
from tests.servers.network import CLEAR, Weather

PLACES = ("w1", "w2", "w3", "w4", "w5")
SEEDS = st.integers(0, 2**32)


@given(SEEDS, st.integers(1, 120), st.integers(0, 20), st.integers(1, 5))
def test_a_seed_decides_as_many_disturbances_as_were_asked_for(
    seed: int, partitions: int, rough: int, at_once: int
) -> None:
    made = make_schedule(seed, PLACES, partitions=partitions, rough=rough, at_once=at_once)
    assert made == make_schedule(seed, PLACES, partitions=partitions, rough=rough, at_once=at_once)
    assert sum(one.kind in PARTITIONS for one in made) == partitions
    assert len(made) == partitions + rough
    assert all(2.0 <= one.lasts_s <= 60.0 for one in made)
    assert [one.at_s for one in made] == sorted(one.at_s for one in made)
    for one in made:
        assert sum(other.at_s <= one.at_s < other.ends_s for other in made) <= at_once


@given(SEEDS)
def test_a_place_has_fair_weather_between_two_disturbances(seed: int) -> None:
    made = make_schedule(seed, PLACES, partitions=100, rough=20)
    for place in PLACES:
        of_place = [one for one in made if one.place == place]
        assert all(later.at_s >= earlier.ends_s + 4.0 for earlier, later in pairwise(of_place))


@given(SEEDS)
def test_a_hundred_partitions_take_a_quarter_of_an_hour_and_meet_everybody_in_every_way(seed: int) -> None:
    made = make_schedule(seed, PLACES, partitions=100, rough=20)
    assert {one.kind for one in made} == set(Kind)
    assert {one.place for one in made} == set(PLACES)
    assert 5 * 60 < max(one.ends_s for one in made) < 18 * 60
    overlapping = Counter(
        frozenset((one.place, other.place))
        for one in made
        for other in made
        if one.place < other.place and one.at_s < other.ends_s and other.at_s < one.ends_s
    )
    assert len(overlapping) == 10, "every two of five were cut off at the same time"


@given(SEEDS)
def test_the_network_is_as_the_schedule_says_and_fair_in_the_end(seed: int) -> None:
    made = make_schedule(seed, PLACES, partitions=20, rough=6)
    weather = dict.fromkeys(PLACES, CLEAR)
    done = changes(made)
    assert [one.at_s for one in done] == sorted(one.at_s for one in done)
    for change in done:
        weather[change.place] = change.weather
        if change.weather is not CLEAR:
            assert any(one.place == change.place and one.at_s <= change.at_s < one.ends_s for one in made)
    assert set(weather.values()) == {CLEAR}
    one_way = {change.weather for change in done if change.weather.out_cut != change.weather.in_cut}
    assert one_way <= {Weather(out_cut=True), Weather(in_cut=True)}
