"""LogLimit: which log lines are written when many of one kind come, and how many were left out.

A kind of line has a budget: so many at once, and then so many a second. A line beyond it is left
out and counted. The counts are asked for every now and then, so that each line is either written
or in one count.

The table holds KINDS_MAX kinds. A kind that is new when the table is full shares one budget with
all others that came too late: a flood that makes up kinds is limited too, and takes no place from
those that were there before it. A kind is forgotten some time after its budget is full again.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from umbel.protocol.value import Value

KINDS_MAX = 2_000
SWEEP_S = 1.0
SHARED = "the kinds that came when the table was full"


class Budget(Value):
    at_once: int
    per_second: float


class LeftOut(Value):
    """So many lines of the kind were left out in that time."""

    kind: Hashable
    count: int
    seconds: float


@dataclass(slots=True)
class _Spent:
    budget: Budget
    lines: float  # that it may still write
    at: float
    left_out: int = 0
    since: float = 0.0  # when the first of those was left out


class LogLimit:
    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
        self._kinds_max = kinds_max
        self._kinds: dict[Hashable, _Spent] = {}
        self._swept_at = 0.0

    def __len__(self) -> int:
        return len(self._kinds)

    def take(self, kinds: Mapping[Hashable, Budget], now: float) -> Hashable | None:
        """None when the line is to be written; otherwise the kind that has left it out and counted it.

        A line may be of several kinds, the widest first. A narrower one is looked at only while the
        wider has room, so that names that are made up do not fill the table.
        """
        spent: list[_Spent] = []
        for kind, budget in kinds.items():
            found = self._find(kind, budget, now)
            if found.lines < 1.0:
                found.since = found.since if found.left_out else now
                found.left_out += 1
                return kind
            spent.append(found)
        for one in spent:
            one.lines -= 1.0
        return None

    def left_out(self, now: float) -> list[LeftOut]:
        """What was left out since this was last asked."""
        found: list[LeftOut] = []
        for kind, spent in self._kinds.items():
            if spent.left_out:
                found.append(LeftOut(kind, spent.left_out, max(0.0, now - spent.since)))
                spent.left_out = 0
        self._forget_full(now)
        return found

    def _find(self, kind: Hashable, budget: Budget, now: float) -> _Spent:
        if kind not in self._kinds and len(self._kinds) >= self._kinds_max:
            if not 0.0 <= now - self._swept_at < SWEEP_S:
                self._forget_full(now)
            if len(self._kinds) >= self._kinds_max:
                kind = SHARED
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Spent(budget, budget.at_once, now)
        _refill(found, now)
        return found

    def _forget_full(self, now: float) -> None:
        self._swept_at = now
        for kind, spent in list(self._kinds.items()):
            _refill(spent, now)
            if not spent.left_out and spent.lines >= spent.budget.at_once:
                del self._kinds[kind]


def _refill(spent: _Spent, now: float) -> None:
    gained = max(0.0, now - spent.at) * spent.budget.per_second
    spent.lines = min(spent.budget.at_once, spent.lines + gained)
    spent.at = now
