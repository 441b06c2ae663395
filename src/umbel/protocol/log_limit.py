"""Rate limits for log lines: which lines are written, and how many were omitted.

Each kind of line has a budget: a burst, and then a rate. Lines beyond it are omitted and counted. The shell
reads the counts periodically, so each line is either written or counted once.

The table holds KINDS_MAX kinds. When the table is full, all new kinds share one budget. So a flood of forged
kinds is limited too, and displaces no earlier kind. A kind is forgotten some time after its budget is full
again.
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
    """How many lines of a kind were omitted, and during how many seconds."""

    kind: Hashable
    count: int
    seconds: float


@dataclass(slots=True)
class _Spent:
    budget: Budget
    lines: float  # number of lines that may still be written
    at: float
    left_out: int = 0
    since: float = 0.0  # when the first line was omitted


class LogLimit:
    """The budgets of recent kinds of log lines, and the counts of omitted lines."""

    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
        self._kinds_max = kinds_max
        self._kinds: dict[Hashable, _Spent] = {}
        self._swept_at = 0.0

    def __len__(self) -> int:
        return len(self._kinds)

    def take(self, kinds: Mapping[Hashable, Budget], now: float) -> Hashable | None:
        """Return None if the line is to be written; otherwise count it as omitted and return the limiting
        kind.

        A line may have several kinds, widest first. A narrower kind is looked up only while the wider one has
        budget, so that forged names do not fill the table.
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
        """Return the omitted lines since the previous call."""
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
