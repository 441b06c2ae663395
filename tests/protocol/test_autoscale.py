import os
import random

import pytest

from umbel.protocol.pool.autoscale import Autoscale, Load, ResizeBy, SizeLimits

BUSY = Load(size=2, busy=2, waiting=100)


def test_a_full_pool_grows_at_the_second_look_and_at_most_doubles() -> None:
    scale = Autoscale(most=10, least=1)
    assert scale.step(BUSY, now=0.0) == []
    assert scale.step(BUSY, now=0.5) == [ResizeBy(2)]
    assert scale.step(Load(4, 4, 100), now=1.0) == []
    assert scale.step(Load(4, 4, 100), now=1.5) == [ResizeBy(4)]
    assert scale.step(Load(8, 8, 100), now=2.0) == []
    assert scale.step(Load(8, 8, 100), now=2.5) == [ResizeBy(2)], "ten are the most"


def test_it_grows_no_more_than_there_is_to_do() -> None:
    scale = Autoscale(most=10, least=1)
    scale.step(Load(4, 4, 1), now=0.0)
    assert scale.step(Load(4, 4, 1), now=0.5) == [ResizeBy(1)]
    scale.step(Load(5, 5, 0), now=1.0)
    assert scale.step(Load(5, 5, 0), now=1.5) == []


def test_it_shrinks_after_a_cool_down_by_those_who_were_never_needed() -> None:
    scale = Autoscale(most=10, least=2, cool_down_s=30.0)
    assert scale.step(Load(8, 1, 0), now=0.0) == []
    assert scale.step(Load(8, 5, 0), now=10.0) == []
    assert scale.step(Load(8, 0, 0), now=29.9) == []
    assert scale.step(Load(8, 0, 0), now=30.0) == [ResizeBy(-3)]
    assert scale.step(Load(5, 0, 0), now=31.0) == [], "a new cool-down begins"
    assert scale.step(Load(5, 0, 0), now=61.0) == [ResizeBy(-3)]
    assert scale.step(Load(2, 0, 0), now=100.0) == []
    assert scale.step(Load(2, 0, 0), now=200.0) == [], "two stay"


def test_new_limits_hold_at_the_next_look_and_spare_the_busy() -> None:
    scale = Autoscale(most=10, least=1)
    assert scale.step(SizeLimits(most=3, least=2), now=0.0) == []
    assert scale.step(Load(8, 6, 50), now=0.5) == [ResizeBy(-2)]
    assert scale.step(Load(6, 6, 50), now=1.0) == []
    assert scale.step(Load(6, 0, 0), now=1.5) == [ResizeBy(-3)]
    scale.step(SizeLimits(most=9, least=5), now=2.0)
    assert scale.step(Load(3, 0, 0), now=2.5) == [ResizeBy(2)]


_SEEDS = 20_000 if os.environ.get("UMBEL_SOAK") else 500


@pytest.mark.parametrize("first", range(0, _SEEDS, 500))
def test_whatever_the_load_it_stays_in_its_range_and_takes_only_the_idle(first: int) -> None:
    """F4, and the guarantees of docs/protocol/autoscale.md."""
    for seed in range(first, first + 500):
        chance = random.Random(seed)
        least = chance.randint(1, 5)
        most, cool_down_s = chance.randint(least, 20), chance.choice([1.0, 5.0, 30.0])
        scale = Autoscale(most=most, least=least, cool_down_s=cool_down_s)
        size, now, demand, needed_at = chance.randint(1, 25), 0.0, 0, 0.0
        was_full = False
        for _ in range(300):
            now += chance.choice([0.5, 0.5, 0.5, 2.0])
            if chance.random() < 0.03:
                least = chance.randint(1, 5)
                most = chance.randint(least, 20)
                scale.step(SizeLimits(most, least), now)
            demand = max(0, demand + chance.randint(-6, 6)) if chance.random() < 0.3 else demand
            busy = min(size, demand)
            was_in_range = least <= size <= most
            by = sum(effect.by for effect in scale.step(Load(size, busy, demand - busy), now))
            about = f"seed {seed}: {size} children, {busy} busy, {demand} wanted, by {by}"
            assert size + by >= min(size, least), about
            assert -by <= size - busy, about
            if was_in_range:
                assert least <= size + by <= most, about
                assert by >= 0 or now - needed_at >= cool_down_s, about
                assert by <= 0 or (demand > size and was_full), about
            if by > 0 or busy == size:
                needed_at = now
            was_full = busy == size
            size += by
        assert size <= most or demand >= size
