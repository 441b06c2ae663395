"""Rate: token buckets that say when a rate-limited task may start.

A bucket holds one second's worth of tokens at most (never less than one), so a limit of "10/s"
allows a burst of ten and "6/m" one task every ten seconds. A task without a token is told when
its token will be there, and that token is set aside for it: tasks parked by the limit come back
in the order they were refused, instead of all at once.

The limit holds for one node, as it does in Celery; a cluster of n nodes runs n times as many.
"""

import re
from dataclasses import dataclass
from math import inf

_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:/\s*([smh]))?\s*$")
_PERIOD_S = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_rate(text: str | float) -> float:
    """Tasks per second from "100/m", "10/s", "0.5" or a number; 0 means no limit."""
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < inf:
        return float(text)
    match = _RATE.match(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a rate; write it as '10/s', '100/m' or '500/h'")
    return float(match[1]) / _PERIOD_S[match[2]]


def show_rate(per_second: float) -> str:
    """A rate as people write it, in the shortest period that makes it a whole number."""
    for unit, period_s in (("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        count = per_second * period_s
        if abs(count - round(count)) < 1e-9 * period_s and count >= 1:
            return f"{round(count)}/{unit}"
    return f"{per_second * 3600:g}/h"


@dataclass(slots=True)
class TokenBucket:
    per_second: float
    _tokens: float = 1.0
    _filled_at: float | None = None

    def take(self, now: float) -> float:
        """Take a token: 0.0 when it is here, else how many seconds until the one set aside is."""
        burst = max(1.0, self.per_second)
        if self._filled_at is None:
            self._tokens = burst
        else:
            # A clock that was set back adds nothing, and must not take tokens away either.
            passed_s = max(0.0, now - self._filled_at)
            self._tokens = min(burst, self._tokens + passed_s * self.per_second)
        self._filled_at = now
        self._tokens -= 1.0
        return max(0.0, -self._tokens / self.per_second)
