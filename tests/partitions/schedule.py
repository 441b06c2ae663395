"""Schedule: which place is cut off when, how and for how long; one seed decides all of it.

Several places are disturbed at a time, each by one thing at a time, and each has a while of fair weather
before the next. Most cuts are short and a few take a minute: lengths are spread evenly over their logarithm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log
from random import Random

from tests.servers.network import CLEAR, CUT, Weather

APART_S = (0.0, 6.0)  # between the beginnings of two
FAIR_S = (4.0, 12.0)  # from the end of one to the next of the same place


class Kind(StrEnum):
    BOTH = "both"  # nothing leaves the place and nothing reaches it
    OUT = "out"  # nothing leaves it; it hears others
    IN = "in"  # nothing reaches it; others hear it, until it waits for an answer
    FLAP = "flap"  # both, again and again
    DELAY = "delay"  # every packet is late, and some overtake others
    LOSS = "loss"  # some packets are lost


PARTITIONS = (Kind.BOTH, Kind.OUT, Kind.IN, Kind.FLAP)
ROUGH = (Kind.DELAY, Kind.LOSS)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """`amount`: the period of a flap in seconds, the delay in seconds, the share of packets that is lost."""

    at_s: float
    lasts_s: float
    place: str
    kind: Kind
    amount: float = 0.0

    @property
    def ends_s(self) -> float:
        return self.at_s + self.lasts_s


@dataclass(frozen=True, slots=True)
class Change:
    at_s: float
    place: str
    weather: Weather


def make_schedule(
    seed: int,
    places: Sequence[str],
    *,
    partitions: int,
    rough: int,
    lasts_s: tuple[float, float] = (2.0, 60.0),
    at_once: int = 3,
    apart_s: tuple[float, float] = APART_S,
) -> tuple[Disturbance, ...]:
    """So many partitions, and so many times of delay or loss among them."""
    chance = Random(f"partitions {seed}")
    kinds = [PARTITIONS[number % len(PARTITIONS)] for number in range(partitions)]
    kinds += [ROUGH[number % len(ROUGH)] for number in range(rough)]
    chance.shuffle(kinds)
    free_at = dict.fromkeys(places, 0.0)
    under_way: list[float] = []
    made: list[Disturbance] = []
    at_s = 0.0
    for kind in kinds:
        under_way = sorted(ends_s for ends_s in under_way if ends_s > at_s)
        if len(under_way) >= at_once:
            at_s = under_way[-at_once]
        at_s = max(at_s, min(free_at.values()))
        place = chance.choice([one for one, free_s in free_at.items() if free_s <= at_s])
        shortest, longest = lasts_s
        length_s = min(longest, max(shortest, exp(chance.uniform(log(shortest), log(longest)))))
        one = Disturbance(at_s, length_s, place, kind, _amount(kind, chance))
        made.append(one)
        under_way.append(one.ends_s)
        free_at[place] = one.ends_s + chance.uniform(*FAIR_S)
        at_s += chance.uniform(*apart_s)
    return tuple(made)


def changes(schedule: Sequence[Disturbance]) -> list[Change]:
    """What to do to the network, in order of time; at the end it is fair everywhere."""
    found = [change for one in schedule for change in _changes(one)]
    return sorted(found, key=lambda change: change.at_s)


def _amount(kind: Kind, chance: Random) -> float:
    match kind:
        case Kind.FLAP:
            return chance.uniform(0.3, 2.5)
        case Kind.DELAY:
            return chance.uniform(0.05, 0.8)
        case Kind.LOSS:
            return chance.uniform(0.05, 0.3)
        case _:
            return 0.0


def _changes(one: Disturbance) -> Iterator[Change]:
    match one.kind:
        case Kind.FLAP:
            at_s, weather = one.at_s, CUT
            while at_s < one.ends_s:
                yield Change(at_s, one.place, weather)
                at_s, weather = at_s + one.amount, CLEAR if weather is CUT else CUT
        case Kind.BOTH:
            yield Change(one.at_s, one.place, CUT)
        case Kind.OUT:
            yield Change(one.at_s, one.place, Weather(out_cut=True))
        case Kind.IN:
            yield Change(one.at_s, one.place, Weather(in_cut=True))
        case Kind.DELAY:
            yield Change(one.at_s, one.place, Weather(delay_s=one.amount, jitter_s=one.amount / 4))
        case Kind.LOSS:
            yield Change(one.at_s, one.place, Weather(loss=one.amount))
    yield Change(one.ends_s, one.place, CLEAR)
