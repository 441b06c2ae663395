"""SLO: parse service level objectives, and check whether the recorded history meets them.

An objective leaves an error budget: `p95 wait < 2s` permits 5 % of the attempts to wait longer, and `failure
rate < 1%` permits 1 % of them to fail. The burn rate is the used share of the budget: at 1 the budget is
used up, at 2 twice as many attempts violate the objective as it permits. A percentile is the smallest value
that the given share of attempts does not exceed. So an objective is met exactly if its burn rate is at most
1, or below 1 if a rate must be strictly below its limit.
"""

import re
from dataclasses import dataclass

from umbel.errors import ConfigurationError
from umbel.history.query import Tables

MEASURES = ("wait", "run", "total")
RATES = ("failure", "success")
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
ROUNDING = 1e-9
"""Tolerance when shares are compared: 0.05 and 1 − 0.95 differ in the last digit."""

_FORM = re.compile(
    r"(?:p(?P<percent>\d{1,2}(?:\.\d+)?)\s+(?P<measure>[a-z]+)|(?P<rate>[a-z]+)\s+rate)"
    r"\s*(?P<sign><=|>=|<|>)\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+|%)",
    re.IGNORECASE,
)
_REMEDY = (
    "write it as 'p95 wait < 2s', 'p99 run < 500ms', 'p95 total < 1m', 'failure rate < 1%'"
    " or 'success rate > 99.9%'"
)


@dataclass(frozen=True)
class Objective:
    """A parsed objective. `share` of the attempts, at most 1, must meet it. `limit` is in seconds; a rate
    has none.
    """

    text: str
    measure: str
    share: float
    limit: float = 0.0
    is_strict: bool = True

    @property
    def budget(self) -> float:
        """The share of attempts that may violate the objective."""
        return 1 - self.share


@dataclass(frozen=True)
class Verdict:
    """The result of checking an objective. `figure` is the percentile in seconds, or the share that failed
    or succeeded.
    """

    objective: str
    is_kept: bool
    figure: float
    n: int
    n_bad: int
    burn_rate: float | None
    """None if the objective has no error budget and was violated."""


def parse_objective(text: str) -> Objective:
    """Parse an objective such as `p95 wait < 2s`. Raise ConfigurationError with a hint if it is invalid."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"{text!r} is not an objective; {_REMEDY}")
    measure, rate, sign = (found["measure"] or "").lower(), (found["rate"] or "").lower(), found["sign"]
    value, unit = float(found["value"]), found["unit"].lower()
    if rate:
        return _of_rate(text, rate, sign, value, unit)
    if measure not in MEASURES:
        raise ConfigurationError(f"{text!r}: {measure!r} is not measured; use {', '.join(MEASURES)}")
    if unit not in UNITS_S:
        raise ConfigurationError(f"{text!r}: {unit!r} is not a unit of time; use {', '.join(UNITS_S)}")
    if sign.startswith(">"):
        raise ConfigurationError(f"{text!r}: a duration has an upper limit; write < or <=")
    share = float(found["percent"]) / 100
    if not share:
        raise ConfigurationError(f"{text!r}: p0 promises nothing; use p50, p95, p99 or p99.9")
    return Objective(text, measure, share, value * UNITS_S[unit], is_strict=sign == "<")


def judge(tables: Tables, objective: Objective) -> Verdict | None:
    """Check an objective against the recorded attempts. Return None if no attempt has ended."""
    if objective.measure in RATES:
        sql, values = _FAILED, {}
    else:
        sign = ">=" if objective.is_strict else ">"
        sql = _DURATIONS.format(source=_SOURCES[objective.measure], sign=sign)
        values = {"share": max(objective.share - ROUNDING, 0.0), "limit": objective.limit}
    [row] = tables.rows(sql, values)
    n, n_bad = row["n"], row["n_bad"]
    if not n:
        return None
    bad = n_bad / n
    figure = {"failure": bad, "success": 1 - bad}.get(objective.measure, row["figure"])
    return Verdict(
        objective=objective.text,
        is_kept=_is_kept(objective, bad),
        figure=figure,
        n=n,
        n_bad=n_bad,
        burn_rate=bad / objective.budget if objective.budget > ROUNDING else None if n_bad else 0.0,
    )


def _is_kept(objective: Objective, bad: float) -> bool:
    """Return whether the share of bad attempts is within the error budget."""
    if objective.measure in RATES and objective.is_strict:
        return bad < objective.budget - ROUNDING
    return bad <= objective.budget + ROUNDING


def _of_rate(text: str, rate: str, sign: str, value: float, unit: str) -> Objective:
    """Parse an objective about the failure or success rate."""
    if rate not in RATES:
        raise ConfigurationError(f"{text!r}: there is no {rate} rate; use failure or success")
    if unit != "%" or value > 100:
        raise ConfigurationError(f"{text!r}: a rate is at most 100 percent; write it as 1%")
    wanted = "<" if rate == "failure" else ">"
    if not sign.startswith(wanted):
        raise ConfigurationError(f"{text!r}: a {rate} rate has a limit on the other side; write {wanted}")
    share = 1 - value / 100 if rate == "failure" else value / 100
    return Objective(text, rate, share, is_strict=len(sign) == 1)


_SOURCES = {
    "wait": "select wait_s as value from attempts where ended_at is not null",
    "run": "select run_s as value from attempts where ended_at is not null",
    "total": """
        select greatest(epoch(state_at) - epoch(coalesce(first_sent_at, first_received_at)), 0) as value
        from tasks where state in ('SUCCESS', 'FAILURE')""",
}
_DURATIONS = """
    select count(*) as n, count(*) filter (value {sign} $limit) as n_bad,
        quantile_disc(value, $share) as figure
    from ({source}) where value is not null"""
_FAILED = """
    select count(*) as n, count(*) filter (outcome = 'FAILURE') as n_bad, null as figure
    from attempts where outcome in ('SUCCESS', 'FAILURE')"""
