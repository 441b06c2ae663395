"""Promises about the history: what can be promised, and whether it was kept."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.published import publish
from tests.history.told import Told, Try, at
from umbel.errors import ConfigurationError
from umbel.history.query import read
from umbel.history.slo import Objective, Verdict, judge, parse_objective
from umbel.history.tables import Wanted


def judged(lake: Path, text: str, wanted: Wanted | None = None) -> Verdict | None:
    return read(lake, lambda tables: judge(tables, parse_objective(text)), wanted=wanted)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty tasks that wait 1 to 20 seconds and run for 2, every tenth fails; one is retried."""
    told = Told()
    for number in range(1, 21):
        start, outcome = 100.0 * number, "FAILURE" if number % 10 == 0 else "SUCCESS"
        told.task(f"t{number}", Try(start - number, (start,), start + 2, outcome), name="shop.pay")
    told.task(
        "again", Try(0, (0,), 2, "RETRY"), Try(2, (62,), 64, waited=0.0), name="mail.send", queue="mail"
    )
    return publish(tmp_path_factory.mktemp("lake"), told.rows)


@pytest.mark.parametrize(
    ("text", "measure", "share", "limit"),
    [
        ("p95 wait < 2s", "wait", 0.95, 2.0),
        ("  P99.9 RUN <= 1.5min ", "run", 0.999, 90.0),
        ("p50 total<500ms", "total", 0.5, 0.5),
        ("failure rate < 1%", "failure", 0.99, 0.0),
        ("success rate >= 99.9 %", "success", 0.999, 0.0),
    ],
)
def test_an_objective_is_a_measure_and_a_limit(text: str, measure: str, share: float, limit: float) -> None:
    found = parse_objective(text)
    assert (found.measure, found.limit, found.is_strict) == (measure, limit, "=" not in text)
    assert found.share == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fast", "'fast' is not an objective; write it as 'p95 wait < 2s'"),
        ("", "'' is not an objective"),
        ("p95 wait < 2s; drop", "is not an objective"),
        ("p100 wait < 2s", "is not an objective"),
        ("p0 wait < 2s", "p0 promises nothing; use p50"),
        ("p95 sleep < 2s", "'sleep' is not measured; use wait, run, total"),
        ("p95 wait < 2parsecs", "'parsecs' is not a unit of time; use us, ms, s"),
        ("p95 wait > 2s", "a duration has an upper limit; write <"),
        ("p95 wait < 2%", "'%' is not a unit of time"),
        ("error rate < 2%", "there is no error rate; use failure or success"),
        ("failure rate < 2s", "a rate is at most 100 percent; write it as 1%"),
        ("failure rate > 1%", "a failure rate has a limit on the other side; write <"),
        ("success rate < 99%", "a success rate has a limit on the other side; write >"),
    ],
)
def test_what_is_no_objective_is_refused_with_the_value_and_the_remedy(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_objective(text)
    assert problem in str(refused.value)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "is_kept", "figure", "n_bad", "burn_rate"),
    [
        ("p95 wait < 20s", True, 19, 1, 1.0),
        ("p95 wait < 19s", False, 19, 2, 2.0),
        ("p95 wait <= 19s", True, 19, 1, 1.0),
        ("p50 wait < 11s", True, 10, 10, 1.0),
        ("p95 run < 3s", True, 2, 0, 0.0),
        ("p50 total < 5s", False, 12, 18, 1.8),
        ("failure rate < 20%", True, 0.1, 2, 0.5),
        ("failure rate < 10%", False, 0.1, 2, 1.0),
        ("failure rate <= 10%", True, 0.1, 2, 1.0),
        ("success rate > 99%", False, 0.9, 2, 10.0),
        ("success rate >= 100%", False, 0.9, 2, None),
    ],
)
def test_a_promise_is_kept_when_no_more_broke_it_than_its_budget_allows(
    lake: Path, text: str, is_kept: bool, figure: float, n_bad: int, burn_rate: float | None
) -> None:
    found = judged(lake, text, Wanted(task="shop.*"))
    assert found is not None
    assert (found.is_kept, found.n, found.n_bad) == (is_kept, 20, n_bad)
    assert found.figure == pytest.approx(figure)
    assert found.burn_rate == (None if burn_rate is None else pytest.approx(burn_rate))


def test_only_what_is_wanted_is_judged(lake: Path) -> None:
    late = judged(lake, "p95 wait < 2s", Wanted(since=at(1950), task="shop.*"))
    mail = judged(lake, "p95 total < 1m", Wanted(queue="mail"))
    assert late is not None and (late.n, late.figure) == (1, 20)
    assert mail is not None and (mail.n, mail.figure) == (1, 64)  # with its retry
    assert judged(lake, "p95 wait < 2s", Wanted(task="none")) is None


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 99), st.integers(0, 40))
def test_the_figure_and_the_budget_never_disagree(waits: list[int], percent: int, limit: int) -> None:
    """The figure is below the limit exactly when enough attempts are."""
    ordered = sorted(waits)
    place = -(-percent * len(waits) // 100) - 1  # the smallest value that so many do not exceed
    bad = sum(wait >= limit for wait in waits)
    is_kept = 100 * bad <= (100 - percent) * len(waits)
    found = judge(_Waits(waits), Objective("", "wait", percent / 100, float(limit)))  # type: ignore[arg-type]
    assert found is not None
    assert (found.is_kept, found.figure) == (is_kept, ordered[place])
    assert found.is_kept == (found.figure < limit)


class _Waits:
    """Attempts that waited so long, without a lake."""

    def __init__(self, waits: list[int]) -> None:
        import duckdb

        self._connection = duckdb.connect(":memory:")
        self._connection.execute("create table attempts (wait_s double, ended_at timestamp)")
        self._connection.executemany(
            "insert into attempts values (?, now()::timestamp)", [[one] for one in waits]
        )

    def rows(self, sql: str, values: dict[str, float]) -> list[dict[str, float]]:
        result = self._connection.execute(sql, values)
        names = [one[0] for one in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
