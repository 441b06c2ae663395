"""Rate limits and concurrency limits: token buckets of one worker, and limits for the whole cluster.

`TokenBucket` limits how often one worker starts a task. A `ClusterLimit` applies to a task and a key, and its
bucket is a record in the broker. `Concurrency` has a number of slots; a claim takes one until it ends. `Rate`
sets a pace for all workers: starts are `interval_s` apart.

A late start may be compensated by up to `slack_s`: the next start is due that much earlier, so starting
within the slack does not lower the rate. The interval is chosen so that no window of the rate's period has
more starts than the rate allows, even if each task starts up to `slack_s` after it was allowed to:

k starts in a window of P: allowed within P + slack, so (k - 1) * interval < P + 2 * slack, so k <= rate.

The slack costs a part of the rate: a tenth of "100/s", 3 % of "100/m", almost nothing of "100/h". The
guarantee does not hold for a task that waits longer than the slack between its permission and its start,
because other tasks of its worker are before it. `limits.lua` contains `Pace` word for word; a property test
compares the two.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from string import Formatter
from typing import Any

from umbel.errors import ConfigurationError, nearest
from umbel.protocol.machine import Value

# ---- rate ------------------------------------------------------------------------------------------
#
# A bucket holds at most the tokens of one second (and at least one), so a limit of "10/s" allows a burst of
# ten and "6/m" one task every ten seconds. A task without a token gets the time at which its token will be
# available, and that token is reserved for it. So tasks parked by the limit return one by one in their order,
# instead of all at once.
#
# The limit applies per node, as in Celery; a cluster of n nodes runs n times as many.

_LOCAL_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:/\s*([smh]))?\s*$")
_LOCAL_PERIOD_S = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_rate(text: str | float) -> float:
    """Return tasks per second from "100/m", "10/s", "0.5" or a number; 0: no limit. Raises ValueError."""
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < inf:
        return float(text)
    match = _LOCAL_RATE.match(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a rate; write it as '10/s', '100/m' or '500/h'")
    return float(match[1]) / _LOCAL_PERIOD_S[match[2]]


def show_rate(per_second: float) -> str:
    """Return a rate as people write it, in the shortest period for which it is a whole number."""
    for unit, period_s in (("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        count = per_second * period_s
        if abs(count - round(count)) < 1e-9 * period_s and count >= 1:
            return f"{round(count)}/{unit}"
    return f"{per_second * 3600:g}/h"


@dataclass(slots=True)
class TokenBucket:
    """The tokens of one rate-limited task on this worker: those of one second, and at least one."""

    per_second: float
    _tokens: float = 1.0
    _filled_at: float | None = None

    def take(self, now: float) -> float:
        """Take a token: return 0.0 if one is available, otherwise the seconds until the reserved token is."""
        burst = max(1.0, self.per_second)
        if self._filled_at is None:
            self._tokens = burst
        else:
            # A clock that was set back adds no tokens, and must not remove any either.
            passed_s = max(0.0, now - self._filled_at)
            self._tokens = min(burst, self._tokens + passed_s * self.per_second)
        self._filled_at = now
        self._tokens -= 1.0
        return max(0.0, -self._tokens / self.per_second)


# ---- limits that hold for the whole cluster --------------------------------------------------------

KEY_MAX_BYTES = 200
RATE_MAX = 1_000_000
CONCURRENCY_MAX = 10_000
SLACK_MAX_S = 1.0
SLACK_PER_PERIOD = 0.05

_RATE = re.compile(r"^\s*(\d+)\s*/\s*([smh])\s*$", re.ASCII)
_PERIOD_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Pace(Value):
    """The pace of starts. `free_at`: when the next start is due; 0: at once."""

    interval_s: float
    slack_s: float

    def take(self, free_at: float, now: float) -> float | None:
        """Return the bucket's new `free_at` if a task may start now, else None."""
        free_at = self._believed(free_at, now)
        return max(free_at, now) + self.interval_s if now >= free_at - self.slack_s else None

    def due(self, free_at: float, now: float, ahead: int) -> float:
        """Return the earliest time at which a task may start if `ahead` other tasks start before it."""
        next_free_at = max(self._believed(free_at, now), now) + ahead * self.interval_s
        return max(next_free_at - self.slack_s, now)

    def _believed(self, free_at: float, now: float) -> float:
        """Limit `free_at` to its highest plausible value: a higher one means that the clock was set back."""
        return min(free_at, now + self.slack_s + self.interval_s)


class Terms(Value):
    """The rule of a bucket: at most `most` at once, or starts at the pace."""

    most: int = 0
    pace: Pace | None = None


