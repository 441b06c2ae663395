"""LogLimit: which log lines are written when many of one kind come, and how many were left out.

A kind of line has a budget: a burst, and then a rate. A line beyond it is left out and counted. The shell
reads the counts periodically, so each line is either written or in one count.

The table holds KINDS_MAX kinds. A kind that is new when the table is full shares one budget with all others
that came too late: a flood of made-up kinds is limited too, and displaces no earlier kind. A kind is
forgotten some time after its budget is full again.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from umbel.protocol.machine import Value

KINDS_MAX = 2_000
SWEEP_S = 1.0
SHARED = "the kinds that came when the table was full"  # one budget for all of them


class Budget(Value):
    """How many lines of a kind may be written at once, and how many per second after that."""

    at_once: int
    per_second: float


class LeftOut(Value):
    """How many lines of a kind were left out, and during how many seconds."""

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
    """The budgets of the kinds of log lines seen lately, and the counts of lines left out."""

    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
        self._kinds_max = kinds_max
        self._kinds: dict[Hashable, _Spent] = {}
        self._swept_at = 0.0

    def __len__(self) -> int:
        return len(self._kinds)

    def take(self, kinds: Mapping[Hashable, Budget], now: float) -> Hashable | None:
        """Return None when the line is to be written; otherwise the kind that leaves it out and has counted
        it.

        A line may be of several kinds, the widest first. A narrower kind is looked up only while the wider
        has room, so that made-up names do not fill the table.
        """
        spent: list[_Spent] = []
        for kind, budget in kinds.items():
            found = self._find(kind, budget, now)
            if found.lines < 1.0:
                found.since = found.since if found.left_out else now
                found.left_out += 1
                return kind
            spent.append(found)
        for entry in spent:
            entry.lines -= 1.0
        return None

    def left_out(self, now: float) -> list[LeftOut]:
        """Return what was left out since the previous call."""
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
