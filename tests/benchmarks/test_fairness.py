"""The ledger of benchmarks/fairness.py: which tasks waited while a child had nothing to do."""

from math import inf

from benchmarks._fairness.ledger import Run, idle_stretches, late, read_runs

LONG = Run("a", "long", 1.0, 31.0)


def test_runs_are_read_from_lines_of_several_children() -> None:
    lines = [
        "began a long 1.0",
        "began b short 2.0",
        "ended b short 2.5",
        "ended a long 31.0",
        "began b short 32.0",
    ]
    assert read_runs(lines) == [LONG, Run("b", "short", 2.0, 2.5), Run("b", "short", 32.0, inf)]


def test_a_child_is_idle_between_its_tasks_unless_that_is_a_moment() -> None:
    runs = [LONG, Run("b", "short", 2.0, 2.5), Run("b", "short", 2.55, 3.0), Run("b", "short", 9.0, 9.5)]
    assert idle_stretches(runs, ["a", "b"]) == [(-inf, 2.0), (3.0, 9.0), (9.5, inf)]
    assert idle_stretches(runs, ["a"]) == [(-inf, 1.0), (31.0, inf)]


def test_a_task_is_late_that_waits_over_a_second_while_a_child_is_idle() -> None:
    quick = Run("b", "short", 1.5, 1.6)
    behind = Run("a", "short", 31.0, 31.1)
    busy = Run("b", "short", 1.6, 30.9)
    assert late([LONG, quick, behind], children=["a", "b"], sent_s=0.0) == 1
    assert late([LONG, quick, busy, behind], children=["a", "b"], sent_s=0.0) == 0  # nobody was idle
    assert late([LONG, quick, behind], children=["a", "b"], sent_s=30.5) == 0
    assert late([LONG, quick, Run("b", "body", 32.0, 32.1)], children=["a", "b"], sent_s=0.0) == 0
