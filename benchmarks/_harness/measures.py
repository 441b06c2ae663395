"""Measures: what a benchmark counts, and what its numbers say when all rounds are in.

Pure: samples in, medians and ratios out. A ratio says how many times better the subject is than
a peer, whichever direction is the better one, and it is the ratio of the two medians, so that
a reader can check it against the table. The lowest and highest ratio of any one round stand
beside it: contenders of one round ran within seconds of each other, so when the machine is noisy
those two say how far the median can be trusted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

COST_UNIT = "µs/task"
COST_TIMES_MAX = 1.05  # a change may make a task cost so many times what it did


@dataclass(frozen=True, slots=True)
class Measure:
    name: str  # the key in JSON
    title: str  # what people read
    unit: str
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """The subject must be at least so many times better than a peer.

    With `among`, that peer is the best of these, and `peer` is what it is called.
    """

    measure: str
    peer: str
    at_least: float
    among: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Ratio:
    measure: str
    peer: str
    value: float
    low: float
    high: float

    @property
    def key(self) -> str:
        return ratio_key(self.measure, self.peer)


@dataclass(frozen=True, slots=True)
class Change:
    """What a measure is now, in times of what it was at another commit: 1.02 of a cost is 2 % more."""

    measure: Measure
    now: Spread
    then: Spread
    times: float  # of the medians
    low: float  # of any one round
    high: float

    @property
    def is_noise(self) -> bool:
        """Rounds disagree on which of the two is more."""
        return self.low <= 1.0 <= self.high

    @property
    def met(self) -> bool | None:
        """Whether a cost has not grown beyond its limit; of other measures nothing is demanded."""
        return self.times <= COST_TIMES_MAX if self.measure.unit == COST_UNIT else None


@dataclass(frozen=True, slots=True)
class Verdict:
    target: Target
    measured: float | None  # None: that peer did not run, or not all of those among which it is the best

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.measured >= self.target.at_least


# One contender's samples: of every measure, one value per round.
Samples = Mapping[str, Sequence[float]]


def ratio_key(measure: str, peer: str) -> str:
    return f"{measure}_vs_{peer}"


def ratios(measures: Sequence[Measure], subject: Samples, peers: Mapping[str, Samples]) -> list[Ratio]:
    return [
        _ratio(measure, name, subject[measure.name], samples[measure.name])
        for measure in measures
        for name, samples in peers.items()
        if measure.name in subject and measure.name in samples
    ]


def changes(measures: Sequence[Measure], now: Samples, then: Samples) -> list[Change]:
    return [
        _change(measure, now[measure.name], then[measure.name])
        for measure in measures
        if measure.name in now and measure.name in then
    ]


def _change(measure: Measure, now: Sequence[float], then: Sequence[float]) -> Change:
    by_round = [_divided(one, other) for one, other in zip(now, then, strict=True)]
    after, before = Spread.of(now), Spread.of(then)
    changed = _divided(after.median, before.median)
    return Change(measure, after, before, changed, min(by_round), max(by_round))


def verdicts(targets: Sequence[Target], found: Sequence[Ratio]) -> list[Verdict]:
    measured = {ratio.key: ratio.value for ratio in found}
    return [Verdict(target, _measured(target, measured)) for target in targets]


def _measured(target: Target, ratios: Mapping[str, float]) -> float | None:
    found = [ratios.get(ratio_key(target.measure, peer)) for peer in target.among or (target.peer,)]
    # The best peer is the one that the subject surpasses least.
    return min((one for one in found if one is not None), default=None) if None not in found else None


def _ratio(measure: Measure, peer: str, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    by_round = [_times_better(measure, one, other) for one, other in zip(ours, theirs, strict=True)]
    value = _times_better(measure, median(ours), median(theirs))
    return Ratio(measure.name, peer, value, min(by_round), max(by_round))


def _times_better(measure: Measure, ours: float, theirs: float) -> float:
    return _divided(ours, theirs) if measure.higher_is_better else _divided(theirs, ours)


def _divided(one: float, other: float) -> float:
    """Of nothing there is as much as of nothing: no event was lost in either, say."""
    return one / other if other else math.inf if one else 1.0