class Rate:
    """Limits the starts per second, minute or hour, by key: `Rate("100/m", key="{customer}")`."""

    def __init__(self, rate: str, *, key: str = "") -> None:
        found = _RATE.match(str(rate))
        if found is None or not 1 <= int(found[1]) <= RATE_MAX:
            raise ConfigurationError(
                f"{rate!r} is not a rate for the cluster; write a whole number from 1 to {RATE_MAX} and a "
                "period, as in '10/s', '100/m' or '500/h'"
            )
        self.rate, self.key = rate, key
        self.names = _names_in(key)
        self.count, self.period_s = int(found[1]), _PERIOD_S[found[2]]
        slack_s = min(SLACK_MAX_S, SLACK_PER_PERIOD * self.period_s)
        self.terms = Terms(pace=Pace((self.period_s + 2 * slack_s) / self.count, slack_s))

    def __repr__(self) -> str:
        return f"Rate({self.rate!r}, key={self.key!r})"


class Concurrency:
    """Limits how many run at the same time, by key: `Concurrency(4, key="{customer}")`."""

    def __init__(self, most: int, *, key: str = "") -> None:
        if type(most) is not int or not 1 <= most <= CONCURRENCY_MAX:
            raise ConfigurationError(
                f"{most!r} is not a valid concurrency limit; write a number from 1 to {CONCURRENCY_MAX}"
            )
        self.most, self.key = most, key
        self.names = _names_in(key)
        self.terms = Terms(most)

    def __repr__(self) -> str:
        return f"Concurrency({self.most}, key={self.key!r})"


class Field(Value):
    """A parameter that the key names: its position, if it has one, and its default."""

    name: str
    position: int | None = None
    default: Any = None
    has_default: bool = False


class ClusterLimit(Value):
    """The limit of one task, its key bound to the parameters of its function."""

    task: str
    template: str
    fields: tuple[Field, ...]
    terms: Terms

    def bucket(self, key: str) -> str:
        """Return the name of the broker's bucket for a key of this task."""
        return bucket_of(self.task, key)

    def key_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the key of a call. Raises ValueError or TypeError if the call has no valid key."""
        key = self.template.format(**{field.name: self._value(field, args, kwargs) for field in self.fields})
        if problem := key_problem(key):
            raise ValueError(f"the limit of task {self.task!r} has the key {key[:80]!r}: {problem}")
        return key

    def _value(self, field: Field, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        if field.name in kwargs:
            value = kwargs[field.name]
        elif field.position is not None and field.position < len(args):
            value = args[field.position]
        elif field.has_default:
            value = field.default
        else:
            raise ValueError(
                f"the limit of task {self.task!r} needs {field.name!r} for its key {self.template!r}: give "
                "it in the call"
            )
        if isinstance(value, list | tuple | set | frozenset | Mapping | bytes):
            raise TypeError(
                f"the limit of task {self.task!r} takes {field.name!r} into its key, which is a "
                f"{type(value).__name__}: it must be a text or a number"
            )
        return str(value)


def bucket_of(task: str, key: str) -> str:
    """Return the name of the broker's bucket for this task and key."""
    return f"{task}:{key}"


def key_problem(key: str) -> str:
    """Return why this text cannot be a key; "" if it can."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if size > KEY_MAX_BYTES:
        return f"it has {size} bytes, and at most {KEY_MAX_BYTES} are allowed; use a shorter id"
    return "a key must not contain NUL" if "\0" in key else ""


def _names_in(key: object) -> tuple[str, ...]:
    """Return the parameters that a key names. Raises ConfigurationError if it is not a valid template."""
    if not isinstance(key, str):
        raise ConfigurationError(f"the key of a limit is {key!r}; it must be text, as in '{{customer}}'")
    try:
        parts = list(Formatter().parse(key))
    except ValueError as error:
        raise ConfigurationError(f"the key of a limit is {key!r}: {error}") from None
    names: dict[str, None] = {}
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if form or conversion or not name.isidentifier():
            raise ConfigurationError(
                f"the key of a limit is {key!r}: braces must contain the name of a parameter only, "
                "as in '{customer}'"
            )
        names[name] = None
    if problem := key_problem(key):
        raise ConfigurationError(f"the key of a limit is {key[:80]!r}: {problem}")
    return tuple(names)


def check_names(task: str, limit: Rate | Concurrency, known: Sequence[str], hidden: Sequence[str]) -> None:
    """Raise ConfigurationError if a key names an unknown or a sensitive parameter."""
    for name in limit.names:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigurationError(
                f"task {task!r} has no parameter {name!r}, which the key of its limit names{hint}"
            )
        if name in hidden:
            raise ConfigurationError(
                f"the key of the limit of task {task!r} names {name!r}, which is sensitive: keys can "
                "be read in the broker"
            )
